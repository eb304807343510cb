"""Graders of the user's own: found at start what is wrong with them, never a reward when they fail."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tollway.envs.base import AgentRun, Grader, Task, Verdict, Work
from tollway.envs.config import EnvConfig
from tollway.envs.custom import Attempt
from tollway.envs.custom.config import CustomConfig
from tollway.envs.custom.grader import CustomGrader, load_grader
from tollway.envs.registry import open_environment
from tollway.errors import ConfigError, EpisodeFailed
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider

HERE = __name__
FREE = threading.Event()


def exact(attempt: Attempt) -> float:
    return float(attempt.answer == attempt.reference)


async def told(attempt: Attempt) -> Verdict:
    await asyncio.sleep(0)
    return Verdict(reward=0.25, reason="said so", facts={"letters": float(len(attempt.answer))})


def raises(attempt: Attempt) -> float:
    raise KeyError("my bug")


def exits(attempt: Attempt) -> float:
    raise SystemExit(3)


def not_a_number(attempt: Attempt) -> float:
    return float("nan")


def too_much(attempt: Attempt) -> float:
    return 7.0


def nothing(attempt: Attempt) -> None:
    return None


def two(attempt: Attempt, more: int) -> float:
    return 0.0


def never(attempt: Attempt) -> float:
    FREE.wait(30)
    return 1.0


def slow_on_real_work(attempt: Attempt) -> float:
    if attempt.answer:
        time.sleep(0.05)
    return 1.0


class Mine(Grader):
    async def grade(self, task: Task, work: Work) -> Verdict:
        return Verdict(reward=0.5, reason="mine")


class Hard(Mine):
    def __init__(self, wanted: int) -> None:
        self.wanted = wanted


NUMBER = 3


def _environment(name: str, **custom: object) -> EnvConfig:
    return EnvConfig.model_validate({"name": "maths", "grader": f"{HERE}:{name}", "custom": custom})


def _work(answer: str) -> Work:
    run = AgentRun(turns=1, submitted=False, finish="stopped", answer=answer)
    return Work(submission={}, provider=FakeProvider(SandboxConfig()), run=run)


async def test_a_function_replaces_the_grader_of_any_environment_and_is_given_the_reference() -> None:
    environment = open_environment(_environment("exact"))
    await environment.open()
    try:
        task = environment.task(0)
        reference = environment.inner.reference(task)  # type: ignore[attr-defined]  # the maths one
        assert (await environment.grader(task).grade(task, _work(reference))).reward == 1.0
        assert (await environment.grader(task).grade(task, _work("no"))).reward == 0.0
        assert environment.size == 50
        assert environment.needs_submission is False
    finally:
        await environment.aclose()


async def test_async_functions_and_grader_classes_serve_too() -> None:
    task = Task(task_id="t", messages=())
    verdict = await load_grader(f"{HERE}:told", CustomConfig()).grade(task, _work("abc"))
    assert (verdict.reward, verdict.facts) == (0.25, {"letters": 3.0})
    assert (await load_grader(f"{HERE}:Mine", CustomConfig()).grade(task, _work(""))).reward == 0.5


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (f"{HERE}:missing", "cannot load"),
        ("no_such_module:x", "cannot load"),
        ("nonsense", "want 'judge' or module:name"),
        (f"{HERE}:NUMBER", "is a int"),
        (f"{HERE}:two", "must take one Attempt"),
        (f"{HERE}:Hard", "without arguments"),
    ],
)
def test_what_cannot_be_called_is_refused_when_the_environment_is_made(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        open_environment(EnvConfig.model_validate({"name": "maths", "grader": name}))


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("raises", "KeyError"),
        ("exits", "SystemExit"),
        ("not_a_number", "nan"),
        ("too_much", "outside of 0.0 to 1.0"),
        ("nothing", "None"),
    ],
)
async def test_a_broken_function_fails_its_dry_run_and_its_episodes_and_is_never_a_reward(
    name: str, complaint: str
) -> None:
    environment = open_environment(_environment(name))
    try:
        with pytest.raises(ConfigError, match="dry run"):
            await environment.open()
    finally:
        await environment.aclose()
    grader = load_grader(f"{HERE}:{name}", CustomConfig())
    with pytest.raises(EpisodeFailed, match=complaint):
        await grader.grade(Task(task_id="t", messages=()), _work("x"))


async def test_the_range_is_the_users() -> None:
    grader = load_grader(f"{HERE}:too_much", CustomConfig(lowest=-10, highest=10))
    assert (await grader.grade(Task(task_id="t", messages=()), _work(""))).reward == 7.0


async def test_a_function_that_never_returns_ends_at_its_deadline_and_others_go_on() -> None:
    FREE.clear()
    task = Task(task_id="t", messages=())
    stuck = load_grader(f"{HERE}:never", CustomConfig(deadline_s=0.05, threads=1))
    with pytest.raises(EpisodeFailed, match=r"deadline_s = 0\.05"):
        await stuck.grade(task, _work("x"))
    with pytest.raises(EpisodeFailed, match="deadline_s"):  # its only thread is still held
        await stuck.grade(task, _work("x"))
    FREE.set()
    assert isinstance(stuck, CustomGrader)
    assert (await load_grader(f"{HERE}:exact", CustomConfig()).grade(task, _work("x"))).reward == 0.0


async def test_functions_that_are_not_async_do_not_hold_up_the_loop() -> None:
    grader = load_grader(f"{HERE}:slow_on_real_work", CustomConfig())
    task, beats = Task(task_id="t", messages=()), 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.001)

    beating = asyncio.create_task(beat())
    await asyncio.gather(*(grader.grade(task, _work("x")) for _ in range(4)))
    beating.cancel()
    assert beats > 3
