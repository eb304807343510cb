"""The router that a session server uses: place a session, run its calls, explain its cache misses.

Owns the order of things around one engine call: pin or place, dispatch, one re-dispatch to another engine
after a lost connection, continuation of replies that an engine aborted, ledger entry. Every wait has a
deadline in ``RouterConfig``; no call is retried for ever. Depends on ``fleet``, ``table``, ``cache_ledger``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from types import TracebackType

from tollway.errors import BadRequest, EngineLost, TollwayError, UpstreamError, VersionNotReady
from tollway.records import PolicyVersion
from tollway.router import metrics
from tollway.router.cache_ledger import CacheLedger, CallFacts, classify, possible_hit
from tollway.router.config import RouterConfig
from tollway.router.continuation import continue_call, merge_replies
from tollway.router.engines import GenerateCall, GenerateDelta, GenerateReply
from tollway.router.fleet import Engine, Fleet
from tollway.router.health import EngineState
from tollway.router.table import Pin, RoutingTable

__all__ = ["Lineage", "Routed", "Router"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lineage:
    """What the conversation knows of the call before this one."""

    parent: CallFacts | None = None
    """The call whose sequence this prompt continues, or the one that it breaks with."""
    common: int = 0
    """Ids that this prompt shares with the parent's prompt plus output."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A reply and what the router did for it."""

    reply: GenerateReply
    facts: CallFacts
    engine_name: str
    """URL and incarnation."""
    dispatches: tuple[str, ...]
    """Request ids in order; more than one after a re-dispatch or a continuation."""
    started_at: float
    ended_at: float
    """Unix seconds."""


class Router:
    """Engines, pins and the cache ledger of one session server.

    >>> async with Router(RouterConfig()) as router:  # doctest: +SKIP
    ...     router.add_engine("http://127.0.0.1:30000")
    ...     await router.wait_ready(60)
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.table = RoutingTable()
        self.ledger = CacheLedger()
        self.fleet = Fleet(config, on_change=self._engine_changed)

    async def __aenter__(self) -> Router:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop watching engines and close their connections."""
        await self.fleet.aclose()

    # -- engines -----------------------------------------------------------------------------------

    def add_engine(self, url: str) -> Engine:
        """Register an engine; it serves once its weight version is confirmed."""
        return self.fleet.add(url)

    async def remove_engine(self, engine_id: str) -> None:
        """Forget an engine; its sessions move at their next call."""
        await self.fleet.remove(engine_id)
        self.table.remove_engine(engine_id)

    def drain_engine(self, engine_id: str) -> Engine:
        """No new session goes to the engine; its own go on."""
        engine = self.fleet.get(engine_id)
        self.fleet.drain(engine)
        return engine

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until an engine serves. Raises ``NoEngine``."""
        await self.fleet.wait_serving(timeout_s)

    def engines(self) -> list[dict[str, object]]:
        """The fleet with states and loads."""
        out = []
        for engine in self.fleet.engines.values():
            row = engine.describe()
            if engine.health.state not in (EngineState.JOINING,):
                load = self.table.load(engine.id)
                row |= {
                    "sessions": load.sessions,
                    "resident_tokens": load.resident_tokens,
                    "in_flight": self.table.in_flight(engine.id),
                }
            out.append(row)
        return out

    def note_refit(self, engine_id: str, version: PolicyVersion | None, *, flushed: bool) -> Engine:
        """The trainer flushed an engine, gave it new weights, or both; called before the engine continues.

        ``version`` is ``None`` while the engine has the weights that it had: whether new ones come is not known yet.
        """
        engine = self.fleet.get(engine_id)
        engine.refitted(version, flushed=flushed)
        return engine

    def context_length(self) -> int | None:
        """Smallest context of the serving engines; ``None`` when none says."""
        known = [e.context_length for e in self.fleet.engines.values() if e.context_length and e.health.takes_calls]
        return min(known, default=None)

    def check_version(self, key: str, minimum: PolicyVersion | None, exact: PolicyVersion | None) -> None:
        """Raise ``VersionNotReady`` when no engine that may serve ``key`` has the wanted weights."""
        if minimum is None and exact is None:
            return
        pin = self.table.pins.get(key)
        ids = [pin.engine_id] if pin is not None and pin.engine_id in self.fleet.engines else self.fleet.serving()
        versions = [v for each in ids if (v := self.fleet.engines[each].version) is not None]
        if any((minimum is None or v >= minimum) and (exact is None or v == exact) for v in versions):
            return
        raise VersionNotReady(exact if exact is not None else minimum or 0, max(versions, default=None))

    def require_engine(self) -> None:
        """Raise ``NoEngine``, with every engine's last words, when no call could be served now."""
        if not any(engine.health.takes_calls for engine in self.fleet.engines.values()):
            raise self.fleet.none_left()

    @property
    def ready(self) -> bool:
        """Whether a new session could be served now."""
        return bool(self.fleet.serving())

    # -- sessions ----------------------------------------------------------------------------------

    def restore_session(self, key: str, engine_name: str, *, group: str = "", resident_tokens: int = 0) -> None:
        """Take over the pin of a session from before a restart; an unknown engine leaves it unpinned."""
        url = engine_name.rpartition("#")[0]
        for engine in self.fleet.engines.values():
            if engine.url == url:
                self.table.add_engine(engine.id, budget_tokens=engine.max_total_tokens)
                self.table.restore(key, engine.id, group=group, resident_tokens=resident_tokens)

    def release_session(self, key: str) -> None:
        """Forget a session's pin and its cache view."""
        self.table.release(key)
        self.ledger.forget(key)

    # -- calls -------------------------------------------------------------------------------------

    async def generate(self, key: str, call: GenerateCall, *, lineage: Lineage, group: str = "") -> Routed:
        """Run one call of session ``key`` to its end.

        Raises ``NoEngine``, ``EngineLost``, ``EngineRefused``, ``ContextLengthExceeded``, ``UpstreamError``.
        Cancelling aborts the request on the engine.
        """
        routed: Routed | None = None
        async for item in self._run(key, call, lineage, group):
            if isinstance(item, Routed):
                routed = item
        if routed is None:
            raise UpstreamError("the engine ended without a reply")
        return routed

    def stream(
        self, key: str, call: GenerateCall, *, lineage: Lineage, group: str = ""
    ) -> AsyncGenerator[GenerateDelta | Routed]:
        """As ``generate``, with deltas; the last item is the ``Routed`` whole. Close it to abort.

        After the first delta a lost engine is not replaced: what a client saw cannot be taken back.
        """
        return self._run(key, replace(call, stream=True), lineage, group)

    async def _run(
        self, key: str, call: GenerateCall, lineage: Lineage, group: str
    ) -> AsyncGenerator[GenerateDelta | Routed]:
        if not call.routing_key or not key:
            raise BadRequest("a generation call needs a routing key: without one every turn would miss the cache")
        started, started_at = time.monotonic(), time.time()
        pieces: list[GenerateReply] = []
        rids: list[str] = []
        current, moved, first_cached = call, None, None
        while True:
            engine, pin = self._target(key, call.prompt.size, group)
            moved, pin.moved = moved or pin.moved, None
            current = replace(current, routed_dp_rank=pin.dp_rank)
            rids.append(current.rid)
            seen = bool(pieces)
            reply: GenerateReply | None = None
            try:
                async with aclosing(self._dispatch(engine, current)) as items:
                    async for item in items:
                        if isinstance(item, GenerateReply):
                            reply = item
                        else:
                            seen = True
                            yield item
            except EngineLost:
                if seen or len(rids) > 1 or not self._elsewhere(key, engine):
                    raise
                current = replace(current, rid=f"{call.rid}-again")
                metrics.REDISPATCHED.inc()
                logger.warning("call %s is sent again as %s", call.rid, current.rid)
                continue
            if reply is None:
                raise UpstreamError(f"engine {engine.url} ended {current.rid} without a reply")
            first_cached = reply.cached_tokens if not pieces else first_cached
            pieces.append(reply)
            following = continue_call(call, pieces)
            if following is None:
                break
            if len(pieces) > self.config.max_resumes:
                raise UpstreamError(f"the engine aborted this reply {len(pieces)} times; see router.max_resumes")
            current = following
        whole = merge_replies(call, pieces)
        facts = self._facts(engine, pin, call, whole, started, moved)
        await self._account(key, engine, facts, lineage, first_cached)
        yield Routed(whole, facts, engine.name, tuple(rids), started_at, time.time())

    async def _dispatch(self, engine: Engine, call: GenerateCall) -> AsyncGenerator[GenerateDelta | GenerateReply]:
        """One attempt on one engine, counted in the table whatever happens."""
        self.table.begin(engine.id)
        metrics.IN_FLIGHT.inc()
        outcome = "cancelled"
        try:
            if call.stream:
                async with aclosing(engine.client.stream(call)) as items:
                    async for item in items:
                        engine.health.progress(time.monotonic())
                        yield item
            else:
                reply = await engine.client.generate(call)
                engine.health.progress(time.monotonic())
                yield reply
            outcome = "ok"
        except TollwayError as error:
            outcome = error.code
            if isinstance(error, EngineLost):
                self.fleet.failed(engine, error)
            raise
        finally:
            self.table.end(engine.id)
            metrics.IN_FLIGHT.dec()
            metrics.CALLS.labels(outcome).inc()

    def _target(self, key: str, tokens: int, group: str) -> tuple[Engine, Pin]:
        """Engine and pin of a session, placing or moving it when needed. Raises ``NoEngine``."""
        pin = self.table.pins.get(key)
        if pin is None:
            pin = self.table.place(key, self.fleet.serving(), tokens=tokens, group=group)
        elif (engine := self.fleet.engines.get(pin.engine_id)) is None or not engine.health.takes_calls:
            pin = self.table.move(key, self.fleet.serving(), "engine_lost")
        if pin is None:
            raise self.fleet.none_left()
        return self.fleet.engines[pin.engine_id], pin

    def _elsewhere(self, key: str, engine: Engine) -> bool:
        """Move the session off ``engine``; False when there is nowhere to go."""
        others = [each for each in self.fleet.serving() if each != engine.id]
        return self.table.move(key, others, "engine_lost") is not None

    # -- the ledger --------------------------------------------------------------------------------

    def _facts(
        self, engine: Engine, pin: Pin, call: GenerateCall, reply: GenerateReply, started: float, moved: str | None
    ) -> CallFacts:
        version = reply.versions[-1].version if reply.versions else engine.version or 0
        return CallFacts(
            engine_id=engine.id,
            incarnation=engine.health.incarnation,
            flush_epoch=engine.flush_epoch,
            end_version=version,
            prompt_tokens=call.prompt.size,
            output_tokens=int(reply.output_ids.size),
            started_at=started,
            ended_at=time.monotonic(),
            dp_rank=pin.dp_rank,
            extra_key=call.extra_key,
            moved=moved,
        )

    async def _account(self, key: str, engine: Engine, facts: CallFacts, lineage: Lineage, cached: int | None) -> None:
        self.table.grow(key, facts.prompt_tokens + facts.output_tokens)
        parent = lineage.parent
        possible = lost = 0
        cause = None
        if parent is not None:
            sequence = parent.prompt_tokens + parent.output_tokens
            common = min(lineage.common, sequence)
            possible = possible_hit(
                common=common, parent_sequence=sequence, prompt=facts.prompt_tokens, page=engine.page_size
            )
            lost = sequence - common
            if cached is not None and cached < possible:
                cause = await self._cause(engine, facts, parent, possible - cached)
                metrics.WASTED.labels(cause).inc(possible - cached)
        first = parent is None
        miss = self.ledger.record(
            key, facts, cached=cached, possible=possible, lost_prefix=lost, first=first, cause=cause
        )
        if miss is not None and miss.cause == "unknown":
            logger.warning("%d tokens missed the prefix cache of %s without a known cause", miss.tokens, engine.name)

    async def _cause(self, engine: Engine, facts: CallFacts, parent: CallFacts, waste: int) -> str:
        def first_cause(*, evicted: bool) -> str:
            return classify(
                facts,
                parent,
                waste=waste,
                # A reply that left just before a flush may be read just after it, so versions decide too.
                flushed_between=engine.flushed_since(parent.end_version, facts.end_version),
                page=engine.page_size,
                evicted=evicted,
            )

        cause = first_cause(evicted=False)
        if cause != "unknown":
            return cause
        before = next((value for at, value in reversed(engine.evicted) if at <= parent.ended_at), None)
        if before is None and engine.evicted:
            before = engine.evicted[0][1]
        try:
            await self.fleet.read_evictions(engine)
        except TollwayError:
            return cause
        now = engine.evicted[-1][1] if engine.evicted else None
        return first_cause(evicted=before is not None and now is not None and now > before)

    def _engine_changed(self, engine: Engine) -> None:
        if engine.health.state is not EngineState.JOINING:
            self.table.add_engine(engine.id, budget_tokens=engine.max_total_tokens)
