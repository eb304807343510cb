"""A whole session server over a scripted engine, inside the caller's event loop, for tests.

Everything but the model is real: HTTP, sessions, journal, router, export. Ships with the package so that
harness and environment authors can test against it; the server never imports it.

>>> async with FakeServer(tmp_path) as server:  # doctest: +SKIP
...     server.engine.script = lambda request: FakeReply(ids=[104, 105, 261])
...     session = await server.client.create()
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import aiohttp
import uvicorn

from tollway.router.config import RouterConfig
from tollway.router.fake import FakeEngine
from tollway.serving import KEEP_ALIVE_S
from tollway.session_server.app import TollwayApp
from tollway.session_server.client import SessionClient
from tollway.session_server.config import ServerConfig
from tollway.session_server.families.base import Family
from tollway.session_server.gateway import Gateway

__all__ = ["FakeServer"]

_JOIN_S = 10.0
"""Longest wait for scripted engines of its own to join."""


class _Quiet(uvicorn.Server):
    """Starts and ends at once: uvicorn's own waits are a fifth of a second, and tests have a thousand servers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening, self.ending = asyncio.Event(), asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)  # connections without a request close now
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets=sockets)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield  # signals belong to the test runner


class FakeServer:
    """A server on a free loopback port.

    ``engines`` are engines that the caller runs, or how many scripted ones to run here. ``folder`` holds the
    journal; a second server on the same folder takes its sessions over. ``settings`` are fields of ``ServerConfig``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        engines: list[FakeEngine] | int = 1,
        family: Family | None = None,
        router: RouterConfig | None = None,
        admin_key: str = "admin-key",
        settings: dict[str, object] | None = None,
    ) -> None:
        self.engines = [FakeEngine() for _ in range(engines)] if isinstance(engines, int) else engines
        self.admin_key = admin_key
        self.config = ServerConfig.model_validate(
            {"journal": folder / "journal.sqlite", "port": 0, "engine_wait_s": 10.0, **(settings or {})}
        )
        self._router_config = router or RouterConfig(
            probe_interval_s=0.2,
            probe_timeout_s=1.0,
            connect_timeout_s=1.0,
            version_wait_s=0.2,
            busy_pause_s=0.3,
            retry_pause_s=0.02,
        )
        self._family = family
        self._own_engines = isinstance(engines, int)
        self._task: asyncio.Task[None] | None = None
        self._http: aiohttp.ClientSession | None = None
        self.url = ""

    @property
    def engine(self) -> FakeEngine:
        """The first engine."""
        return self.engines[0]

    @property
    def http(self) -> aiohttp.ClientSession:
        """An HTTP session for raw calls."""
        if self._http is None:
            raise RuntimeError("the server is not started")
        return self._http

    async def __aenter__(self) -> FakeServer:
        if self._own_engines:
            for engine in self.engines:
                await engine.start()
        urls = [engine.url for engine in self.engines]
        self.gateway = Gateway(self.config, self._router_config, admin_key=self.admin_key, engine_urls=urls)
        if self._family is not None:
            self.gateway.family = self._family
        await self.gateway.start()
        if self._own_engines:
            await self.gateway.router.fleet.wait_serving(_JOIN_S, len(self.engines))
        listener = socket.socket(proto=socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        settings = uvicorn.Config(
            TollwayApp(self.gateway),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = _Quiet(settings)
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener]))
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self.client = SessionClient(self.url, self.admin_key, http=self._http)
        await self._server.listening.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()
        if self._task is not None:
            self._server.ending.set()
            await self._task
        await self.gateway.stop()
        if self._own_engines:
            for engine in self.engines:
                await engine.stop()
