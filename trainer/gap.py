"""The log-probability gap: trainer against sampler on tokens whose weights are the very ones that score.

Tokens of older versions are left out: their drift is ``train_rollout_logprob_abs_diff``, another thing. Pure
but for the calls it is given. Depends on the batch records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tollway.records import Group, Trajectory
from tollway.trainer.batch import Batch, Row

__all__ = ["Gap", "measure", "scoring_batch", "trajectories_at"]


@dataclass(frozen=True, slots=True)
class Gap:
    """|trainer - sampler| in nats over ``tokens`` sampled tokens."""

    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0

    @property
    def mean(self) -> float | None:
        """Mean gap; ``None`` without tokens."""
        return self.total / self.tokens if self.tokens else None

    def __add__(self, other: Gap) -> Gap:
        return Gap(self.tokens + other.tokens, self.total + other.total, max(self.largest, other.largest))


def trajectories_at(groups: Iterable[Group], version: int) -> list[Trajectory]:
    """Rows with at least one token sampled by weights ``version``."""
    rows = (row for group in groups for rollout in group.rollouts for row in rollout.rows)
    return [row for row in rows if (row.weight_version == version).any()]


def scoring_batch(rows: Sequence[Trajectory]) -> Batch:
    """A batch to score: every weight is 0, temperatures are those of the sampler."""
    return Batch(
        rows=tuple(
            Row(
                token_ids=row.token_ids,
                loss_mask=row.loss_mask,
                weights=np.zeros(row.token_ids.size),
                advantages=np.zeros(row.token_ids.size),
                old_logprobs=row.logprobs,
                temperature=row.sampling.temperature,
            )
            for row in rows
        )
    )


def measure(rows: Sequence[Trajectory], scores: Sequence[NDArray[np.float32]], version: int) -> Gap:
    """Compare ``scores`` [tokens] per row with the recorded log-probabilities of weights ``version``."""
    found = Gap()
    for row, scored in zip(rows, scores, strict=True):
        same = (row.loss_mask == 1) & (row.weight_version == version)
        if same.any():
            gaps = np.abs(scored[same].astype(np.float64) - row.logprobs[same].astype(np.float64))
            found += Gap(int(same.sum()), float(gaps.sum()), float(gaps.max()))
    return found
