"""Nobody waits for a thread that is gone."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from tollway.engine.scheduler import Scheduler
from tollway.errors import ComponentLost


def generation(step=lambda: False) -> SimpleNamespace:
    """What the scheduler asks of a ``Generation``; nothing is generated."""
    return SimpleNamespace(outbox=[], step=step, submit=lambda _request: None, abort=lambda *_arguments: 0)


async def test_a_command_behind_the_end_fails_instead_of_waiting_for_ever() -> None:
    scheduler = Scheduler(generation(), asyncio.get_running_loop(), lambda: None)
    scheduler.start()
    entered, go = threading.Event(), threading.Event()

    def block(_generation: object) -> bool:
        entered.set()
        return go.wait(20)

    busy = asyncio.create_task(scheduler.call(block))
    await asyncio.to_thread(entered.wait, 20)
    stopping = asyncio.create_task(asyncio.to_thread(scheduler.stop))
    while scheduler._inbox.empty():
        await asyncio.sleep(0.001)
    late = asyncio.create_task(scheduler.call(lambda _generation: 1))
    while scheduler._inbox.qsize() < 2:
        await asyncio.sleep(0.001)
    go.set()
    assert await busy is True
    with pytest.raises(ComponentLost, match="shutting down"):
        await asyncio.wait_for(late, 20)
    await stopping
    with pytest.raises(ComponentLost, match="gone"):
        await scheduler.call(lambda _generation: 1)


async def test_a_crash_is_told_to_later_callers_and_to_the_process() -> None:
    crashed = asyncio.Event()

    def explode() -> bool:
        raise RuntimeError("no more memory")

    scheduler = Scheduler(generation(explode), asyncio.get_running_loop(), crashed.set)
    scheduler.start()
    assert await scheduler.call(lambda _generation: 7) == 7
    await asyncio.wait_for(crashed.wait(), 20)
    with pytest.raises(ComponentLost, match="no more memory"):
        await scheduler.call(lambda _generation: 1)


async def test_what_a_command_raises_is_raised_to_its_caller_and_the_thread_lives_on() -> None:
    scheduler = Scheduler(generation(), asyncio.get_running_loop(), lambda: None)
    scheduler.start()
    with pytest.raises(ZeroDivisionError):
        await scheduler.call(lambda _generation: 1 // 0)
    assert await scheduler.call(lambda _generation: 2) == 2
    await asyncio.to_thread(scheduler.stop)
