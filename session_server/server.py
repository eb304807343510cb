"""Run a session server as a process: bind, start, say so in one line, serve, stop cleanly.

The ready line on stdout is JSON ``{"event": "ready", "url", "pid"}``; logs go to stderr. SIGTERM and SIGINT
finish what can be finished, abort the rest and exit 0. Depends on uvicorn and ``app``.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
import uvloop

from tollway.errors import ConfigError
from tollway.router.config import RouterConfig
from tollway.serving import KEEP_ALIVE_S, announce, listen
from tollway.session_server.app import TollwayApp
from tollway.session_server.config import ServerConfig
from tollway.session_server.gateway import Gateway

__all__ = ["run"]

_GRACE_S = 5


def run(config: ServerConfig, router_config: RouterConfig, *, admin_key: str, engine_urls: list[str]) -> None:
    """Serve until a signal comes. Raises ``ConfigError`` (port, journal, family) and ``NoEngine``."""
    if not admin_key:
        raise ConfigError("no admin key: set TOLLWAY_ADMIN_KEY to a secret of your choice")
    listener = listen(config.host, config.port, key="server.port")
    try:
        gateway = Gateway(config, router_config, admin_key=admin_key, engine_urls=engine_urls)
        uvloop.run(_serve(gateway, listener))
    finally:
        listener.close()


async def _serve(gateway: Gateway, listener: socket.socket) -> None:
    try:
        await gateway.start()
        settings = uvicorn.Config(
            TollwayApp(gateway),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        await _Server(settings, listener).serve(sockets=[listener])
    finally:
        await gateway.stop()


class _Server(uvicorn.Server):
    """uvicorn that announces itself and exits 0 on signals."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        announce(self._listener)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
