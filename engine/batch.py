"""Per-request numbers of the running batch as arrays: index i is row i of ``Rows``.

Owns the vectorised view of the running requests, so that a decode step loops over none of them. Adding and
removing keep indices dense: the last request moves into a hole. Depends on ``request``; numpy and torch only.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tollway.engine.request import Request

__all__ = ["Batch", "Needs"]


class Needs:
    """Bits: what a request needs beyond plain sampling; steps skip what nobody needs. Plain ints, because
    enum flags cost microseconds per operation and a step does several."""

    NOTHING = 0
    FILTER = 1
    """top_k, top_p or min_p."""
    EDIT = 2
    """Penalties or logit_bias."""
    MIN_NEW = 4
    TOPS = 8
    STREAM = 16
    WATCH = 32
    """Stop strings."""


class Batch:
    """Arrays of ``capacity`` entries, the first ``n`` in use."""

    def __init__(self, capacity: int, vocab_size: int) -> None:
        self._capacity, self._vocab_size = capacity, vocab_size
        self.requests: list[Request] = []
        self.tokens = np.zeros(capacity, np.int64)
        """Newest token of each request: known, but its keys and values are not stored yet."""
        self.lengths = np.zeros(capacity, np.int64)
        """Positions with stored keys and values; also the position of ``tokens``."""
        self.counts = np.zeros(capacity, np.int64)
        """Generated tokens."""
        self.limits = np.zeros(capacity, np.int64)
        self.seeds = np.zeros(capacity, np.uint64)
        self.scale = np.ones((capacity, 1), np.float32)
        """1 / temperature; 1 for greedy requests."""
        self.greedy = np.zeros(capacity, bool)
        self.top_k = np.zeros(capacity, np.int64)
        self.top_p = np.ones(capacity, np.float32)
        self.min_p = np.zeros(capacity, np.float32)
        self.min_new = np.zeros(capacity, np.int64)
        self.penalties = np.zeros((capacity, 3), np.float32)
        """frequency, presence, repetition."""
        self.needs = np.zeros(capacity, np.int64)
        self.stops = np.full((capacity, 2), -1, np.int64)
        """[capacity, k] ids that end generation, padded with -1."""
        self.seen: Tensor | None = None
        """[capacity, vocabulary] how often each id was generated; made when a request has penalties."""
        self.bias: Tensor | None = None
        """[capacity, vocabulary] ``logit_bias``; made together with ``seen``."""

    @property
    def n(self) -> int:
        """Running requests."""
        return len(self.requests)

    def needs_in(self, first: int, end: int) -> int:
        """Union of what requests [first, end) need."""
        return int(np.bitwise_or.reduce(self.needs[first:end]))

    def add(self, request: Request) -> int:
        """Take in a request whose known tokens are about to be prefilled; returns its row."""
        i, params = self.n, request.params
        self.requests.append(request)
        self.lengths[i] = self.tokens[i] = 0
        self.counts[i] = len(request.generated)
        self.limits[i], self.seeds[i], self.min_new[i] = request.limit, request.seed, params.min_new_tokens
        self.greedy[i] = params.greedy
        self.scale[i] = 1.0 if params.greedy else 1.0 / params.temperature
        self.top_k[i] = params.top_k if params.top_k > 0 else self._vocab_size
        self.top_p[i], self.min_p[i] = params.top_p, params.min_p
        self.penalties[i] = params.frequency_penalty, params.presence_penalty, params.repetition_penalty
        self._set_stops(i, request.stop_ids)
        needs = Needs.NOTHING
        if not params.greedy and (params.top_p < 1 or params.min_p > 0 or 0 < params.top_k < self._vocab_size):
            needs |= Needs.FILTER
        needs |= Needs.EDIT if params.edits_logits else Needs.NOTHING
        needs |= Needs.MIN_NEW if params.min_new_tokens and request.stop_ids else Needs.NOTHING
        needs |= Needs.TOPS if request.top_logprobs else Needs.NOTHING
        needs |= Needs.STREAM if request.stream else Needs.NOTHING
        needs |= Needs.WATCH if request.watch is not None else Needs.NOTHING
        self.needs[i] = needs
        if params.edits_logits:
            self._prepare_edits(i, request)
        return i

    def remove(self, i: int) -> int:
        """Drop request ``i``; returns the index whose request now sits at ``i`` (``i`` itself: none moved)."""
        last = self.n - 1
        if i != last:
            self.requests[i] = self.requests[last]
            for array in self._arrays():
                array[i] = array[last]
            if self.seen is not None and self.bias is not None:
                self.seen[i], self.bias[i] = self.seen[last], self.bias[last]
        self.requests.pop()
        return last

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return (
            *(self.tokens, self.lengths, self.counts, self.limits, self.seeds, self.scale, self.greedy),
            *(self.top_k, self.top_p, self.min_p, self.min_new, self.penalties, self.needs, self.stops),
        )

    def _set_stops(self, i: int, ids: tuple[int, ...]) -> None:
        if len(ids) > self.stops.shape[1]:
            wider = np.full((self._capacity, len(ids)), -1, np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[i] = -1
        self.stops[i, : len(ids)] = ids

    def _prepare_edits(self, i: int, request: Request) -> None:
        if self.seen is None or self.bias is None:
            self.seen = torch.zeros(self._capacity, self._vocab_size)
            self.bias = torch.zeros(self._capacity, self._vocab_size)
        self.seen[i] = torch.from_numpy(np.bincount(request.generated, minlength=self._vocab_size).astype(np.float32))
        self.bias[i] = 0.0
        for token, value in (request.params.logit_bias or {}).items():
            self.bias[i, int(token)] = value
