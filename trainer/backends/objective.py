"""The per-token losses in torch, shared by every backend, and the loop over micro-batches.

``losses`` holds the numpy reference of the same formulas. Depends on torch, ``microbatch`` and ``losses``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tollway.trainer.backends.microbatch import MicroBatch, split
from tollway.trainer.batch import Objective, Row
from tollway.trainer.losses import LOG_RATIO_LIMIT

__all__ = ["Score", "accumulate", "loss_sum", "score_rows"]

Score = Callable[[MicroBatch], torch.Tensor]
"""Forward pass: log-probability [rows, width - 1] of each target at the row's temperature."""


def loss_sum(logprobs: torch.Tensor, micro: MicroBatch, objective: Objective) -> torch.Tensor:
    """Sum of weight * loss of one micro-batch, fp64 scalar; ``logprobs`` [rows, width - 1].

    Untrained targets are replaced before the arithmetic, so that nothing there can reach the gradient.
    """
    device = logprobs.device
    mask = torch.from_numpy(micro.mask).to(device)
    new = torch.where(mask, logprobs.double(), 0.0)
    if objective.kind == "nll":
        losses = -new
    else:
        old = torch.from_numpy(micro.old_logprobs).to(device).double()
        advantages = torch.from_numpy(micro.advantages).to(device)
        ratio = (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        clipped = ratio.clamp(objective.ratio_low, objective.ratio_high)
        losses = torch.maximum(-ratio * advantages, -clipped * advantages)
        if objective.dual_clip is not None:
            bounded = torch.minimum(losses, -objective.dual_clip * advantages)
            losses = torch.where(advantages < 0, bounded, losses)
    return (losses * torch.from_numpy(micro.weights).to(device)).sum()


def accumulate(
    rows: Sequence[Row], objective: Objective, score: Score, max_tokens: int
) -> tuple[float, tuple[NDArray[np.float32], ...]]:
    """Backpropagate every micro-batch; gradients add up. Returns the loss and the log-probabilities."""
    total = 0.0
    out = _empty(rows)
    for micro in split(rows, max_tokens):
        logprobs = score(micro)
        loss = loss_sum(logprobs, micro, objective)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        total += loss.item()
        _scatter(out, micro, logprobs.detach())
    return total, tuple(out)


def score_rows(rows: Sequence[Row], score: Score, max_tokens: int) -> tuple[NDArray[np.float32], ...]:
    """Forward only: log-probabilities [tokens] per row, NaN at position 0."""
    out = _empty(rows)
    with torch.no_grad():
        for micro in split(rows, max_tokens):
            _scatter(out, micro, score(micro))
    return tuple(out)


def _empty(rows: Sequence[Row]) -> list[NDArray[np.float32]]:
    return [np.full(row.token_ids.size, np.nan, dtype=np.float32) for row in rows]


def _scatter(out: list[NDArray[np.float32]], micro: MicroBatch, logprobs: torch.Tensor) -> None:
    values = logprobs.float().cpu().numpy()
    for at, index in enumerate(micro.members):
        size = out[index].size
        out[index][1:] = values[at, : size - 1]
