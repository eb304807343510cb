"""The placement service: one routing table for several session servers, over HTTP.

The data path stays between session server and engine: a server asks here once per session, and tells in batches
what happened. Every route but the two health checks wants the admin key, and a stranger learns nothing else, not
even which routes there are. Plain ASGI, so that a waiting server that goes away is noticed. Depends on
``shared_table`` and uvicorn.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, MutableMapping
from contextlib import contextmanager
from typing import cast
from urllib.parse import parse_qs

import msgspec
import uvicorn

from tollway.errors import (
    BadRequest,
    CapacityExceeded,
    ConfigError,
    NotFound,
    TollwayError,
    Unauthorized,
    VersionNotReady,
)
from tollway.router.config import RouterConfig
from tollway.router.placement_link import KEY_VARIABLE
from tollway.router.placement_wire import Attach, EngineSaid, Move, Place, RefitNotice, Report, decode, encode
from tollway.router.shared_table import SharedTable
from tollway.serving import KEEP_ALIVE_S, announce, handling_signals, listen

__all__ = ["LEASE_S", "PlacementApp", "PlacementServer", "run"]

logger = logging.getLogger(__name__)
LEASE_S = 30.0
"""How long a session server may be silent before its sessions are released."""
MAX_BODY_BYTES = 16 << 20
"""A server that attaches tells about all of its sessions, about 150 bytes for each."""
_LONGEST_POLL_S = 60.0
_ENGINE = re.compile(r"/engines/([^/]+)(?:/(drain|undrain|refit))?")

Scope = Mapping[str, object]
Message = MutableMapping[str, object]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class PlacementApp:
    """The service as an ASGI application. ``shared`` is started and closed by whoever serves it."""

    def __init__(self, shared: SharedTable, *, key: str) -> None:
        if not key:
            raise ConfigError(f"no key for the placement service: set {KEY_VARIABLE} to a secret of your choice")
        self.shared = shared
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] != "http":
            raise RuntimeError(f"this service speaks HTTP only, not {scope['type']}")
        try:
            status, body = await self._answer(scope, receive)
        except TollwayError as error:
            status, body = error.status, _error_body(error)
        except asyncio.CancelledError:
            raise
        except Exception:  # boundary: the server must get an answer, the log the trace
            logger.exception("%s %s failed", scope["method"], scope["path"])
            status, body = 500, _error_body(TollwayError("internal error; see the log of the placement service"))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        method, path = str(scope["method"]), str(scope["path"])
        if method == "GET" and path == "/healthz":
            return 200, b'{"status":"ok"}'
        if method == "GET" and path == "/readyz":
            ready = bool(self.shared.fleet.serving())
            return (200 if ready else 503), json.dumps({"ready": ready}).encode()
        self._require_key(cast("Iterable[tuple[bytes, bytes]]", scope["headers"]))
        if method == "GET":
            return await self._get(path, bytes(cast(bytes, scope.get("query_string", b""))), receive)
        body = await _read(receive)
        return await self._change(method, path, body, receive)

    def _require_key(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        given = next((value for name, value in headers if name == b"authorization"), b"")
        if not hmac.compare_digest(given, self._expected):
            raise Unauthorized(f"this service wants its key ({KEY_VARIABLE}) as Bearer")

    async def _get(self, path: str, query: bytes, receive: Receive) -> tuple[int, bytes]:
        if path == "/fleet":
            said = parse_qs(query.decode("ascii", "replace"))
            after, wait_s = _number(said, "revision", -1.0), _number(said, "wait_s", 0.0)
            seen = self.shared.seen(
                after=int(after), epoch=said.get("epoch", [""])[0], wait_s=min(max(wait_s, 0.0), _LONGEST_POLL_S)
            )
            return 200, encode(await _unless_gone(seen, receive))
        if path == "/engines":
            return 200, msgspec.json.encode({"engines": self.shared.snapshot().engines})
        raise NotFound(f"no route GET {path}")

    async def _change(self, method: str, path: str, body: bytes, receive: Receive) -> tuple[int, bytes]:
        shared = self.shared
        match method, path:
            case "POST", "/place":
                return 200, encode(await _unless_gone(shared.place(decode(body, Place)), receive))
            case "POST", "/move":
                return 200, encode(shared.move(decode(body, Move)))
            case "POST", "/report":
                report = decode(body, Report)
                shared.report(report)
                for url in report.removed:
                    await shared.remove(url)
                return 200, b"{}"
            case "POST", "/attach":
                return 200, encode(shared.attach(decode(body, Attach)))
            case "POST", "/engines":
                return 201, encode(shared.describe(shared.add(decode(body, EngineSaid))))
        found = _ENGINE.fullmatch(path)
        if found is None:
            raise NotFound(f"no route {method} {path}")
        return await self._change_engine(method, found[1], found[2], body)

    async def _change_engine(self, method: str, name: str, action: str | None, body: bytes) -> tuple[int, bytes]:
        shared = self.shared
        engine = shared.fleet.get(name)
        match method, action:
            case "DELETE", None:
                await shared.remove(engine.url)
                return 200, b"{}"
            case "POST", "drain":
                shared.fleet.drain(engine)
            case "POST", "undrain":
                shared.fleet.undrain(engine)
            case "POST", "refit":
                shared.refit(decode(_with_url(body, engine.url), RefitNotice))
            case _:
                raise NotFound(f"no route {method} /engines/{{id}}" + (f"/{action}" if action else ""))
        return 200, encode(shared.describe(engine))


def run(config: RouterConfig, *, host: str, port: int, key: str, engine_urls: list[str]) -> None:
    """Serve until a signal comes. Raises ``ConfigError`` for a missing key, a taken port, a bad engine URL."""
    if not key:
        raise ConfigError(f"set {KEY_VARIABLE}: session servers and operators need it")
    service = PlacementServer(config, listen(host, port, key="--port"), key=key, kind=_Process)
    asyncio.run(service.serve(engine_urls))


class PlacementServer:
    """The service on a listening socket, which it closes at its end; here inside a process that does other things."""

    def __init__(
        self, config: RouterConfig, listener: socket.socket, *, key: str, kind: type[_Guest] | None = None
    ) -> None:
        self._shared_config, self._listener = config, listener
        self.key = key
        self._kind = kind or _Guest
        self._server: _Guest | None = None

    def stop(self) -> None:
        """Let ``serve`` end."""
        if self._server is not None:
            self._server.should_exit = True

    async def serve(self, engine_urls: list[str]) -> None:
        """Serve until ``stop``. Raises ``ConfigError`` for a bad engine URL, and what breaks inside."""
        shared = SharedTable(self._shared_config, lease_s=LEASE_S)
        serving: asyncio.Task[None] | None = None
        try:
            for url in engine_urls:
                try:
                    shared.add(EngineSaid(url=url))
                except BadRequest as error:
                    raise ConfigError(str(error)) from None
            watch = await shared.start()
            settings = uvicorn.Config(
                PlacementApp(shared, key=self.key),
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=1,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
            self._server = self._kind(settings, self._listener)
            serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
            await asyncio.wait({serving, watch}, return_when=asyncio.FIRST_COMPLETED)
            await (serving if serving.done() else watch)
        finally:
            if serving is not None:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
            await shared.aclose()
            self._listener.close()


class _Guest(uvicorn.Server):
    """uvicorn that leaves signals and stdout to its process."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _Process(_Guest):
    """uvicorn that announces itself and ends with status 0 on a signal."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        announce(self._listener)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        with handling_signals(self.handle_exit):
            yield


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest("the client went away before the end of the body")
        part = cast(bytes, message.get("body", b""))
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise BadRequest(f"the body has more than {MAX_BODY_BYTES} bytes")
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def _unless_gone(work: Awaitable[msgspec.Struct], receive: Receive) -> msgspec.Struct:
    """Wait for ``work``, or give it up when whoever asked goes away: a place for nobody would hold its room."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise BadRequest("the client went away")
        return await task
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _number(said: Mapping[str, list[str]], name: str, default: float) -> float:
    try:
        value = float(said.get(name, [str(default)])[0])
        if not abs(value) < 1e15:
            raise ValueError(value)
    except ValueError:
        raise BadRequest(f"{name}={said[name][0]!r}: want a number", param=name) from None
    return value


def _with_url(body: bytes, url: str) -> bytes:
    """A refit notice of an operator names its engine in the path."""
    try:
        said = msgspec.json.decode(body, type=dict[str, object])
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"no JSON object: {error}") from None
    return msgspec.json.encode({**said, "url": url})


def _error_body(error: TollwayError) -> bytes:
    said: dict[str, object] = {"message": str(error), "code": error.code, "retryable": error.retryable}
    if isinstance(error, BadRequest) and error.param is not None:
        said["param"] = error.param
    if isinstance(error, CapacityExceeded):
        said["retry_after_s"] = error.retry_after_s
    if isinstance(error, VersionNotReady):
        said |= {"wanted": error.wanted, "serving": error.serving, "exact": error.exact}
    return json.dumps({"error": said}).encode()
