"""Every phase ends in time, whatever hangs in it; a place is always free for grading; errors are told as they are."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from episode_helpers import request
from episode_stage import GraderInPlace, Stage

from tollway.envs.base import AgentRun, Desk, Limits, Task, Verdict, Work
from tollway.envs.leases import Leases
from tollway.envs.places import Places
from tollway.envs.runner import group_of, qualified
from tollway.errors import (
    BadImage,
    CapabilityMissing,
    ComponentLost,
    ConfigError,
    CreateFailed,
    EngineLost,
    RateLimited,
    SandboxError,
    SandboxGone,
    Unauthorized,
)
from tollway.sandboxes.base import SandboxSpec
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider


def _fake(**settings: object) -> FakeProvider:
    return FakeProvider(SandboxConfig.model_validate(settings))


@pytest.mark.parametrize(
    ("where", "setting", "words"),
    [
        ("outfit.enter", "setup_timeout_s", "set-up of counting/0 took longer than 0.05 s"),
        ("tools.open", "setup_timeout_s", "set-up of counting/0 took longer than 0.05 s"),
        ("collect", "collect_timeout_s", "collecting files took longer than 0.05 s"),
        ("grade", "grade_timeout_s", "grading took longer than 0.05 s"),
    ],
)
async def test_a_phase_that_hangs_ends_the_episode_without_a_reward(where: str, setting: str, words: str) -> None:
    async with _fake() as provider:
        stage = Stage(provider, **{setting: 0.05})
        stage.counts.stall = {where}
        episode = await stage.episode()
        assert words in str(episode.failure)
        assert episode.rollout().reward is None
        assert stage.sessions.rewards == {}
        await stage.assert_clean()


async def test_a_create_that_hangs_ends_with_the_set_up_and_its_sandbox_does_not_stay() -> None:
    async with _fake() as provider:
        provider.faults.create_delay_s = 0.3
        stage = Stage(provider, setup_timeout_s=0.05)
        assert "set-up of counting/0 took longer" in str((await stage.episode()).failure)
        await stage.assert_clean()
        assert provider.made == provider.killed == 1


async def test_a_tasks_own_limits_come_before_the_configured_ones() -> None:
    async with _fake() as provider:
        stage = Stage(provider)
        task = stage.environment.task(0)
        stage.environment.task = lambda index: Task(  # type: ignore[method-assign]
            task_id=task.task_id, messages=task.messages, limits=Limits(agent_s=0.3, grade_s=0.06)
        )
        stage.counts.stall = {"agent"}
        episode = await stage.episode()
        assert episode.run is not None
        assert (episode.run.finish, episode.run.turns) == ("timeout", 1)
        stage.counts.stall = {"grade"}
        assert "grading took longer than 0.06 s" in str((await stage.episode()).failure)


async def test_what_a_harness_returns_when_its_time_is_up_is_kept_but_is_no_submission() -> None:
    async with _fake() as provider:
        stage = Stage(provider, agent_timeout_s=0.05)

        async def run(task: object, desk: object) -> AgentRun:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return AgentRun(turns=3, submitted=True, finish="submitted", log=b"so far")
            raise AssertionError

        stage.harness.run = run  # type: ignore[method-assign,assignment]
        episode = await stage.episode()
        assert episode.run == AgentRun(turns=3, submitted=False, finish="timeout", log=b"so far")
        assert episode.rollout().reward == 0.0


@pytest.mark.parametrize("where", ["agent", "tools.aclose", "outfit.exit", "grade"])
async def test_a_part_that_ignores_being_cancelled_cannot_hold_the_run(where: str) -> None:
    async with _fake() as provider:
        limits = {f"{where}_timeout_s": 0.05} if where in ("agent", "grade") else {}
        stage = Stage(provider, release_timeout_s=0.05, **limits)
        stage.counts.stubborn = {where}
        episode = await asyncio.wait_for(stage.episode(), 30)
        if where in ("agent", "grade"):
            assert episode.rollout().reward is None, "it may still be at work: nothing of it can be trusted"
        else:
            assert episode.rollout().reward == 1.0
        await asyncio.wait_for(stage.runner.aclose(), 30)
        assert stage.runner._leases.left_behind >= 1
        assert provider.live == 0
        stage.counts.stubborn = set()
        await asyncio.gather(*stage.runner._leases._owned, return_exceptions=True)


async def test_a_kill_that_hangs_neither_holds_the_run_nor_loses_the_grade() -> None:
    async with _fake() as provider:
        stage = Stage(provider, release_timeout_s=0.05)
        provider.faults.kill_delay_s = 0.4
        episode = await asyncio.wait_for(stage.episode(), 30)
        # The grader's own kill takes its time; the agent's goes on in the background.
        assert episode.rollout().reward == 1.0
        provider.faults.kill_delay_s = 0.0
        await stage.assert_clean()


async def test_what_a_harness_holds_may_not_fall_while_the_agent_works() -> None:
    async with _fake() as provider:
        stage = Stage(provider)
        stage.harness.loses_outfit = True
        stage.counts.stall = {"agent"}
        episode = await asyncio.wait_for(stage.episode(), 30)
        assert "the harness's outfit ended in the middle" in str(episode.failure)
        assert "the bridge fell" in str(episode.failure)
        await stage.assert_clean()


@pytest.mark.parametrize("in_place", [False, True])
async def test_with_one_place_many_episodes_are_graded_one_after_the_other(in_place: bool) -> None:
    async with _fake(max_live=1, create_timeout_s=5) as provider:
        stage = Stage(provider)
        stage.environment.grades = GraderInPlace if in_place else stage.environment.grades
        episodes = await asyncio.wait_for(stage.episodes(samples=12), 30)
        assert [each.failure for each in episodes] == [None] * 12
        if not in_place:
            roles = [spec.labels.get("role", "agent") for spec in provider.specs]
            assert roles == ["agent", "grader"] * 12, "what is worked on is graded before the next one begins"
        await stage.assert_clean()


async def test_no_session_is_opened_before_its_agent_has_a_place() -> None:
    async with _fake(max_live=2) as provider:
        stage = Stage(provider)
        stage.counts.stall = {"agent"}
        running = asyncio.create_task(stage.episodes(samples=6))
        while provider.live < 2:
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(stage.sessions.opened) == 2
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await stage.assert_clean()


async def test_a_task_without_a_sandbox_needs_no_place() -> None:
    async with _fake(max_live=1) as provider:
        stage = Stage(provider)
        stage.environment.machine = None
        async with stage.runner.parts.places.take():
            episode = await asyncio.wait_for(stage.episode(), 30)
        # Its grader makes a sandbox all the same, which is the provider's to allow.
        assert episode.rollout().reward == 1.0
        assert [spec.labels["role"] for spec in provider.specs] == ["grader"]


async def test_places_are_given_in_the_order_of_asking() -> None:
    places, order = Places(1), []

    async def want(name: str) -> None:
        async with places.take():
            order.append(name)
            await asyncio.sleep(0)

    async with places.take():
        tasks = [asyncio.create_task(want(name)) for name in "abcd"]
        await asyncio.sleep(0)
        tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "c", "d"]
    async with asyncio.timeout(5), places.take():
        pass


async def test_harnesses_with_two_sandboxes_never_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _fake(max_live=3, create_timeout_s=5) as provider:
        stage = Stage(provider)
        stage.harness.sandboxes = 2

        async def run(task: Task, desk: Desk) -> AgentRun:
            assert desk.provider is provider
            assert provider.live <= 3
            own = await provider.create(SandboxSpec(ttl_s=60, labels={"role": "harness"}))
            await asyncio.sleep(0)
            await own.kill()
            return AgentRun(turns=1, submitted=True, finish="submitted")

        monkeypatch.setattr(stage.harness, "run", run)
        episodes = await asyncio.wait_for(stage.episodes(samples=8), 30)
        assert [each.failure for each in episodes] == [None] * 8
        await stage.assert_clean()


async def test_a_harness_that_needs_more_places_than_there_are_is_refused() -> None:
    async with _fake(max_live=1) as provider:
        stage = Stage(provider)
        stage.harness.sandboxes = 2
        with pytest.raises(ConfigError, match=r"holds 2 sandboxes at once.*sandbox\.max_live is 1"):
            await stage.episodes()


async def test_who_needs_many_places_is_not_passed_over_for_ever() -> None:
    places, order = Places(2), []

    async def want(name: str, count: int) -> None:
        async with places.take(count):
            order.append(name)
            await asyncio.sleep(0)

    async with places.take():
        tasks = [asyncio.create_task(want(name, count)) for name, count in (("two", 2), ("one", 1), ("gone", 2))]
        await asyncio.sleep(0)
        assert order == []
        tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["two", "one"]
    async with asyncio.timeout(5), places.take(2):
        pass


async def test_a_place_given_to_a_cancelled_waiter_goes_to_the_next() -> None:
    places = Places(1)
    async with places.take():
        waiter = asyncio.create_task(places.take().__aenter__())
        await asyncio.sleep(0)
    waiter.cancel()  # its turn has come and it does not know yet
    await asyncio.gather(waiter, return_exceptions=True)
    async with asyncio.timeout(5), places.take():
        pass


@pytest.mark.parametrize(
    ("error", "creates"),
    [(BadImage("none"), 1), (RateLimited("slow down", retry_after_s=0.0), 3), (CreateFailed("no"), 3)],
)
async def test_what_a_provider_gave_up_is_not_tried_again_on_top_of_it(error: SandboxError, creates: int) -> None:
    async with _fake(create_attempts=3) as provider:
        provider.faults.create = deque([error] * 20)
        stage = Stage(provider, attempts=4)
        episode = await stage.episode()
        assert (episode.attempt, episode.phase) == (1, "set-up")
        assert 20 - len(provider.faults.create) == creates
        assert str(episode.failure) == f"{error.code}: {error}"
        await stage.assert_clean()


async def test_a_lost_sandbox_starts_the_whole_episode_again_with_new_ones() -> None:
    async with _fake() as provider:
        stage = Stage(provider, attempts=3)
        provider.faults.write = deque([SandboxGone("evicted")])
        original = stage.environment.task(0)
        stage.environment.task = lambda index: Task(  # type: ignore[method-assign]
            task_id=original.task_id, messages=original.messages
        )
        episode = await stage.episode()
        assert episode.rollout().reward == 1.0
        assert episode.attempt == 2
        assert episode.earlier == ("sandbox_gone: evicted",)
        assert stage.sessions.opened[0] in stage.sessions.deleted
        assert stage.sessions.closed[-1] == stage.sessions.opened[1]
        agents = [spec for spec in provider.specs if "role" not in spec.labels]
        assert len({spec.labels["session"] for spec in agents}) == 2
        await stage.assert_clean()


async def test_the_number_of_attempts_bounds_sandboxes_and_sessions() -> None:
    async with _fake() as provider:
        stage = Stage(provider, attempts=3)
        stage.counts.breaks["agent"] = SandboxError("unreachable")
        episode = await stage.episode()
        assert episode.failure == "sandbox_error: unreachable"
        assert len(episode.earlier) == 2
        assert provider.made == len(stage.sessions.opened) == 3
        await stage.assert_clean()


async def test_the_error_is_told_and_not_that_nothing_was_recorded() -> None:
    async with _fake() as provider:
        stage = Stage(provider)
        stage.harness.result = AgentRun(
            turns=0, submitted=True, finish="submitted", log=b"...\nTraceback: no model key"
        )
        episode = await stage.episode()
        assert "without one answered model call; it wrote: ...\nTraceback: no model key" in str(episode.failure)

        async def none(session_id: str) -> tuple[()]:
            return ()

        stage.harness.result = None
        stage.sessions.trajectories = none  # type: ignore[method-assign,assignment]
        assert "exported no row of 1 model calls" in str((await stage.episode()).failure)
        stage.counts.breaks["agent"] = CapabilityMissing("no network")
        assert (await stage.episode()).failure == "sandbox_capability_missing: no network"


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
async def test_a_reward_that_is_no_number_is_no_reward(reward: float) -> None:
    async with _fake() as provider:
        stage = Stage(provider)
        stage.environment.reward = reward
        episode = await stage.episode()
        assert "want a finite reward" in str(episode.failure)
        assert stage.sessions.rewards == {}


async def test_what_would_end_every_episode_ends_the_run() -> None:
    async with _fake() as provider:
        for error, kind in ((ConfigError("no codex here"), ConfigError), (ComponentLost("gone"), ComponentLost)):
            stage = Stage(provider, attempts=5)
            stage.counts.breaks["outfit.enter"] = error
            with pytest.raises(kind, match=str(error)):
                await stage.episodes(samples=3)
            await stage.assert_clean()
        stage = Stage(provider)
        stage.sessions.faults["create"] = deque([Unauthorized("wrong key")])
        with pytest.raises(ConfigError, match="refuses the admin key: wrong key"):
            await stage.episodes()


async def test_a_group_is_lost_only_when_no_engine_answered_any_of_it() -> None:
    async with _fake() as provider:
        stage = Stage(provider)
        stage.sessions.faults["chat"] = deque([EngineLost("dead")])
        first = await stage.episode()
        with pytest.raises(ComponentLost, match="no engine answers: dead"):
            group_of("g", [first])
        group = group_of("g", [first, await stage.episode()])
        assert [each.reward for each in group.rollouts] == [None, 1.0]


async def test_task_ids_of_two_environments_are_never_the_same() -> None:
    async with _fake() as provider:
        one, two = Stage(provider).environment, Stage(provider).environment
        two.name = "other"
        bare = Task(task_id="0", messages=())
        assert {qualified(one, bare), qualified(two, bare)} == {"counting/0", "other/0"}
        assert qualified(one, one.task(1)) == "counting/1"
        stage = Stage(provider)
        stage.environment.name = "other"
        group = await stage.runner.run_group(request())
        assert group.task_id == "other/counting/0"


async def test_a_fact_that_nobody_reported_is_not_there() -> None:
    async with _fake() as provider:
        stage = Stage(provider)
        facts = (await stage.episode()).rollout().facts
        assert facts["tool_s"] == 0.5
        assert facts["sampled_tokens"] == 1.0
        assert "prompt_tokens" not in facts, "the row does not say"
        assert "cached_tokens" not in facts
        assert {"setup_s", "agent_s", "grade_s", "submitted", "flagged"} <= set(facts)
        stage.harness.result = AgentRun(turns=1, submitted=False, finish="stopped")
        facts = (await stage.episode()).rollout().facts
        assert "grade_s" not in facts
        odd: dict[str, float] = {"nan": float("nan"), "inf": float("inf"), "text": "x", "yes": True}  # type: ignore[dict-item]
        stage.harness.result = AgentRun(turns=1, submitted=True, finish="submitted", facts=odd)
        facts = (await stage.episode()).rollout().facts
        assert {name: facts.get(name) for name in odd} == {"nan": None, "inf": None, "text": None, "yes": 1.0}
        stage.harness.result = AgentRun(turns=1, submitted=False, finish="stopped")
        facts = (await stage.episode()).rollout().facts
        assert "tool_s" not in facts


async def test_an_error_of_ours_is_told_out_of_a_group_of_errors() -> None:
    async with _fake() as provider:
        stage = Stage(provider)
        inner = ExceptionGroup("inner", [ValueError("x"), SandboxGone("evicted")])
        stage.counts.breaks["agent"] = ExceptionGroup("unhandled errors in a TaskGroup", [KeyError("k"), inner])
        assert (await stage.episode()).failure == "sandbox_gone: evicted"
        await stage.assert_clean()


async def test_flags_of_a_verdict_are_recorded_with_the_reward() -> None:
    async with _fake() as provider:
        stage = Stage(provider)
        noted: list[object] = []

        class Suspicious(GraderInPlace):
            in_agents_sandbox = False

            async def grade(self, task: Task, work: Work) -> Verdict:
                return Verdict(reward=0.0, reason="tests were edited", flags=("tamper",))

        async def reward(name: str, value: float, *, error: str | None = None, details: object = None) -> None:
            noted.append(details)
            stage.sessions.rewards[name] = value

        stage.environment.grades = Suspicious
        stage.sessions.reward = reward  # type: ignore[method-assign,assignment]
        episode = await stage.episode()
        assert episode.rollout().facts["flagged"] == 1.0
        assert noted == [{"reason": "tests were edited", "finish": "submitted", "turns": 1, "flags": ["tamper"]}]


async def test_leases_tell_a_task_that_cancelled_itself_from_being_cancelled() -> None:
    leases = Leases(1.0)

    async def odd() -> None:
        raise asyncio.CancelledError

    with pytest.raises(Exception, match="cancelled itself"):
        await leases.run(odd(), 5.0, "the agent")
    await leases.aclose()
