"""Forward passes over the running batch: ragged prefills and single-token decode steps.

Owns padding, masks and chunking; decides nothing about who runs. Depends on ``model``, ``rows`` and ``batch``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tollway.engine.batch import Batch
from tollway.engine.model import Decoder, Span
from tollway.engine.rows import Rows

__all__ = ["PREFILL_TOKENS", "Forward"]

PREFILL_TOKENS = 512
"""Most tokens (padding included) of one prefill pass: larger passes leave the caches of a core."""
_BUCKET = 32
"""Decode looks at a multiple of this many keys."""


class Forward:
    """Runs a ``Decoder`` over rows of a ``Batch``."""

    def __init__(self, decoder: Decoder, rows: Rows, batch: Batch) -> None:
        self._decoder, self._rows, self._batch = decoder, rows, batch
        self._keys = torch.arange(0)
        self._hidden = torch.tensor(float("-inf"), dtype=decoder.dtype)
        self._seen = torch.tensor(0.0, dtype=decoder.dtype)

    def decode(self) -> Tensor:
        """Feed the newest token of every running request; returns logits [n, vocabulary] float32."""
        batch, n = self._batch, self._batch.n
        longest = int(batch.lengths[:n].max()) + 1
        self._rows.ensure(n, longest + 1)
        length = min(-(-longest // _BUCKET) * _BUCKET, self._rows.length)
        positions = torch.from_numpy(batch.lengths[:n]).unsqueeze(1)
        span = Span(0, positions, length, self._mask(positions, length))
        hidden, routes = self._decoder.forward(torch.from_numpy(batch.tokens[:n]).unsqueeze(1), span, self._rows)
        if routes is not None and self._rows.routes is not None:
            self._rows.routes[np.arange(n), batch.lengths[:n]] = routes[:, 0].numpy()
        batch.lengths[:n] += 1
        return self._decoder.logits(hidden[:, 0])

    def prefill(self, first: int, known: Sequence[NDArray[np.int32]], starts: NDArray[np.int64]) -> Tensor:
        """Feed ``known[i][starts[i]:]`` into row ``first + i``; returns logits of each last token.

        Rows already hold keys and values of positions before ``starts``. Shorter ones are padded: what padding
        writes behind a sequence is overwritten before anything looks at it.
        """
        ends = np.array([len(ids) for ids in known], np.int64)
        width = int((ends - starts).max())
        self._rows.ensure(first + len(known), int(starts.max()) + width + 1)
        tokens = np.zeros((len(known), width), np.int64)
        for i, ids in enumerate(known):
            tokens[i, : ends[i] - starts[i]] = ids[starts[i] :]
        hidden = self._pass(first, tokens, starts, width)
        self._batch.lengths[first : first + len(known)] = ends
        return self._decoder.logits(hidden[np.arange(len(known)), ends - starts - 1])

    def prefill_long(
        self, row: int, known: NDArray[np.int32], start: int, score_from: int | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Prefill one row in chunks; returns logits [1, vocabulary] and, when ``score_from`` is given, pieces of
        log-softmax [k, vocabulary] that predict tokens ``score_from + 1 .. len(known) - 1``."""
        self._rows.ensure(row + 1, len(known) + 1)
        scored: list[Tensor] = []
        hidden = torch.zeros(0)
        for at in range(start, len(known), PREFILL_TOKENS):
            tokens = known[None, at : at + PREFILL_TOKENS].astype(np.int64)
            hidden = self._pass(row, tokens, np.array([at]), tokens.shape[1])
            if score_from is not None:
                wanted = hidden[0, max(score_from - at, 0) : len(known) - 1 - at]
                scored += [
                    torch.log_softmax(self._decoder.logits(part), -1) for part in torch.split(wanted, 256) if len(part)
                ]
        self._batch.lengths[row] = len(known)
        return self._decoder.logits(hidden[:, -1]), scored

    def _pass(self, first: int, tokens: NDArray[np.int64], starts: NDArray[np.int64], width: int) -> Tensor:
        positions = torch.from_numpy(starts[:, None] + np.arange(width))
        length = int(starts.max()) + width
        span = Span(first, positions, length, self._mask(positions, length))
        hidden, routes = self._decoder.forward(torch.from_numpy(tokens), span, self._rows)
        if routes is not None and self._rows.routes is not None:
            rows = np.arange(first, first + len(tokens))[:, None]
            self._rows.routes[rows, positions.numpy()] = routes.numpy()
        return hidden

    def _mask(self, positions: Tensor, length: int) -> Tensor:
        """[n, 1, t, length]: a position sees itself and what is before it."""
        if len(self._keys) < length:
            self._keys = torch.arange(2 * length)
        later = self._keys[:length] > positions.unsqueeze(-1)
        return torch.where(later, self._hidden, self._seen).unsqueeze(1)
