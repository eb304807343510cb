"""Cut a batch into forward passes: rows of like length padded together, within a token budget.

Which rows share a pass changes speed and memory, never a value: padding is at the end, where causal
attention cannot see it, and carries weight 0. Depends on numpy and ``batch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tollway.trainer.batch import Row

__all__ = ["MicroBatch", "collate", "split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Padded rows. Target arrays are [rows, width - 1]: entry t belongs to the prediction of token t + 1."""

    members: tuple[int, ...]
    """Index of each row in the batch."""
    ids: NDArray[np.int64]
    """[rows, width] token ids, 0 after the end."""
    weights: NDArray[np.float64]
    advantages: NDArray[np.float64]
    old_logprobs: NDArray[np.float32]
    """0 where the token is not trained (its weight is 0 there)."""
    mask: NDArray[np.bool_]
    """True where the target is trained."""
    temperatures: NDArray[np.float32]
    """[rows]"""


def split(rows: Sequence[Row], max_tokens: int, *, multiple: int = 1) -> list[MicroBatch]:
    """Sort by length and fill each pass up to ``max_tokens`` padded tokens, at least one row each.

    The number of predictions of a row, its width less one, is padded to a multiple of ``multiple``.
    """
    order = sorted(range(len(rows)), key=lambda index: (-rows[index].token_ids.size, index))
    passes: list[list[int]] = []
    for index in order:
        width = _width(rows[passes[-1][0]].token_ids.size, multiple) if passes else 0
        if passes and width * (len(passes[-1]) + 1) <= max_tokens:
            passes[-1].append(index)
        else:
            passes.append([index])
    return [collate(rows, members, multiple=multiple) for members in passes]


def collate(rows: Sequence[Row], members: Sequence[int], *, multiple: int = 1) -> MicroBatch:
    """Pad the named rows to the longest of them, and at least to two tokens; ``multiple`` as in ``split``."""
    width = _width(max(rows[index].token_ids.size for index in members), multiple)
    shape = (len(members), width)
    ids = np.zeros(shape, dtype=np.int64)
    weights, advantages = np.zeros(shape), np.zeros(shape)
    old = np.zeros(shape, dtype=np.float32)
    mask = np.zeros(shape, dtype=np.bool_)
    for at, index in enumerate(members):
        row, size = rows[index], rows[index].token_ids.size
        on = row.loss_mask == 1
        ids[at, :size] = row.token_ids
        weights[at, :size] = row.weights
        advantages[at, :size] = row.advantages
        mask[at, :size] = on
        old[at, :size] = np.where(on & np.isfinite(row.old_logprobs), row.old_logprobs, 0.0)
    return MicroBatch(
        members=tuple(members),
        ids=ids,
        weights=weights[:, 1:],
        advantages=advantages[:, 1:],
        old_logprobs=old[:, 1:],
        mask=mask[:, 1:],
        temperatures=np.array([rows[index].temperature for index in members], dtype=np.float32),
    )


def _width(longest: int, multiple: int) -> int:
    return -(-max(1, longest - 1) // multiple) * multiple + 1
