"""The per-token losses in torch, and the part of a backend around them that all share: the loop over micro-batches.

``losses`` holds the numpy reference of the same formulas. Depends on torch, ``base``, ``microbatch`` and ``losses``.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tollway.trainer.backends.base import BackendSpec, TrainBackend
from tollway.trainer.backends.microbatch import MicroBatch, split
from tollway.trainer.backends.shape import ModelShape
from tollway.trainer.batch import Batch, Objective, Row, StepReport
from tollway.trainer.losses import LOG_RATIO_LIMIT

__all__ = ["MicroBatchedBackend", "loss_sum"]


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


class MicroBatchedBackend(TrainBackend):
    """What backends do alike: passes over micro-batches, and the clock around a step."""

    def __init__(self, spec: BackendSpec, shape: ModelShape) -> None:
        self._shape = shape
        self._max_tokens = spec.micro_batch_tokens

    def score(self, batch: Batch) -> tuple[NDArray[np.float32], ...]:
        """See ``TrainBackend``."""
        out = _empty(batch.rows)
        with torch.no_grad():
            for micro in split(batch.rows, self._max_tokens):
                _scatter(out, micro, self._logprobs(micro))
        return tuple(out)

    def step(self, batch: Batch, *, lr: float) -> StepReport:
        """See ``TrainBackend``."""
        started, cpu = time.perf_counter(), time.process_time()
        loss, logprobs = self._backward(batch)
        norm = self._update(lr)
        return StepReport(
            loss=loss,
            grad_norm=norm,
            logprobs=logprobs,
            seconds=time.perf_counter() - started,
            cpu_seconds=time.process_time() - cpu,
        )

    def _accumulate(self, batch: Batch) -> tuple[float, tuple[NDArray[np.float32], ...]]:
        """Backpropagate every micro-batch; gradients add up. Returns the loss and the log-probabilities."""
        total = 0.0
        out = _empty(batch.rows)
        for micro in split(batch.rows, self._max_tokens):
            logprobs = self._logprobs(micro)
            loss = loss_sum(logprobs, micro, batch.objective)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            total += loss.item()
            _scatter(out, micro, logprobs.detach())
        return total, tuple(out)

    @abstractmethod
    def _logprobs(self, micro: MicroBatch) -> torch.Tensor:
        """Forward pass: log-probability [rows, width - 1] of each target at the row's temperature."""

    @abstractmethod
    def _backward(self, batch: Batch) -> tuple[float, tuple[NDArray[np.float32], ...]]:
        """``_accumulate`` from zeroed gradients."""

    @abstractmethod
    def _update(self, lr: float) -> float:
        """Clip and take one optimiser step; returns the gradient's norm before clipping."""


def _empty(rows: Sequence[Row]) -> list[NDArray[np.float32]]:
    return [np.full(row.token_ids.size, np.nan, dtype=np.float32) for row in rows]


def _scatter(out: list[NDArray[np.float32]], micro: MicroBatch, logprobs: torch.Tensor) -> None:
    values = logprobs.float().cpu().numpy()
    for at, index in enumerate(micro.members):
        size = out[index].size
        out[index][1:] = values[at, : size - 1]
