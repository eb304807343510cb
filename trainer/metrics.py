"""The trainer's numbers: each name once with unit and meaning, how they are computed, and metrics.jsonl.

A number that nobody reported is absent, never 0. Largest values stay largest values when they are joined.
Depends on telemetry and the records of a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from tollway.records import Group, Rollout
from tollway.telemetry import declare
from tollway.trainer.batch import StepReport
from tollway.trainer.losses import mismatch
from tollway.trainer.planner import Plan, is_scored
from tollway.trainer.weights.turns import Handover

__all__ = ["MetricsFile", "facts_of", "refit_metrics", "rollout_metrics", "train_metrics"]

RAW_REWARD = declare("rollout/raw_reward", "reward", "Mean reward of scored attempts, groups without variance included")
ROLLOUTS = declare("rollout/rollouts", "attempts", "Scored attempts in the step's groups")
FAILED = declare("rollout/failed_rollouts", "attempts", "Attempts without a reward, excluded from statistics")
TURNS = declare("rollout/turns", "calls", "Mean model calls of a scored attempt")
SAMPLED = declare("rollout/sampled_tokens", "tokens", "Sampled tokens in the step's groups")
ZERO_VARIANCE = declare("rollout/zero_variance_groups", "groups", "Groups of the step that had nothing to compare")
FACT = declare("env/<fact>", "as named", "Mean of a number that the environment reports, over attempts that did")
FACT_COUNT = declare("env/<fact>/count", "attempts", "Attempts that reported the number")

QUEUE = declare("rollout/fully_async/queue_size", "groups", "Finished groups waiting when the step took its batch")
AVG_STALENESS = declare("rollout/fully_async/avg_staleness", "versions", "Mean age of taken and stale-dropped groups")
MAX_STALENESS = declare(
    "rollout/fully_async/max_staleness", "versions", "Largest age of taken and stale-dropped groups"
)
BUFFER_AVG = declare("rollout/fully_async/buffer_avg_staleness", "versions", "Mean age of groups still waiting")
BUFFER_MAX = declare("rollout/fully_async/buffer_max_staleness", "versions", "Largest age of groups still waiting")
ABORTED = declare("rollout/fully_async/aborted_groups_filtered", "groups", "Groups dropped for lack of scored attempts")
STALE = declare("rollout/fully_async/stale_groups_filtered", "groups", "Groups dropped as too old when taken")
DYNAMIC = declare("rollout/fully_async/dynamic_groups_filtered", "groups", "Groups without variance that were replaced")

LOSS = declare("train/loss", "1", "Summed weight * loss of the first update")
GRAD_NORM = declare("train/grad_norm", "1", "Largest gradient norm before clipping, over the step's updates")
LR = declare("train/lr", "1", "Learning rate of the last update")
TOKENS = declare("train/tokens", "tokens", "Trained tokens in the batch")
ABS_DIFF = declare(
    "train/train_rollout_logprob_abs_diff", "nats", "Mean |trainer - sampler| before the first update, any version"
)
KL = declare("train/train_rollout_kl", "nats", "k3 estimate of KL(rollout || train) before the first update")
ESS = declare("train/ess_ratio", "1", "Effective sample size of the importance weights, as a share of tokens")
CLIPFRAC = declare("train/pg_clipfrac", "1", "Share of tokens without gradient because of clipping, mean over updates")
GAP_MAX = declare("train/logprob_gap_max", "nats", "Largest |trainer - sampler| at equal weights")
GAP_MEAN = declare("train/logprob_gap_mean", "nats", "Mean |trainer - sampler| at equal weights")
GAP_TOKENS = declare("train/logprob_gap_tokens", "tokens", "Tokens that the gap was taken over")

STEP_TIME = declare("perf/step_time", "s", "Wall time of the step, refit included")
WAIT_TIME = declare("perf/train_wait_time", "s", "Time the trainer waited for groups")
TRAIN_TIME = declare("perf/actor_train_time", "s", "Time in optimiser updates")
TRAIN_CPU = declare("perf/actor_train_cpu_time", "s", "CPU time in optimiser updates")
TRAIN_RATE = declare("perf/actor_train_tok_per_s", "tokens/s", "Tokens of the batch per second of optimiser updates")
TRAIN_TFLOPS = declare("perf/actor_train_tflops", "TFLOP/s", "Operations of the model's formula in optimiser updates")
TRAIN_MFU = declare("perf/actor_train_mfu", "1", "The same as a share of trainer.peak_tflops")
TRAIN_PEAK = declare("perf/actor_train_peak_bytes", "bytes", "Most device memory that tensors held during an update")
MAKE_TIME = declare("perf/update_weights_make_time", "s", "Time to serialise the weights in the training process")
REFIT_TIME = declare("perf/update_weights_time", "s", "Time to push the serialised weights to all engines")
PAUSE_TIME = declare("perf/update_weights_pause_time", "s", "Longest time that an engine was paused by the push")
WIRE_BYTES = declare("perf/update_weights_wire_bytes", "bytes", "Payload bytes sent to each engine")
WEIGHTS_RATE = declare(
    "perf/update_weights_gb_per_s", "GB/s", "Bytes of the weights per second of the push, 1 GB = 10^9 bytes"
)
ASLEEP_TIME = declare("perf/engines_asleep_time", "s", "Time from the engines' sleep to their waking, when colocated")
FREED_BYTES = declare(
    "perf/engines_freed_bytes", "bytes", "Device memory that their sleep freed, by the driver's count"
)


class MetricsFile:
    """metrics.jsonl, one object per step; a resume cuts what came after the checkpoint."""

    def __init__(self, path: Path, *, keep_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        if path.exists() and path.stat().st_size > keep_bytes:
            with path.open("r+b") as file:
                file.truncate(keep_bytes)

    def write(self, step: int, metrics: Mapping[str, float]) -> int:
        """Append one step; returns the length of the file."""
        with self._path.open("ab") as file:
            file.write(json.dumps({"step": step, **metrics}).encode() + b"\n")
            return file.tell()


def facts_of(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Means of the environment's numbers over the attempts that reported each, with their counts."""
    found: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.facts.items():
            found.setdefault(name, []).append(value)
    out: dict[str, float] = {}
    for name, values in sorted(found.items()):
        out[f"env/{name}"] = float(np.mean(values))
        out[f"env/{name}/count"] = len(values)
    return out


def rollout_metrics(groups: Sequence[Group], plan: Plan) -> dict[str, float]:
    """Figures of the groups that a step took."""
    attempts = [rollout for group in groups for rollout in group.rollouts]
    scored = [rollout for rollout in attempts if is_scored(rollout)]
    out = {
        ROLLOUTS: float(len(scored)),
        FAILED: float(len(attempts) - len(scored)),
        SAMPLED: float(sum(row.trained_tokens for rollout in attempts for row in rollout.rows)),
        ZERO_VARIANCE: float(plan.verdicts.count("zero_variance")),
        TOKENS: float(plan.batch.trained_tokens),
    }
    if scored:
        out[RAW_REWARD] = float(np.mean([rollout.reward for rollout in scored if rollout.reward is not None]))
        out[TURNS] = float(np.mean([rollout.turns for rollout in scored]))
    return out | facts_of(scored)


def train_metrics(
    plan: Plan, reports: Sequence[StepReport], lr: float, *, peak_tflops: float | None = None
) -> dict[str, float]:
    """Figures of a step's updates, largest values joined as largest; empty when nothing was trained."""
    if not reports:
        return {}
    found = [mismatch(plan.batch.rows, report.logprobs, plan.batch.objective) for report in reports]
    out = {
        LOSS: reports[0].loss,
        GRAD_NORM: max(report.grad_norm for report in reports),
        LR: lr,
        TRAIN_TIME: sum(report.seconds for report in reports),
        TRAIN_CPU: sum(report.cpu_seconds for report in reports),
    }
    if (first := found[0]) is not None:
        out |= {ABS_DIFF: first.abs_diff, KL: first.kl, ESS: first.ess_ratio}
        out[CLIPFRAC] = float(np.mean([each.clipfrac for each in found if each is not None]))
    return out | _speed(plan, reports, out[TRAIN_TIME], peak_tflops)


def _speed(plan: Plan, reports: Sequence[StepReport], seconds: float, peak_tflops: float | None) -> dict[str, float]:
    out: dict[str, float] = {}
    flops = [report.flops for report in reports if report.flops is not None]
    peaks = [report.peak_bytes for report in reports if report.peak_bytes is not None]
    if peaks:
        out[TRAIN_PEAK] = float(max(peaks))
    if seconds <= 0:
        return out
    out[TRAIN_RATE] = plan.batch.tokens * len(reports) / seconds
    if len(flops) == len(reports):
        out[TRAIN_TFLOPS] = sum(flops) / seconds / 1e12
        if peak_tflops is not None:
            out[TRAIN_MFU] = out[TRAIN_TFLOPS] / peak_tflops
    return out


def refit_metrics(done: Handover) -> dict[str, float]:
    """Figures of the weights' way to the engines, and of a device that changed hands for it."""
    pushed = done.pushed
    out = {
        WIRE_BYTES: float(pushed.wire_bytes),
        MAKE_TIME: pushed.make_s,
        REFIT_TIME: pushed.seconds,
        PAUSE_TIME: pushed.paused_s,
    }
    if pushed.seconds > 0:
        out[WEIGHTS_RATE] = pushed.weight_bytes / 1e9 / pushed.seconds
    if done.asleep_s is not None:
        out[ASLEEP_TIME] = done.asleep_s
    if done.freed_bytes is not None:
        out[FREED_BYTES] = float(done.freed_bytes)
    return out
