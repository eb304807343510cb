"""Turn finished groups into one batch: advantages and per-token weights, once, in fp64, over the whole step.

Backends sum ``weight * loss`` and nothing else, so data parallelism, packing, micro-batches and the split
of a rollout into rows cannot change the loss. Pure; depends on ``advantages``, ``batch`` and the records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tollway.errors import InvalidRecord
from tollway.records import Group, Ids, Rollout, Trajectory
from tollway.trainer.advantages import has_variance, normalised
from tollway.trainer.batch import Batch, Objective, Row
from tollway.trainer.config import TrainerConfig

__all__ = ["Plan", "Verdict", "demonstration_batch", "is_scored", "judge", "objective_of", "plan"]

Verdict = Literal["train", "aborted", "zero_variance"]


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch and what became of each group."""

    batch: Batch
    verdicts: tuple[Verdict, ...]
    """Parallel to the groups that were planned."""
    rollouts: int
    """Attempts that train."""


def objective_of(config: TrainerConfig) -> Objective:
    """The policy objective with absolute ratio bounds."""
    return Objective(
        kind="policy",
        ratio_low=1.0 - config.clip_low,
        ratio_high=1.0 + config.clip_high,
        dual_clip=config.dual_clip,
    )


def is_scored(rollout: Rollout) -> bool:
    """Whether an attempt has a reward. A reward that is no finite number is a grader's failure, so none."""
    return rollout.reward is not None and math.isfinite(rollout.reward)


def survivors(group: Group, scoring: Literal["individual", "group"]) -> tuple[Rollout, ...]:
    """Attempts that count. Individual scoring drops failed ones; group scoring drops all with one."""
    scored = tuple(rollout for rollout in group.rollouts if is_scored(rollout))
    if scoring == "group" and len(scored) < len(group.rollouts):
        return ()
    return scored


def judge(group: Group, scoring: Literal["individual", "group"] = "individual") -> Verdict:
    """Whether a group trains, failed for lack of scored attempts, or has nothing to compare."""
    scored = survivors(group, scoring)
    if len(scored) < 2:
        return "aborted"
    return "train" if has_variance(_rewards(scored)) else "zero_variance"


def plan(groups: Sequence[Group], config: TrainerConfig) -> Plan:
    """Weigh every trained token of ``groups``.

    token_mean: w = 1 / B over the B trained tokens of the step. sample_mean: w = 1 / (N M_i) for N rollouts
    with M_i trained tokens over all rows of rollout i. Raises ``InvalidRecord`` when rows of one rollout
    carry different rewards.
    """
    verdicts = tuple(judge(group, config.group_scoring) for group in groups)
    rollouts: list[tuple[Rollout, float]] = []
    for group, verdict in zip(groups, verdicts, strict=True):
        if verdict == "train":
            members = survivors(group, config.group_scoring)
            rollouts += zip(members, normalised(_rewards(members)).tolist(), strict=True)
    rollouts = [(rollout, advantage) for rollout, advantage in rollouts if _trained_tokens(rollout)]
    step_tokens = sum(_trained_tokens(rollout) for rollout, _ in rollouts)
    rows: list[Row] = []
    for rollout, advantage in rollouts:
        if config.reduction == "token_mean":
            weight = 1.0 / step_tokens
        else:
            weight = 1.0 / (len(rollouts) * _trained_tokens(rollout))
        rows += [_row(trajectory, advantage, weight) for trajectory in _trainable(rollout)]
    batch = Batch(rows=tuple(rows), objective=objective_of(config))
    return Plan(batch=batch, verdicts=verdicts, rollouts=len(rollouts))


def demonstration_batch(sequences: Sequence[tuple[Ids, NDArray[np.float64]]]) -> Batch:
    """Supervised batch of (token ids [n], loss weights [n]): weighted token mean of the negative log-likelihood.

    The first token of a sequence is never learned: nothing predicts it.
    """
    shares = [np.where(np.arange(weights.size) > 0, weights, 0.0) for _, weights in sequences]
    total = sum(float(weights.sum()) for weights in shares)
    if not total:
        raise InvalidRecord("demonstrations without a token to learn")
    rows = tuple(
        Row(
            token_ids=np.asarray(ids, dtype=np.int32),
            loss_mask=(weights > 0).astype(np.uint8),
            weights=weights / total,
            advantages=np.zeros(weights.size),
            old_logprobs=np.full(weights.size, np.nan, dtype=np.float32),
        )
        for (ids, _), weights in zip(sequences, shares, strict=True)
    )
    return Batch(rows=rows, objective=Objective(kind="nll"))


def _rewards(rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
    for rollout in rollouts:
        for row in rollout.rows:
            if row.reward is not None and row.reward != rollout.reward:
                raise InvalidRecord(
                    f"session {rollout.session_id}: a row has reward {row.reward}, its rollout {rollout.reward}"
                )
    return np.array([rollout.reward for rollout in rollouts], dtype=np.float64)


def _trainable(rollout: Rollout) -> list[Trajectory]:
    return [row for row in rollout.rows if row.trainable and row.trained_tokens]


def _trained_tokens(rollout: Rollout) -> int:
    return sum(row.trained_tokens for row in _trainable(rollout))


def _row(trajectory: Trajectory, advantage: float, weight: float) -> Row:
    mask = trajectory.loss_mask
    return Row(
        token_ids=trajectory.token_ids,
        loss_mask=mask,
        weights=mask.astype(np.float64) * weight,
        advantages=mask.astype(np.float64) * advantage,
        old_logprobs=trajectory.logprobs,
        temperature=trajectory.sampling.temperature,
    )
