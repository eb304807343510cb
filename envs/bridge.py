"""The way from a sandbox without a network to its episode's model: a unix socket that leads to one session only.

Outside, a small reverse proxy listens on a socket in a private directory, which is mounted into the sandbox; inside,
``bridge_inside`` makes it a port of the sandbox's own loopback. What passes is in ``bridge_rules``: the model calls of
this session and nothing else. The session's token stays outside; inside, a key of the episode's own is asked for,
since sockets of other users can be found. Bodies stream both ways. Depends on aiohttp, the session's record type and
the kernel; knows no harness.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import aiohttp
import orjson
from aiohttp import web

from tollway.envs.bridge_rules import answer_headers, credential_matches, forwarded_headers, route_of
from tollway.errors import BadRequest, EngineLost, EpisodeFailed, TollwayError, UpstreamError
from tollway.session_server.client import Session
from tollway.session_server.client_forms import error_of

__all__ = ["INSIDE", "PROGRAM", "SOCKET", "Bridge", "BridgeLimits", "Tally", "recorded_turns"]

logger = logging.getLogger(__name__)
INSIDE = "/run/tollway"
"""Where the bridge's directory appears in a sandbox."""
PROGRAM = Path(__file__).with_name("bridge_inside.py")
"""What runs inside; it is in the bridge's directory, too."""
SOCKET = "model.sock"
_ENDS = (b"\ndata: [DONE]", b"\nevent: message_stop", b"\nevent: response.completed", b"\nevent: response.incomplete")
"""One of these begins the last event of every stream that is a whole reply; no text of a model has line breaks."""
_RECORD_S = 60.0
_END_S = 5.0
"""For calls that were just aborted."""
_MAX_ERROR = 1 << 16
_MAX_PATH = 100
"""Bytes of a unix socket's path that every kernel takes, less its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeLimits:
    """What one episode's harness may take of the bridge."""

    body_bytes: int = 1 << 26
    connections: int = 64
    """Open at once, and so also calls at once."""
    connect_timeout_s: float = 10.0
    """For a connection to the session server; how long a call takes is for the server to bound."""


@dataclass(slots=True)
class Tally:
    """What became of the model calls that came over the bridge."""

    answered: int = 0
    refused: int = 0
    """Requests that may not pass."""
    failure: TollwayError | None = None
    """Why the last model call got no answer; ``None`` when it got one."""


class Bridge:
    """One session's bridge. Use as ``async with``, around the life of the sandbox that it is mounted into."""

    def __init__(self, session: Session, *, limits: BridgeLimits = BridgeLimits(), root: Path | None = None) -> None:
        self.session, self._limits, self._root = session, limits, root
        self.key = f"bridge-{secrets.token_urlsafe(24)}"
        """What a harness has for an API key. Good for this bridge only, and no longer than it."""
        self.tally = Tally()

    @property
    def folder(self) -> Path:
        """The directory that is mounted, as it is called outside. Holds no secrets."""
        return self._folder

    @property
    def mounts(self) -> Mapping[str, Path]:
        """What the sandbox has to be made with."""
        return {INSIDE: self._folder}

    @property
    def socket(self) -> Path:
        """The socket as it is called outside."""
        return self._folder / SOCKET

    async def __aenter__(self) -> Bridge:
        self._private = Path(tempfile.mkdtemp(prefix="tollway-bridge-", dir=self._root))
        try:
            self._folder = self._private / secrets.token_hex(8)
            if len(os.fsencode(self._folder)) > _MAX_PATH:
                raise EpisodeFailed(f"{self._private} is too long a path for a socket; set TMPDIR to a shorter one")
            self._folder.mkdir(mode=0o755)
            shutil.copyfile(PROGRAM, self._folder / PROGRAM.name)
            (self._folder / PROGRAM.name).chmod(0o644)
            # Sandboxes run under uids of their own and must pass through; nobody can list it.
            self._private.chmod(0o711)
            self._folder.chmod(0o711)
            await self._listen()
        except BaseException:
            shutil.rmtree(self._private, ignore_errors=True)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hang up on whoever is connected, abort their calls upstream, remove the socket."""
        self._listener.close()
        shutil.rmtree(self._private, ignore_errors=True)
        for connection in self._server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        try:
            await self._server.shutdown(_END_S)
            await self._listener.wait_closed()
        finally:
            await self._http.close()

    # -- outside end of the socket -----------------------------------------------------------------

    async def _listen(self) -> None:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        # Bodies pass as they are: what is not unpacked cannot grow.
        self._server = web.Server(
            self._handle, handler_cancellation=True, access_log=None, auto_decompress=False, lingering_time=0.0
        )
        try:
            self._listener = await asyncio.get_running_loop().create_unix_server(self._protocol, self.socket)
            self.socket.chmod(0o666)
        except BaseException:
            await self._http.close()
            raise

    def _protocol(self) -> asyncio.Protocol:
        if len(self._server.connections) >= self._limits.connections:
            return _Full()
        return self._server()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        headers = list(request.headers.items())
        target = request.raw_path
        route = route_of(request.method, target, self.session.session_id)
        if route is None:
            self.tally.refused += 1
            return _refusal(
                403,
                "forbidden",
                f"{request.method} {target[:200]} leads nowhere from here: only this session's model calls pass, "
                "POST /v1/chat/completions, /v1/responses, /v1/messages and /v1/messages/count_tokens, GET /v1/models",
            )
        if request.method != "HEAD" and not credential_matches(headers, self.key):
            self.tally.refused += 1
            return _refusal(401, "unauthorized", "send the key that this harness was given, as Bearer or x-api-key")
        if (request.content_length or 0) > self._limits.body_bytes:
            return self._too_large()
        if request.headers.get("expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        counts = request.method == "POST" and not route.partition("?")[0].endswith("/count_tokens")
        return await self._forward(request, route, headers, counts=counts)

    async def _forward(
        self, request: web.BaseRequest, route: str, headers: list[tuple[str, str]], *, counts: bool
    ) -> web.StreamResponse:
        body = _Body(request, self._limits.body_bytes) if request.body_exists else None
        url = self.session.base_url + route  # of characters that nobody writes in another way
        out: web.StreamResponse | None = None
        try:
            async with self._http.request(
                request.method,
                url,
                headers=forwarded_headers(headers, self.session.token),
                data=body.pieces() if body else None,
                allow_redirects=False,
            ) as answer:
                out = web.StreamResponse(status=answer.status, headers=answer_headers(answer.headers))
                await out.prepare(request)
                seen = _Seen()
                async for piece in answer.content.iter_any():
                    seen.take(piece)
                    await out.write(piece)
                if counts:
                    self._note(answer, seen)
                await out.write_eof()
                return out
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if body is not None and body.too_large:
                return self._too_large()
            if request.transport is None or request.transport.is_closing():
                raise  # it is the harness that went away
            lost = EngineLost(f"the session server is lost: {error or type(error).__name__}")
            if counts:
                self.tally.failure = lost
            logger.warning("bridge of session %s: %s", self.session.session_id[:8], lost)
            if out is None:
                return _refusal(lost.status, lost.code, str(lost))
            # Half a reply must not look like a whole one.
            request.transport.abort()
            raise ConnectionResetError(str(lost)) from error

    def _note(self, answer: aiohttp.ClientResponse, seen: _Seen) -> None:
        """Remember whether a model call was answered."""
        if answer.status >= 400:
            self.tally.failure = error_of(answer.status, bytes(seen.head), answer.headers.get("retry-after"))
        elif answer.content_type == "text/event-stream" and not seen.ended:
            self.tally.failure = UpstreamError("a stream ended without its last event")
        else:
            self.tally.answered += 1
            self.tally.failure = None

    def _too_large(self) -> web.StreamResponse:
        limit = BadRequest(
            f"the body has more than {self._limits.body_bytes} bytes, which is env.command.max_body_bytes"
        )
        return _refusal(413, limit.code, str(limit))


async def recorded_turns(session: Session) -> int:
    """Model calls that a session has recorded. Raises the server's error, never a wrong number."""
    headers = {"authorization": f"Bearer {session.token}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_RECORD_S)) as http,
            http.get(session.base_url, headers=headers) as answer,
        ):
            body = await answer.read()
            if answer.status >= 400:
                raise error_of(answer.status, body, answer.headers.get("retry-after"))
            return int(orjson.loads(body)["turns"])
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise EngineLost(f"the session server did not say what it recorded: {error or 'no answer'}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UpstreamError(f"the session server described a session without {error}") from error


class _Seen:
    """What is to be remembered of an answer on its way."""

    def __init__(self) -> None:
        self.head = bytearray()
        """Its beginning, which is all of an error."""
        self.ended = False
        """The last event of a stream began."""
        self._last = b"\n"

    def take(self, piece: bytes) -> None:
        """The next piece."""
        self.head += piece[: max(0, _MAX_ERROR - len(self.head))]
        if not self.ended:
            data = self._last + piece
            self.ended = any(end in data for end in _ENDS)
            self._last = data[-max(map(len, _ENDS)) :]


class _Body:
    """A request's body on its way, counted."""

    def __init__(self, request: web.BaseRequest, limit: int) -> None:
        self._request, self._limit = request, limit
        self.too_large = False

    async def pieces(self) -> AsyncIterator[bytes]:
        size = 0
        async for piece in self._request.content.iter_any():
            size += len(piece)
            if size > self._limit:
                self.too_large = True
                # What was sent so far is no message: the connection breaks before its end.
                raise aiohttp.ClientPayloadError("the body is too large")
            yield piece


class _Full(asyncio.Protocol):
    """Takes no more than the time to say no."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.WriteTransport):
            text = b'{"error":{"message":"too many connections at once","code":"capacity_exceeded"}}'
            head = b"HTTP/1.1 429 Too Many Requests\r\nconnection: close\r\nretry-after: 1\r\n"
            kind = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text)
            with contextlib.suppress(OSError):
                transport.write(head + kind + text)
        transport.close()


def _refusal(status: int, code: str, message: str) -> web.Response:
    """An error as all dialects' clients read it. The connection ends: what follows on it was not understood, too."""
    kinds = {401: "authentication_error", 403: "permission_error", 503: "overloaded_error"}
    error = {"message": message, "type": kinds.get(status, "invalid_request_error"), "code": code}
    response = web.Response(
        status=status, body=orjson.dumps({"type": "error", "error": error}), content_type="application/json"
    )
    response.force_close()
    return response
