"""Per-token losses and mismatch figures in fp64 numpy: the reference that backends are checked against.

Also what the controller computes metrics with, from the log-probabilities that a backend returns. Masked
positions never take part, whatever their values. Depends on numpy and ``batch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tollway.trainer.batch import Objective, Row

__all__ = ["LOG_RATIO_LIMIT", "Mismatch", "mismatch", "policy_loss", "total_loss"]

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +-this, so that exp() of a hopeless token stays finite."""


def policy_loss(new: F64, old: F64, advantages: F64, objective: Objective) -> F64:
    """Clipped policy loss of each token [n]; all arguments [n], trained tokens only.

    l = max(-rho A, -clip(rho) A) with rho = exp(new - old); with a dual clip c, l = min(l, -c A) where A < 0.
    """
    ratio = np.exp(np.clip(new - old, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    clipped = np.clip(ratio, objective.ratio_low, objective.ratio_high)
    loss: F64 = np.maximum(-ratio * advantages, -clipped * advantages)
    if objective.dual_clip is not None:
        loss = np.where(advantages < 0, np.minimum(loss, -objective.dual_clip * advantages), loss)
    return loss


def total_loss(rows: Sequence[Row], logprobs: Sequence[F32], objective: Objective) -> float:
    """Sum of weight * loss over ``rows``; ``logprobs`` [tokens] per row, parallel to ``rows``."""
    total = 0.0
    for row, scored in zip(rows, logprobs, strict=True):
        on = row.loss_mask == 1
        new = scored[on].astype(np.float64)
        if objective.kind == "nll":
            losses = -new
        else:
            losses = policy_loss(new, row.old_logprobs[on].astype(np.float64), row.advantages[on], objective)
        total += float((row.weights[on] * losses).sum())
    return total


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far the scoring weights are from those that sampled, over trained tokens."""

    tokens: int
    abs_diff: float
    """Mean |new - old| in nats."""
    abs_diff_max: float
    kl: float
    """k3 estimate of KL(rollout || train): mean of exp(d) - 1 - d with d = new - old."""
    ess_ratio: float
    """Effective sample size of the importance weights over the number of tokens, in (0, 1]."""
    clipfrac: float
    """Share of tokens whose loss comes from a clipped ratio, so that they have no gradient."""


def mismatch(rows: Sequence[Row], logprobs: Sequence[F32], objective: Objective) -> Mismatch | None:
    """Compare scores with recorded log-probabilities; ``None`` without a trained token."""
    masks = [row.loss_mask == 1 for row in rows]
    if not sum(int(mask.sum()) for mask in masks):
        return None
    new = np.concatenate([s[m] for s, m in zip(logprobs, masks, strict=True)]).astype(np.float64)
    old = np.concatenate([r.old_logprobs[m] for r, m in zip(rows, masks, strict=True)]).astype(np.float64)
    advantages = np.concatenate([r.advantages[m] for r, m in zip(rows, masks, strict=True)])
    delta = np.clip(new - old, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = np.exp(delta)
    out_high = (ratio > objective.ratio_high) & (advantages > 0)
    out_low = (ratio < objective.ratio_low) & (advantages < 0)
    flat = out_high | out_low
    if objective.dual_clip is not None:
        flat |= (advantages < 0) & (ratio > objective.dual_clip)
    gap = np.abs(new - old)
    return Mismatch(
        tokens=new.size,
        abs_diff=float(gap.mean()),
        abs_diff_max=float(gap.max()),
        kl=float((ratio - 1.0 - delta).mean()),
        ess_ratio=float(ratio.sum() ** 2 / (new.size * (ratio**2).sum())),
        clipfrac=float(flat.mean()),
    )
