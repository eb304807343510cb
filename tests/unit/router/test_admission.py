"""Admission: waiting at the start, deadlines, cancellation at every point."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

import pytest

from tollway.errors import CapacityExceeded, NoEngine, VersionNotReady
from tollway.router.admission import Admission
from tollway.router.config import RouterConfig
from tollway.router.placement import wait_s
from tollway.router.queues import AdmissionQueue, SessionTicket
from tollway.router.table import Pin, RoutingTable
from tollway.router.targets import Target, Wanted

PATIENT = RouterConfig(admission_timeout_s=15.0)
BRIEF = RouterConfig(admission_timeout_s=0.05)


def made(config: RouterConfig = PATIENT, engines: int = 1, **facts: object) -> tuple[RoutingTable, Admission]:
    routes = RoutingTable()
    for number in range(engines):
        routes.set_engine(f"e{number}", **({"budget_tokens": 1000, "version": 1} | facts))  # type: ignore[arg-type]
    return routes, Admission(routes, config)


async def settled() -> None:
    """Every task that can run has run."""
    for _ in range(5):
        await asyncio.sleep(0)


def soon(admission: Admission, key: str, tokens: int = 900, **how: object) -> asyncio.Task[Pin]:
    return asyncio.ensure_future(admission.place(key, tokens=tokens, **how))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def slot(admission: Admission, target: Target, *, priority: int = 0) -> AsyncIterator[None]:
    ticket = await admission.enter(target, priority=priority)
    try:
        yield
    finally:
        admission.leave(ticket)


def clean(routes: RoutingTable, admission: Admission) -> bool:
    counters = [
        (each.resident_tokens, each.reserved_tokens, each.sessions, each.in_flight, each.waiting)
        for model in ("", "judge")
        for each in routes.of_model(model)
    ]
    return all(not any(row) for row in counters) and not admission.waiting_sessions and not admission.waiting_calls


async def test_a_session_waits_at_its_start_and_never_in_the_middle() -> None:
    routes, admission = made()
    first = await admission.place("a", tokens=900)
    second = soon(admission, "b")
    await settled()
    assert not second.done()
    assert await admission.place("a", tokens=100_000) is first
    routes.release("a")
    assert (await second).engine_id == "e0"
    routes.release("b")
    assert clean(routes, admission)


async def test_calls_of_one_session_that_arrive_together_wait_together() -> None:
    routes, admission = made()
    await admission.place("a", tokens=900)
    tasks = [soon(admission, "b") for _ in range(3)]
    await settled()
    assert admission.waiting_sessions == 1
    tasks[0].cancel()
    await settled()
    assert admission.waiting_sessions == 1
    routes.release("a")
    pins = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(pins[0], asyncio.CancelledError)
    assert pins[1] is pins[2] is routes.pin("b")
    routes.release("b")
    assert clean(routes, admission)


async def test_the_deadline_is_429_with_a_reason_and_a_retry_keeps_its_turn() -> None:
    routes, admission = made(BRIEF)
    await admission.place("a", tokens=900)
    with pytest.raises(CapacityExceeded, match=r"no engine had KV room .* 900 tokens .*e0 900 of 950") as caught:
        await admission.place("old", tokens=900)
    assert caught.value.retry_after_s > 0
    assert admission.waiting_sessions == 0
    patient = Admission(routes, PATIENT)
    patient._refused = admission._refused
    young = soon(patient, "young")
    await settled()
    again = soon(patient, "old")
    await settled()
    routes.release("a")
    await settled()
    assert again.done()
    assert not young.done()
    routes.release("old")
    await young
    routes.release("young")
    assert clean(routes, patient)


async def test_no_engine_and_no_version_are_said_at_once() -> None:
    routes, admission = made(engines=2)
    with pytest.raises(NoEngine, match="model 'judge'"):
        await admission.place("s", tokens=1, model="judge")
    with pytest.raises(VersionNotReady) as caught:
        await admission.place("s", tokens=1, want=Wanted(minimum=3))
    assert (caught.value.wanted, caught.value.serving) == (3, 1)
    for each in ("e0", "e1"):
        routes.set_engine(each, admits=False)
    with pytest.raises(NoEngine, match=r"the policy takes new sessions \(known: e0, e1\)"):
        await admission.place("s", tokens=1)
    assert clean(routes, admission)


async def test_who_waits_is_told_when_its_version_is_gone_and_sits_out_a_pause() -> None:
    routes, admission = made()
    await admission.place("a", tokens=900)
    exact, anyone = soon(admission, "exact", want=Wanted(exact=1)), soon(admission, "any")
    await settled()
    routes.set_engine("e0", budget_tokens=1000, version=1, admits=False, serves=False)
    await settled()
    assert not exact.done()
    routes.set_engine("e0", budget_tokens=1000, version=2)
    with pytest.raises(VersionNotReady):
        await exact
    assert not anyone.done()
    routes.release("a")
    await anyone
    routes.release("any")
    assert clean(routes, admission)


async def test_a_new_engine_lets_sessions_in() -> None:
    routes, admission = made()
    await admission.place("a", tokens=900)
    waiting = soon(admission, "b")
    await settled()
    routes.set_engine("e1", budget_tokens=1000)
    assert (await waiting).engine_id == "e1"


async def test_a_child_never_waits_for_the_room_that_its_parent_holds() -> None:
    routes, admission = made()
    await admission.place("parent", tokens=900)
    before = soon(admission, "stranger")
    await settled()
    child = await asyncio.wait_for(admission.place("child", tokens=900, parent="parent"), 5)
    assert child.engine_id == "e0"
    before.cancel()
    await asyncio.gather(before, return_exceptions=True)
    for key in ("parent", "child"):
        routes.release(key)
    assert clean(routes, admission)


async def test_a_cancel_in_the_moment_of_admission_gives_the_place_back() -> None:
    routes, admission = made()
    await admission.place("a", tokens=900)
    lucky, following = soon(admission, "b"), soon(admission, "c")
    await settled()
    routes.release("a")  # b has its place, and has not run since
    assert routes.pin("b") is not None
    lucky.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lucky
    assert routes.pin("b") is None
    assert (await following) is routes.pin("c")
    routes.release("c")
    assert clean(routes, admission)


async def test_a_place_that_somebody_else_uses_by_now_is_not_given_back() -> None:
    routes, admission = made()
    await admission.place("a", tokens=900)
    first = soon(admission, "b")
    await settled()
    routes.release("a")
    pin = await admission.place("b", tokens=900)  # before the one that waited has run
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert routes.pin("b") is pin
    routes.release("b")
    assert clean(routes, admission)


async def test_calls_wait_for_a_place_and_go_by_priority_then_arrival() -> None:
    routes, admission = made(max_in_flight=1)
    (target,) = routes.targets("e0")
    order: list[str] = []
    free = asyncio.Event()

    async def call(name: str, priority: int) -> None:
        async with slot(admission, target, priority=priority):
            order.append(name)
            assert target.in_flight == 1
            await free.wait()

    tasks = [asyncio.ensure_future(call("running", 0))]
    await settled()
    for name, priority in (("plain", 0), ("plain too", 0), ("long tail", 2), ("urgent", 1)):
        tasks.append(asyncio.ensure_future(call(name, priority)))
        await settled()
    assert (target.in_flight, target.waiting) == (1, 4)
    free.set()
    await asyncio.gather(*tasks)
    assert order == ["running", "long tail", "urgent", "plain", "plain too"]
    assert clean(routes, admission)


async def test_a_place_that_never_comes_is_429() -> None:
    routes, admission = made(BRIEF, max_in_flight=1)
    (target,) = routes.targets("e0")
    async with slot(admission, target):
        with pytest.raises(CapacityExceeded, match="ran 1 calls at once, its limit"):
            async with slot(admission, target):
                pytest.fail("there is no place")
        assert target.waiting == 0
    assert clean(routes, admission)


async def test_a_failing_call_gives_its_place_back() -> None:
    routes, admission = made(max_in_flight=1)
    (target,) = routes.targets("e0")
    for _ in range(3):
        with pytest.raises(RuntimeError):
            async with slot(admission, target):
                raise RuntimeError("the engine broke")
    assert clean(routes, admission)


async def test_a_long_queue_is_worth_a_move() -> None:
    routes, admission = made(engines=2, max_in_flight=1)
    pin = await admission.place("s", tokens=100)
    home = routes.target_of(pin)
    assert home is not None
    home.observe(uncached_tokens=1000, output_tokens=0, call_s=1.0)
    assert not admission.should_move(pin)
    async with slot(admission, home):
        assert wait_s(home) == pytest.approx(1.0)
        assert admission.should_move(pin)  # 1 s against three times 0.1 s
        moved = routes.move("s", "migration")
        assert moved is not None
        assert not admission.should_move(moved)
    routes.release("s")
    assert clean(routes, admission)


async def agent(rng: random.Random, admission: Admission, routes: RoutingTable, key: str) -> None:
    """A session of some calls, as the router makes them."""
    model = rng.choice(["", "", "judge"])
    try:
        pin = await admission.place(
            key, model=model, tokens=rng.randrange(1, 1200), group=rng.choice(["", "g", "h"]), priority=rng.randrange(3)
        )
        for _ in range(rng.randrange(4)):
            target = routes.target_of(pin)
            if target is None or admission.should_move(pin):
                pin = routes.move(key, "engine_lost" if target is None else "migration", model=model) or pin
                target = routes.target_of(pin)
            if target is None:
                return
            async with slot(admission, target, priority=rng.randrange(3)):
                await asyncio.sleep(0.0001 * rng.randrange(8))
                target.observe(uncached_tokens=10, output_tokens=5, call_s=0.01)
            routes.grow(key, pin.resident_tokens + 50, model)
    finally:
        routes.release(key)


async def test_a_thousand_cancels_at_every_phase_leave_every_counter_at_zero() -> None:
    routes, admission = made(engines=3, max_in_flight=2)
    routes.set_engine("j", model="judge", budget_tokens=1000, max_in_flight=1)
    rng = random.Random(7)
    seen: list[Target] = [each for model in ("", "judge") for each in routes.of_model(model)]
    changes: list[Callable[[], None]] = [
        lambda: routes.remove_engine("e2"),
        lambda: routes.set_engine("e2", budget_tokens=1000, max_in_flight=2),
        lambda: routes.set_engine("e1", budget_tokens=1000, max_in_flight=1, admits=False),
        lambda: routes.set_engine("e1", budget_tokens=1000, max_in_flight=3),
    ]
    tasks: list[asyncio.Task[None]] = []
    for number in range(1000):
        tasks.append(asyncio.ensure_future(agent(rng, admission, routes, f"s{number}")))
        if number % 3 == 0:
            await asyncio.sleep(0)
        if number % 50 == 0:
            rng.choice(changes)()
            seen += routes.targets("e2")
        rng.choice(tasks[-40:]).cancel()
    for _ in range(40):
        await asyncio.sleep(0.001)
        rng.choice(tasks).cancel()
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert clean(routes, admission)
    for target in seen:
        assert (target.in_flight, target.waiting, target.sessions, target.reserved_tokens) == (0, 0, 0, 0)
    assert not any(routes.has_group(model, group) for model in ("", "judge") for group in "gh")


async def test_thousands_that_give_up_at_once_cost_one_look_at_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    routes, admission = made()
    await admission.place("first", tokens=900)
    waiting = [soon(admission, f"s{number}", priority=number % 3) for number in range(2000)]
    await settled()
    assert admission.waiting_sessions == 2000
    looks = 0
    pump = AdmissionQueue.pump

    def counted(queue: AdmissionQueue) -> list[SessionTicket]:
        nonlocal looks
        looks += 1
        return pump(queue)

    monkeypatch.setattr(AdmissionQueue, "pump", counted)
    for task in waiting:
        task.cancel()
    assert all(
        isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*waiting, return_exceptions=True)
    )
    await settled()
    assert looks < 20
    routes.release("first")
    assert clean(routes, admission)
