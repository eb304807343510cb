"""Requests that reach the wrong worker go to the right one, as they are, both ways streamed.

Wraps a worker's application. A session's id names its owner; a new session goes to the owner of its parent or of its
group, or to the workers in turn. What a sibling sent is never sent on, so there are no loops. Owns no state of
sessions and reads no body but that of ``POST /sessions``. Depends on ``siblings``, ``auth`` and, for errors, the
dialects.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import cast

import aiohttp
import orjson
from yarl import URL  # the form in which aiohttp takes a target as it is

from tollway.errors import BadRequest, TollwayError, WorkerDown
from tollway.session_server import auth
from tollway.session_server.crew import WORKER_HEADER, Crew
from tollway.session_server.dialects.messages import MESSAGES
from tollway.session_server.http import Receive, Scope, Send, error_body, error_headers, header, read_body, send_reply
from tollway.session_server.siblings import BASE, Siblings, down

__all__ = ["Forwarder", "from_sibling"]

logger = logging.getLogger(__name__)
_MARK = "tollway.from_sibling"
_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect", WORKER_HEADER),
    )
)
"""Headers of one connection, and the one that only workers may set."""
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_TARGET = re.compile(rb"/[\x21-\x7e]*")
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]


def from_sibling(scope: Scope) -> bool:
    """Whether a sibling makes this call itself, so that it concerns this worker alone."""
    return scope.get(_MARK) is True


class Forwarder:
    """The application of one worker as any client may reach it."""

    def __init__(self, app: App, siblings: Siblings, *, admin_key: str, max_body_bytes: int) -> None:
        self._app = app
        self._crew: Crew = siblings.crew
        self._siblings = siblings
        self._admin_key = admin_key
        self._max_body_bytes = max_body_bytes
        self._turn = self._crew.index

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] == "http":
            try:
                if not self._take_mark(scope):
                    if _creates(scope) and self._by_admin(scope):
                        await self._create(scope, receive, send)
                        return
                    owner = self._owner(scope)
                    if owner is not None:
                        await self._forward(owner, scope, receive, send)
                        return
            except TollwayError as error:
                body = MESSAGES.error(error) if "/v1/messages" in cast(str, scope["path"]) else error_body(error)
                await send_reply(send, error.status, body, error_headers(error))
                return
        await self._app(scope, receive, send)

    # -- whose it is -------------------------------------------------------------------------------

    def _take_mark(self, scope: Scope) -> bool:
        """Take the workers' header off a request; whether it is right, and the request's journey ends here."""
        headers = cast("list[tuple[bytes, bytes]]", scope["headers"])
        marks = [value for name, value in headers if name == WORKER_HEADER]
        if marks:
            scope["headers"] = [each for each in headers if each[0] != WORKER_HEADER]
        call, passed = (
            any(hmac.compare_digest(mark, value.encode()) for mark in marks)
            for value in (self._crew.own_call, self._crew.passed_on)
        )
        scope[_MARK] = call
        return call or passed

    def _owner(self, scope: Scope) -> int | None:
        """The sibling that has to answer; ``None`` when this worker does."""
        path, headers = cast(str, scope["path"]), cast(Headers, scope["headers"])
        owner: int | None = None
        if path.startswith("/sessions/"):
            name = path.split("/", 3)[2]
            owner = auth.worker_of(auth.session_of(name) or name)
        elif path.startswith("/v1/"):
            token = auth.credential(headers)
            named = auth.session_of(token) if token is not None else None
            owner = auth.worker_of(named) if named is not None else None
        # An owner that does not exist is answered here, like any unknown session.
        return owner if owner is not None and owner != self._crew.index and owner < self._crew.size else None

    def _by_admin(self, scope: Scope) -> bool:
        return auth.is_admin(auth.credential(cast(Headers, scope["headers"])), self._admin_key)

    async def _create(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A new session, on the worker that its parent or its group has, or on the next one that is up."""
        body = await read_body(receive, self._max_body_bytes)
        if body is None:
            return
        group, parent = _relatives_in(body)
        key = header(cast(Headers, scope["headers"]), b"idempotency-key")
        owners = [parent] if parent is not None and parent < self._crew.size else self._owners(group, key)
        for owner in owners:
            again = _Replay(body, receive)
            if owner == self._crew.index:
                await self._app(scope, again, send)
                return
            try:
                await self._forward(owner, scope, again, send)
                return
            except WorkerDown as error:
                if owner == owners[-1] or not isinstance(error.__cause__, aiohttp.ClientConnectorError):
                    raise  # what was sent may have opened a session

    def _owners(self, group: str, key: str | None) -> list[int]:
        """Workers that may have a new session, in the order in which they are asked."""
        size = self._crew.size
        if group:
            return [_hash(group) % size]
        if key is not None:
            first = _hash(key)  # the same create again meets its first answer
        else:
            first = self._turn = self._turn + 1
        return [(first + step) % size for step in range(size)]

    # -- on its way --------------------------------------------------------------------------------

    async def _forward(self, owner: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay one request to ``owner``; ends when its reply is sent or the client has gone.

        Raises ``WorkerDown`` while nothing of a reply has been sent.
        """
        given = cast("list[tuple[bytes, bytes]]", scope["headers"])
        headers = [*_onward(given), (WORKER_HEADER.decode(), self._crew.passed_on)]
        upload = _Upload(receive, has_body=any(name in (b"content-length", b"transfer-encoding") for name, _ in given))
        call = _Call(cast(str, scope["method"]), _target(scope), headers, owner)
        exchange = asyncio.ensure_future(self._exchange(call, upload, send))
        gone = asyncio.ensure_future(upload.gone())
        try:
            await asyncio.wait((exchange, gone), return_when=asyncio.FIRST_COMPLETED)
            if exchange.done():
                exchange.result()
        finally:
            # Ending the exchange closes its connection, by which the owner knows that the client has gone.
            exchange.cancel()
            gone.cancel()
            await asyncio.gather(exchange, gone, return_exceptions=True)

    async def _exchange(self, call: _Call, upload: _Upload, send: Send) -> None:
        started = False
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._siblings.http(call.owner).request(
                call.method,
                call.target,
                headers=call.headers,
                data=upload.body() if upload.has_body else None,
                allow_redirects=False,
            )
            head = _kept((name.lower(), value) for name, value in response.raw_headers)
            started = True
            await send({"type": "http.response.start", "status": response.status, "headers": head})
            async for chunk in response.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, OSError) as error:
            if not started:
                raise down(call.owner, error) from error
            # The reply has no end, so the client's connection is closed without one and nobody takes it for whole.
            logger.warning("worker %d was lost in the middle of a reply: %s", call.owner, error)
        finally:
            if response is not None:
                response.close()


@dataclass(frozen=True, slots=True)
class _Call:
    method: str
    target: URL
    headers: list[tuple[str, str]]
    owner: int


class _Upload:
    """The request body on its way, and the client behind it."""

    def __init__(self, receive: Receive, *, has_body: bool) -> None:
        self.has_body = has_body
        self._receive = receive
        self._read = asyncio.Event()
        self._left = False
        if not has_body:
            self._read.set()

    async def body(self) -> AsyncGenerator[bytes]:
        """Parts as they come. Ends with an error when the client leaves, so that no half passes for a whole."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._left = True
                self._read.set()
                raise BadRequest("the client went away before the end of the body")
            if part := cast(bytes, message.get("body", b"")):
                yield part
            if not message.get("more_body", False):
                self._read.set()
                return

    async def gone(self) -> None:
        """Returns when the client has gone."""
        await self._read.wait()
        while not self._left:
            self._left = (await self._receive())["type"] == "http.disconnect"


class _Replay:
    """A ``receive`` whose body was read already."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> dict[str, object]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        return dict(await self._receive())


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def _creates(scope: Scope) -> bool:
    return scope["method"] == "POST" and scope["path"] == "/sessions"


def _relatives_in(body: bytes) -> tuple[str, int | None]:
    """(group, worker of the parent) that a create names. What is wrong with the body is for the route to say."""
    if b"group_id" not in body and b"parent_id" not in body:
        return "", None
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "", None
    if not isinstance(value, dict):
        return "", None
    group, parent = value.get("group_id"), value.get("parent_id")
    return group if isinstance(group, str) else "", auth.worker_of(parent) if isinstance(parent, str) else None


def _target(scope: Scope) -> URL:
    """The request's own target, byte for byte."""
    raw = cast(bytes, scope.get("raw_path") or b"")
    query = cast(bytes, scope.get("query_string") or b"")
    whole = raw + (b"?" + query if query else b"")
    if not _TARGET.fullmatch(whole):
        raise BadRequest("the request target holds characters that must be percent-encoded")
    return URL(BASE + whole.decode("ascii"), encoded=True)


def _onward(headers: Headers) -> list[tuple[str, str]]:
    """Request headers for the owner: none of this connection, none that could become two."""
    try:
        return [(name.decode("ascii"), value.decode("utf-8")) for name, value in _kept(headers)]
    except UnicodeDecodeError as error:
        raise BadRequest(f"a header is not UTF-8: {error.object[:80]!r}") from None


def _kept(headers: Headers) -> list[tuple[bytes, bytes]]:
    """End-to-end headers. Raises ``BadRequest`` for bytes that would end a header."""
    found = [(name, value) for name, value in headers if name != b"date"]
    for name, value in found:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise BadRequest(f"header {name[:80]!r} holds control characters")
    listed = {part.strip().lower() for name, value in found if name == b"connection" for part in value.split(b",")}
    if any(name == b"transfer-encoding" for name, _ in found):
        listed.add(b"content-length")  # of two lengths the chunks' is the true one
    return [(name, value) for name, value in found if name not in _HOP and name not in listed]
