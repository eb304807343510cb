"""Real OpenEnv servers, made with the package: the echo one with MCP tools, one with typed actions and tasks, and
the one that the package's own `openenv init` writes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from bridge_stage import stage
from episode_helpers import calls, script

from tollway.errors import CapacityExceeded
from tollway.messages import Message

pytestmark = [pytest.mark.all, pytest.mark.slow(120)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "openenv" / "server.py"
Bridge = Callable[[str], Path]


def _serve(bridge: Bridge, name: str, *more: str) -> list[str]:
    return [str(bridge("openenv")), str(EXAMPLE), name, "--port", "{port}", *more]


async def test_echo_has_its_tools_offered_and_called_over_mcp(bridge: Bridge) -> None:
    async with stage(name="openenv", openenv={"command": _serve(bridge, "echo")}) as played:
        policy = script(
            calls(("echo_message", {"message": "hi"}), ("echo_with_length", {"message": "four"})),
            calls(("nope", {}), ("echo_message", {})),
            Message(role="assistant", content="done"),
        )
        (rollout,), sessions = await played.play(0, policy)
        assert rollout.error is None
        assert rollout.reward == 0.0
        shown = [message.content for message in sessions.seen["s0"] if message.role == "tool"]
        assert shown[0] == "hi"
        assert json.loads(shown[1]) == {"message": "four", "length": 4}
        assert shown[2].startswith("error: there is no tool")
        assert "Missing required argument" in shown[3]
        assert rollout.facts["steps"] == 3.0
        assert sessions.seen["s0"][1].content == "Echo environment ready!"


def _bisect(messages: Sequence[Message]) -> Message:
    """Plays by what the tool says."""
    low, high, guess = 0, 100, 50
    for message in messages:
        if message.role == "tool":
            low, high = (guess + 1, high) if message.content == "higher" else (low, guess - 1)
            guess = (low + high) // 2
    return calls(("step", {"number": guess}))


async def test_a_game_with_typed_actions_is_won_by_playing_and_lost_by_not(bridge: Bridge) -> None:
    async with stage(name="openenv", openenv={"command": _serve(bridge, "guess")}) as played:
        assert played.environment.size == 4
        won = []
        for index in range(4):
            (rollout,), sessions = await played.play(index, _bisect)
            won.append(rollout.reward)
            assert rollout.error is None
            assert sessions.seen["s0"][0].content == "Find my number."
        assert set(won) <= {0.0, 1.0}
        assert 1.0 in won
        (lost,), _ = await played.play(0, script(calls(("step", {"number": 101})), calls(("step", {"number": 0}))))
        assert (lost.reward, lost.facts["bad_calls"]) == (0.0, 1.0)


async def test_more_episodes_than_places_wait_for_one_and_share_none(bridge: Bridge) -> None:
    async with stage(name="openenv", openenv={"command": _serve(bridge, "guess", "--most", "2")}) as played:
        rollouts, _ = await played.play(0, _bisect, samples=6)
        assert [rollout.error for rollout in rollouts] == [None] * 6
        assert len({rollout.reward for rollout in rollouts}) == 1
    impatient = {"command": _serve(bridge, "guess", "--most", "1"), "capacity_timeout_s": 0.5}
    async with stage(name="openenv", openenv=impatient) as played:
        held = played.environment.toolset(played.environment.task(0), None)
        await held.open()
        waiting = played.environment.toolset(played.environment.task(1), None)
        with pytest.raises(CapacityExceeded):
            await waiting.open()
        await held.aclose()


async def test_the_environment_that_the_package_writes_itself_runs_as_it_is(bridge: Bridge, tmp_path: Path) -> None:
    python = bridge("openenv")
    subprocess.run(
        [python.parent / "openenv", "init", "parrot", "--output-dir", str(tmp_path)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    command = [str(python), "-m", "uvicorn", "parrot.server.app:app", "--port", "{port}", "--log-level", "warning"]
    fields = {"command": command, "command_env": {"PYTHONPATH": str(tmp_path)}, "tasks": 3}
    async with stage(name="openenv", openenv=fields) as played:
        policy = script(calls(("step", {"message": "hello"})), Message(role="assistant", content="done"))
        (rollout,), sessions = await played.play(0, policy)
        assert rollout.error is None
        assert rollout.reward == pytest.approx(0.5)  # a tenth for every letter
        (shown,) = [message.content for message in sessions.seen["s0"] if message.role == "tool"]
        assert json.loads(shown)["echoed_message"] == "hello"
