"""The dialect routes in plain ASGI: the hot path between a socket and a turn.

Owns what a client sees while a turn runs: waiting, streaming, replay for retries, and what happens when it
goes away. The turn itself knows nothing of sockets. Depends on ``calls``, ``conversation``, ``turn`` and the
dialects.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from tollway.errors import TollwayError
from tollway.router.targets import ANY
from tollway.session_server.bodies import Body
from tollway.session_server.calls import Call, other_body
from tollway.session_server.config import ServerConfig
from tollway.session_server.conversation import Conversations
from tollway.session_server.dialects.base import Dialect, ReplyNames, StreamWriter
from tollway.session_server.dialects.messages import count_reply
from tollway.session_server.families.base import Family
from tollway.session_server.forest import Node
from tollway.session_server.http import JSON, Receive, Send, error_headers, header, read_parts, send_reply
from tollway.session_server.journal import Journal
from tollway.session_server.matching import chain
from tollway.session_server.names import fresh
from tollway.session_server.request import TurnDelta, TurnOutcome
from tollway.session_server.session import Session
from tollway.session_server.turn import Asked, Turns
from tollway.session_server.wants import requested, want_of
from tollway.telemetry import session_id

__all__ = ["TurnApi"]

logger = logging.getLogger(__name__)
_STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_EVENTS = (b"data:", b"event:")
RawHeaders = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class _Job:
    """One generation to be produced."""

    session: Session
    dialect: Dialect
    asked: Asked
    call: Call
    names: ReplyNames


class TurnApi:
    """Serves the model calls of authenticated sessions."""

    def __init__(self, config: ServerConfig, family: Family, turns: Turns, journal: Journal) -> None:
        self._config = config
        self._family = family
        self._turns = turns
        self._journal = journal
        self._conversations = Conversations(journal)

    async def handle(
        self, session: Session, dialect: Dialect, headers: RawHeaders, receive: Receive, send: Send
    ) -> None:
        """One request. Raises ``TollwayError`` while nothing has been sent."""
        body = Body()
        # Most calls continue the conversation of the last one.
        stops = [mark.offset for mark in session.memos[0].marks] if session.memos else []
        if not await read_parts(receive, self._config.max_body_bytes, lambda part: body.add(part, stops)):
            return
        key = header(headers, b"idempotency-key") or None
        retry = (header(headers, b"x-stainless-retry-count") or "0") != "0"
        versions = requested(headers)
        want = want_of(session.settings, versions)
        # One body may be a request of two dialects, or want other weights: these are two calls.
        digest = chain(dialect.name.encode(), body.digest())
        if versions is not ANY:
            digest = chain(digest, repr(versions).encode())
        call = session.calls.find(digest, key=key, retry=retry)
        if call is None and key is not None:
            call = await self._kept(session, digest, key)
        if call is None:
            names = ReplyNames(dialect.id_prefix + fresh(), int(time.time()))
            asked = await self._read(session, dialect, body, reply_id=names.reply_id, key=key)
            if want is not ANY:
                asked = replace(asked, want=want)
            # The same request may have arrived while the journal was asked.
            call = session.calls.find(digest, key=key, retry=retry)
        if call is None:
            call = Call(digest, key, asked.wish.stream)
            session.calls.start(call, self._produce(_Job(session, dialect, asked, call, names)))
        call.clients += 1
        if call.streaming:
            await self._serve_stream(session, call, receive, send)
        else:
            await self._serve_whole(session, call, receive, send)

    async def count(self, session: Session, dialect: Dialect, receive: Receive, send: Send) -> None:
        """How many tokens the prompt of a request has. Raises as ``handle``."""
        body = Body()
        if await read_parts(receive, self._config.max_body_bytes, body.add):
            asked = await self._read(session, dialect, body)
            await send_reply(send, 200, count_reply(await self._turns.count(session, asked)))

    async def _read(
        self, session: Session, dialect: Dialect, body: Body, *, reply_id: str = "", key: str | None = None
    ) -> Asked:
        try:
            return await self._conversations.read(session, dialect, body, reply_id=reply_id, key=key)
        except TollwayError:
            raise
        except Exception as error:
            # The boundary of the server, as in ``_produce``.
            logger.exception("a request could not be read")
            raise TollwayError("internal error; the server log has the traceback") from error

    # -- producing ---------------------------------------------------------------------------------

    async def _produce(self, job: _Job) -> None:
        """Run the turn and write what clients get into the call."""
        session_id.set(job.session.session_id)
        call = job.call
        writer = job.dialect.stream(job.asked.wish, job.names, self._family) if call.streaming else None
        try:
            if writer is not None:
                await self._produce_stream(job, writer)
            else:
                await self._produce_whole(job)
        except TollwayError as error:
            _write_error(job, writer, error)
        except asyncio.CancelledError:
            _write_error(job, writer, call.abort_reason)
        except Exception:
            # The boundary of the server: a bug must not leave a client waiting, and must be seen.
            logger.exception("turn failed")
            _write_error(job, writer, TollwayError("internal error; the server log has the traceback"))
        finally:
            call.finish()

    async def _produce_whole(self, job: _Job) -> None:
        call, asked = job.call, job.asked

        def render(outcomes: Sequence[TurnOutcome]) -> bytes:
            return job.dialect.reply(asked.wish, outcomes, job.names, self._family)

        keep = None if asked.key is None else lambda outcomes: call.digest + render(outcomes)
        async with aclosing(self._turns.run(job.session, asked, keep=keep)) as items:
            async for item in items:
                if not isinstance(item, TurnDelta):
                    call.on_delivery = _delivery(partial(_nodes, job.session, item))
                    reply = render(item)
                    call.begin(200, JSON)
                    call.write(reply)

    async def _produce_stream(self, job: _Job, writer: StreamWriter) -> None:
        call = job.call
        start = end = b""

        def whole(outcomes: Sequence[TurnOutcome]) -> bytes:
            nonlocal start, end
            if not call.started:  # a reply without a piece: writers number their events as they are made
                start = writer.start()
            end = writer.end(outcomes)
            return b"".join([call.digest, start, *call.chunks, end])

        keep = whole if job.asked.key is not None else None
        async with aclosing(self._turns.run(job.session, job.asked, keep=keep)) as items:
            async for item in items:
                if not call.started:
                    call.begin(200, _STREAM)
                    call.write(start or writer.start())
                if isinstance(item, TurnDelta):
                    call.write(writer.delta(item))
                else:
                    call.on_delivery = _delivery(partial(_nodes, job.session, item))
                    call.write(end or writer.end(item))

    async def _kept(self, session: Session, digest: bytes, key: str) -> Call | None:
        """The reply that the journal kept for an idempotency key, from before a restart or long ago.

        Its first bytes are the digest of the body that it answered. Raises ``BadRequest`` for another body.
        """
        rows = await self._journal.read(
            "SELECT number, reply FROM turns WHERE session_id=? AND idempotency_key=? AND reply IS NOT NULL",
            (session.session_id, key),
        )
        if not rows:
            return None
        number, kept = cast("tuple[int, bytes]", rows[0])
        answered, reply = kept[: len(digest)], kept[len(digest) :]
        if answered != digest:
            raise other_body()
        call = Call(digest, key, reply.startswith(_EVENTS))
        call.on_delivery = _delivery(partial(session.forest.choices, number))
        call.begin(200, _STREAM if call.streaming else JSON)
        call.write(reply)
        call.finish()
        return call

    # -- serving -----------------------------------------------------------------------------------

    async def _serve_whole(self, session: Session, call: Call, receive: Receive, send: Send) -> None:
        gone = _leaving(call, receive)
        try:
            while not call.finished and not gone.done():
                await call.change()
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
        gone = _leaving(call, receive)
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
                    await call.change()
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


def _leaving(call: Call, receive: Receive) -> asyncio.Future[None]:
    """Ends when the client is gone, and wakes whoever waits for the call."""
    gone = asyncio.ensure_future(_disconnected(receive))
    gone.add_done_callback(lambda _: call.wake())
    return gone


async def _disconnected(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _write_error(job: _Job, writer: StreamWriter | None, error: TollwayError) -> None:
    """An error answer; inside a stream an error event, never a finish reason."""
    call = job.call
    call.failed = True
    failed = job.session.tally.failed_calls
    failed[error.code] = failed.get(error.code, 0) + 1
    if writer is not None and call.started:
        call.write(writer.error(error))
    else:
        call.begin(error.status, error_headers(error))
        call.write(job.dialect.error(error))


def _nodes(session: Session, outcomes: Sequence[TurnOutcome]) -> list[Node]:
    """Nodes of a reply that are in memory."""
    nodes = session.forest.nodes
    return [nodes[outcome.number] for outcome in outcomes if outcome.number in nodes]


def _delivery(nodes: Callable[[], Sequence[Node]]) -> Callable[[bool], None]:
    """Notes at a reply's nodes whether any of its clients got it whole; one is enough, whatever comes later."""
    got = False

    def told(whole: bool) -> None:
        nonlocal got
        got = got or whole
        for node in nodes():
            node.delivered = got

    return told
