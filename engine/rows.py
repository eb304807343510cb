"""Memory of the running requests: row i holds keys, values, ids and log-probabilities of request i.

Rows of running requests are always 0..n-1, so that a decode step reads views and gathers nothing. Grows by
doubling; copies of stretches (``Segment``) go to and come from the prefix cache. Must not know requests.
Depends on ``spec``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tollway.engine.spec import ModelSpec

__all__ = ["Rows", "Segment"]

_SKEW = 8
"""Positions added to a row's length: rows a power of two apart fall into the same cache sets, and attention over
a batch of them was 20 % slower."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Keys and values of adjacent positions, owned by the prefix cache."""

    kv: Tensor
    """[layers, 2, kv_heads, positions, head_dim]"""
    routes: NDArray[np.int16] | None
    """[positions, layers, top_k] chosen experts; ``None`` in a dense model."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.kv.nbytes + (0 if self.routes is None else self.routes.nbytes)

    def cut(self, start: int, end: int) -> Segment:
        """Copy of positions [start, end): a view would keep the whole alive after an eviction."""
        routes = None if self.routes is None else self.routes[start:end].copy()
        return Segment(self.kv[..., start:end, :].clone(), routes)


class Rows:
    """Growable storage of ``count`` rows with ``length`` positions each."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, *, max_rows: int, max_length: int) -> None:
        self._spec, self._dtype = spec, dtype
        self._max_rows, self._max_length = max_rows, max_length
        self.count = self.length = 0
        self.clear()

    def clear(self) -> int:
        """Give the memory back; returns the bytes freed. Only without running requests."""
        freed = self.nbytes if self.count else 0
        self.count = self.length = 0
        self._kv = self._zeros(0, 0)
        self.ids: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        """[rows, length] token at each position."""
        self.logprobs: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        """[rows, length] log-probability of each sampled token; undefined at prompt positions."""
        self.routes: NDArray[np.int16] | None = self._new_routes(0, 0)
        """[rows, length, layers, top_k]; ``None`` in a dense model."""
        self._prepare()
        return freed

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        routes = 0 if self.routes is None else self.routes.nbytes
        return self._kv.nbytes + self.ids.nbytes + self.logprobs.nbytes + routes

    def ensure(self, rows: int, length: int) -> None:
        """Make room for ``rows`` rows of ``length`` positions, keeping the first ``rows`` of what is there."""
        if rows <= self.count and length <= self.length:
            return
        count = min(_grown(rows, self.count, 8), self._max_rows)
        size = self.length
        if length > size:
            size = min(_grown(length, size, 128), max(self._max_length, length)) + _SKEW
        # Rows that are not in use are not copied: that would make their untouched pages resident.
        old, old_kv = (min(self.count, rows), self.length), self._kv
        ids, logprobs, routes = self.ids, self.logprobs, self.routes
        self._kv = self._zeros(count, size)
        self._kv[:, :, : old[0], :, : old[1]] = old_kv[:, :, : old[0]]
        self.ids, self.logprobs = np.zeros((count, size), np.int32), np.zeros((count, size), np.float32)
        self.ids[: old[0], : old[1]], self.logprobs[: old[0], : old[1]] = ids[: old[0]], logprobs[: old[0]]
        self.routes = self._new_routes(count, size)
        if self.routes is not None and routes is not None:
            self.routes[: old[0], : old[1]] = routes[: old[0]]
        self.count, self.length = count, size
        self._prepare()

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one row over another."""
        self._kv[:, :, target, :, :length] = self._kv[:, :, source, :, :length]
        self.ids[target, : length + 1] = self.ids[source, : length + 1]
        self.logprobs[target, : length + 1] = self.logprobs[source, : length + 1]
        if self.routes is not None:
            self.routes[target, :length] = self.routes[source, :length]

    def load(self, row: int, at: int, segment: Segment, count: int) -> None:
        """Copy the first ``count`` positions of a cached stretch to position ``at``."""
        self._kv[:, :, row, :, at : at + count] = segment.kv[..., :count, :]
        if self.routes is not None and segment.routes is not None:
            self.routes[row, at : at + count] = segment.routes[:count]

    def copy(self, row: int, start: int, end: int) -> Segment:
        """Copy positions [start, end) of a row."""
        routes = None if self.routes is None else self.routes[row, start:end].copy()
        return Segment(self._kv[:, :, row, :, start:end].contiguous(), routes)

    def flat_index(self, first: int, positions: Tensor) -> Tensor:
        """[n * t * kv_heads] places of [n, t] positions of rows from ``first`` in ``flat``."""
        n = positions.shape[0]
        return (self._bases[first : first + n].unsqueeze(1) + positions.unsqueeze(2)).reshape(-1)

    def flat(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values as [rows * kv_heads * length, head_dim], for writing at ``flat_index``."""
        return self._flat[layer]

    def window(self, layer: int, first: int, n: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [n, kv_heads, length, head_dim] of rows from ``first``."""
        keys, values = self._by_row[layer]
        return keys[first : first + n, :, :length], values[first : first + n, :, :length]

    def _prepare(self) -> None:
        dim, kv_heads = self._spec.head_dim, self._spec.kv_heads
        self._flat: list[tuple[Tensor, Tensor]] = [
            (layer[0].view(-1, dim), layer[1].view(-1, dim)) for layer in self._kv
        ]
        self._by_row: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in self._kv]
        self._bases = torch.arange(self.count * kv_heads).view(self.count, kv_heads) * self.length

    def _zeros(self, rows: int, length: int) -> Tensor:
        shape = (self._spec.layers, 2, rows, self._spec.kv_heads, length, self._spec.head_dim)
        if not rows * length:
            return torch.zeros(shape, dtype=self._dtype)
        # numpy takes zeroed pages lazily from the system: rows that nobody uses cost nothing. They must be
        # zero, not garbage: masked positions are multiplied by 0, and 0 * NaN is NaN.
        size = self._dtype.itemsize * int(np.prod(shape))
        return torch.from_numpy(np.zeros(size, np.uint8)).view(self._dtype).view(shape)

    def _new_routes(self, rows: int, length: int) -> NDArray[np.int16] | None:
        if not self._spec.experts:
            return None
        return np.zeros((rows, length, self._spec.layers, self._spec.experts_per_token), np.int16)


def _grown(wanted: int, current: int, smallest: int) -> int:
    if wanted <= current:
        return current
    size = max(current, smallest)
    while size < wanted:
        size *= 2
    return size
