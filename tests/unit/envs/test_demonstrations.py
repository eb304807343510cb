"""Demonstrations look exactly like episodes, and are as noisy as asked."""

from __future__ import annotations

import json

import pytest
from episode_helpers import ScriptedSessions, request, runner

from tollway.envs.config import DemonstrationConfig
from tollway.envs.micro_swe.demonstrations import GIVES_UP, Demonstration, demonstrations
from tollway.envs.micro_swe.environment import TOOLS
from tollway.envs.micro_swe.projects import project_at
from tollway.errors import SandboxError
from tollway.messages import Message
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider
from tollway.sandboxes.local import LocalProvider

ORDER = 1 << 32


def _index(demo: Demonstration) -> int:
    return int(demo.task_id.rpartition("/")[2])


async def test_replaying_a_demonstration_as_an_episode_shows_the_same_bytes(local: LocalProvider) -> None:
    made = await demonstrations(local, 40, seed=5, recipe=DemonstrationConfig(distinct_tasks=8, p_run_again=0.6))
    assert local.live == 0
    chosen = {(_index(d), d.right, len(d.messages)): d for d in made}
    assert len(chosen) >= 8
    assert {d.right for d in chosen.values()} == {True, False}
    for demo in chosen.values():
        replies = [message for message in demo.messages if message.role == "assistant"]

        def policy(messages: object, replies: list[Message] = replies) -> Message:
            return replies[sum(m.role == "assistant" for m in messages)]  # type: ignore[attr-defined]

        sessions = ScriptedSessions(policy)
        episodes = runner(sessions, local, seed=5 + ORDER)
        (rollout,) = (await episodes.run_group(request(_index(demo)))).rollouts
        assert sessions.seen["s0"] == list(demo.messages[:-1])
        assert rollout.reward == float(demo.right)


async def test_probabilities_and_lengths_are_as_asked(local: LocalProvider) -> None:
    made = await demonstrations(
        local, 2000, seed=1, recipe=DemonstrationConfig(distinct_tasks=8, p_run=0.7, p_right=0.3, p_run_again=0.3)
    )
    assert len(made) == 2000
    first = [d.messages[1].tool_calls[0].name for d in made]
    assert 0.66 < first.count("run") / 2000 < 0.74
    assert 0.34 < sum(d.right for d in made) / 2000 < 0.44  # p_right + (1 - p_right) / 8
    assert all(d.messages[0].role == "user" and d.tools == TOOLS for d in made)
    assert all(d.messages[-1].tool_calls[0].name == "submit" for d in made)
    assert max(sum(m.role == "assistant" for m in d.messages) for d in made) == 4
    for demo in made[:200]:
        project = project_at(1 + ORDER, "train", _index(demo))
        edit = next(c for m in demo.messages for c in m.tool_calls if c.name == "edit")
        assert (json.loads(edit.arguments)["rule"] == project.rule) == demo.right


async def test_some_give_up_in_plain_text_when_asked(local: LocalProvider) -> None:
    recipe = DemonstrationConfig(distinct_tasks=4, p_quit=0.2)
    made = await demonstrations(local, 1000, seed=1, recipe=recipe)
    quits = [d for d in made if not d.messages[-1].tool_calls]
    assert 160 < len(quits) < 240
    assert all(d.messages[-1].content == GIVES_UP for d in quits)


async def test_the_same_seed_gives_the_same_demonstrations_and_training_tasks_are_others(local: LocalProvider) -> None:
    assert await demonstrations(
        local, 20, seed=2, recipe=DemonstrationConfig(distinct_tasks=4)
    ) == await demonstrations(local, 20, seed=2, recipe=DemonstrationConfig(distinct_tasks=4))
    assert [project_at(2, "train", at) for at in range(4)] != [project_at(2 + ORDER, "train", at) for at in range(4)]


async def test_an_episode_of_this_environment_is_short(local: LocalProvider) -> None:
    made = await demonstrations(local, 200, seed=3, recipe=DemonstrationConfig(distinct_tasks=32))
    sizes = [
        1
        + sum(len(m.content.encode()) + 2 for m in d.messages)
        + sum(
            len(c.name) + 1 + sum(len(v) + 1 for v in json.loads(c.arguments).values())
            for m in d.messages
            for c in m.tool_calls
        )
        for d in made
    ]
    assert sum(sizes) / len(sizes) < 110
    assert max(sizes) < 160


async def test_a_broken_sandbox_fails_loudly_instead_of_teaching_nonsense() -> None:
    async with FakeProvider(SandboxConfig()) as provider:
        with pytest.raises(SandboxError, match="usable"):
            await demonstrations(provider, 3)
        assert provider.live == 0
