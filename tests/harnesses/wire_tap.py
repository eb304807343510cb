"""What a harness sends: a proxy between it and the server that records, and one that lets nobody out.

Neither changes a byte. Depends on aiohttp only.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp import web

_OWN_HOP = {"connection", "host", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade"}


@dataclass(slots=True)
class Exchange:
    """One request of a harness and the beginning of its answer."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    data: bytes
    status: int = 0
    answer: bytes = b""

    @property
    def body(self) -> dict[str, Any]:
        """The request's JSON."""
        return json.loads(self.data) if self.data else {}


class WireTap:
    """A reverse proxy on a free loopback port. Set ``target`` before the first request."""

    def __init__(self) -> None:
        self.target = ""
        self.url = ""
        self.exchanges: list[Exchange] = []

    async def __aenter__(self) -> WireTap:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{rest:.*}", self._forward)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._http = aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()
        await self._runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OWN_HOP}
        exchange = Exchange(request.method, request.path, request.query_string, headers, await request.read())
        self.exchanges.append(exchange)
        async with self._http.request(
            request.method, self.target + request.raw_path, headers=headers, data=exchange.data
        ) as answer:
            exchange.status = answer.status
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OWN_HOP}
            out = web.StreamResponse(status=answer.status, headers=kept)
            await out.prepare(request)
            async for piece in answer.content.iter_any():
                exchange.answer += piece
                await out.write(piece)
            await out.write_eof()
        return out


class NoWayOut:
    """A forward proxy that refuses everything and remembers who was asked for."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[str] = []

    async def __aenter__(self) -> NoWayOut:
        self._server = await asyncio.start_server(self._refuse, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readline()
            self.asked.append(line.decode("latin-1").strip())
            writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()
        except ConnectionError:
            pass  # it has its answer
        finally:
            writer.close()
