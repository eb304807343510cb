"""An upstream that remembers what reached it, and raw conversations over a bridge's socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from tollway.envs.bridge import Bridge
from tollway.session_server.client import Session

ID = "ab" * 17
TOKEN = "tw_secret-of-the-session"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Upstream:
    """Stands where the session server would."""

    url: str = ""
    seen: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    """(method, target, headers, body) of every request that came whole."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    handler: Handler | None = None

    @property
    def session(self) -> Session:
        """The one session that a bridge may lead to."""
        base = f"{self.url}/sessions/{ID}"
        return Session(
            session_id=ID,
            token=TOKEN,
            base_url=base,
            openai_base_url=f"{base}/v1",
            anthropic_base_url=base,
            expires_at=0.0,
        )


@asynccontextmanager
async def upstream(handler: Handler | None = None, *, whole: bool = True) -> AsyncIterator[Upstream]:
    """Answers every request that comes whole with ``{}``, or as ``handler`` says, which may read the body itself."""
    here = Upstream(handler=handler)

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            body = await request.read() if whole else b""
            here.seen.append((request.method, request.raw_path, dict(request.headers), body))
            return web.json_response({}) if here.handler is None else await here.handler(request)
        except asyncio.CancelledError:
            here.cancelled.set()
            raise

    app = web.Application(client_max_size=1 << 28)
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    here.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield here
    finally:
        await runner.cleanup()


async def raw(bridge: Bridge, data: bytes) -> bytes:
    """Everything that a bridge answers to these bytes, until it hangs up or has been silent for a while."""
    reader, writer = await asyncio.open_unix_connection(bridge.socket)
    answer = b""
    try:
        writer.write(data)
        await writer.drain()
        while piece := await asyncio.wait_for(reader.read(1 << 16), 1.0):
            answer += piece
    except (TimeoutError, ConnectionError):
        pass  # it keeps the connection, or broke it
    finally:
        writer.close()
    return answer


def request(
    method: str,
    target: str,
    key: str,
    body: bytes = b"",
    headers: tuple[tuple[str, str], ...] = (),
    *,
    close: bool = True,
) -> bytes:
    """One request as bytes."""
    lines = [f"{method} {target} HTTP/1.1", "Host: model", f"Authorization: Bearer {key}"]
    lines += [f"{name}: {value}" for name, value in headers]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    if close:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode() + body


def status(answer: bytes) -> int:
    """Status of the first answer; 0 for none."""
    return int(answer.split(b" ", 2)[1]) if answer else 0


def chat(text: str = "hi", **more: object) -> bytes:
    """Body of a Chat Completions call."""
    return json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}], **more}).encode()
