"""Episodes from end to end: rewards are earned, infrastructure is never a reward, nothing is left behind."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import pytest
from episode_helpers import ScriptedSessions, calls, repair, request, runner, script

from tollway.envs.evaluate import evaluate, summarise, wilson
from tollway.envs.micro_swe.projects import project_at
from tollway.envs.micro_swe.rules import RULES
from tollway.errors import (
    BadRequest,
    ComponentLost,
    CreateFailed,
    EngineLost,
    NoEngine,
    SandboxError,
    SandboxUnavailable,
    UpstreamError,
)
from tollway.messages import Message
from tollway.records import Rollout, Sampling
from tollway.sandboxes import heartbeat
from tollway.sandboxes.base import SandboxProvider
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider, Process
from tollway.sandboxes.local import LocalProvider


async def _no_check(process: Process) -> int:
    process.stdout += b"KeyError at x.py:1\n"
    return 1


def _fake(**settings: int) -> FakeProvider:
    return FakeProvider(SandboxConfig(**settings), programs={"python3": _no_check, "sed": _no_check})


async def _left_clean(provider: SandboxProvider, sessions: ScriptedSessions) -> None:
    """Every sandbox is gone and every session is finished."""
    async with asyncio.timeout(10):
        while provider.live or sessions.unfinished:
            await asyncio.sleep(0.005)


async def test_the_right_repair_earns_1_and_every_tool_output_was_real(local: LocalProvider) -> None:
    project = project_at(0, "train", 5)
    sessions = ScriptedSessions(repair(project.rule))
    group = await runner(sessions, local).run_group(request(5))
    (rollout,) = group.rollouts
    assert rollout.reward == 1.0
    assert rollout.error is None
    assert rollout.turns == 4
    assert rollout.facts["ran_checks"] == 1.0
    assert rollout.facts["submitted"] == 1.0
    assert [row.reward for row in rollout.rows] == [1.0]
    shown = [message.content for message in sessions.seen["s0"] if message.role == "tool"]
    assert shown[0].startswith(f"{project.kind} at {project.path}:")
    assert shown[1:] == ["applied", "ok"]
    assert sessions.closed == ["s0"]
    assert sessions.deleted == []
    assert local.live == 0


async def test_a_wrong_repair_and_a_missing_submit_earn_0_not_none(local: LocalProvider) -> None:
    project = project_at(0, "train", 5)
    wrong = next(name for name in RULES if name != project.rule)
    never = script(calls(("edit", {"rule": project.rule})), calls(("run", {})))
    talk = script(calls(("edit", {"rule": project.rule})), Message(role="assistant", content="done"))
    for policy, finish in ((repair(wrong), 1.0), (never, 0.0), (talk, 0.0)):
        sessions = ScriptedSessions(policy)
        (rollout,) = (await runner(sessions, local).run_group(request(5))).rollouts
        assert rollout.reward == 0.0
        assert rollout.error is None
        assert rollout.facts["submitted"] == finish
        assert sessions.rewards == {"s0": 0.0}
        assert sessions.closed == ["s0"]


async def test_a_group_runs_one_task_and_reports_every_attempt(local: LocalProvider) -> None:
    project = project_at(0, "train", 2)
    sessions = ScriptedSessions(repair(project.rule))
    sessions.faults["chat"] = deque([UpstreamError("garbage")])
    group = await runner(sessions, local).run_group(request(2, samples=4))
    assert len(group.rollouts) == 4
    assert sorted(str(each.reward) for each in group.rollouts) == ["1.0", "1.0", "1.0", "None"]
    failed = next(each for each in group.rollouts if each.reward is None)
    assert failed.error == "upstream_error: garbage"
    assert failed.rows == ()
    assert failed.session_id in sessions.deleted
    assert failed.session_id not in sessions.rewards
    await _left_clean(local, sessions)


@pytest.mark.parametrize(
    ("where", "error"),
    [("create", CreateFailed("no room")), ("exec", SandboxError("unreachable")), ("write", SandboxError("disk"))],
)
async def test_a_failing_sandbox_is_no_reward(where: str, error: Exception) -> None:
    sessions = ScriptedSessions(repair("default"))
    async with _fake(create_attempts=1) as provider:
        getattr(provider.faults, where).append(error)
        (rollout,) = (await runner(sessions, provider).run_group(request())).rollouts
        assert rollout.reward is None
        assert str(error) in str(rollout.error)
        assert sessions.rewards == {}
        await _left_clean(provider, sessions)
        assert provider.made == provider.killed


async def test_a_grader_without_infrastructure_gives_no_grade() -> None:
    async with _fake(create_attempts=1) as provider:
        sessions = ScriptedSessions(script(calls(("submit", {}))))
        made = provider._create

        async def second_fails(spec: object) -> object:
            if provider.made:
                raise CreateFailed("no room for the grader")
            return await made(spec)  # type: ignore[arg-type]

        provider._create = second_fails  # type: ignore[assignment,method-assign]
        (rollout,) = (await runner(sessions, provider).run_group(request())).rollouts
        assert rollout.reward is None
        assert "no room for the grader" in str(rollout.error)
        await _left_clean(provider, sessions)


@pytest.mark.parametrize("phase", ["create", "chat", "reward", "trajectories", "close"])
async def test_session_faults_are_retried_as_whole_episodes_a_bounded_number_of_times(phase: str) -> None:
    sessions = ScriptedSessions(script(calls(("submit", {}))))
    sessions.faults[phase] = deque([EngineLost("connection lost")])
    async with _fake() as provider:
        (rollout,) = (await runner(sessions, provider, attempts=2).run_group(request())).rollouts
        assert rollout.reward == 0.0
        assert sessions.closed == [rollout.session_id]
        assert len(sessions.opened) == (1 if phase == "create" else 2)
        sessions.faults[phase] = deque([UpstreamError("garbage")] * 5)
        (rollout,) = (await runner(sessions, provider, attempts=2).run_group(request())).rollouts
        assert rollout.reward is None
        assert len(sessions.faults[phase]) == 3
        await _left_clean(provider, sessions)


@pytest.mark.parametrize("phase", ["create", "chat", "reward", "trajectories", "close"])
async def test_a_stalled_server_ends_the_episode_without_a_reward(phase: str) -> None:
    sessions = ScriptedSessions(script(calls(("submit", {}))))
    sessions.stall = {phase}
    async with _fake() as provider:
        limits = {"model_timeout_s": 0.05, "record_timeout_s": 0.05, "open_timeout_s": 0.05}
        episodes = runner(sessions, provider, **limits)
        if phase == "create":
            episodes.parts.opening_grace_s = 0.05
        (rollout,) = (await episodes.run_group(request())).rollouts
        assert rollout.reward is None
        assert "took longer than" in str(rollout.error)
        await episodes.aclose()
        await _left_clean(provider, sessions)


async def test_an_agent_out_of_time_is_graded_as_it_stands() -> None:
    def policy(messages: Sequence[Message]) -> Message:
        sessions.stall = {"chat"}  # from the second call on
        return calls(("run", {}))

    sessions = ScriptedSessions(policy)
    async with _fake() as provider:
        (rollout,) = (await runner(sessions, provider, agent_timeout_s=0.3).run_group(request())).rollouts
        assert rollout.reward == 0.0
        assert rollout.turns == 1
        assert rollout.facts["timed_out"] == 1.0
        await _left_clean(provider, sessions)


async def test_an_agent_whose_model_never_answered_is_no_reward() -> None:
    sessions = ScriptedSessions(script(calls(("run", {}))))
    sessions.stall = {"chat"}
    async with _fake() as provider:
        (rollout,) = (await runner(sessions, provider, agent_timeout_s=0.05).run_group(request())).rollouts
        assert rollout.reward is None
        assert "without one answered model call" in str(rollout.error)
        await _left_clean(provider, sessions)


@pytest.mark.parametrize("phase", ["create", "chat", "reward", "trajectories", "close"])
async def test_cancelling_leaves_no_sandbox_and_no_session(phase: str) -> None:
    sessions = ScriptedSessions(script(calls(("submit", {}))))
    sessions.stall = {phase}
    async with _fake() as provider:
        episodes = runner(sessions, provider)
        running = asyncio.create_task(episodes.run_group(request(samples=3)))
        await asyncio.wait_for(sessions.stalled.wait(), 10)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        sessions.stall = set()
        if phase != "create":
            assert len(sessions.opened) == 3
        if phase == "create":
            return  # the scripted server stalls for ever there and never opens one
        await episodes.aclose()
        await _left_clean(provider, sessions)
        assert provider.made == provider.killed


async def test_cancelling_in_the_middle_of_real_commands_leaves_nothing(local: LocalProvider) -> None:
    sessions = ScriptedSessions(script(calls(("run", {}))))
    for delay_ms in (1, 10, 20, 40):
        episodes = runner(sessions, local, max_turns=100)
        running = asyncio.create_task(episodes.run_group(request(samples=3)))
        await asyncio.sleep(delay_ms / 1000)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await episodes.aclose()
        await _left_clean(local, sessions)
    assert local.home is not None
    assert [entry.name for entry in local.home.iterdir() if entry.is_dir()] == []


async def test_a_session_that_opens_after_its_caller_left_is_deleted() -> None:
    sessions = ScriptedSessions(script(calls(("submit", {}))))
    gate = asyncio.Event()
    create = sessions.create

    async def slow(**arguments: object) -> object:
        await gate.wait()
        return await create(**arguments)  # type: ignore[arg-type]

    sessions.create = slow  # type: ignore[method-assign,assignment]
    async with _fake() as provider:
        episodes = runner(sessions, provider)
        running = asyncio.create_task(episodes.run_group(request()))
        await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert sessions.opened == []
        gate.set()
        await episodes.aclose()
        assert sessions.deleted == sessions.opened == ["s0"]


async def test_when_no_engine_or_no_sandbox_can_serve_the_component_is_lost() -> None:
    async with _fake() as provider:
        sessions = ScriptedSessions(script(calls(("submit", {}))))
        sessions.faults["chat"] = deque([NoEngine("no engine left")] * 10)
        with pytest.raises(ComponentLost, match="no engine left"):
            await runner(sessions, provider).run_group(request(samples=2))
        sessions.faults.clear()
        provider.faults.create.append(SandboxUnavailable("no bwrap; install it"))
        with pytest.raises(ComponentLost, match="no bwrap; install it"):
            await runner(sessions, provider).run_group(request(samples=2))
        await _left_clean(provider, sessions)


async def test_a_bug_in_a_harness_ends_its_episode_and_not_the_group(caplog: pytest.LogCaptureFixture) -> None:
    def broken(messages: object) -> Message:
        raise ZeroDivisionError("harness bug")

    sessions = ScriptedSessions(broken)
    async with _fake() as provider:
        rollouts = (await runner(sessions, provider).run_group(request(samples=2))).rollouts
        assert [rollout.reward for rollout in rollouts] == [None, None]
        assert all("ZeroDivisionError: harness bug" in str(rollout.error) for rollout in rollouts)
        assert caplog.text.count("Traceback") == 1, "each fault is told once, not once an episode"
        await _left_clean(provider, sessions)


async def test_an_overflowing_context_truncates_the_episode_instead_of_failing_it() -> None:
    sessions = ScriptedSessions(script(calls(("run", {}))))
    overflow = BadRequest("maximum context length")
    overflow.code = "context_length_exceeded"
    async with _fake() as provider:
        episodes = runner(sessions, provider)
        sessions.faults["chat"] = deque([overflow])
        (rollout,) = (await episodes.run_group(request())).rollouts
        assert rollout.reward == 0.0
        assert rollout.facts["truncated"] == 1.0
        sessions.faults["chat"] = deque([BadRequest("unknown role")])
        (rollout,) = (await episodes.run_group(request())).rollouts
        assert rollout.reward is None


async def test_a_heartbeat_moves_the_end_of_a_slow_agents_sandbox_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beats come thick and the life is long: no stall of this machine can end the sandbox."""
    monkeypatch.setattr(heartbeat, "_BEATS_PER_TTL", 30_000)
    sessions = ScriptedSessions(script(calls(("run", {})), calls(("run", {})), calls(("submit", {}))))
    chat = sessions.chat
    ends: list[float] = []

    async def slow(*arguments: object) -> object:
        (info,) = await provider.list()
        sandbox = await provider.attach(info.id)
        before = sandbox.expires_at
        async with asyncio.timeout(20):
            while sandbox.expires_at <= before:
                await asyncio.sleep(0.005)
        ends.append(sandbox.expires_at)
        return await chat(*arguments)  # type: ignore[arg-type]

    sessions.chat = slow  # type: ignore[method-assign,assignment]
    async with _fake() as provider:
        (rollout,) = (await runner(sessions, provider, sandbox_ttl_s=300).run_group(request())).rollouts
        assert rollout.error is None
        assert rollout.facts["runs"] == 2.0
        assert len(ends) == 3
        await _left_clean(provider, sessions)


async def test_the_agents_sandbox_is_gone_before_the_grader_needs_a_place() -> None:
    sessions = ScriptedSessions(script(calls(("submit", {}))))
    async with _fake(max_live=1) as provider:
        group = await asyncio.wait_for(runner(sessions, provider).run_group(request(samples=4)), 10)
        assert [rollout.reward for rollout in group.rollouts] == [0.0] * 4
        assert provider.made == provider.killed == 8
        roles = [spec.labels.get("role", "agent") for spec in provider.specs]
        assert roles.count("grader") == 4


async def test_evaluation_averages_graded_episodes_only(local: LocalProvider) -> None:
    def policy(messages: object) -> Message:
        return repair(project_at(0, "train", 0).rule)(messages)  # type: ignore[arg-type]

    sessions = ScriptedSessions(policy)
    sessions.faults["chat"] = deque([UpstreamError("garbage")])
    result = await evaluate(runner(sessions, local), 9, sampling=Sampling(temperature=1.0))
    assert result.episodes == 8
    assert result.errors == 1
    assert result.reward is not None
    assert 0.0 < result.reward < 1.0
    assert result.interval[0] < result.reward < result.interval[1]
    assert result.facts["ran_checks"] == 1.0
    assert result.turns == 4.0


def test_a_mean_over_nothing_is_not_zero() -> None:
    result = summarise([Rollout(session_id="s", rows=(), reward=None, error="e")])
    assert result.reward is None
    assert (result.episodes, result.errors) == (0, 1)
    assert wilson(0.0, 256)[0] == 0.0
    assert 0.9 < wilson(1.0, 256)[0] < 1.0


def test_facts_are_averaged_over_the_episodes_that_report_them() -> None:
    rollouts = [
        Rollout(session_id="a", rows=(), reward=1.0, facts={"x": 4.0}),
        Rollout(session_id="b", rows=(), reward=0.0),
    ]
    assert summarise(rollouts).facts == {"x": 4.0}


def test_rewards_beyond_a_proportion_have_an_interval_of_their_own() -> None:
    """Rewards of an environment may be negative or above 1; a Wilson interval does not exist for those."""
    rollouts = [Rollout(session_id="s", rows=(), reward=reward) for reward in (-1.0, 3.0, 1.0, 5.0)]
    result = summarise(rollouts)
    assert result.reward == 2.0
    assert result.interval == pytest.approx((2.0 - 2.53, 2.0 + 2.53), abs=0.01)
    assert summarise(rollouts[1:2]).interval == (3.0, 3.0)
