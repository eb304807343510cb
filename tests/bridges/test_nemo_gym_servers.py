"""Resources servers of the real nemo-gym package: a stateful one with tools, and one that compares answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from bridge_stage import stage
from episode_helpers import calls, script

from tollway.messages import Message

pytestmark = [pytest.mark.all, pytest.mark.slow(180)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "nemo_gym"
Bridge = Callable[[str], Path]


def _section(bridge: Bridge, server: str, data: Path) -> dict[str, object]:
    command = [str(bridge("nemo-gym")), str(EXAMPLE / "serve.py"), f"resources_servers.{server}", "--port", "{port}"]
    return {"command": command, "data": str(data)}


def _adds(messages: Sequence[Message]) -> Message:
    """Does what "add A then add B then get the count" asks for."""
    words = messages[0].content.split()
    done = sum(message.role == "tool" for message in messages)
    if done < 2:
        return calls(("increment_counter", {"count": int(words[1 + 3 * done])}))
    return calls(("get_counter_value", {})) if done == 2 else Message(role="assistant", content=messages[-1].content)


async def test_a_stateful_server_is_played_in_sessions_of_ones_own_and_verifies_them(bridge: Bridge) -> None:
    server = "example_session_state_mgmt.app:StatefulCounterResourcesServer"
    async with stage(name="nemo-gym", nemo_gym=_section(bridge, server, EXAMPLE / "counter.jsonl")) as played:
        for index in range(2):
            rollouts, sessions = await played.play(index, _adds, samples=3)
            assert [(rollout.error, rollout.reward) for rollout in rollouts] == [(None, 1.0)] * 3
            assert all(json.loads(seen[-1].content)["count"] in (6, 15) for seen in sessions.seen.values())
        (idle,), _ = await played.play(0, script(Message(role="assistant", content="6")))
        assert (idle.error, idle.reward) == (None, 0.0)


async def test_the_packages_own_example_lines_are_played_too(bridge: Bridge) -> None:
    python = bridge("nemo-gym")
    (package,) = python.parents[1].glob("lib/python3.*/site-packages/resources_servers/example_session_state_mgmt")
    server = "example_session_state_mgmt.app:StatefulCounterResourcesServer"
    section = _section(bridge, server, package / "data" / "example.jsonl")
    async with stage(name="nemo-gym", nemo_gym=section) as played:
        assert played.environment.size == 5
        (rollout,), _ = await played.play(3, _adds)
        assert (rollout.error, rollout.reward) == (None, 1.0)
