"""One command trains through the real path, survives what kills it, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from demo_runs import processes_of, wait_until_gone

from tollway.trainer.spool import decode_group

SUMMARY_KEYS = {
    "reward_before",
    "reward_after",
    "reward_blank_tools",
    "steps",
    "episodes",
    "logprob_gap_max",
    "logprob_gap_tokens",
    "train_rollout_logprob_abs_diff",
    "cache",
    "staleness_max",
    "tokens_generated",
    "wall_s",
    "phases",
}
CACHE_KEYS = {"hit_rate", "ceiling", "efficiency", "efficiency_without_refit", "unknown_tokens"}


def leftovers(run_dir: Path) -> list[str]:
    """Everything that a run's sandboxes left on the host."""
    return [path.name for path in (run_dir.parent / "sandboxes").iterdir()]


@pytest.mark.timeout(300)
def test_a_run_on_megatron_trains_exactly_and_the_same_command_knows_that_it_is_done(tiny) -> None:  # type: ignore[no-untyped-def]
    # Half of the demo's warm start: a policy that never succeeds gives its groups nothing to compare.
    warm = ("trainer.warm_start.steps=220", "env.demonstrations.distinct_tasks=32")
    run = tiny("train", *warm, backend="megatron")
    assert run.wait(240) == 0, run.output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["cache"].keys() >= CACHE_KEYS
    assert summary["steps"] == 3
    assert summary["episodes"] == 24
    assert summary["logprob_gap_max"] < 1e-4
    assert summary["logprob_gap_tokens"] >= 100
    assert summary["cache"]["unknown_tokens"] == 0
    assert 1 <= summary["staleness_max"] <= 4
    assert all(0 <= summary[f"reward_{when}"] <= 1 for when in ("before", "after", "blank_tools"))

    groups = [decode_group(path) for path in sorted((run.run_dir / "trajectories").rglob("*.safetensors"))]
    rows = [row for group in groups for rollout in group.rollouts for row in rollout.rows]
    assert rows
    assert summary["tokens_generated"] > sum(row.trained_tokens for row in rows) > 0
    assert {int(v) for row in rows for v in row.weight_version[row.loss_mask == 1]} <= {0, 1, 2, 3}
    assert all(np.array_equal(np.isnan(row.logprobs), row.loss_mask == 0) for row in rows)
    assert wait_until_gone(run.run_dir) == []

    again = tiny("train", backend="megatron")
    assert again.wait(60) == 0, again.output
    assert "finished before" in again.output
    assert json.loads((run.run_dir / "summary.json").read_text()) == summary

    evaluation = tiny("eval", backend="megatron", flags=("--blank-tools", "--json", "--episodes", "4"))
    assert evaluation.wait(120) == 0, evaluation.output
    assert json.loads(evaluation.output.splitlines()[-1])["episodes"] == 4


@pytest.mark.timeout(300)
def test_a_killed_engine_ends_the_run_with_its_last_words_and_the_next_start_goes_on(tiny) -> None:  # type: ignore[no-untyped-def]
    run = tiny("train", "trainer.steps=500", "engine.restarts=0")
    run.wait_for_step(2)
    os.kill(run.pid_of("tollway engine"), signal.SIGKILL)
    assert run.wait(60) == 1, run.output
    assert "engine ended with status -9" in run.output
    assert "no restart is left" in run.output
    assert "component_lost" in run.output
    assert "the run ends: engine ended with status -9" in (run.run_dir / "logs" / "train.log").read_text()
    assert wait_until_gone(run.run_dir) == []
    assert leftovers(run.run_dir) == []

    again = tiny("train", "trainer.steps=4", "engine.restarts=0")
    assert again.wait(120) == 0, again.output
    assert "resumed at step" in again.output
    assert json.loads((run.run_dir / "summary.json").read_text())["steps"] >= 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.all)])
def test_a_dead_or_hung_engine_is_started_again_gets_the_newest_weights_and_the_run_ends_well(  # type: ignore[no-untyped-def]
    tiny, number: signal.Signals
) -> None:
    quick = ("router.probe_interval_s=0.5", "router.probe_timeout_s=3.0", "router.busy_window_s=3.0")
    run = tiny("train", "trainer.steps=6", *quick)
    run.wait_for_step(2)
    os.kill(run.pid_of("tollway engine"), number)
    assert run.wait(200) == 0, run.output
    said = (run.run_dir / "logs" / "train.log").read_text()
    assert "engine serves again" in said
    assert ("runs and is lost to its router" in said) is (number == signal.SIGSTOP)
    assert (run.run_dir / "logs" / "server.log").read_text().count("is synced: it ") == 1, "it waited for its weights"
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["logprob_gap_max"] < 1e-4, "nothing was sampled from the weights of the first day"
    assert wait_until_gone(run.run_dir) == []


@pytest.mark.timeout(300)
def test_a_run_without_a_ready_engine_ends_in_time_and_says_why(tiny, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """The engine's process lives on, so nobody but the router knows."""
    monkeypatch.setenv("TOLLWAY_ADMIN_KEY", "k" * 20)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = tiny("train", "trainer.steps=500", "router.rollout_down_timeout_s=4.0", f"server.port={port}")
    run.wait_for_step(1)
    engines = [sys.executable, "-m", "tollway", "engines", "--url", f"http://127.0.0.1:{port}"]
    listed = json.loads(subprocess.run([*engines, "--json"], stdout=subprocess.PIPE, check=True, timeout=60).stdout)
    (engine,) = listed["engines"]
    subprocess.run([*engines, "drain", engine["id"]], check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert run.wait(90) == 1, run.output
    assert "[rollout_down] no engine was ready for" in run.output
    assert "is draining: takes no new sessions" in run.output
    assert wait_until_gone(run.run_dir) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.all)])
def test_stopping_a_run_leaves_no_process_and_no_sandbox(tiny, number: signal.Signals) -> None:  # type: ignore[no-untyped-def]
    run = tiny("train", "trainer.steps=500")
    run.wait_for_step(1)
    run.process.send_signal(number)
    assert run.wait(60) == 130, run.output
    assert "stopped" in run.output
    assert wait_until_gone(run.run_dir) == []
    assert leftovers(run.run_dir) == []
    with closing(sqlite3.connect(run.run_dir / "journal.sqlite")) as journal:
        assert journal.execute("SELECT count(*) FROM sessions WHERE state = 'open'").fetchone() == (0,)


@pytest.mark.timeout(300)
def test_killing_the_run_itself_leaves_no_process(tiny) -> None:  # type: ignore[no-untyped-def]
    run = tiny("train", "trainer.steps=500")
    run.wait_for_step(1)
    assert len(processes_of(run.run_dir)) >= 4
    run.process.kill()
    run.process.wait()
    assert wait_until_gone(run.run_dir) == []


@pytest.mark.timeout(300)
def test_a_second_run_in_the_same_directory_is_refused(tiny) -> None:  # type: ignore[no-untyped-def]
    run = tiny("train", "trainer.steps=500")
    run.wait_for("warm start")
    second = tiny("train")
    assert second.wait(60) == 2
    assert "another process is running in" in second.output
    assert run.process.poll() is None
