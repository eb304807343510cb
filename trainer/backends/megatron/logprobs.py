"""Log-probabilities of targets from logits, with one copy of the logits in memory and none in fp32.

At a vocabulary of 152 k and 16 k tokens the logits are 5 GB in bfloat16 and 10 GB in fp32; a chain of tensor
operations keeps several. Here fp32 exists only for some rows at a time, and the gradient takes the logits' own
place. For a vocabulary that lies on one rank. Depends on torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["target_logprobs"]

_CHUNK_ELEMENTS = 1 << 26
"""Logits in fp32 at once: 256 MiB."""

Score = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
Slope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor], torch.Tensor]


def target_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor | None, *, compiled: bool = False
) -> torch.Tensor:
    """Log-softmax of ``logits / temperatures`` at ``targets``: fp32, differentiable once.

    ``logits`` is [..., vocab], contiguous, and is overwritten by the backward pass: nobody else may need it.
    ``targets`` and ``temperatures`` are [...]; no temperatures means that all are 1. ``compiled`` fuses the arithmetic
    into a few kernels by torch.compile.
    """
    flat = None if temperatures is None else temperatures.reshape(-1)
    score, slope = _compiled() if compiled else (_score, _slope)
    found: torch.Tensor = _TargetLogprobs.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        logits, targets.reshape(-1), flat, score, slope
    )
    return found.view(targets.shape)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor | None,
        score: Score,
        slope: Slope,
    ) -> torch.Tensor:
        rows = logits.detach().view(-1, logits.shape[-1])
        found = torch.empty(rows.shape[0], dtype=torch.float32, device=logits.device)
        totals = torch.empty_like(found)
        for part in _chunks(rows):
            found[part], totals[part] = score(rows[part], targets[part], _of(temperatures, part))
        ctx.save_for_backward(logits, targets, temperatures, totals)
        ctx.slope = slope
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, targets, temperatures, totals = ctx.saved_tensors
        rows = logits.detach().view(-1, logits.shape[-1])
        for part in _chunks(rows):
            rows[part] = ctx.slope(rows[part], targets[part], _of(temperatures, part), totals[part], upstream[0][part])
        return logits, None, None, None, None


def _score(
    logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows [n, vocab]: log-probability of the target and the log of the sum, [n] fp32 each."""
    scaled = _scaled(logits, temperatures)
    total = scaled.logsumexp(-1)
    return scaled.gather(-1, targets[:, None])[:, 0] - total, total


def _slope(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor | None,
    total: torch.Tensor,
    upstream: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the logits [n, vocab], fp32: (1 at the target - probability) * upstream / temperature."""
    steep = upstream if temperatures is None else upstream / temperatures
    found = (_scaled(logits, temperatures) - total[:, None]).exp_()
    found.scatter_add_(-1, targets[:, None], torch.full_like(total, -1.0)[:, None])
    return found.mul_(-steep[:, None])


def _scaled(logits: torch.Tensor, temperatures: torch.Tensor | None) -> torch.Tensor:
    return logits.float() if temperatures is None else logits.float() / temperatures[:, None]


def _compiled() -> tuple[Score, Slope]:
    if not _COMPILED:
        _COMPILED.append((torch.compile(_score), torch.compile(_slope)))
    return _COMPILED[0]


_COMPILED: list[tuple[Score, Slope]] = []


def _chunks(rows: torch.Tensor) -> Iterator[slice]:
    height = max(1, _CHUNK_ELEMENTS // rows.shape[-1])
    for start in range(0, rows.shape[0], height):
        yield slice(start, start + height)


def _of(values: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if values is None else values[part]
