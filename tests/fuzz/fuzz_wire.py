"""A small HTTP/1.1 client that also sends what no decent client would.

Headers may hold any bytes, bodies may be cut, wrongly counted or chunked, and the client may leave at any
moment. Connections are kept and used again, as a harness does.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

Leave = Literal["", "unsent", "sent", "answered"]


@dataclass(frozen=True)
class Shot:
    """One request as it goes over the wire."""

    path: bytes
    body: bytes = b""
    method: bytes = b"POST"
    headers: tuple[tuple[bytes, bytes], ...] = ()
    chunks: tuple[int, ...] = ()
    """Sizes of the pieces of a chunked body; empty: the body has a length."""
    length: int | None = None
    """Length that is told in place of the true one."""
    leave: Leave = ""
    """When the client goes away: half the body sent, all of it sent, or at the answer's first bytes."""
    clean: bool = False
    """A request that must be answered with 200."""
    broken: bool = False
    """So wrong as HTTP that the server may answer in plain text, or hang up."""


@dataclass(frozen=True)
class Answer:
    """What came back. ``status`` 0: nothing, the server hung up or the client left."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Client:
    """Sends shots to one server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def close(self) -> None:
        """Close what is idle."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def fire(self, shot: Shot) -> Answer:
        """Send one request and read its answer; status 0 when it does not come whole."""
        if self._idle and not shot.broken:
            # A kept connection may have been closed meanwhile, which says nothing about this request.
            with contextlib.suppress(_Stale):
                return await self._fire(shot, *self._idle.pop(), kept=True)
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 22)
        except OSError:
            return Answer(0)
        return await self._fire(shot, reader, writer, kept=False)

    async def _fire(
        self, shot: Shot, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, kept: bool
    ) -> Answer:
        keep = False
        try:
            answer = await _exchange(shot, reader, writer, kept=kept)
            keep = answer.status > 0 and not shot.broken and answer.headers.get("connection") != "close"
            return answer
        finally:
            if keep:
                self._idle.append((reader, writer))
            else:
                writer.close()


class _Stale(Exception):
    """A kept connection ended before the first byte of an answer."""


async def _exchange(shot: Shot, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, kept: bool) -> Answer:
    data = _encoded(shot)
    try:
        if shot.leave == "unsent":
            writer.write(data[: len(data) - len(shot.body) // 2 - 1])
            await writer.drain()
            return Answer(0)
        writer.write(data)
        await writer.drain()
        if shot.broken:
            with contextlib.suppress(OSError):
                writer.write_eof()
        if shot.leave == "sent":
            return Answer(0)
        first = await reader.read(1)
        if shot.leave == "answered":
            return Answer(0)
        if not first:
            raise ConnectionResetError
    except ConnectionError:
        if kept:
            raise _Stale from None
        return Answer(0)
    try:
        return await _read_answer(reader, first, head=shot.method == b"HEAD")
    except (ConnectionError, asyncio.IncompleteReadError):
        return Answer(0)


def _encoded(shot: Shot) -> bytes:
    lines = [shot.method + b" " + shot.path + b" HTTP/1.1", b"host: test"]
    lines += [name + b": " + value for name, value in shot.headers]
    if shot.chunks:
        lines.append(b"transfer-encoding: chunked")
        body, at = b"", 0
        for size in shot.chunks:
            part = shot.body[at : at + size]
            at += size
            if part:
                body += b"%x\r\n" % len(part) + part + b"\r\n"
        rest = shot.body[at:]
        body += (b"%x\r\n" % len(rest) + rest + b"\r\n" if rest else b"") + b"0\r\n\r\n"
    else:
        body = shot.body
        lines.append(b"content-length: %d" % (len(body) if shot.length is None else shot.length))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def _read_answer(reader: asyncio.StreamReader, begun: bytes, *, head: bool) -> Answer:
    status = 100
    headers: dict[str, str] = {}
    while status < 200:
        block = begun + await reader.readuntil(b"\r\n\r\n")
        begun = b""
        first, *rest = block.decode("latin-1").split("\r\n")
        status = int(first.split(" ", 2)[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest if line)}
    if head or status == 204:
        return Answer(status, headers)
    if "content-length" in headers:
        return Answer(status, headers, await reader.readexactly(int(headers["content-length"])))
    if headers.get("transfer-encoding") != "chunked":
        return Answer(status, headers | {"connection": "close"}, await reader.read())
    body = bytearray()
    while size := int(await reader.readuntil(b"\n"), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readuntil(b"\n")
    return Answer(status, headers, bytes(body))
