"""One generation request, from its arrival to its result.

``Request`` belongs to the scheduler's thread once submitted; what the HTTP side sees are the immutable
``Progress`` and ``Result`` that the scheduler hands over. Depends on ``params`` and ``text``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tollway.engine.params import SamplingParams
from tollway.engine.text import StopWatch

__all__ = ["Finish", "Progress", "Request", "Result", "TopRow"]

TopRow = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Log-probabilities and ids of the k most likely tokens at one position, best first."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Why generation ended: ``stop`` (with what matched), ``length`` or ``abort`` (with a message)."""

    kind: str
    matched: int | str | None = None
    message: str = ""
    status: int | None = None
    """HTTP status of an abort that is the request's or the server's fault; plain aborts have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What has been generated so far."""

    ids: NDArray[np.int32]
    """[generated]"""
    logprobs: NDArray[np.float32]
    """[generated] nats."""
    tops: tuple[TopRow, ...]
    """Parallel to ``ids`` when the request asked for top log-probabilities, else empty."""
    cached_tokens: int
    weight_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Progress):
    """The end of a request."""

    finish: Finish
    versions: tuple[tuple[str, int, int], ...]
    """(version, start, end) over generated tokens, gapless."""
    routes: NDArray[np.int16] | None
    """[rows, layers, top_k] from the requested start position."""
    input_logprobs: NDArray[np.float32] | None
    """[prompt - start - 1] of the prompt tokens after ``logprob_start_len``."""
    input_tops: tuple[TopRow, ...]
    retractions: int
    latency_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Everything the scheduler knows of one request. Generated tokens live in the rows while it runs."""

    rid: str
    prompt: NDArray[np.int32]
    params: SamplingParams
    namespace: str = ""
    limit: int
    """Generated tokens at which it ends, the context already considered."""
    seed: int
    stop_ids: tuple[int, ...] = ()
    watch: StopWatch | None = None
    return_logprob: bool = False
    logprob_start: int = -1
    top_logprobs: int = 0
    return_routes: bool = False
    routes_start: int = 0
    stream: bool = False
    on_progress: Callable[[Progress], None] = lambda _: None
    """Called on the HTTP loop."""
    on_result: Callable[[Result], None] = lambda _: None
    """Called on the HTTP loop, once, last."""

    arrived: float = field(default_factory=time.monotonic)
    generated: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Kept here only while the request is not running (retracted)."""
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """Parallel to ``generated``."""
    tops: list[TopRow] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, index of the first token sampled with it)."""
    routes: NDArray[np.int16] | None = None
    """Expert choices from ``routes_start`` on at the last retraction: those that its tokens were sampled with."""
    cached_tokens: int | None = None
    """Frozen at the first prefill."""
    retractions: int = 0
    input_logprobs: NDArray[np.float32] | None = None
    input_tops: list[TopRow] = field(default_factory=list)

    def answers_to(self, rid: str | None) -> bool:
        """Whether an abort of ``rid`` means this request: its id, or the id that its siblings were named after."""
        return rid is None or self.rid == rid or self.rid.startswith(f"{rid}_")

    @property
    def known(self) -> NDArray[np.int32]:
        """Prompt and what was generated before a retraction: what a prefill feeds."""
        return np.concatenate([self.prompt, self.generated]) if self.generated.size else self.prompt

    @property
    def cache_limit(self) -> int:
        """Positions that may come from the prefix cache: the last one is always computed, and so are prompt
        positions whose log-probabilities were asked for."""
        limit = len(self.prompt) + len(self.generated) - 1
        if self.return_logprob and self.logprob_start >= 0 and self.input_logprobs is None:
            limit = min(limit, self.logprob_start)
        return limit

    def score_prompt(self, pieces: Sequence[Tensor]) -> None:
        """Record log-probabilities of prompt tokens after ``logprob_start`` from log-softmax rows."""
        values, at = [], self.logprob_start + 1
        for piece in pieces:
            ids = torch.from_numpy(self.prompt[at : at + len(piece)].astype(np.int64))
            values.append(piece[: len(ids)].gather(1, ids.unsqueeze(1))[:, 0].numpy())
            if self.top_logprobs and len(ids):
                best, tops = piece[: len(ids)].topk(self.top_logprobs, -1)
                self.input_tops += list(zip(best.numpy(), tops.numpy(), strict=True))
            at += len(ids)
        self.input_logprobs = np.concatenate(values) if values else np.zeros(0, np.float32)

    def mark_version(self, version: str, generated: int) -> None:
        """Tokens from index ``generated`` on are sampled with ``version``."""
        if self.marks and self.marks[-1][1] == generated:
            self.marks.pop()
        if not self.marks or self.marks[-1][0] != version:
            self.marks.append((version, generated))

    def spans(self, generated: int) -> tuple[tuple[str, int, int], ...]:
        """Version spans over [0, generated)."""
        ends = [start for _, start in self.marks[1:]] + [generated] * bool(self.marks)
        return tuple((v, start, end) for (v, start), end in zip(self.marks, ends, strict=True) if start < end)
