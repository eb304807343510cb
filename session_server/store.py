"""The life of sessions: create, find, reward, close, delete, expire, and come back after a restart.

Every change is in the journal before it is answered. Of an open session that nobody uses only a card stays
in memory; its next call brings it back from the journal, as does the first one after a restart. Depends on
``journal``, ``rows`` and the router (for pins).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import cast

from tollway.errors import BadRequest, CapacityExceeded, Conflict, JournalError, RequestAborted, ServerStopping
from tollway.heap import collect_if_due, give_back
from tollway.router.service import Router
from tollway.session_server import auth, metrics
from tollway.session_server.config import ServerConfig
from tollway.session_server.forest import Forest
from tollway.session_server.journal import Journal, Read
from tollway.session_server.rows import (
    CARD_COLUMNS,
    EXACT_OPEN,
    NODE_COLUMNS,
    SESSION_COLUMNS,
    card_from_row,
    node_from_row,
    outcome_update,
    session_from_row,
    session_insert,
    settings_from_row,
)
from tollway.session_server.session import Card, Outcome, Session, Settings, Tally

__all__ = ["SessionStore"]

logger = logging.getLogger(__name__)
_SWEEP_S = 5.0
_SETTLED_S = 1.0
_LOOK_AHEAD = 64
"""Sessions at the end of the queue that may be busy, so that room can still be made."""
_TRIM_AFTER = 32
"""Sessions that have left memory before it is given back to the system, which takes some milliseconds."""


class SessionStore:
    """All sessions of one server process. ``worker`` is its number among its siblings."""

    def __init__(self, config: ServerConfig, journal: Journal, router: Router, *, worker: int = 0) -> None:
        self._config = config
        self._journal = journal
        self._router = router
        self._worker = worker
        self.boot = secrets.token_hex(8)
        """Names this run of the server, see ``TurnInsert``."""
        self._open: dict[str, Card] = {}
        self._loaded: OrderedDict[str, Session] = OrderedDict()
        """Open sessions in memory, the one used last at the end."""
        self._pushed_out = 0
        """Sessions that left memory for want of room since the last sweep."""
        self._away: set[str] = set()
        """Open sessions that left memory for want of room and whose KV still counts: their tools may be running."""
        self._closed: OrderedDict[str, Session] = OrderedDict()
        self._loading: dict[str, asyncio.Task[Session | None]] = {}

    @property
    def open_sessions(self) -> int:
        """Sessions that take calls."""
        return len(self._open)

    async def start(self) -> None:
        """Take over the open sessions of the journal."""
        rows = await self._journal.read(f"SELECT {CARD_COLUMNS} FROM sessions WHERE state='open'")  # noqa: S608
        self._open = dict(card_from_row(row, used_at=time.time()) for row in rows)
        for row in await self._journal.read(EXACT_OPEN):
            _hold(self._router, *settings_from_row(row))
        metrics.SESSIONS.set(len(self._open))
        if rows:
            logger.info("%d open sessions taken over from %s", len(rows), self._journal.path)

    async def sweep(self) -> None:
        """Close sessions whose time is over and unload those that nobody uses, for ever."""
        unloaded = 0
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.time()
            await self.expire(now)
            unloaded += self.unload(now)
            if unloaded >= _TRIM_AFTER:
                unloaded = 0
                await asyncio.to_thread(give_back)
            if _quiet(self._loaded, self._open, now):
                collect_if_due()

    async def expire(self, now: float) -> None:
        """Close the sessions whose time is over at ``now``, in Unix seconds."""
        for session_id, card in list(self._open.items()):
            if not self._over(session_id, card, now):
                continue
            try:
                if session_id not in self._loaded and session_id not in self._loading:
                    logger.info("session %s: %s", session_id[:8], self._over(session_id, card, now))
                    await self._close_unloaded(session_id)
                    continue
                session = await self.get(session_id)
                # It may have been called while the journal was asked.
                if session is not None and (why := self._over(session_id, card, now)):
                    logger.info("session %s: %s", session_id[:8], why)
                    await self.close(session, why=why)
            except JournalError as error:
                # Closed in memory; a restart finds it open and expired, and closes it again.
                logger.error("session %s: %s", session_id[:8], error)

    async def _close_unloaded(self, session_id: str) -> None:
        """Close a session that nobody uses, from its card."""
        self._forget(session_id)
        self._router.release_session(session_id)
        metrics.SESSIONS.set(len(self._open))
        await self._journal.write(("UPDATE sessions SET state='closed' WHERE id=?", (session_id,)))

    def unload(self, now: float) -> int:
        """Keep only the cards of sessions that nobody has used for a while; how many left memory."""
        gone, self._pushed_out = self._pushed_out, 0
        for session_id, session in list(self._loaded.items()):
            if self._idle(session_id, session, now, self._config.unload_after_s):
                self._unload(session_id)
                gone += 1
        for session_id in [key for key in self._away if self._open[key].used_at + self._config.unload_after_s <= now]:
            self._away.discard(session_id)
            self._router.rest_session(session_id)
        return gone

    def _idle(self, session_id: str, session: Session, now: float, seconds: float) -> bool:
        # Whoever has just had it loaded does not visit it yet.
        used_at = max(self._open[session_id].used_at, session.loaded_at)
        return not session.busy and used_at + seconds <= now

    def _unload(self, session_id: str, *, away: bool = False) -> None:
        session, card = self._loaded.pop(session_id), self._open[session_id]
        card.tally = session.tally if session.tally else None
        self._router.ledger.rest(session_id)
        (self._away.add if away else self._router.rest_session)(session_id)
        # Replies know their session: without this only a full collection would free it.
        session.calls.forget()

    def _make_room(self) -> None:
        """Beyond ``server.loaded_sessions`` those that were used longest ago leave memory."""
        surplus = len(self._loaded) - self._config.loaded_sessions
        if surplus <= 0:
            return
        now = time.time()
        oldest = list(itertools.islice(self._loaded.items(), surplus + _LOOK_AHEAD))
        idle = [key for key, session in oldest if self._idle(key, session, now, _SETTLED_S)]
        for session_id in idle[:surplus]:
            self._unload(session_id, away=True)
            self._pushed_out += 1

    def _over(self, session_id: str, card: Card, now: float) -> str:
        """Why a session has to end; empty while it may go on."""
        if card.expires_at <= now:
            return "the session expired"
        loaded = self._loaded.get(session_id)
        busy = loaded is not None and loaded.busy
        if card.used_at + self._config.idle_ttl_s <= now and not busy:
            return f"the session was idle for {self._config.idle_ttl_s:.0f} s"
        return ""

    # -- life --------------------------------------------------------------------------------------

    async def create(
        self, settings: Settings, *, task_id: str, group_id: str, ttl_s: float | None
    ) -> tuple[Session, str]:
        """(session, token). The token is not kept. Raises ``CapacityExceeded``."""
        if len(self._open) >= self._config.capacity:
            raise CapacityExceeded(f"all {self._config.capacity} sessions are in use; close some", retry_after_s=1.0)
        session_id, token = auth.new_session_secret(self._worker)
        now = time.time()
        session = Session(
            session_id=session_id,
            token_hash=auth.token_hash(token),
            task_id=task_id,
            group_id=group_id,
            created_at=now,
            expires_at=now + (ttl_s if ttl_s is not None else self._config.ttl_s),
            settings=settings,
            forest=Forest(call_ids=self._config.match_tool_call_ids),
        )
        # Counted before the write, so that a burst cannot pass the cap.
        self._open[session_id] = Card(session.token_hash, session.expires_at, now)
        self._loaded[session_id] = session
        self._make_room()
        try:
            await self._journal.write(session_insert(session))
        except BaseException:
            self._forget(session_id)
            raise
        _hold(self._router, session_id, settings)
        metrics.SESSIONS.set(len(self._open))
        return session, token

    async def get(self, session_id: str) -> Session | None:
        """A session by id, from memory or from the journal."""
        session = self._loaded.get(session_id) or self._closed.get(session_id)
        if session is not None:
            return session
        task = self._loading.get(session_id)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._recall(session_id))
            self._loading[session_id] = task
        return await asyncio.shield(task)

    async def token_hash(self, session_id: str) -> bytes | None:
        """What is kept of a session's token, without loading the session."""
        known = self._open.get(session_id) or self._closed.get(session_id)
        if known is not None:
            return known.token_hash
        rows = await self._journal.read("SELECT token_hash FROM sessions WHERE id=?", (session_id,))
        return cast(bytes, rows[0][0]) if rows else None

    @asynccontextmanager
    async def visit(self, session: Session) -> AsyncIterator[Session]:
        """Hold a session in memory for the time of a request and note that it is used."""
        session.visitors += 1
        try:
            yield session
        finally:
            session.visitors -= 1
            if (card := self._open.get(session.session_id)) is not None:
                card.used_at = time.time()
                if session.session_id in self._loaded:
                    self._loaded.move_to_end(session.session_id)

    async def reward(self, session: Session, outcome: Outcome) -> None:
        """Record the verdict once; the same one again is fine, another is ``Conflict``."""
        if outcome.reward is not None and not math.isfinite(outcome.reward):
            raise BadRequest(f"reward {outcome.reward} is not a number", param="reward")
        if session.outcome is not None:
            if (session.outcome.reward, session.outcome.error) != (outcome.reward, outcome.error):
                raise Conflict(f"this session already has reward {session.outcome.reward}; it is recorded once")
            return
        session.outcome = outcome
        try:
            await self._journal.write(outcome_update(session.session_id, outcome))
        except BaseException:
            session.outcome = None
            raise

    async def close(self, session: Session, *, why: str = "the session was closed") -> None:
        """End a session and keep its record. Idempotent; after a ``JournalError`` it can be repeated."""
        if session.state != "closed":
            session.state = "closed"
            await session.calls.cancel_all(RequestAborted(why))
            self._forget(session.session_id)
            self._remember(session)
            self._router.close_session(session.session_id)
            metrics.SESSIONS.set(len(self._open))
        await self._journal.write(("UPDATE sessions SET state='closed' WHERE id=?", (session.session_id,)))

    async def delete(self, session_id: str) -> None:
        """Abort, forget and erase. Unknown ids are fine."""
        session = self._forget(session_id) or self._closed.pop(session_id, None)
        if session is not None:
            session.state = "closed"
            await session.calls.cancel_all(RequestAborted("the session was deleted"))
            session.calls.forget()
        self._router.release_session(session_id)
        metrics.SESSIONS.set(len(self._open))
        await self._journal.write(
            ("DELETE FROM turns WHERE session_id=?", (session_id,)), ("DELETE FROM sessions WHERE id=?", (session_id,))
        )
        # A load beside the erasure may have found the record, or be about to.
        self._loading.pop(session_id, None)
        self._closed.pop(session_id, None)
        self._forget(session_id)

    async def stop(self) -> None:
        """End every running call; what is committed stays."""
        await asyncio.gather(
            *(
                session.calls.cancel_all(ServerStopping("the server is stopping; send the call again"))
                for session in self._loaded.values()
            )
        )

    def summary(self) -> Mapping[str, object]:
        """Counters for ``/healthz``."""
        return {
            "open_sessions": len(self._open),
            "loaded_sessions": len(self._loaded),
            "closed_in_memory": len(self._closed),
        }

    # -- the journal -------------------------------------------------------------------------------

    async def _load(self, session_id: str) -> Session | None:
        return await self._journal.use(lambda read: self._built(read, session_id))

    def _built(self, read: Read, session_id: str) -> Session | None:
        """A session from its rows; runs in a reading thread of the journal."""
        rows = read(f"SELECT {SESSION_COLUMNS} FROM sessions WHERE id=?", (session_id,))  # noqa: S608 - constants
        if not rows:
            return None
        session = session_from_row(rows[0], call_ids=self._config.match_tool_call_ids)
        turns = f"SELECT {NODE_COLUMNS} FROM turns WHERE session_id=? ORDER BY number"  # noqa: S608 - constants
        for row in read(turns, (session_id,)):
            session.take_in(*node_from_row(row, session.forest.nodes, boot=self.boot))
        return session

    async def _recall(self, session_id: str) -> Session | None:
        """A session that is not in memory; ``None`` when it was deleted while it was read."""
        mine = asyncio.current_task()
        try:
            session = await self._load(session_id)
            if session is None or self._loading.get(session_id) is not mine:
                return None
            if (card := self._open.get(session_id)) is not None:
                session.state, session.tally = "open", card.tally or Tally()
                card.used_at = time.time()  # who waits for it must find it in memory
                self._loaded[session_id] = session
                self._away.discard(session_id)
                _restore_pin(self._router, session)
                self._make_room()
            else:
                # The journal of one that is being closed or deleted lags behind.
                session.state = "closed"
                self._remember(session)
            return session
        finally:
            if self._loading.get(session_id) is mine:
                del self._loading[session_id]

    def _forget(self, session_id: str) -> Session | None:
        self._open.pop(session_id, None)
        self._away.discard(session_id)
        return self._loaded.pop(session_id, None)

    def _remember(self, session: Session) -> None:
        session.memos.clear()
        self._router.ledger.rest(session.session_id)
        session.calls.forget()
        self._closed[session.session_id] = session
        self._closed.move_to_end(session.session_id)
        while len(self._closed) > self._config.keep_closed:
            old, _ = self._closed.popitem(last=False)
            self._router.ledger.forget(old)


def _hold(router: Router, session_id: str, settings: Settings) -> None:
    """Weights that the session is fixed to are not taken away before it had its time."""
    if settings.exact_version is not None:
        router.hold_exact(session_id, settings.exact_version, settings.model)


def _restore_pin(router: Router, session: Session) -> None:
    last, settings = session.forest.last, session.settings
    # One that has only rested keeps its place, and counts there again from its next call on.
    if last is not None and router.table.pin(session.session_id, settings.model) is None:
        router.restore_session(
            session.session_id,
            last.engine_id,
            dp_rank=last.facts.dp_rank if last.facts is not None else None,
            group=session.group_id,
            resident_tokens=max(node.length for node in session.forest.nodes.values()),
            model=settings.model,
        )


def _quiet(loaded: OrderedDict[str, Session], cards: Mapping[str, Card], now: float) -> bool:
    """Whether nobody has called for a moment: between two calls of a busy server there is no call, either."""
    if any(session.busy for session in loaded.values()):
        return False
    last = next(reversed(loaded), None)
    return last is None or cards[last].used_at + _SETTLED_S <= now
