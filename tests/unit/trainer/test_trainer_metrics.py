"""Metrics: absent is not zero, a maximum stays one, and a resume does not repeat steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trainer_helpers import group, rollout

from tollway.telemetry import METRICS
from tollway.trainer.batch import StepReport
from tollway.trainer.config import TrainerConfig
from tollway.trainer.metrics import MetricsFile, facts_of, refit_metrics, rollout_metrics, train_metrics
from tollway.trainer.planner import plan
from tollway.trainer.weights.refit import RefitReport
from tollway.trainer.weights.turns import Handover


def test_a_number_that_one_of_two_episodes_reports_is_its_mean() -> None:
    facts = facts_of([replace(rollout(1.0), facts={"tool_time": 4.0}), rollout(0.0)])
    assert facts == {"env/tool_time": 4.0, "env/tool_time/count": 1}


def test_failed_attempts_are_counted_and_left_out_of_the_reward() -> None:
    groups = [group(rollout(1.0), rollout(0.0), rollout(None, error="gone"))]
    row = rollout_metrics(groups, plan(groups, TrainerConfig()))
    assert (row["rollout/raw_reward"], row["rollout/rollouts"], row["rollout/failed_rollouts"]) == (0.5, 2, 1)


def test_no_scored_attempt_means_no_reward_rather_than_zero() -> None:
    groups = [group(rollout(None), rollout(None))]
    assert "rollout/raw_reward" not in rollout_metrics(groups, plan(groups, TrainerConfig()))
    assert train_metrics(plan(groups, TrainerConfig()), [], 1e-3) == {}


def test_the_largest_gradient_norm_of_the_updates_is_reported() -> None:
    planned = plan([group(rollout(1.0), rollout(0.0))], TrainerConfig())
    scores = tuple(np.full(3, -1.5, dtype=np.float32) for _ in planned.batch.rows)
    reports = [
        StepReport(loss=loss, grad_norm=norm, logprobs=scores, seconds=1.0, cpu_seconds=0.5)
        for loss, norm in ((0.25, 3.0), (0.5, 30.0), (0.75, 10.0))
    ]
    row = train_metrics(planned, reports, 1e-3)
    assert (row["train/grad_norm"], row["train/loss"], row["perf/actor_train_time"]) == (30.0, 0.25, 3.0)
    assert row["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.5)


def reported(**changes: object) -> StepReport:
    scores = (np.full(3, -1.5, dtype=np.float32),) * 2
    fields = {"loss": 0.0, "grad_norm": 1.0, "logprobs": scores, "seconds": 2.0, "cpu_seconds": 1.0}
    return StepReport(**(fields | changes))  # type: ignore[arg-type]


def test_speed_is_that_of_the_updates_together_and_a_share_only_of_a_known_peak() -> None:
    planned = plan([group(rollout(1.0), rollout(0.0))], TrainerConfig())
    tokens = planned.batch.tokens
    reports = [reported(flops=4e12, peak_bytes=10), reported(flops=4e12, peak_bytes=30)]
    row = train_metrics(planned, reports, 0.1, peak_tflops=8.0)
    assert row["perf/actor_train_tok_per_s"] == 2 * tokens / 4.0
    assert (row["perf/actor_train_tflops"], row["perf/actor_train_mfu"]) == (2.0, 0.25)
    assert row["perf/actor_train_peak_bytes"] == 30
    assert "perf/actor_train_mfu" not in train_metrics(planned, reports, 0.1)
    bare = train_metrics(planned, [reported(), reported(flops=1.0)], 0.1, peak_tflops=8.0)
    assert not {"perf/actor_train_tflops", "perf/actor_train_mfu", "perf/actor_train_peak_bytes"} & bare.keys()


def test_what_a_handover_did_not_measure_is_absent() -> None:
    pushed = RefitReport(
        version=1, make_s=0.5, seconds=2.0, paused_s=1.5, wire_bytes=90, weight_bytes=4 * 10**9, quarantined=()
    )
    row = refit_metrics(Handover(pushed))
    assert row == {
        "perf/update_weights_wire_bytes": 90.0,
        "perf/update_weights_make_time": 0.5,
        "perf/update_weights_time": 2.0,
        "perf/update_weights_pause_time": 1.5,
        "perf/update_weights_gb_per_s": 2.0,
    }
    full = refit_metrics(Handover(pushed, asleep_s=3.0, freed_bytes=7))
    assert full == row | {"perf/engines_asleep_time": 3.0, "perf/engines_freed_bytes": 7.0}
    assert full.keys() <= METRICS.keys()


def test_every_reported_name_is_declared() -> None:
    groups = [group(rollout(1.0), rollout(0.0))]
    planned = plan(groups, TrainerConfig())
    scores = tuple(np.full(3, -1.5, dtype=np.float32) for _ in planned.batch.rows)
    report = StepReport(loss=0.0, grad_norm=1.0, logprobs=scores, seconds=1.0, cpu_seconds=1.0)
    row = rollout_metrics(groups, planned) | train_metrics(planned, [report], 0.1)
    assert [name for name in row if name not in METRICS] == []


def test_a_resume_cuts_the_steps_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, keep_bytes=0)
    kept = first.write(1, {"train/loss": 0.5})
    first.write(2, {"train/loss": 0.25})
    MetricsFile(path, keep_bytes=kept).write(2, {"train/loss": 0.125})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 1, "train/loss": 0.5}, {"step": 2, "train/loss": 0.125}]
