"""The per-token losses in torch, and the part of a backend around them that all share: the loop over micro-batches.

``losses`` holds the numpy reference of the same formulas. Depends on torch, ``base``, ``microbatch`` and ``losses``.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tollway.errors import TrainerLost
from tollway.trainer.backends.base import BackendSpec, TrainBackend
from tollway.trainer.backends.microbatch import MicroBatch, split
from tollway.trainer.backends.offload import HostMemory
from tollway.trainer.backends.shape import ModelShape
from tollway.trainer.batch import Batch, Objective, Row, StepReport
from tollway.trainer.flops import train_flops
from tollway.trainer.losses import LOG_RATIO_LIMIT

__all__ = ["MicroBatchedBackend", "loss_sum", "training_device", "upload"]


def training_device() -> torch.device:
    """The current CUDA device, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor of the array on the device, without waiting for what the device still does."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    # From ordinary memory the copy waits for every kernel before it; the host could then never run ahead.
    return tensor.pin_memory().to(device, non_blocking=True)


def loss_sum(logprobs: torch.Tensor, micro: MicroBatch, objective: Objective) -> torch.Tensor:
    """Sum of weight * loss of one micro-batch, fp64 scalar; ``logprobs`` [rows, width - 1].

    Untrained targets are replaced before the arithmetic, so that nothing there can reach the gradient.
    """
    device = logprobs.device
    mask = upload(micro.mask, device)
    new = torch.where(mask, logprobs.double(), 0.0)
    if objective.kind == "nll":
        losses = -new
    else:
        old = upload(micro.old_logprobs, device).double()
        advantages = upload(micro.advantages, device)
        ratio = (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        clipped = ratio.clamp(objective.ratio_low, objective.ratio_high)
        losses = torch.maximum(-ratio * advantages, -clipped * advantages)
        if objective.dual_clip is not None:
            bounded = torch.minimum(losses, -objective.dual_clip * advantages)
            losses = torch.where(advantages < 0, bounded, losses)
    return (losses * upload(micro.weights, device)).sum()


class MicroBatchedBackend(TrainBackend):
    """What backends do alike: passes over micro-batches, what a step took, and memory given back."""

    def __init__(self, spec: BackendSpec, shape: ModelShape, *, multiple: int = 1) -> None:
        self._shape = shape
        self._max_tokens, self._multiple = spec.micro_batch_tokens, multiple
        self._device = training_device()
        self._memory = HostMemory(self._device)

    def score(self, batch: Batch) -> tuple[NDArray[np.float32], ...]:
        """See ``TrainBackend``."""
        self._memory.require_onloaded()
        with torch.no_grad():
            passes = [(micro, self._logprobs(micro)) for micro in self._split(batch)]
        return _scattered(batch.rows, passes)

    def step(self, batch: Batch, *, lr: float) -> StepReport:
        """See ``TrainBackend``."""
        self._memory.require_onloaded()
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        started, cpu = time.perf_counter(), time.process_time()
        loss, logprobs = self._backward(batch)
        norm = self._update(lr)
        if on_gpu:
            torch.cuda.synchronize(self._device)
        if not math.isfinite(norm):
            # The update is done and its weights are no numbers: they must reach neither an engine nor a checkpoint.
            raise TrainerLost(
                f"the gradient's norm is {norm} at a loss of {loss}, want a finite one: the same command goes on from "
                'the last checkpoint; if it happens again, lower trainer.optimizer.lr or set trainer.dtype = "float32"'
            )
        return StepReport(
            loss=loss,
            grad_norm=norm,
            logprobs=logprobs,
            seconds=time.perf_counter() - started,
            cpu_seconds=time.process_time() - cpu,
            flops=train_flops(self._shape, [row.token_ids.size for row in batch.rows]),
            peak_bytes=torch.cuda.max_memory_allocated(self._device) if on_gpu else None,
        )

    def offload(self) -> None:
        """See ``TrainBackend``. Gradients are lost: every step starts from zeroed ones."""
        if not self._memory.away:
            self._memory.offload(*self._resident())

    def onload(self) -> None:
        """See ``TrainBackend``."""
        self._memory.onload()

    def _accumulate(self, batch: Batch) -> tuple[float, tuple[NDArray[np.float32], ...]]:
        """Backpropagate every micro-batch; gradients add up. Returns the loss and the log-probabilities."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        passes = []
        for micro in self._split(batch):
            logprobs = self._logprobs(micro)
            loss = loss_sum(logprobs, micro, batch.objective)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            total += loss.detach()
            passes.append((micro, logprobs.detach()))
        return total.item(), _scattered(batch.rows, passes)

    def _split(self, batch: Batch) -> list[MicroBatch]:
        return split(batch.rows, self._max_tokens, multiple=self._multiple)

    @abstractmethod
    def _resident(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        """Every tensor that outlives a step: those whose bytes matter, and those that the next step overwrites."""

    @abstractmethod
    def _logprobs(self, micro: MicroBatch) -> torch.Tensor:
        """Forward pass: log-probability [rows, width - 1] of each target at the row's temperature."""

    @abstractmethod
    def _backward(self, batch: Batch) -> tuple[float, tuple[NDArray[np.float32], ...]]:
        """``_accumulate`` from zeroed gradients."""

    @abstractmethod
    def _update(self, lr: float) -> float:
        """Clip and take one optimiser step; returns the gradient's norm before clipping."""


def _scattered(
    rows: Sequence[Row], passes: Sequence[tuple[MicroBatch, torch.Tensor]]
) -> tuple[NDArray[np.float32], ...]:
    """Log-probabilities by row of the batch. Called after the last pass: reading waits for the device."""
    out = [np.full(row.token_ids.size, np.nan, dtype=np.float32) for row in rows]
    for micro, logprobs in passes:
        values = logprobs.float().cpu().numpy()
        for at, index in enumerate(micro.members):
            size = out[index].size
            out[index][1:] = values[at, : size - 1]
    return tuple(out)
