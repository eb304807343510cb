"""``tollway sandbox serve-e2b``: E2B's protocol over the configured sandbox provider.

Parses, opens the provider, serves until it is stopped. Imports the server when it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys
from typing import TYPE_CHECKING

from tollway import telemetry
from tollway.errors import ConfigError
from tollway.settings import Settings

if TYPE_CHECKING:
    from tollway.sandboxes.config import SandboxConfig

__all__ = ["DESCRIPTION", "KEY_VARIABLE", "add_arguments", "run"]

DESCRIPTION = "serve sandboxes to unmodified E2B SDKs; the API key comes from TOLLWAY_E2B_KEY, or is made"
KEY_VARIABLE = "TOLLWAY_E2B_KEY"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_LEAST_OUTPUT = 16 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--provider", metavar="NAME", help="default: sandbox.provider")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=3000, help="port to listen on, 0 for a free one (default: 3000)")
    parser.add_argument("--network", action="store_true", help="let clients have sandboxes with a network")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Serve until stopped."""
    key = os.environ.get(KEY_VARIABLE)
    if not key and arguments.host not in _LOOPBACK:
        raise ConfigError(f"set {KEY_VARIABLE} to a key of your own before listening on {arguments.host}")
    telemetry.configure(settings.run.log_level, component="sandbox")
    asyncio.run(_serve(arguments, _config(settings, arguments.provider), key))
    return 0


def _config(settings: Settings, provider: str | None) -> SandboxConfig:
    given = settings.sandbox
    local = given.local.model_copy(update={"mode": "session"})  # background processes live on between commands
    most = max(_LEAST_OUTPUT, given.max_output_bytes)
    return given.model_copy(update={"provider": provider or given.provider, "local": local, "max_output_bytes": most})


async def _serve(arguments: argparse.Namespace, config: SandboxConfig, key: str | None) -> None:
    from tollway.sandboxes.e2b_server import FrontEnd, serve
    from tollway.sandboxes.registry import open_provider

    made = key or f"e2b_{secrets.token_hex(20)}"
    async with open_provider(config) as provider:
        front_end = FrontEnd(provider, key=made, network=arguments.network)
        runner, url = await serve(front_end, arguments.host, arguments.port)
        try:
            print(f"E2B's protocol over the provider {provider.name} at {url}; for clients:")
            print(f"  export E2B_API_URL={url} E2B_SANDBOX_URL={url}")
            print(f"  export E2B_API_KEY={f'${KEY_VARIABLE}' if key else made}", flush=True)
            await _stopped()
        finally:
            print("ending all sandboxes", file=sys.stderr)
            await front_end.aclose()
            await runner.cleanup()


async def _stopped() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
