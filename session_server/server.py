"""Run a session server as a process: bind, start, say so in one line, serve, stop cleanly.

The ready line on stdout is JSON ``{"event": "ready", "url", "pid"}``; logs go to stderr. The first SIGTERM or
SIGINT lets running turns finish for ``server.drain_s``, a second one does not wait; either way clients get
their whole reply or an error, and the exit status is 0. Depends on uvicorn and ``app``; ``workers`` starts
several of these processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import FrameType

import uvicorn
import uvloop

from tollway.errors import ConfigError
from tollway.heap import keep_freed_memory, settle
from tollway.router.config import RouterConfig
from tollway.serving import KEEP_ALIVE_S, announce, handling_signals, listen
from tollway.session_server.app import TollwayApp
from tollway.session_server.config import ServerConfig
from tollway.session_server.crew import SOLO, Crew, check_journals, journal_of
from tollway.session_server.forward import App, Forwarder
from tollway.session_server.gateway import Gateway
from tollway.session_server.workers import supervise

__all__ = ["run"]

logger = logging.getLogger(__name__)
_FLUSH_S = 5.0
"""How long replies and errors may take to leave once no turn runs."""


def run(config: ServerConfig, router_config: RouterConfig, *, admin_key: str, engine_urls: list[str]) -> None:
    """Serve until a signal comes, with as many processes as ``config.workers`` says.

    Raises ``ConfigError`` (port, journal, family), ``NoEngine``, and ``ComponentLost`` when workers keep dying.
    """
    if not admin_key:
        raise ConfigError("no admin key: set TOLLWAY_ADMIN_KEY to a secret of your choice")
    keep_freed_memory()
    crew = Crew.from_environment()
    if crew is not None:
        _run_worker(config, router_config, crew, admin_key=admin_key, engine_urls=engine_urls)
        return
    _warn_of_strangers(config)
    for path in check_journals(config.journal, config.workers):
        logger.warning("%s belongs to a worker that is not started; its closed sessions cannot be read", path)
    if config.workers > 1:
        supervise(config, router_config, admin_key=admin_key, engine_urls=engine_urls)
        return
    listener = listen(config.host, config.port, key="server.port")
    try:
        gateway = Gateway(config, router_config, admin_key=admin_key, engine_urls=engine_urls)
        uvloop.run(_serve(gateway, TollwayApp(gateway), [listener]))
    finally:
        listener.close()


def _run_worker(
    config: ServerConfig, router_config: RouterConfig, crew: Crew, *, admin_key: str, engine_urls: list[str]
) -> None:
    own = config.model_copy(update={"journal": journal_of(config.journal, crew.index)})
    gateway = Gateway(own, router_config, admin_key=admin_key, engine_urls=engine_urls, crew=crew)
    app = Forwarder(TollwayApp(gateway), gateway.siblings, admin_key=admin_key, max_body_bytes=config.max_body_bytes)
    uvloop.run(_serve(gateway, app, crew.listeners(), crew))


def _warn_of_strangers(config: ServerConfig) -> None:
    """Say what it means when others than this machine can reach the server."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(config.host).is_loopback:
            return
    if config.host != "localhost":
        logger.warning(
            "listening on %s: whoever reaches this address can send requests, and tokens travel unencrypted; keep it "
            "inside a trusted network or put a proxy with TLS in front of it and set server.public_url",
            config.host,
        )


async def _serve(gateway: Gateway, app: App, listeners: Sequence[socket.socket], crew: Crew = SOLO) -> None:
    """Serve on ``listeners``; the ready line names the second of a worker's, else the only one."""
    try:
        await gateway.start()
        settle()
        settings = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=round(gateway.config.drain_s + _FLUSH_S),
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        await _Server(settings, gateway, listeners[0 if crew.alone else 1]).serve(sockets=list(listeners))
    finally:
        await gateway.stop()


class _Server(uvicorn.Server):
    """uvicorn that announces itself, and ends turns before it ends connections."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, listener: socket.socket) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._listener = listener
        self._parent = os.getppid()
        self._signals = 0
        self._hurry = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        announce(self._listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain = asyncio.get_running_loop().create_task(self._drain(), name="drain")
        try:
            await super().shutdown(sockets=sockets)
        finally:
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)

    async def _drain(self) -> None:
        """Give running turns their time, then end them: each client is told, and connections close by themselves."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), self._gateway.config.drain_s)
        while True:  # a request that was on its way in may still start one
            await self._gateway.store.stop()
            await asyncio.sleep(0.1)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        self.should_exit = True
        if self._gateway.crew.alone:
            hurry, force = self._signals > 1, self._signals > 2
        else:
            # A service manager may signal parent and workers alike, so only the parent's SIGINT means haste. What is
            # asked of an orphan is haste, too: the successor of its parent wants port and journal.
            hurry, force = sig == signal.SIGINT or os.getppid() != self._parent, False
        if hurry:
            self._hurry.set()
        self.force_exit = self.force_exit or force

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        with handling_signals(self.handle_exit):
            yield
