"""The examples of environments: their files are configurations, and those that need no other package are played."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from episode_helpers import ScriptedSessions, calls, request, script

from tollway.envs.harnesses.registry import open_harness
from tollway.envs.registry import open_environment
from tollway.envs.runner import EpisodeRunner
from tollway.messages import Message
from tollway.records import Rollout
from tollway.sandboxes.base import SandboxProvider
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider
from tollway.sandboxes.local import LocalProvider
from tollway.settings import Settings, load_settings

ROOT = Path(__file__).parents[3]
NAMES = ("custom_grader", "harbor", "judge", "maths", "nemo_gym", "openenv", "own_environment", "verifiers")


@pytest.fixture
def settings(name: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.chdir(ROOT)
    return load_settings(ROOT / "examples" / name / "tollway.toml", ["env.attempts=1"])


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_a_configuration_with_a_page(name: str, settings: Settings) -> None:
    page = (ROOT / "examples" / name / "README.md").read_text()
    assert f"examples/{name}/tollway.toml" in page
    anchors = [line for line in page.splitlines() if "docs/environments.md#" in line]
    headings = {
        line.lstrip("#").strip().lower().replace(" ", "-")
        for line in (ROOT / "docs" / "environments.md").read_text().splitlines()
        if line.startswith("#")
    }
    for line in anchors:
        assert line.split("environments.md#")[1].split(")")[0] in headings, line
    assert settings.env.name


def test_the_documented_environment_is_the_example() -> None:
    code = (ROOT / "examples" / "own_environment" / "countdown.py").read_text()
    assert f"```python\n{code}```\n" in (ROOT / "docs" / "environments.md").read_text()


async def _play(settings: Settings, provider: SandboxProvider, sessions: ScriptedSessions, index: int) -> Rollout:
    environment = open_environment(settings.env)
    await environment.open()
    try:
        runner = EpisodeRunner(
            settings.env,
            environment=environment,
            harness=open_harness(settings.env, environment),
            sessions=sessions,
            provider=provider,
        )
        (rollout,) = (await runner.run_group(request(index))).rollouts
        await runner.aclose()
    finally:
        await environment.aclose()
    return rollout


def _import(folder: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the example's module importable without its folder on the path."""
    spec = importlib.util.spec_from_file_location(module, ROOT / "examples" / folder / f"{module}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module, made)
    spec.loader.exec_module(made)


@pytest.mark.parametrize("name", ["own_environment"])
async def test_the_environment_of_ones_own_rewards_every_right_step(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    _import("own_environment", "countdown", monkeypatch)

    def count(messages: Sequence[Message]) -> Message:
        start = int(messages[0].content.split()[3])
        return calls(("say", {"number": start - sum(message.role == "tool" for message in messages)}))

    for index in range(3):
        sessions = ScriptedSessions(count)
        rollout = await _play(settings, FakeProvider(SandboxConfig()), sessions, index)
        assert (rollout.error, rollout.reward) == (None, 1.0)
    wrong = ScriptedSessions(script(calls(("say", {"number": 99}))))
    assert (await _play(settings, FakeProvider(SandboxConfig()), wrong, 0)).reward == 0.0


@pytest.mark.parametrize("name", ["custom_grader"])
async def test_the_grader_of_ones_own_takes_a_little_for_length(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    _import("custom_grader", "short_answer", monkeypatch)
    sessions = ScriptedSessions(script(Message(role="assistant", content="x" * 100)))
    rollout = await _play(settings, FakeProvider(SandboxConfig()), sessions, 0)
    assert (rollout.error, rollout.reward) == (None, -0.1)


@pytest.mark.parametrize("name", ["harbor"])
async def test_the_harbor_tasks_are_solved_with_the_agents_tools(settings: Settings, local: LocalProvider) -> None:
    solutions = {
        "Create": "echo 'Hello, world!' > hello.txt",
        "The table": 'echo \'{"north": 42, "south": 12, "west": 1}\' > answer.json',
    }

    def solve(messages: Sequence[Message]) -> Message:
        if messages[-1].role == "tool":
            return calls(("submit", {}))
        command = next(text for start, text in solutions.items() if messages[0].content.startswith(start))
        return calls(("bash", {"command": command}))

    for index in range(2):
        rollout = await _play(settings, local, ScriptedSessions(solve), index)
        assert (rollout.error, rollout.reward) == (None, 1.0)
    assert local.live == 0


@pytest.mark.parametrize(("name", "harness", "reward"), [("harbor", "gold", 1.0), ("harbor", "empty", 0.0)])
async def test_the_documented_environment_with_a_sandbox_tells_work_from_none(
    settings: Settings, harness: str, reward: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "environments.md").read_text(), re.DOTALL)
    (code,) = [each for each in snippets if "class Sorting(" in each]
    (tmp_path / "sorting_of_the_page.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    env = settings.env.model_copy(update={"name": "sorting_of_the_page:Sorting", "harness": harness})
    async with LocalProvider(SandboxConfig()) as provider:
        played = settings.model_copy(update={"env": env})
        rollout = await _play(played, provider, ScriptedSessions(script()), 0)
    assert (rollout.error, rollout.reward) == (None, reward)
