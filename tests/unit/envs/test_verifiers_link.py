"""The verifiers worker as a process, over a stand-in for the package: protocol, sandbox calls, death.

The real package is tested in tests/bridges; the stand-in has the few names that the worker's v0 side uses.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tollway.envs.base import AgentRun, Verdict, Work
from tollway.envs.config import EnvConfig
from tollway.envs.verifiers.environment import Verifiers, VerifiersTools
from tollway.errors import ConfigError, EpisodeFailed, NotFound
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider

PACKAGE = """
class Rubric:
    async def score_rollout(self, state):
        said = state["completion"][-1]["content"]
        if said == "raise":
            raise KeyError("in the rubric")
        if said == "die":
            import os
            os._exit(7)
        print("a rubric that talks")
        state["reward"] = float("nan") if said == "nan" else float(said == state["answer"])
        state["metrics"] = {"length": len(said)}

class SingleTurnEnv:
    def __init__(self, rows):
        self.rows, self.rubric = rows, Rubric()
    def get_dataset(self):
        return self.rows

def load_environment(name, count=3, secret=None):
    import os
    if name != "words":
        raise ValueError("no environment " + name)
    if any("SECRET" in key for key in os.environ):
        raise RuntimeError("told too much")
    rows = [
        {"prompt": [{"role": "user", "content": "say w%d" % at}], "answer": "w%d" % at, "example_id": at}
        for at in range(count)
    ]
    return SingleTurnEnv(rows)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "verifiers"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "types.py").write_text("class State(dict):\n    pass\n")
    return tmp_path


Make = Callable[..., Awaitable[Verifiers]]


@pytest.fixture
async def opened(package: Path) -> AsyncIterator[Make]:
    made: list[Verifiers] = []

    async def make(split: str = "train", **fields: object) -> Verifiers:
        section = {"python": sys.executable, "taskset": "words", "path": [str(package)], **fields}
        environment = Verifiers(EnvConfig.model_validate({"split": split, "verifiers": section}))
        made.append(environment)
        await environment.open()
        return environment

    yield make
    for environment in made:
        await environment.aclose()


async def _score(environment: Verifiers, index: int, answer: str) -> Verdict:
    task = environment.find(f"verifiers/{index}")
    tools = environment.toolset(task, None)
    await tools.open()
    await tools.aclose()
    run = AgentRun(turns=1, submitted=False, finish="stopped", answer=answer)
    work = Work(submission={}, provider=FakeProvider(SandboxConfig()), run=run, tools=tools)
    return await environment.grader(task).grade(task, work)


async def test_tasks_are_listed_and_scored_by_the_rubric(opened: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "x")  # the worker must not get it
    environment = await opened()
    assert environment.size == 3
    task = environment.find("1")
    assert (task.messages[0].content, task.machine) == ("say w1", None)
    right = await _score(environment, 1, "w1")
    assert (right.reward, right.facts) == (1.0, {"metric_length": 2.0})
    assert (await _score(environment, 1, "w2")).reward == 0.0
    with pytest.raises(NotFound):
        environment.find("verifiers/9")


async def test_what_a_rubric_raises_and_a_reward_that_is_no_number_are_infrastructure(opened: Make) -> None:
    environment = await opened()
    with pytest.raises(EpisodeFailed, match="KeyError: 'in the rubric'"):
        await _score(environment, 0, "raise")
    with pytest.raises(EpisodeFailed, match="reward is nan"):
        await _score(environment, 0, "nan")
    assert (await _score(environment, 0, "w0")).reward == 1.0


async def test_a_worker_that_dies_fails_its_episode_and_is_started_again(opened: Make) -> None:
    environment = await opened()
    with pytest.raises(EpisodeFailed, match="worker ended"):
        await _score(environment, 0, "die")
    assert (await _score(environment, 2, "w2")).reward == 1.0


async def test_a_worker_that_does_not_answer_is_given_up(opened: Make) -> None:
    environment = await opened(score_timeout_s=0.2)
    link = environment._links[0]
    assert link._process is not None
    group = os.getpgid(link._process.pid)
    os.killpg(group, signal.SIGSTOP)
    try:
        with pytest.raises(EpisodeFailed, match=r"longer than 0\.2 s for begin"):
            await _score(environment, 0, "w0")
    finally:
        os.killpg(group, signal.SIGCONT)


async def test_configuration_reaches_the_taskset_and_differs_by_split(opened: Make) -> None:
    assert (await opened(config={"count": 2})).size == 2
    heldout = await opened(split="heldout", config={"count": 2}, heldout_config={"count": 5}, workers=2)
    assert heldout.size == 5
    assert [(await _score(heldout, index, f"w{index}")).reward for index in range(4)] == [1.0] * 4


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"taskset": "nope"}, "no environment nope"),
        ({"taskset": ""}, "set python"),
        ({"python": "/nowhere/python"}, "worker"),
        ({"config": {"count": 0}}, "no tasks"),
        ({"config": {"unknown": 1}}, "unknown"),
    ],
)
async def test_what_does_not_load_is_said_at_start(opened: Make, fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        await opened(**fields)


async def test_an_episode_that_is_never_scored_is_forgotten_by_the_worker(opened: Make) -> None:
    environment = await opened()
    task = environment.find("verifiers/0")
    tools = environment.toolset(task, None)
    assert isinstance(tools, VerifiersTools)
    await tools.open()
    episode = tools.episode
    del tools
    gc.collect()
    link = environment._links[0]
    assert link.dropped == [episode]
    await _score(environment, 0, "w0")
    assert episode not in link.dropped
    with pytest.raises(EpisodeFailed, match=episode):
        await link.request("score", {"episode": episode, "messages": [], "ok": True}, 10.0)
