"""A thousand cancelled calls, at every phase of a call, leave every counter at 0."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
from call_helpers import QUICK, call, loads, over, until

from tollway.records import Sampling
from tollway.router import metrics
from tollway.router.fake import FakeEngine, FakeReply, FakeRequest
from tollway.router.fleet import Membership
from tollway.router.service import Lineage, Router
from tollway.router.targets import Wanted

ROUNDS, AT_ONCE = (
    10,
    100,
)  # at once no more than wait in the backlog of a listening socket: a lost one comes a second later
PATIENT = QUICK.model_copy(
    update={
        # Nobody is lost only because a hundred connections are opened and closed at once.
        "probe_interval_s": 30.0,
        "probe_timeout_s": 20.0,
        "connect_timeout_s": 20.0,
        "progress_timeout_s": 60.0,
        "busy_window_s": 30.0,
        "version_wait_s": 30.0,
        "admission_timeout_s": 60.0,
    }
)
LONG = Sampling(max_new_tokens=1000)


async def waits_in_the_queue(router: Router, engine: FakeEngine) -> Callable[[], bool]:
    """No KV room: every session but one waits at its first call."""
    await router.generate("full", call("full", ids=[1] * 90, rid="full"), lineage=Lineage())
    return lambda: len(router.admission._tickets) == AT_ONCE


async def waits_for_a_slot(router: Router, engine: FakeEngine) -> Callable[[], bool]:
    """All places of the engine are taken."""
    engine.script = lambda request: FakeReply(ids=[5], delay_s=60)
    target = router.table.targets("e0")[0]
    return lambda: target.in_flight + target.waiting == AT_ONCE


async def waits_for_a_version(router: Router, engine: FakeEngine) -> Callable[[], bool]:
    """Nobody has the weights yet."""
    return lambda: len(router.seats._changes._waiting) == AT_ONCE


async def connects(router: Router, engine: FakeEngine) -> Callable[[], bool]:
    """As soon as a place is taken, whether or not a byte has left."""
    engine.script = lambda request: FakeReply(ids=[5], delay_s=60)
    return lambda: router.table.in_flight("e0") == AT_ONCE


async def waits_for_the_first_token(router: Router, engine: FakeEngine) -> Callable[[], bool]:
    """The engine has it and says nothing."""
    engine.script = lambda request: FakeReply(ids=[5], delay_s=60)
    return lambda: engine.in_flight == AT_ONCE


async def streams(router: Router, engine: FakeEngine) -> Callable[[], bool]:
    """Some tokens came."""
    engine.script = lambda request: FakeReply(ids=[5] * 1000, delay_s=0.05, incremental=True)
    return lambda: engine.in_flight == AT_ONCE


async def is_continued(router: Router, engine: FakeEngine) -> Callable[[], bool]:
    """The engine aborted a first piece; the second one runs."""

    def script(request: FakeRequest) -> FakeReply:
        second = request.rid.endswith("-1")
        return FakeReply(ids=[5], delay_s=60) if second else FakeReply(ids=[5, 6], finish="abort")

    engine.script = script
    return lambda: sum(rid.endswith("-1") for rid in engine._running) == AT_ONCE


async def waits_for_a_retry(router: Router, engine: FakeEngine) -> Callable[[], bool]:
    """The engine had no room; the next attempt is due later."""
    engine.script = lambda request: FakeReply(ids=[], status=503, error="full")
    seen: set[str] = set()

    def all_refused() -> bool:
        seen.update(request.rid for request in engine.requests)
        return len(seen) >= AT_ONCE and engine.in_flight == 0

    return all_refused


Prepare = Callable[[Router, FakeEngine], Awaitable[Callable[[], bool]]]
PHASES: tuple[Prepare, ...] = (
    *(waits_in_the_queue, waits_for_a_slot, waits_for_a_version, connects),
    *(waits_for_the_first_token, streams, is_continued, waits_for_a_retry),
)


@contextlib.asynccontextmanager
async def stage(phase: Prepare) -> AsyncIterator[tuple[Router, FakeEngine]]:
    async with FakeEngine() as engine:
        engine.kv_tokens = 100 if phase is waits_in_the_queue else None
        limit = 20 if phase is waits_for_a_slot else None
        config = PATIENT.model_copy(update={"retry_pause_s": 60.0})
        async with over(engine, config=config, members={0: Membership(max_in_flight=limit)}) as router:
            yield router, engine


@pytest.mark.slow(limit_s=60)
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
async def test_a_thousand_cancels_leave_every_counter_at_zero(phase: Prepare) -> None:
    before = metrics.IN_FLIGHT._value.get()
    async with stage(phase) as (router, engine):
        reached = await phase(router, engine)
        want = Wanted(minimum=7) if phase is waits_for_a_version else Wanted()

        async def one(key: str, stream: bool) -> None:
            wanted = replace(call(key, rid=key, stream=stream), sampling=LONG)
            if not stream:
                await router.generate(key, wanted, lineage=Lineage(), want=want)
                return
            async with contextlib.aclosing(router.stream(key, wanted, lineage=Lineage(), want=want)) as items:
                async for _ in items:
                    pass

        for number in range(ROUNDS):
            engine.requests.clear()
            keys = [f"{number}-{at}" for at in range(AT_ONCE)]
            tasks = [asyncio.create_task(one(key, phase is streams or at % 2 == 0)) for at, key in enumerate(keys)]
            await until(lambda now=tasks: reached() or any(task.done() for task in now), phase.__name__)
            assert [task for task in tasks if task.done()] == []
            for at, task in enumerate(tasks):
                task.cancel()
                if at % 50 == 0:
                    await asyncio.sleep(0)  # what ends while others go on wakes these
            await asyncio.gather(*tasks, return_exceptions=True)
            assert [task for task in tasks if not task.cancelled()] == []
            assert [load[:2] for load in loads(router)] == [(0, 0)]
            for key in keys:
                router.release_session(key)
            if phase is waits_in_the_queue:
                assert loads(router)[0][2] == 1, "the session that was there"
            else:
                assert loads(router) == [(0, 0, 0, 0, 0)]
            await until(lambda: engine.in_flight == 0, "the engine was told of every one")
        assert metrics.IN_FLIGHT._value.get() == before
        admission = router.admission
        assert len(admission._tickets) == len(admission._waiters) == len(admission._calls) == 0
        assert len(admission._queue) == 0
        assert admission._slots.targets() == []
        assert not router.seats._changes._waiting
        assert not router.seats.holders._calls
        await until(lambda: not router.fleet.engines["e0"].client.aborts, "every abort has arrived")
        assert router.fleet.engines["e0"].health.failures == 0
