"""Tasksets and environments of the real verifiers package, v1 and v0, each in its own interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from bridge_stage import stage
from episode_helpers import calls, script

from tollway.envs.verifiers.environment import Verifiers
from tollway.errors import ConfigError
from tollway.messages import Message
from tollway.sandboxes.base import SandboxSpec
from tollway.sandboxes.local import LocalProvider

pytestmark = [pytest.mark.all, pytest.mark.slow(120)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "verifiers"
Bridge = Callable[[str], Path]


def _section(bridge: Bridge, taskset: str, **fields: object) -> dict[str, object]:
    return {"python": str(bridge("verifiers")), "taskset": taskset, "path": [str(EXAMPLE)], **fields}


def _backwards(messages: Sequence[Message]) -> Message:
    return Message(role="assistant", content=messages[-1].content.split()[4][::-1])


async def test_a_v1_taskset_is_scored_by_its_own_rewards_and_metrics(bridge: Bridge) -> None:
    section = _section(bridge, "spelling", config={"words": 4})
    async with stage(name="verifiers", verifiers=section) as played:
        assert played.environment.size == 4
        (right,), _ = await played.play(0, _backwards)
        assert (right.reward, right.facts["reward_right"], right.facts["metric_letters"]) == (1.0, 1.0, 1.0)
        (wrong,), _ = await played.play(1, script(Message(role="assistant", content="no")))
        assert (wrong.error, wrong.reward) == (None, 0.0)


async def test_a_task_sets_up_and_scores_in_the_agents_sandbox(bridge: Bridge, local: LocalProvider) -> None:
    section = _section(bridge, "spelling:FileTaskset")
    async with stage(local, name="verifiers", verifiers=section) as played:
        policy = script(calls(("bash", {"command": "rev < word.txt > answer.txt"})), calls(("submit", {})))
        rollouts, _ = await played.play(0, policy, samples=3)
        assert [(rollout.error, rollout.reward) for rollout in rollouts] == [(None, 1.0)] * 3
        (idle,), _ = await played.play(0, script(calls(("submit", {}))))
        assert idle.reward == 0.0
        environment, task = played.environment, played.environment.task(0)
        assert isinstance(environment, Verifiers)
        sandbox = await local.create(SandboxSpec(ttl_s=60, labels={"test": "validate"}))
        assert await environment.validate(task, sandbox) is True
        await sandbox.kill()


async def test_a_taskset_that_is_missing_is_said_at_start(bridge: Bridge) -> None:
    with pytest.raises(ConfigError, match="not found"):
        async with stage(name="verifiers", verifiers=_section(bridge, "no-such-taskset")):
            pass


@pytest.mark.parametrize("taskset", ["v0_words", "v0_words:load_environment"])
async def test_a_v0_environment_is_scored_by_its_rubric(bridge: Bridge, taskset: str) -> None:
    section = {
        "python": str(bridge("verifiers-v0")),
        "taskset": taskset,
        "path": [str(Path(__file__).parent)],
        "config": {"words": 2},
    }
    async with stage(name="verifiers", verifiers=section) as played:
        assert played.environment.size == 2

        def spell(messages: Sequence[Message]) -> Message:
            assert messages[0] == Message(role="system", content="Be brief.")
            return Message(role="assistant", content=messages[-1].content.split()[1][::-1])

        (right,), _ = await played.play(0, spell)
        assert (right.error, right.reward, right.facts["metric_right"]) == (None, 1.0, 1.0)
        (wrong,), _ = await played.play(0, script(Message(role="assistant", content="no")))
        assert wrong.reward == 0.0
