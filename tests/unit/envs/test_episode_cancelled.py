"""Cancelled at any await, an episode leaves no sandbox, no unfinished session, no tools and no outfit."""

from __future__ import annotations

import asyncio

import pytest
from episode_stage import GraderInPlace, Stage

from tollway.sandboxes.base import SandboxProvider
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider


def _fake() -> FakeProvider:
    return FakeProvider(SandboxConfig())


async def _steps_of_a_whole_run(stage: Stage) -> int:
    running = asyncio.create_task(stage.episodes(samples=2))
    steps = 0
    while not running.done():
        await asyncio.sleep(0)
        steps += 1
    assert [each.failure for each in running.result()] == [None, None]
    return steps


async def _cancelled_after(stage: Stage, steps: int) -> None:
    running = asyncio.create_task(stage.episodes(samples=2))
    for _ in range(steps):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("in_place", [False, True])
async def test_cancelling_after_every_step_of_the_loop_leaves_nothing(in_place: bool) -> None:
    """A step of the event loop takes a task to its next await: every one of them is tried."""
    async with _fake() as provider:
        stage = Stage(provider)
        total = await _steps_of_a_whole_run(stage)
        assert total > 50, "there is something to cancel"
    reached: set[str] = set()
    for steps in range(total + 1):
        async with _fake() as provider:
            stage = Stage(provider)
            stage.environment.grades = GraderInPlace if in_place else stage.environment.grades
            await _cancelled_after(stage, steps)
            reached |= stage.counts.reached
            await stage.assert_clean()
        assert provider.made == provider.killed
    wanted = {"outfit.enter", "tools.open", "agent", "tools.aclose", "collect", "outfit.exit", "grade"}
    assert reached == wanted


@pytest.mark.parametrize("again", [1, 3, 9])
async def test_cancelling_twice_while_it_is_released_leaves_nothing(again: int) -> None:
    for steps in range(10, 90, 4):
        async with _fake() as provider:
            provider.faults.kill_delay_s = 0.001
            stage = Stage(provider)
            running = asyncio.create_task(stage.episodes())
            for _ in range(steps):
                await asyncio.sleep(0)
            running.cancel()
            for _ in range(again):
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await stage.assert_clean()


@pytest.mark.parametrize(
    "where", ["outfit.enter", "tools.open", "agent", "tools.aclose", "collect", "outfit.exit", "grade"]
)
@pytest.mark.parametrize("kind", [ValueError("a bug"), ExceptionGroup("several", [OSError("x")])])
async def test_a_bug_anywhere_in_a_users_part_leaves_nothing(where: str, kind: Exception) -> None:
    async with _fake() as provider:
        stage = Stage(provider)
        stage.counts.breaks[where] = kind
        episode = await stage.episode()
        if where in ("tools.aclose", "outfit.exit"):
            assert episode.rollout().reward == 1.0, "what was earned is not lost by a bad release"
            stage.counts.closed["tools"] = stage.counts.opened["tools"]  # its own fault
        else:
            assert episode.rollout().reward is None
            assert ("a bug" if isinstance(kind, ValueError) else "OSError: x") in str(episode.failure)
            assert stage.sessions.rewards == {}
        await stage.assert_clean()


@pytest.mark.parametrize("where", ["outfit.enter", "tools.open", "agent", "collect", "grade"])
async def test_cancelling_each_stalled_phase_leaves_nothing(where: str) -> None:
    async with _fake() as provider:
        stage = Stage(provider)
        stage.counts.stall = {where}
        running = asyncio.create_task(stage.episodes(samples=3))
        while where not in stage.counts.reached:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await stage.assert_clean()


async def test_a_grader_cancelled_with_a_session_and_a_sandbox_open_leaves_neither() -> None:
    async with _fake() as provider:
        stage = Stage(provider)
        chat = stage.sessions.chat
        calls = 0

        async def second_stalls(*arguments: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 2:  # the grader's
                await asyncio.Event().wait()
            return await chat(*arguments)  # type: ignore[arg-type]

        stage.sessions.chat = second_stalls  # type: ignore[method-assign,assignment]
        running = asyncio.create_task(stage.episodes())
        while calls < 2:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await stage.assert_clean()
        assert len(stage.sessions.opened) == 2


async def test_closing_a_provider_in_the_middle_fails_the_episode_and_leaves_nothing() -> None:
    provider: SandboxProvider = _fake()
    stage = Stage(provider)
    stage.counts.stall = {"agent"}
    running = asyncio.create_task(stage.episodes())
    while "agent" not in stage.counts.reached:
        await asyncio.sleep(0)
    await provider.aclose()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await stage.assert_clean()
