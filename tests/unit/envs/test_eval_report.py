"""What an evaluation says: means over graded episodes, pass@k, errors by code, and what nobody knows as unknown."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from episode_helpers import SAMPLING
from rich.console import Console

from tollway.envs.base import AgentRun, Task, Verdict
from tollway.envs.config import EnvConfig
from tollway.envs.episode import Episode
from tollway.envs.evaluate import interval_of
from tollway.envs.micro_swe.environment import MicroSwe
from tollway.envs.report import Report, pass_at
from tollway.envs.selection import one_task, select_tasks
from tollway.envs.usage import usage_of
from tollway.episode_view import show_episode, show_report, task_table
from tollway.errors import ConfigError, EngineLost, EpisodeFailed, NotFound, TollwayError
from tollway.records import TokenSpan, Trajectory


def _row(
    spans: list[tuple[int, int]], prompts: tuple[int, ...] = (), cached: tuple[int | None, ...] = (), **more: object
) -> Trajectory:
    size = spans[-1][1]
    mask = np.zeros(size, np.uint8)
    for start, end in spans:
        mask[start:end] = 1
    return Trajectory(
        token_ids=np.arange(size, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask == 1, -0.5, np.nan).astype(np.float32),
        weight_version=np.where(mask == 1, 0, -1).astype(np.int32),
        session_id="s",
        leaf=0,
        branch_reason="root",
        turn_spans=tuple(TokenSpan(*span) for span in spans),
        finish_reasons=("stop",) * len(spans),
        sampling=SAMPLING,
        engine_ids=("e",) * len(spans),
        cached_tokens=cached or (None,) * len(spans),
        prompt_tokens=prompts,
        **more,  # type: ignore[arg-type]
    )


def _episode(
    task: str, reward: float | None, error: TollwayError | None = None, rows: tuple[Trajectory, ...] = ()
) -> Episode:
    return Episode(
        task=Task(task_id=task, messages=()),
        task_id=task,
        environment="e",
        harness="h",
        group_id="g",
        attempt=1,
        phase="record",
        seconds={"total": 2.0, "agent": 1.0},
        run=AgentRun(turns=3, submitted=True, finish="submitted", facts={} if reward else {"tool_s": 4.0}),
        verdict=None
        if reward is None
        else Verdict(reward=reward, reason="because", flags=("odd",) if not reward else ()),
        rows=rows,
        error=error,
    )


def _report(*episodes: Episode, samples: int = 1) -> Report:
    report = Report(environment="e", harness="h", tasks=len({each.task_id for each in episodes}), samples=samples)
    for episode in episodes:
        report.add(episode)
    return report


def test_errors_are_apart_by_code_and_part_of_no_mean() -> None:
    report = _report(
        _episode("a", 1.0),
        _episode("b", 0.0),
        _episode("c", None, EngineLost("gone")),
        _episode("d", None, EpisodeFailed("slow")),
        _episode("e", None, EpisodeFailed("slow")),
    )
    found = report.as_json()
    assert (found["episodes"], found["errors"], found["reward"]) == (2, 3, 0.5)
    assert found["errors_by_code"] == {"engine_lost": 1, "episode_failed": 2}
    assert found["facts"]["tool_s"] == 4.0, "one of the two reports it, and its mean is that of one"  # type: ignore[index]
    assert found["complete"] is True
    rows = {row["task"]: row for row in found["tasks"]}  # type: ignore[attr-defined]
    assert rows["a"]["reward"] == 1.0
    assert rows["b"]["flags"] == ["odd"]
    assert (rows["c"]["reward"], rows["c"]["errors"]) == (None, ["engine_lost: gone"])
    json.dumps(found)


def test_nothing_graded_is_nothing_known_and_not_zero() -> None:
    report = _report(_episode("a", None, EngineLost("gone")))
    found = report.as_json()
    assert [found[name] for name in ("reward", "interval", "turns", "cache_hit_rate", "sampled_tokens")] == [None] * 5
    assert _report().as_json()["errors"] == 0


def test_a_stopped_evaluation_tells_what_it_knows() -> None:
    report = Report(environment="e", harness="h", tasks=10, samples=2)
    report.add(_episode("a", 1.0))
    found = report.as_json()
    assert (found["planned"], found["complete"], found["episodes"]) == (20, False, 1)


@pytest.mark.parametrize(
    ("counts", "k", "wanted"),
    [
        ([(1, 1)], 1, 1.0),
        ([(4, 1)], 1, 0.25),
        ([(4, 1)], 4, 1.0),
        ([(4, 2)], 2, 1 - 1 / 6),
        ([(2, 0), (2, 2)], 2, 0.5),
        ([(1, 1)], 2, None),
        ([], 1, None),
    ],
)
def test_pass_at_k_is_the_unbiased_estimate(counts: list[tuple[int, int]], k: int, wanted: float | None) -> None:
    found = pass_at(counts, k)
    assert found == (wanted if wanted is None else pytest.approx(wanted))


def test_samples_of_one_task_are_not_independent_tasks() -> None:
    episodes = [_episode(task, reward) for task, reward in (("a", 1.0), ("b", 0.0)) for _ in range(50)]
    report = _report(*episodes, samples=50)
    low, high = report.evaluation().interval
    assert (low, high) == interval_of([1.0, 0.0])
    assert high - low > 0.5, "two tasks, not a hundred"
    assert report.pass_at() == dict.fromkeys((1, 2, 4, 8, 16, 32, 50), 0.5)


def test_tokens_of_a_call_that_several_rows_share_count_once() -> None:
    shared = _row([(2, 4), (6, 8)], prompts=(2, 6), cached=(0, 4))
    sibling = _row([(2, 4), (6, 9)], prompts=(2, 6), cached=(0, 5))
    usage = usage_of([shared, sibling])
    assert (usage.calls, usage.sampled_tokens, usage.prompt_tokens, usage.cached_tokens) == (3, 7, 14, 9)
    assert usage_of([]).facts() == {}


def test_a_cache_hit_that_one_engine_did_not_tell_is_unknown_and_not_0() -> None:
    known = _episode("a", 1.0, rows=(_row([(2, 4)], prompts=(2,), cached=(1,)),))
    unknown = _episode("b", 1.0, rows=(_row([(2, 4)], prompts=(2,)),))
    assert _report(known).cache_hit_rate == 0.5
    assert _report(known, unknown).cache_hit_rate is None
    assert _report(known, unknown).tokens("sampled_tokens") == 4
    assert "cached_tokens" not in usage_of(unknown.rows).facts()


class Finite(MicroSwe):
    size = 4


def test_tasks_are_named_by_index_range_id_and_pattern() -> None:
    endless, finite = MicroSwe(EnvConfig(seed=5)), Finite(EnvConfig())
    assert [task.task_id for task in select_tasks(endless, ["3, 0-1", "1"], count=9)] == [
        f"micro-swe/train/5/{index}" for index in (3, 0, 1)
    ]
    assert len(select_tasks(endless, [], count=3)) == 3
    (task,) = select_tasks(endless, ["micro-swe/heldout/7/2"], count=0)
    assert task == one_task(MicroSwe(EnvConfig(seed=7, split="heldout")), "2")
    assert len(select_tasks(finite, ["*/[12]"], count=0)) == 2
    for wrong in ("5-2", "nope", "micro-swe/train/0", "micro-swe/train/0/x", "0-99999999"):
        with pytest.raises(ConfigError):
            select_tasks(endless, [wrong], count=0)
    with pytest.raises(ConfigError, match="has no end"):
        select_tasks(endless, ["micro*"], count=0)
    with pytest.raises(ConfigError, match="none of the 4 tasks"):
        select_tasks(finite, ["swe*"], count=0)
    with pytest.raises(NotFound):
        endless.find("other/train/0/1")


@pytest.mark.parametrize("columns", [80, 60, 200])
def test_a_table_keeps_its_figures_however_long_names_and_verdicts_are(columns: int) -> None:
    names = [f"environment/{'long-name-' * at}{at}" for at in range(9)]
    report = _report(*(_episode(name, float(at % 2)) for at, name in enumerate(names)))
    for row in report.rows.values():
        row.reasons = ["tests/test_of_something.py::TestCase::test_that_is_told " * 5]
    console = Console(width=columns, file=io.StringIO())
    console.print(task_table(report, columns))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= columns
    assert "reward" in lines[0]
    assert [line.count("1.00") + line.count("0.00") for line in lines[1:]] == [1] * 9


def test_many_tasks_are_listed_as_far_as_somebody_reads_them() -> None:
    report = _report(*(_episode(f"e/{at}", float(at > 30)) for at in range(200)))
    console = Console(width=80, file=io.StringIO())
    console.print(task_table(report, 80))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "e/31 " not in text, "a solved one"
    assert [line.split()[0] for line in text.splitlines()[1:32]] == [f"e/{at}" for at in range(31)]


def test_of_very_many_tasks_the_unsolved_are_listed_and_the_rest_counted(capsys: pytest.CaptureFixture[str]) -> None:
    show_report(_report(*(_episode(f"t{number}", 1.0) for number in range(70))))
    said = capsys.readouterr().out
    assert "70 solved tasks are not listed; --json has them all" in said
    assert "verdict" not in said, "a table without a row has no head"
    show_report(_report(*(_episode(f"t{number}", float(number > 2)) for number in range(70))))
    said = capsys.readouterr().out
    assert "67 solved tasks are not listed" in said
    assert [f"t{number}" in said.split() for number in range(5)] == [True, True, True, False, False]


def test_an_episode_is_told_with_the_exit_status_of_its_agent_and_each_error_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = AgentRun(turns=1, submitted=False, finish="stopped", facts={"exit_code": 3.0})
    error = EpisodeFailed("the disk is gone")
    show_episode(replace(_episode("t", None, error), run=run, earlier=("episode_failed: the disk is gone",)))
    said = capsys.readouterr().out
    assert "stopped (exit status 3) after 1 model call" in said.splitlines()[2]
    assert said.count("the disk is gone") == 1
    assert "2.0 s (agent 1.0 s)" in said
