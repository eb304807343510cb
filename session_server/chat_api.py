"""``POST .../v1/chat/completions`` in plain ASGI: the hot path between a socket and a turn.

Owns what a client sees while a turn runs: waiting, streaming, replay for retries, and what happens when it
goes away. The turn itself knows nothing of sockets. Depends on ``calls``, ``turn`` and the chat dialect.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import cast

import xxhash

from tollway.errors import TollwayError
from tollway.session_server.calls import Call, other_body
from tollway.session_server.config import ServerConfig
from tollway.session_server.dialects.chat import ChatStream, ChatWish, parse_request, render_reply
from tollway.session_server.families.base import Family
from tollway.session_server.http import JSON, Receive, Send, error_body, error_headers, header, read_body, send_reply
from tollway.session_server.journal import Journal
from tollway.session_server.names import fresh
from tollway.session_server.request import TurnOutcome
from tollway.session_server.session import Session
from tollway.session_server.turn import Turns
from tollway.telemetry import session_id

__all__ = ["ChatApi"]

logger = logging.getLogger(__name__)
_STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
RawHeaders = Iterable[tuple[bytes, bytes]]


class ChatApi:
    """Serves chat completions of authenticated sessions."""

    def __init__(self, config: ServerConfig, family: Family, turns: Turns, journal: Journal) -> None:
        self._config = config
        self._family = family
        self._turns = turns
        self._journal = journal

    async def handle(self, session: Session, headers: RawHeaders, receive: Receive, send: Send) -> None:
        """One request. Raises ``TollwayError`` while nothing has been sent."""
        body = await read_body(receive, self._config.max_body_bytes)
        if body is None:
            return
        key = header(headers, b"idempotency-key")
        retry = (header(headers, b"x-stainless-retry-count") or "0") != "0"
        digest = xxhash.xxh3_128_digest(body)
        call = session.calls.find(digest, key=key, retry=retry)
        if call is None and key is not None:
            # The same request may have arrived while the journal was asked.
            call = await self._kept(session, digest, key) or session.calls.find(digest, key=key, retry=retry)
        if call is None:
            wish = parse_request(body)
            if key is not None:
                wish = replace(wish, turn=replace(wish.turn, idempotency_key=key))
            call = Call(digest, key, wish.turn.stream)
            session.calls.start(call, self._produce(session, call, wish))
        call.clients += 1
        if call.streaming:
            await self._serve_stream(session, call, receive, send)
        else:
            await self._serve_whole(session, call, receive, send)

    # -- producing ---------------------------------------------------------------------------------

    async def _produce(self, session: Session, call: Call, wish: ChatWish) -> None:
        """Run the turn and write what clients get into ``call``."""
        session_id.set(session.session_id)
        created = int(time.time())
        try:
            if wish.turn.stream:
                await self._produce_stream(session, call, wish, created)
                return
            outcome: TurnOutcome | None = None

            reply_id = _reply_id()

            def render(done: TurnOutcome) -> bytes:
                return render_reply(wish, done, self._family, reply_id=reply_id, created=created)

            async for item in self._turns.run(session, wish.turn, keep=lambda done: call.digest + render(done)):
                if isinstance(item, TurnOutcome):
                    outcome = item
            if outcome is not None:
                call.on_delivery = _delivery(session, outcome.number)
                call.begin(200, JSON)
                call.write(render(outcome))
        except TollwayError as error:
            _write_error(call, error)
        except asyncio.CancelledError:
            _write_error(call, call.abort_reason)
        except Exception:
            # The boundary of the server: a bug must not leave a client waiting, and must be seen.
            logger.exception("turn failed")
            _write_error(call, TollwayError("internal error; the server log has the traceback"))
        finally:
            call.finish()

    async def _produce_stream(self, session: Session, call: Call, wish: ChatWish, created: int) -> None:
        writer = ChatStream(wish, self._family, reply_id=_reply_id(), created=created)

        def whole(done: TurnOutcome) -> bytes:
            return b"".join([call.digest, *call.chunks, writer.end(done)])

        async with aclosing(self._turns.run(session, wish.turn, keep=whole)) as items:
            async for item in items:
                if not call.started:
                    call.begin(200, _STREAM)
                    call.write(writer.start())
                if isinstance(item, TurnOutcome):
                    call.on_delivery = _delivery(session, item.number)
                    call.write(writer.end(item))
                else:
                    call.write(writer.delta(item))

    async def _kept(self, session: Session, digest: bytes, key: str) -> Call | None:
        """The reply that the journal kept for an idempotency key, from before a restart or long ago.

        Its first bytes are the digest of the body that it answered. Raises ``BadRequest`` for another body.
        """
        rows = await self._journal.read(
            "SELECT reply FROM turns WHERE session_id=? AND idempotency_key=? AND reply IS NOT NULL",
            (session.session_id, key),
        )
        if not rows:
            return None
        kept = cast(bytes, rows[0][0])
        answered, reply = kept[: len(digest)], kept[len(digest) :]
        if answered != digest:
            raise other_body()
        call = Call(digest, key, reply.startswith(b"data:"))
        call.begin(200, _STREAM if call.streaming else JSON)
        call.write(reply)
        call.finish()
        return call

    # -- serving -----------------------------------------------------------------------------------

    async def _serve_whole(self, session: Session, call: Call, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            while not call.finished and not gone.done():
                await asyncio.wait((call.change(), gone), return_when=asyncio.FIRST_COMPLETED)
            if not call.finished:
                self._leave(session, call)
                return
            # The server reports a disconnect after every answer, so ask before it.
            whole = not gone.done()
            await send_reply(send, call.status, b"".join(call.chunks), call.headers or JSON)
            _delivered(call, whole)
        finally:
            gone.cancel()

    async def _serve_stream(self, session: Session, call: Call, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        sent = 0
        try:
            while True:
                if len(call.chunks) > sent:
                    if not sent:
                        await send({"type": "http.response.start", "status": call.status, "headers": [*call.headers]})
                    ready, sent = call.chunks[sent:], len(call.chunks)
                    await send({"type": "http.response.body", "body": b"".join(ready), "more_body": True})
                elif call.finished:
                    break
                elif gone.done():
                    self._leave(session, call)
                    return
                else:
                    await asyncio.wait((call.change(), gone), return_when=asyncio.FIRST_COMPLETED)
            whole = not gone.done()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            _delivered(call, whole)
        finally:
            gone.cancel()

    def _leave(self, session: Session, call: Call) -> None:
        session.calls.leave(call, grace_s=self._config.retry_grace_s)


def _delivered(call: Call, whole: bool) -> None:
    if call.on_delivery is not None:
        call.on_delivery(whole)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _write_error(call: Call, error: TollwayError) -> None:
    """An error answer; inside a stream an error event, never a finish reason."""
    call.failed = True
    if not call.started:
        call.begin(error.status, error_headers(error))
        call.write(error_body(error))
    else:
        call.write(b"data: " + error_body(error) + b"\n\n")


def _delivery(session: Session, number: int) -> Callable[[bool], None]:
    def told(whole: bool) -> None:
        node = session.forest.nodes.get(number)
        if node is not None:
            node.delivered = whole

    return told


def _reply_id() -> str:
    return f"chatcmpl-{fresh()}"
