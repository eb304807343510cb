"""What the controller hands to a training backend and what comes back: numpy records only.

Every number that a loss needs is in here, computed once on the controller; a backend only evaluates
``sum(weight * loss)``. Depends on numpy and ``errors``; must stay importable without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tollway.errors import InvalidRecord
from tollway.records import Ids

__all__ = ["Batch", "Objective", "OptimizerSettings", "Row", "StepReport"]

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Which per-token loss; bounds are absolute ratios."""

    kind: Literal["policy", "nll"] = "policy"
    ratio_low: float = 0.8
    ratio_high: float = 1.2
    dual_clip: float | None = None
    """Bound c > 1 for negative advantages: loss = min(loss, -c A)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio_low <= 1.0 <= self.ratio_high or (self.dual_clip or 2.0) <= 1.0:
            raise InvalidRecord(f"[{self.ratio_low}, {self.ratio_high}] and dual {self.dual_clip} are no clip bounds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One token sequence. All arrays are [tokens] and parallel to ``token_ids``."""

    token_ids: Ids
    loss_mask: NDArray[np.uint8]
    """1 where the token is trained; never at position 0, which nothing predicts."""
    weights: F64
    """Share of the token's loss in the step's loss, over the whole step; 0 where the mask is 0."""
    advantages: F64
    old_logprobs: F32
    """Log-probability under the sampler; NaN where the mask is 0 (and everywhere for demonstrations)."""
    temperature: float = 1.0

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        if len(shape) != 1 or not shape[0]:
            raise InvalidRecord(f"a row needs token ids [n], got shape {shape}")
        for name in ("loss_mask", "weights", "advantages", "old_logprobs"):
            if getattr(self, name).shape != shape:
                raise InvalidRecord(f"{name} has shape {getattr(self, name).shape}, token_ids {shape}")
        on = self.loss_mask == 1
        if on[0]:
            raise InvalidRecord("position 0 cannot be trained: nothing predicts it")
        if not np.isfinite(self.weights).all() or self.weights[~on].any():
            raise InvalidRecord("weights must be finite, and 0 where the mask is 0")
        if not np.isfinite(self.advantages).all():
            raise InvalidRecord("advantages must be finite")
        if self.temperature <= 0:
            raise InvalidRecord(f"temperature {self.temperature} cannot scale logits")

    @property
    def trained_tokens(self) -> int:
        """Number of tokens with mask 1."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """All rows of one optimiser update; their order, packing and placement do not change the result."""

    rows: tuple[Row, ...]
    objective: Objective = Objective()

    @property
    def tokens(self) -> int:
        """Tokens of all rows, context included."""
        return sum(row.token_ids.size for row in self.rows)

    @property
    def trained_tokens(self) -> int:
        """Tokens with mask 1."""
        return sum(row.trained_tokens for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one optimiser update saw, before the weights moved."""

    loss: float
    """Sum of weight * loss over the batch."""
    grad_norm: float
    """Global L2 norm before clipping."""
    logprobs: tuple[F32, ...]
    """Per row [tokens]: log-probability of each token given those before it; NaN at position 0."""
    seconds: float
    cpu_seconds: float
    flops: float | None = None
    """Floating point operations that the model's formula asks for; ``None``: nobody counted."""
    peak_bytes: int | None = None
    """Most device memory that tensors held during the update; ``None`` without a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW as a backend needs it; the learning rate comes with each step."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    """0 does not clip."""
