"""Routers over scripted engines, for tests of calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import numpy as np

from tollway.records import Sampling
from tollway.router.config import RouterConfig
from tollway.router.fake import FakeEngine
from tollway.router.fleet import Membership
from tollway.router.service import Router
from tollway.router.wire import GenerateCall, Prompt

QUICK = RouterConfig(
    probe_interval_s=0.05,
    probe_timeout_s=0.3,
    probe_failures=3,
    connect_timeout_s=0.5,
    progress_timeout_s=5.0,
    busy_window_s=0.4,
    version_wait_s=0.1,
    admission_timeout_s=5.0,
    busy_pause_s=0.1,
    retry_pause_s=0.01,
)


def call(key: str = "s", ids: list[int] | None = None, rid: str = "r", **more: object) -> GenerateCall:
    prompt = np.array(ids or [1, 2, 3], np.int32)
    return GenerateCall(rid=rid, prompt=Prompt.of(prompt), sampling=Sampling(max_new_tokens=8), routing_key=key, **more)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def fleet(count: int, config: RouterConfig = QUICK) -> AsyncIterator[tuple[Router, list[FakeEngine]]]:
    """A router over ``count`` engines that all serve."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine()) for _ in range(count)]
        async with over(*engines, config=config) as router:
            yield router, engines


@contextlib.asynccontextmanager
async def over(
    *engines: FakeEngine, config: RouterConfig = QUICK, members: dict[int, Membership] | None = None
) -> AsyncIterator[Router]:
    """A router over engines that the test runs; ``members`` says what some of them are."""
    async with Router(config) as router:
        for at, engine in enumerate(engines):
            router.add_engine(engine.url, (members or {}).get(at))
        await until(lambda: states(router) == ["serving"] * len(engines), "all engines serve")
        yield router


def states(router: Router) -> list[object]:
    """State of every engine, in order."""
    return [engine["state"] for engine in router.engines()]


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait until ``condition()`` holds; the test's own timeout is the limit."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never: {what}")


def home_of(engines: list[FakeEngine]) -> tuple[FakeEngine, FakeEngine]:
    """(the engine of two that got calls, the other one)."""
    one, two = engines
    return (one, two) if one.requests else (two, one)


def loads(router: Router) -> list[tuple[int, int, int, int, int]]:
    """(calls, waiting, sessions, resident, reserved) of every target."""
    return [
        (each.in_flight, each.waiting, each.sessions, each.resident_tokens, each.reserved_tokens)
        for engine in router.fleet.engines
        for each in router.table.targets(engine)
    ]
