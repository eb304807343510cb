"""Small pieces of plain ASGI: read a body, send an answer, render an error. Depends on ``errors``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import cast

import orjson

from tollway.errors import (
    BadRequest,
    CapacityExceeded,
    ContextLengthExceeded,
    TollwayError,
    VersionNotReady,
    WorkerDown,
)

__all__ = [
    "JSON",
    "Headers",
    "Receive",
    "Scope",
    "Send",
    "error_body",
    "error_headers",
    "found",
    "header",
    "read_body",
    "read_parts",
    "send_reply",
]

Scope = MutableMapping[str, object]
Receive = Callable[[], Awaitable[MutableMapping[str, object]]]
Send = Callable[[MutableMapping[str, object]], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

JSON: Headers = ((b"content-type", b"application/json"),)
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    """First value of a header; names are lower case in ASGI."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


async def read_body(receive: Receive, limit: int) -> bytes | None:
    """The whole request body; ``None`` when the client went away. Raises ``BadRequest`` over ``limit`` bytes."""
    parts: list[bytes] = []
    if not await read_parts(receive, limit, parts.append):
        return None
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def read_parts(receive: Receive, limit: int, take: Callable[[bytes], None]) -> bool:
    """Hand the request body to ``take`` as it comes; False when the client went away. Raises as ``read_body``."""
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return False
        part = cast(bytes, message.get("body", b""))
        size += len(part)
        if size > limit:
            raise BadRequest(f"the body has more than {limit} bytes, which is server.max_body_bytes")
        take(part)
        more = bool(message.get("more_body", False))
    return True


async def send_reply(send: Send, status: int, body: bytes, headers: Headers = JSON) -> None:
    """One complete answer."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def found(problem: Mapping[str, object]) -> str:
    """What pydantic found where it wanted something else, for the end of an error text."""
    loc = cast("Sequence[object]", problem.get("loc", ()))
    # Of headers nothing is shown: they hold keys. What is missing has the whole body as its input.
    if "header" in loc or problem.get("type") in ("missing", "json_invalid"):
        return ""
    return f", found {repr(problem.get('input'))[:80]}"


def error_body(error: TollwayError) -> bytes:
    """The error object that OpenAI-style clients read."""
    inner: dict[str, object] = {
        "message": str(error),
        "type": _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error"),
        "code": error.code,
        "param": error.param if isinstance(error, BadRequest) else None,
        "retryable": error.retryable,
    }
    if isinstance(error, ContextLengthExceeded):
        inner |= {"prompt_tokens": error.prompt_tokens, "limit": error.limit}
    if isinstance(error, VersionNotReady):
        inner |= {
            "wanted": error.wanted,
            "exact": error.exact,
            "serving": error.serving,
            "available": error.available,
        }
    return orjson.dumps({"error": inner})


def error_headers(error: TollwayError) -> Headers:
    """Content type, and ``Retry-After`` where a retry can help."""
    if isinstance(error, (CapacityExceeded, WorkerDown)):
        return (*JSON, (b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
    if error.status == 401:
        return (*JSON, (b"www-authenticate", b"Bearer"))
    return JSON
