"""What the scheduler hands over: snapshots of a request as ``Progress`` and ``Result``.

Pure functions that copy out of rows. Depends on ``request`` and ``rows``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tollway.engine.request import Finish, Progress, Request, Result, TopRow
from tollway.engine.rows import Rows

__all__ = ["finished", "progress", "top_rows", "unstarted"]


def progress(request: Request, rows: Rows, row: int, count: int, version: str) -> Progress:
    """Everything generated so far, for an event of a stream."""
    start = len(request.prompt)
    return Progress(
        ids=rows.ids[row, start : start + count].copy(),
        logprobs=rows.logprobs[row, start : start + count].copy(),
        tops=tuple(request.tops),
        cached_tokens=request.cached_tokens or 0,
        weight_version=version,
    )


def finished(
    request: Request,
    rows: Rows,
    row: int,
    count: int,
    finish: Finish,
    version: str,
    routes: NDArray[np.int16] | None,
) -> Result:
    """The end of a running request."""
    start = len(request.prompt)
    ids, logprobs = rows.ids[row, start : start + count].copy(), rows.logprobs[row, start : start + count].copy()
    return _result(request, ids, logprobs, finish, version, routes)


def unstarted(request: Request, finish: Finish, version: str) -> Result:
    """The end of a request that was waiting, with what it had before a retraction."""
    return _result(request, request.generated, request.logprobs, finish, version, request.routes)


def top_rows(distribution: Tensor, widths: Sequence[int]) -> list[TopRow]:
    """The ``widths[i]`` most likely ids of row ``i`` of log-probabilities [n, vocabulary]."""
    values, ids = distribution.topk(min(max(widths), distribution.shape[1]), -1)
    return [(values[i, :k].numpy().copy(), ids[i, :k].numpy().copy()) for i, k in enumerate(widths)]


def _result(
    request: Request,
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    finish: Finish,
    version: str,
    routes: NDArray[np.int16] | None,
) -> Result:
    return Result(
        ids=ids,
        logprobs=logprobs,
        tops=tuple(request.tops),
        cached_tokens=request.cached_tokens or 0,
        weight_version=version,
        finish=finish,
        versions=request.spans(len(ids)),
        routes=routes,
        input_logprobs=request.input_logprobs,
        input_tops=tuple(request.input_tops),
        retractions=request.retractions,
        latency_s=time.monotonic() - request.arrived,
    )
