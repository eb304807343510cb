"""Enters every call of a router into its cache ledger, once, however it ended.

Owns what is looked up for it: the facts of a call and, for a miss that nothing else explains, the engine's
own counters, read once for all calls that wait for them. Decides nothing about placement. Depends on
``cache_ledger``, ``causes``, ``fleet`` and ``metrics``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from tollway.errors import EngineBusy, EngineLost, EngineRefused, TollwayError, UpstreamError
from tollway.router import metrics
from tollway.router.cache_ledger import CacheLedger, Entry
from tollway.router.causes import CallFacts, EngineKeys, Evidence, Miss, Reach, explain, reach
from tollway.router.fleet import Engine, Fleet
from tollway.router.wire import LOGPROB_START_LEN, GenerateCall, GenerateReply

__all__ = ["Accounts", "Lineage", "Tab"]

logger = logging.getLogger(__name__)
_FULL = 0.9
"""Share of the KV room held by running requests above which the engine evicts, whatever its counter says."""
_READ_S = 2.0
"""Longest wait for an engine's counters; a reply waits for them."""
_WARN_EVERY_S = 60.0
"""Between two warnings about one engine."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """What the conversation knows of the call before this one."""

    parent: CallFacts | None = None
    """The call whose sequence this prompt continues, or the one that it breaks with."""
    common: int = 0
    """Ids that this prompt shares with the parent's prompt plus output."""
    lost: int = 0
    """Ids of a conversation that this prompt gave up although it continues an earlier call of it."""


@dataclass(slots=True, kw_only=True)
class Tab:
    """One call while it runs, for the ledger. Whoever runs it says where, and what a stream told so far."""

    key: str
    """The session's."""
    call: GenerateCall
    lineage: Lineage
    model: str = ""
    started: float = 0.0
    """Monotonic seconds at which it was sent, the last time before its first prefill."""
    engine: Engine | None = None
    """That has it now; ``None`` until it was sent."""
    dp_rank: int | None = None
    moved: str | None = None
    """Why the session last changed its engine."""
    cached: int | None = None
    """What the engine said of its first prefill; ``None`` until then."""
    settled: bool = False
    """It is counted."""

    def sent(self, engine: Engine, *, dp_rank: int | None, moved: str | None) -> None:
        """The call goes to ``engine``, for the first time or again."""
        if self.cached is None:
            self.started = time.monotonic()  # what it found is from now on; before it may have waited
        self.engine, self.dp_rank, self.moved = engine, dp_rank, moved or self.moved

    def heard(self, cached: int | None) -> None:
        """A piece of the reply says how much was cached; the first prefill counts."""
        if self.cached is None:
            self.cached = cached


@dataclass(slots=True)
class _Reading:
    """Readings of one engine's counters."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    began: float = float("-inf")
    """Monotonic seconds at which the last one began."""
    warned: float = float("-inf")
    unexplained: int = 0
    """Tokens without a cause since the last warning."""


class Accounts:
    """The ledger of one router and what it needs to know of engines."""

    def __init__(self, ledger: CacheLedger, fleet: Fleet) -> None:
        self.ledger = ledger
        self._fleet = fleet
        self._readings: dict[str, _Reading] = {}
        self._late: set[asyncio.Task[None]] = set()
        """Calls without a reply that wait for a reading."""

    async def aclose(self) -> None:
        """Wait for calls that are still being explained."""
        await asyncio.gather(*self._late, return_exceptions=True)

    @contextmanager
    def open(self, key: str, call: GenerateCall, lineage: Lineage, *, model: str = "") -> Iterator[Tab]:
        """The account of a call of session ``key``, for as long as it runs.

        A call that ends here without ``settle`` is counted as failed or cancelled, unless no engine had it or the
        one that did refused it.
        """
        tab = Tab(key=key, call=call, lineage=lineage, model=model)
        try:
            yield tab
        except (EngineBusy, EngineRefused):
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._unfinished(tab, "cancelled")
            raise
        except (EngineLost, UpstreamError):
            self._unfinished(tab, "failed")
            raise

    async def settle(self, tab: Tab, reply: GenerateReply) -> CallFacts:
        """Count a call that ended with ``reply``, its pieces joined; returns what the next call has to know."""
        engine = tab.engine
        if engine is None:
            raise ValueError("a call that was never sent has no reply")
        version = reply.versions[-1].version if reply.versions else engine.version or 0
        facts = _facts(tab, engine, version, int(reply.output_ids.size), reasoning=reply.reasoning_tokens > 0)
        hit, cached, tiers = _reach(tab, engine, facts), reply.cached_tokens, reply.cached_tiers
        host_missed = 0
        if tiers is not None and cached is not None:
            host_missed = max(0, tiers.device + tiers.host + tiers.storage - cached)
        misses = _explain(tab, engine, facts, hit, cached, host_missed)
        if _unexplained(misses) and await self._read(engine, facts.ended_at):
            misses = _explain(tab, engine, facts, hit, cached, host_missed)
        entry = _entry(tab, facts, hit, cached, misses, reply=reply)
        tab.settled = True
        self._enter(tab, engine, entry)
        return replace(facts, evicted=_evicted(engine))

    def _unfinished(self, tab: Tab, outcome: Literal["failed", "cancelled"]) -> None:
        """Count a call that an engine had and that ended without a reply. Nobody waits for it."""
        engine = tab.engine
        if engine is None or tab.settled:
            return
        tab.settled = True
        facts = _facts(tab, engine, engine.version or 0, 0, reasoning=False)
        hit = _reach(tab, engine, facts)
        misses = _explain(tab, engine, facts, hit, tab.cached, 0)
        if not _unexplained(misses):
            self._enter(tab, engine, _entry(tab, facts, hit, tab.cached, misses, outcome=outcome))
            return

        async def later() -> None:
            await self._read(engine, facts.ended_at)
            found = _explain(tab, engine, facts, hit, tab.cached, 0)
            # Its session may have been forgotten meanwhile.
            self._enter(tab, engine, _entry(tab, facts, hit, tab.cached, found, outcome=outcome), late=True)

        task = asyncio.get_running_loop().create_task(later())
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    def _enter(self, tab: Tab, engine: Engine, entry: Entry, *, late: bool = False) -> None:
        self.ledger.record(tab.key, entry, known_only=late)
        metrics.count_cache(entry)
        self._warn(engine, entry.misses)

    async def _read(self, engine: Engine, since: float) -> bool:
        """Have the engine's counters as they were after ``since``; False when it does not tell.

        Many calls may miss at once: one reading that began after they ended answers for all of them.
        """
        reading = self._readings.setdefault(engine.id, _Reading())
        try:
            async with asyncio.timeout(_READ_S), reading.lock:
                if reading.began < since:
                    began = time.monotonic()
                    await self._fleet.read_evictions(engine)
                    reading.began = began
        except (TollwayError, TimeoutError) as error:
            logger.info("no counters of %s to explain a cache miss with: %s", engine.name, error or "timeout")
            return False
        return True

    def _warn(self, engine: Engine, misses: Sequence[Miss]) -> None:
        tokens = sum(miss.tokens for miss in misses if miss.cause == "unknown")
        if not tokens:
            return
        reading, now = self._readings.setdefault(engine.id, _Reading()), time.monotonic()
        reading.unexplained += tokens
        if now - reading.warned >= _WARN_EVERY_S:
            logger.warning(
                "%d tokens missed the prefix cache of %s and no cause is known%s; see docs/cache.md",
                reading.unexplained,
                engine.name,
                "" if engine.usage is not None else " (it shows no metrics: start it with --enable-metrics)",
            )
            reading.warned, reading.unexplained = now, 0


def _facts(tab: Tab, engine: Engine, version: int, output: int, *, reasoning: bool) -> CallFacts:
    return CallFacts(
        engine_id=engine.id,
        incarnation=engine.health.incarnation,
        flush_epoch=engine.flush_epoch,
        end_version=version,
        prompt_tokens=tab.call.prompt.size,
        output_tokens=output,
        started_at=tab.started,
        ended_at=time.monotonic(),
        dp_rank=tab.dp_rank,
        extra_key=tab.call.extra_key,
        moved=tab.moved,
        engine_url=engine.url,
        reasoning=reasoning,
    )


def _reach(tab: Tab, engine: Engine, facts: CallFacts) -> Reach:
    said = engine.client.facts
    keys = EngineKeys(page=engine.page_size, bigram=said.bigram_keys, strips_thinking=said.strips_thinking)
    lineage = tab.lineage
    return reach(facts, lineage.parent, lineage.common, keys=keys, logprob_start=LOGPROB_START_LEN)


def _explain(
    tab: Tab, engine: Engine, facts: CallFacts, hit: Reach, cached: int | None, host_missed: int
) -> tuple[Miss, ...]:
    """Causes of what was possible and not cached, as far as the engine's counters are known by now."""
    parent = tab.lineage.parent
    if parent is None or cached is None or cached >= hit.possible:
        return ()
    before, now = parent.evicted, _evicted(engine)
    if before is None and not parent.earlier_run and engine.evicted:
        before = engine.evicted[0][1]  # nothing was read by then: what rose since the first reading
    rose = before is not None and now is not None and now > before
    evidence = Evidence(
        # A reply that left just before a flush may be read just after it, so versions decide too.
        flushed=engine.flushed_since(parent.end_version, facts.end_version),
        evicted=rose or (engine.usage or 0.0) > _FULL,
        host_missed=host_missed,
    )
    return explain(facts, parent, hit.possible - cached, evidence, page=engine.page_size)


def _unexplained(misses: Sequence[Miss]) -> int:
    return sum(miss.tokens for miss in misses if miss.cause in ("unknown", "server_restarted"))


def _entry(
    tab: Tab,
    facts: CallFacts,
    hit: Reach,
    cached: int | None,
    misses: tuple[Miss, ...],
    *,
    outcome: Literal["ok", "failed", "cancelled"] = "ok",
    reply: GenerateReply | None = None,
) -> Entry:
    tiers = reply.cached_tiers if reply is not None else None
    host = min(tiers.host, cached) if tiers is not None and cached is not None else None
    return Entry(
        engine_id=facts.engine_id,
        model=tab.model,
        prompt=facts.prompt_tokens,
        cached=cached,
        host=host,
        storage=min(tiers.storage, cached - host) if tiers is not None and cached and host is not None else 0,
        possible=hit.possible,
        first=tab.lineage.parent is None,
        misses=misses,
        beyond=hit.beyond,
        lost_prefix=hit.lost_prefix + tab.lineage.lost,
        outcome=outcome,
        retractions=reply.retractions if reply is not None else 0,
        versions=len({span.version for span in reply.versions}) if reply is not None else 1,
        resumed=reply.resumed if reply is not None else 0,
        resumed_tokens=reply.resumed_tokens if reply is not None else 0,
    )


def _evicted(engine: Engine) -> float | None:
    return engine.evicted[-1][1] if engine.evicted else None
