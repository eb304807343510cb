"""A plain ASGI application: routing, bodies, errors, and nothing else.

Plain ASGI because it costs a fifth of a framework's CPU per call, and that CPU is taken from the decode loop.
Depends on ``tollway.errors`` and orjson.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass

import orjson

from tollway.errors import BadRequest, NotFound, TollwayError, Unauthorized

__all__ = ["Application", "Call", "Handler", "Reply"]

logger = logging.getLogger(__name__)
Message = MutableMapping[str, object]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_OPEN_PATHS = ("/health", "/health_generate", "/ready")
"""Answered without a key: a supervisor must be able to ask whether the process lives."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole response."""

    content: bytes = b""
    status: int = 200
    media_type: str = "application/json"

    @classmethod
    def json(cls, value: object, status: int = 200) -> Reply:
        """A JSON response."""
        return cls(orjson.dumps(value), status)


@dataclass(slots=True)
class Call:
    """One request being handled."""

    body: bytes
    query: bytes
    receive: Receive
    send: Send

    def json(self) -> object:
        """The decoded body; an empty one is an empty object."""
        try:
            return orjson.loads(self.body) if self.body else {}
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"the body is not valid JSON: {error}") from None

    async def disconnected(self) -> None:
        """Return when the client has gone."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def start(self, media_type: str) -> None:
        """Begin a streamed response."""
        await self.send({"type": "http.response.start", "status": 200, "headers": _headers(media_type)})

    async def write(self, chunk: bytes, *, more: bool = True) -> None:
        """Send one chunk of a streamed response."""
        await self.send({"type": "http.response.body", "body": chunk, "more_body": more})


Handler = Callable[[Call], Awaitable[Reply | None]]
"""Returns the whole response, or ``None`` after streaming one."""


class Application:
    """Dispatches by method and path; turns ``TollwayError`` into SGLang's error bodies."""

    def __init__(self, routes: Mapping[tuple[str, str], Handler], api_key: str | None) -> None:
        self._routes, self._api_key = routes, api_key

    async def __call__(self, scope: Mapping[str, object], receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] != "http":
            raise RuntimeError(f"this server speaks HTTP only, not {scope['type']}")
        try:
            handler = self._find(scope)
            call = Call(await _read(receive), bytes(scope["query_string"]), receive, send)  # type: ignore[call-overload]
            reply = await handler(call)
        except TollwayError as error:
            reply = _error(error)
        except asyncio.CancelledError:
            raise
        except Exception:  # boundary: the client must get an answer, the log the trace
            logger.exception("%s %s failed", scope["method"], scope["path"])
            reply = _error(TollwayError("internal error; see the engine's log"))
        if reply is not None:
            headers = [*_headers(reply.media_type), (b"content-length", str(len(reply.content)).encode())]
            await send({"type": "http.response.start", "status": reply.status, "headers": headers})
            await send({"type": "http.response.body", "body": reply.content})

    def _find(self, scope: Mapping[str, object]) -> Handler:
        path, method = str(scope["path"]), str(scope["method"])
        if self._api_key is not None and path not in _OPEN_PATHS:
            headers = dict(scope["headers"])  # type: ignore[call-overload]
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self._api_key.encode()):
                raise Unauthorized("this engine wants its key: send Authorization: Bearer ...")
        handler = self._routes.get((method, path))
        if handler is None:
            raise NotFound(f"no route {method} {path}")
        return handler


async def _read(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            # Half a body must not pass for an empty one, which pauses or releases by default.
            raise BadRequest("the client went away before the end of the body")
        pieces.append(message.get("body", b""))  # type: ignore[arg-type]  # ASGI: bytes
        if not message.get("more_body"):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _error(error: TollwayError) -> Reply:
    detail = {"message": str(error), "type": type(error).__name__, "code": error.code}
    if isinstance(error, BadRequest) and error.param is not None:
        detail["param"] = error.param
    return Reply.json({"error": detail, "success": False, "message": str(error)}, error.status)


def _headers(media_type: str) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", media_type.encode())]
