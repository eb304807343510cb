"""``tollway router``: one placement service for several session servers.

The key comes from TOLLWAY_ROUTER_KEY; session servers find the service by ``router.placement_url`` and have the
same key. Parses and calls; everything else is in ``tollway.router.placement_service``.
"""

from __future__ import annotations

import argparse
import os

from tollway import telemetry
from tollway.interrupts import EndingAtOnce
from tollway.settings import Settings

__all__ = ["DESCRIPTION", "add_arguments", "run"]

DESCRIPTION = (
    "run the placement service: one routing table for several session servers (router.placement_url); "
    "its key comes from TOLLWAY_ROUTER_KEY"
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    command.add_argument("--engine", action="append", default=[], metavar="URL", help="an engine (may repeat)")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    command.add_argument("--port", type=int, default=8600, help="port to listen on, 0 for a free one (default: 8600)")


def run(arguments: argparse.Namespace, settings: Settings) -> None:
    """Serve until a signal comes. Raises ``ConfigError``."""
    with EndingAtOnce():
        from tollway.router.placement_link import KEY_VARIABLE
        from tollway.router.placement_service import run as serve
        from tollway.router.supervisor import die_with_parent

    die_with_parent()
    telemetry.configure(settings.run.log_level, component="router")
    key = os.environ.get(KEY_VARIABLE, "")
    serve(settings.router, host=arguments.host, port=arguments.port, key=key, engine_urls=arguments.engine)
