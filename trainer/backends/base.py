"""The port of a training backend: score a batch, take one optimiser step, give weights away, save, load.

A backend decides nothing about learning: weights, advantages and rates arrive with each call. It lives in
a process of its own (``worker``), so its methods block. This module imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tollway.trainer.batch import Batch, OptimizerSettings, StepReport

if TYPE_CHECKING:
    import torch

__all__ = ["BackendHandle", "BackendSpec", "TrainBackend", "WeightBuckets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """How to build a backend; small enough to travel to its process."""

    kind: Literal["megatron", "torch"]
    model_dir: str
    seed: int = 0
    micro_batch_tokens: int = 2048
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the trained weights; gradients and optimizer state are fp32 in both. ``auto``: bfloat16 on a GPU."""
    compile_layers: bool = False
    """Compile each decoder layer with torch; worth its minute on a GPU."""
    options: Mapping[str, bool | int | float | str] | None = None
    """Passed through to the framework under its own names."""


@dataclass(frozen=True, slots=True)
class WeightBuckets:
    """All weights of one moment, serialised for ``update_weights_from_tensor``."""

    buckets: tuple[bytes, ...]
    weight_bytes: int
    """Bytes of the tensors themselves; a bucket of handles is shorter than what it stands for."""


class TrainBackend(ABC):
    """One model and its optimizer. Not thread-safe; calls come one at a time.

    ``step`` is the only method that changes weights besides the loaders. All results are independent of
    the order of rows and of how they are grouped into passes, up to fp32 rounding.
    """

    @abstractmethod
    def score(self, batch: Batch) -> tuple[NDArray[np.float32], ...]:
        """Log-probability of every token given those before it, [tokens] per row; NaN at position 0.

        Logits are divided by each row's temperature. Changes nothing.
        """

    @abstractmethod
    def step(self, batch: Batch, *, lr: float) -> StepReport:
        """Sum weight * loss, clip the gradient, one AdamW update at rate ``lr``.

        Raises ``TrainerLost`` for a gradient that is not finite: the weights are then no numbers either.
        """

    @abstractmethod
    def gradients(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Gradient of the summed loss by Hugging Face tensor name, fp32 on the CPU. Changes nothing."""

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor under its Hugging Face name, detached, in the dtype that engines load."""

    @abstractmethod
    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights; names and shapes must fit exactly. Optimizer state stays."""

    @abstractmethod
    def reset_optimizer(self, settings: OptimizerSettings) -> None:
        """Start a fresh optimizer state, as between warm start and reinforcement."""

    @abstractmethod
    def offload(self) -> None:
        """Move weights, gradients and optimizer state to the host and give the device's memory back. Idempotent.

        Until ``onload`` only that may be called.
        """

    @abstractmethod
    def onload(self) -> None:
        """Undo ``offload``, bit for bit. Idempotent."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write weights, optimizer and random state into an existing, empty directory."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Continue from ``save`` exactly: the next steps equal those of a run that never stopped."""


class BackendHandle(Protocol):
    """A backend as the controller sees it, in another process: the same calls, awaited. See ``proxy``.

    Every call raises ``TrainerLost`` when the process is gone.
    """

    async def score(self, batch: Batch) -> tuple[NDArray[np.float32], ...]:
        """See ``TrainBackend.score``."""

    async def step(self, batch: Batch, *, lr: float) -> StepReport:
        """See ``TrainBackend.step``."""

    async def reset_optimizer(self, settings: OptimizerSettings) -> None:
        """See ``TrainBackend.reset_optimizer``."""

    async def weight_buckets(self, max_bytes: int, transport: Literal["tensor", "cuda_ipc"]) -> WeightBuckets:
        """All weights, serialised for engines, in buckets of about ``max_bytes``.

        ``cuda_ipc`` sends handles: the process keeps what they stand for until the next call, ``offload`` or its end.
        Raises ``ConfigError`` for it without a GPU.
        """

    async def export(self, target: Path) -> None:
        """Write a Hugging Face model directory, atomically."""

    async def device_memory(self) -> tuple[int, int] | None:
        """Free and total bytes of the device, as its driver counts them; ``None`` without CUDA."""

    async def offload(self) -> None:
        """See ``TrainBackend.offload``."""

    async def onload(self) -> None:
        """See ``TrainBackend.onload``."""

    async def save(self, directory: Path) -> None:
        """See ``TrainBackend.save``."""

    async def load(self, directory: Path) -> None:
        """See ``TrainBackend.load``."""
