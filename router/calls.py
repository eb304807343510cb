"""One call of a session from its first attempt to its whole reply.

Owns what happens after an attempt fails: exactly one re-dispatch after a lost connection, a bounded number of
retries after a 503, a wait for a version that an engine refuses, and the continuation of replies that an
engine aborted. Nothing is retried once a client saw a piece of it, and no loop goes on for ever. Depends on
``seats``, ``continuation`` and ``accounts``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from tollway.errors import BadRequest, EngineBusy, EngineLost, EngineRefused, TollwayError, UpstreamError
from tollway.router import metrics
from tollway.router.accounts import Accounts, Lineage, Tab
from tollway.router.causes import CallFacts
from tollway.router.config import RouterConfig
from tollway.router.continuation import continue_call, merge_replies
from tollway.router.engines import EngineClient
from tollway.router.fleet import Fleet
from tollway.router.seats import Seat, Seats, Terms
from tollway.router.targets import ANY
from tollway.router.versions import not_ready
from tollway.router.wire import GenerateCall, GenerateDelta, GenerateReply

__all__ = ["Attempt", "Calls", "Routed"]

logger = logging.getLogger(__name__)
_LONGEST_PAUSE_S = 8.0
"""Between two attempts at an engine that refuses for now."""
_DOUBLINGS = 16
"""Of that pause; versions may be refused a thousand times, and 2 ** 1024 is no number of seconds."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request to one engine."""

    rid: str
    engine_name: str
    """URL and incarnation."""
    why: str = ""
    """Why there was another attempt: ``engine_lost``, ``busy``, ``not_ready`` or ``resumed``; empty for the first."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A reply and what the router did for it."""

    reply: GenerateReply
    facts: CallFacts
    engine_name: str
    """URL and incarnation."""
    attempts: tuple[Attempt, ...]
    """In order; more than one after a re-dispatch, a retry or a continuation."""
    started_at: float
    ended_at: float
    """Unix seconds."""

    @property
    def dispatches(self) -> tuple[str, ...]:
        """Request ids in order."""
        return tuple(attempt.rid for attempt in self.attempts)


@dataclass(slots=True)
class _Course:
    """How a call has gone so far."""

    call: GenerateCall
    current: GenerateCall
    """What the next attempt sends."""
    first: bool
    """No earlier call of its conversation left anything in a cache."""
    why: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    pieces: list[GenerateReply] = field(default_factory=list)
    shown: bool = False
    """A client saw tokens that no whole piece holds yet: they cannot be taken back."""
    redispatched: bool = False
    retries: int = 0
    """Further attempts after a 503."""
    refusals: int = 0
    """Times that an engine said that it has not the wanted version."""
    refused_until: float | None = None
    """Monotonic second until which an engine may go on saying that it is not ready."""

    def sits(self, seat: Seat, tab: Tab) -> None:
        """The next attempt goes to ``seat``."""
        pin, sign = seat.pin, seat.engine.client.facts.priority_sign
        tab.sent(seat.engine, dp_rank=pin.dp_rank, moved=pin.moved)
        priority = sign * seat.priority if sign else None
        if (self.current.routed_dp_rank, self.current.priority) != (pin.dp_rank, priority):
            self.current = replace(self.current, routed_dp_rank=pin.dp_rank, priority=priority)
        self.attempts.append(Attempt(self.current.rid, seat.engine.name, self.why))

    def came_from(self, seat: Seat, tab: Tab) -> None:
        """The reply names another engine than the one that the call was meant for."""
        tab.sent(seat.engine, dp_rank=seat.pin.dp_rank, moved=seat.pin.moved)
        self.attempts[-1] = replace(self.attempts[-1], engine_name=seat.engine.name)

    def again(self, why: str, suffix: str) -> None:
        """Send the same once more, under a new request id."""
        base = self.call.rid if not self.pieces else f"{self.call.rid}-{len(self.pieces)}"
        self.why, self.current = why, replace(self.current, rid=f"{base}-{suffix}")


class Calls:
    """Runs the calls of one router."""

    def __init__(self, config: RouterConfig, seats: Seats, fleet: Fleet, accounts: Accounts) -> None:
        self._config = config
        self._seats = seats
        self._fleet = fleet
        self._accounts = accounts

    async def run(
        self, key: str, call: GenerateCall, lineage: Lineage, terms: Terms
    ) -> AsyncGenerator[GenerateDelta | Routed]:
        """Deltas when streaming; the last item is the ``Routed`` whole. Close it to abort."""
        if not call.routing_key or not key:
            raise BadRequest("a generation call needs a routing key: without one every turn would miss the cache")
        with self._accounts.open(key, call, lineage, model=terms.model) as tab:
            started_at = time.time()
            course = _Course(call, call, first=lineage.parent is None)
            while True:
                failure: TollwayError | None = None
                held = seat = await self._seats.take(key, course.current.prompt.size, terms)
                try:
                    course.sits(seat, tab)
                    client = seat.engine.client  # a lost engine gets another one
                    async with aclosing(self._attempt(seat, client, course.current)) as items:
                        async for item in items:
                            tab.heard(item.cached_tokens)
                            if isinstance(item, GenerateReply):
                                course.pieces.append(item)
                                course.shown = False
                            else:
                                course.shown = True
                                yield item
                except (EngineLost, EngineBusy, EngineRefused) as error:
                    failure = error
                finally:
                    self._seats.give(held)
                if (found := self._seats.served(key, course.current.rid, seat)) is not None:
                    seat = found
                    course.came_from(seat, tab)
                if failure is not None:
                    await self._after(failure, course, seat, client, (key, terms))
                elif not self._continued(course):
                    break
            whole = merge_replies(call, course.pieces)
            facts = await self._accounts.settle(tab, whole)
        self._seats.grow(key, facts.prompt_tokens + facts.output_tokens, terms)
        if terms.want is not ANY and not all(terms.want.holds(span.version) for span in whole.versions):
            # New weights came in the middle: what was sampled is not what was wanted.
            raise not_ready(terms.want, [span.version for span in whole.versions])
        yield Routed(whole, facts, seat.engine.name, tuple(course.attempts), started_at, time.time())

    async def _attempt(
        self, seat: Seat, client: EngineClient, call: GenerateCall
    ) -> AsyncGenerator[GenerateDelta | GenerateReply]:
        """One request to one engine, counted whatever happens. Errors as ``EngineClient.generate``."""
        engine, started, first_s = seat.engine, time.monotonic(), None
        metrics.IN_FLIGHT.inc()
        outcome = "cancelled"
        try:
            if call.stream:
                async with aclosing(client.stream(call)) as items:
                    async for item in items:
                        now = time.monotonic()
                        first_s = now - started if first_s is None else first_s
                        engine.health.progress(now)
                        if isinstance(item, GenerateReply):
                            _observe(seat, call, item, now - started, first_s)
                        yield item
            else:
                reply = await client.generate(call)
                now = time.monotonic()
                engine.health.progress(now)
                _observe(seat, call, reply, now - started, None)
                yield reply
            outcome = "ok"
            self._fleet.relieved(engine)
        except TollwayError as error:
            outcome = error.code
            # What the process before said last is nothing against the one that came back.
            if isinstance(error, (EngineLost, EngineBusy)) and client is engine.client:
                self._fleet.failed(engine, error)
            raise
        finally:
            metrics.IN_FLIGHT.dec()
            metrics.CALLS.labels(outcome).inc()

    async def _after(
        self, error: TollwayError, course: _Course, seat: Seat, client: EngineClient, at: tuple[str, Terms]
    ) -> None:
        """Prepare the next attempt after a failed one, or raise ``error``. Ends nothing that is not ended."""
        key, terms = at
        if course.shown:
            raise error
        if isinstance(error, EngineLost):
            if course.redispatched or not self._seats.leave(key, seat, terms):
                raise error
            # The old request must not decode beside the new one, as far as its engine can be told.
            if not await client.aborts.settled(course.current.rid, within_s=self._config.abort_wait_s):
                logger.warning("engine %s takes no abort of %s; it is sent elsewhere", client.url, course.current.rid)
            course.redispatched = True
            course.again("engine_lost", "again")
            metrics.REDISPATCHED.inc()
            logger.warning("call %s is sent again as %s", course.call.rid, course.current.rid)
        elif isinstance(error, EngineBusy):
            if course.retries >= self._config.max_retries:
                raise error
            course.retries += 1
            course.again("busy", f"retry{course.retries}")
            if not course.first or not self._seats.withdraw(key, seat, terms, course.call.prompt.size):
                await asyncio.sleep(self._pause_s(course.retries))
                await self._seats.until_resumed(seat.engine)
        elif isinstance(error, EngineRefused) and error.upstream_status == 409 and terms.want is not ANY:
            await self._refused(course, seat, terms)
        else:
            raise error

    async def _refused(self, course: _Course, seat: Seat, terms: Terms) -> None:
        """An engine says itself that it has not the wanted version: ask the same one again, within the deadline."""
        now = time.monotonic()
        if course.refused_until is None:
            course.refused_until = now + self._config.version_wait_s
        if now >= course.refused_until:
            raise not_ready(terms.want, self._seats.versions(terms.model))
        course.refusals += 1
        course.again("not_ready", f"version{course.refusals}")
        await self._seats.change(min(self._pause_s(course.refusals), course.refused_until - now))

    def _pause_s(self, retries: int) -> float:
        return float(min(self._config.retry_pause_s * 2 ** min(retries - 1, _DOUBLINGS), _LONGEST_PAUSE_S))

    def _continued(self, course: _Course) -> bool:
        """Whether the reply was aborted by its engine and goes on; prepares the call that asks for the rest."""
        following = continue_call(course.call, course.pieces)
        if following is None:
            return False
        if len(course.pieces) > self._config.max_resumes:
            raise UpstreamError(f"the engine aborted this reply {len(course.pieces)} times; see router.max_resumes")
        course.why, course.current = "resumed", following
        return True


def _observe(seat: Seat, call: GenerateCall, reply: GenerateReply, call_s: float, first_s: float | None) -> None:
    """Tell the target how fast it was; replies that do not say what was cached tell nothing."""
    if reply.cached_tokens is not None and reply.finish_reason != "abort":
        seat.target.observe(
            uncached_tokens=max(0, call.prompt.size - reply.cached_tokens),
            output_tokens=int(reply.output_ids.size),
            call_s=call_s,
            first_s=first_s,
        )
