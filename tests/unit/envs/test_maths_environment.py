"""Maths episodes: the shipped questions, users' own, and rewards that are earned by the answer alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from episode_helpers import ScriptedSessions, request, script

from tollway.envs.base import AgentRun, Work
from tollway.envs.config import EnvConfig
from tollway.envs.harnesses.tool_loop import ToolLoop
from tollway.envs.maths.problems import read_problems, shipped
from tollway.envs.registry import open_environment
from tollway.envs.runner import EpisodeRunner
from tollway.errors import ConfigError, NotFound
from tollway.messages import Message
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider


def _config(**fields: object) -> EnvConfig:
    return EnvConfig.model_validate({"name": "maths", "attempts": 1, **fields})


async def test_every_shipped_answer_is_right_by_its_own_checker_and_no_other_answer_is() -> None:
    config = _config()
    environment = open_environment(config)
    await environment.open()
    try:
        answers = [problem.answer for problem in shipped("train")]
        for problem, other in zip(shipped("train"), answers[1:] + answers[:1], strict=True):
            task = environment.find(f"maths/{problem.id}")
            for text, reward in ((problem.answer, 1.0), (other, 0.0)):
                run = AgentRun(turns=1, submitted=False, finish="stopped", answer=f"So \\boxed{{{text}}}.")
                work = Work(submission={}, provider=FakeProvider(SandboxConfig()), run=run)
                verdict = await environment.grader(task).grade(task, work)
                assert verdict.reward == reward, (problem, text, verdict)
    finally:
        await environment.aclose()


def test_splits_share_no_question_and_the_order_is_the_seeds() -> None:
    train, heldout = ({p.question for p in shipped(split)} for split in ("train", "heldout"))
    assert len(train) == len(heldout) == 50
    assert not train & heldout
    orders = [[open_environment(_config(seed=seed)).task(at).task_id for at in range(50)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert set(orders[0]) == set(orders[2])


@pytest.mark.parametrize(("reply", "reward"), [("It is \\boxed{0.5}", 1.0), ("\\boxed{2}", 0.0), ("", 0.0)])
async def test_an_episode_without_a_sandbox_is_graded_by_its_last_reply(
    tmp_path: Path, reply: str, reward: float
) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text(json.dumps({"question": "half of 1?", "answer": "1/2"}) + "\n")
    config = _config(maths={"data": str(data)})
    environment = open_environment(config)
    provider = FakeProvider(SandboxConfig())
    sessions = ScriptedSessions(script(Message(role="assistant", content=reply)))
    runner = EpisodeRunner(
        config,
        environment=environment,
        harness=ToolLoop(config, environment),
        sessions=sessions,
        provider=provider,
    )
    await environment.open()
    try:
        (rollout,) = (await runner.run_group(request(0))).rollouts
    finally:
        await environment.aclose()
    assert rollout.error is None
    assert rollout.reward == reward
    assert sessions.seen["s0"][0].content == "half of 1?\n\nPut the final answer in \\boxed{}."
    assert provider.live == 0


def test_data_is_read_by_line_feeds_only_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "a\u2028b\x85c", "answer": "1"}\n{"question": "d", "answer": "2"}\n', "utf-8")
    assert [problem.question for problem in read_problems(path)] == ["a\u2028b\x85c", "d"]
    for text, complaint in {
        '{"question": "a"}': "line 1: 'answer' is None",
        '{"question": "a", "answer": "1"}\nnope': "line 2 is not JSON",
        "[1]": "line 1 is a list",
        "": "no questions",
        '{"question": "a", "answer": "1", "id": 1}\n{"question": "b", "answer": "1", "id": 1}': "the id '1'",
    }.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"env\.maths\.data") as caught:
            read_problems(path)
        assert complaint in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        read_problems(tmp_path / "missing")


def test_an_unknown_question_is_not_found() -> None:
    with pytest.raises(NotFound, match="train-00"):
        open_environment(_config()).find("maths/nope")
