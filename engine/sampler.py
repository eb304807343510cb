"""Drawing the next token of every running request at once.

The random number of a token is a hash of (request seed, token index), so a request's samples do not depend on
what else is in the batch, on retractions or on the order of arrivals. Log-probabilities are log-softmax of the
temperature-scaled logits over the whole vocabulary, before top_k, top_p and min_p cut it, as SGLang reports
them. Depends on ``batch``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tollway.engine.batch import Batch, Needs

__all__ = ["Drawn", "draw", "mix_seed"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sampled token per request."""

    tokens: NDArray[np.int64]
    """[n]"""
    logprobs: NDArray[np.float32]
    """[n] of the sampled token."""
    distribution: Tensor
    """[n, vocabulary] log-probabilities."""


def draw(logits: Tensor, batch: Batch, first: int, end: int) -> Drawn:
    """Sample from float32 ``logits`` [end - first, vocabulary], which are overwritten, for rows [first, end)."""
    needs = batch.needs_in(first, end)
    if needs & Needs.EDIT:
        _edit(logits, batch, first, end)
    if needs & Needs.MIN_NEW:
        _forbid_stops(logits, batch, first, end)
    distribution = torch.log_softmax(logits.mul_(torch.from_numpy(batch.scale[first:end])), -1)
    uniform = torch.from_numpy(_uniform(batch.seeds[first:end], batch.counts[first:end])).unsqueeze(1)
    tokens = _inverse_cdf(distribution.exp(), uniform)
    if needs & Needs.FILTER:
        rows = np.flatnonzero(batch.needs[first:end] & Needs.FILTER)
        tokens[rows] = _filtered(distribution[rows].exp(), uniform[rows], batch, rows + first)
    greedy = batch.greedy[first:end]
    if greedy.any():
        rows = np.flatnonzero(greedy)
        tokens[rows] = distribution[rows].argmax(-1, keepdim=True)
    logprobs = distribution.gather(1, tokens)
    return Drawn(tokens.numpy()[:, 0], logprobs.numpy()[:, 0], distribution)


def mix_seed(seed: int, index: int) -> int:
    """64-bit seed of sample ``index`` under ``seed`` (any int)."""
    return int(_splitmix(np.array([(seed * 0xD1342543DE82EF95 + index) & _MASK], np.uint64))[0])


def _uniform(seeds: NDArray[np.uint64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in (0, 1] per request."""
    bits = _splitmix(seeds + counts.astype(np.uint64) * np.uint64(_GOLDEN))
    return ((bits >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _inverse_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """[n, v], [n, 1] -> [n, 1] ids. In float64: a float32 sum cannot resolve the tail of a large vocabulary."""
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    # uniform > 0, so the left-most sum that reaches the target belongs to an id of non-zero probability.
    tokens: Tensor = torch.searchsorted(sums, uniform * sums[:, -1:])
    return tokens.clamp_(max=probabilities.shape[1] - 1)


def _filtered(probabilities: Tensor, uniform: Tensor, batch: Batch, rows: NDArray[np.int64]) -> Tensor:
    """Like ``_inverse_cdf``, over what top_k, top_p and min_p leave."""
    values, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    ahead = values.cumsum(-1) - values
    keep = torch.arange(values.shape[1]) < torch.from_numpy(batch.top_k[rows]).unsqueeze(1)
    keep &= ahead <= torch.from_numpy(batch.top_p[rows]).unsqueeze(1)
    keep &= values >= values[:, :1] * torch.from_numpy(batch.min_p[rows]).unsqueeze(1)
    return ids.gather(1, _inverse_cdf(values * keep, uniform))


def _edit(logits: Tensor, batch: Batch, first: int, end: int) -> None:
    """Penalties over generated tokens, then ``logit_bias``."""
    if batch.seen is None or batch.bias is None:
        raise RuntimeError("a request edits logits, but the batch holds no table for it")
    local = np.flatnonzero(batch.needs[first:end] & Needs.EDIT)
    seen, x = batch.seen[local + first], logits[local]
    frequency, presence, repetition = torch.from_numpy(batch.penalties[local + first]).unsqueeze(2).unbind(1)
    x = torch.where(seen > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    logits[local] = x - frequency * seen - presence * (seen > 0) + batch.bias[local + first]


def _forbid_stops(logits: Tensor, batch: Batch, first: int, end: int) -> None:
    """Stop ids cannot be drawn before min_new_tokens."""
    for i in np.flatnonzero(batch.counts[first:end] < batch.min_new[first:end]):
        stops = batch.stops[first + i]
        logits[i, stops[(stops >= 0) & (stops < logits.shape[1])]] = float("-inf")
