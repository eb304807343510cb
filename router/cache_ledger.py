"""What the prefix cache could have given, what it gave, and why the rest is missing.

The ids of every call are known exactly, so the possible hit is known too. Hit rate, ceiling and efficiency
are reported together, and every missed token has the first cause that holds. First calls stand apart: a
hit there is a shared prompt. Pure state, no I/O. Depends on the kernel and orjson.

Definitions for a call with prompt P and C cached tokens, whose parent call had prompt P' and output G':
``L`` is the common prefix of this prompt with the parent's whole sequence,
``I = floor(min(L, P' + G' - 1, P - 1) / page) * page`` is the possible hit, and the waste ``max(0, I - C)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import orjson

__all__ = ["CAUSES", "CacheFigures", "CacheLedger", "CallFacts", "Miss", "classify", "possible_hit"]

CAUSES = (
    "prefix_mismatch",
    "moved",
    "engine_restarted",
    "refit_flush",
    "namespace",
    "parent_in_flight",
    "page_alignment",
    "eviction",
    "unknown",
)
"""Causes of wasted tokens, in the order in which they are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """What must be remembered of a call to explain the next one. Nodes of a conversation keep it."""

    engine_id: str
    incarnation: int
    flush_epoch: int
    """Flushes of the engine seen when the call ended."""
    end_version: int
    """Weight version of the last sampled token."""
    prompt_tokens: int
    output_tokens: int
    started_at: float
    """Monotonic seconds of the router's clock."""
    ended_at: float
    dp_rank: int | None = None
    extra_key: str | None = None
    moved: str | None = None
    """Why the session changed its engine just before this call."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Tokens of one call that could have been cached and were not."""

    cause: str
    tokens: int


def possible_hit(*, common: int, parent_sequence: int, prompt: int, page: int) -> int:
    """``I`` of the module's definition; the engine never has KV of the very last token of a sequence.

    >>> possible_hit(common=120, parent_sequence=120, prompt=150, page=1)
    119
    """
    return max(0, min(common, parent_sequence - 1, prompt - 1)) // page * page


def classify(
    call: CallFacts,
    parent: CallFacts,
    *,
    waste: int,
    flushed_between: bool,
    page: int,
    evicted: bool,
) -> str:
    """First cause that holds for ``waste`` missed tokens.

    ``flushed_between``: the engine dropped its cache after the parent's last token. ``evicted``: the engine
    is known to have evicted tokens since the parent call.
    """
    if call.engine_id != parent.engine_id or call.dp_rank != parent.dp_rank:
        return "moved"
    if call.incarnation != parent.incarnation:
        return "engine_restarted"
    if flushed_between or call.flush_epoch != parent.flush_epoch:
        return "refit_flush"
    if call.extra_key != parent.extra_key:
        return "namespace"
    if call.started_at < parent.ended_at:
        return "parent_in_flight"
    if waste < page:
        return "page_alignment"
    return "eviction" if evicted else "unknown"


@dataclass(slots=True)
class CacheFigures:
    """Sums over calls. Rates are ``None`` while nothing was possible."""

    calls: int = 0
    unreported_calls: int = 0
    """Calls whose engine did not say what was cached: in no sum."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    possible_tokens: int = 0
    useful_tokens: int = 0
    """sum of min(C, I)"""
    first_calls: int = 0
    first_prompt_tokens: int = 0
    shared_tokens: int = 0
    """Cached tokens beyond a session's own prefix: what it owes to others, such as group siblings."""
    lost_prefix_tokens: int = 0
    """Tokens of parents that a changed prefix made useless (``prefix_mismatch``); they lower the ceiling."""
    waste: Counter[str] = field(default_factory=Counter)
    """Missed tokens by cause."""

    def add(self, *, prompt: int, cached: int, possible: int, first: bool, misses: tuple[Miss, ...]) -> None:
        """Count one call."""
        self.calls += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.possible_tokens += possible
        self.useful_tokens += min(cached, possible)
        self.shared_tokens += max(0, cached - possible)
        if first:
            self.first_calls += 1
            self.first_prompt_tokens += prompt
        for miss in misses:
            self.waste[miss.cause] += miss.tokens

    def summary(self) -> dict[str, object]:
        """JSON form.

        ``hit_rate`` compares with ``ceiling``: hits beyond a session's own prefix, on what it shares with
        others, are in ``hit_rate_with_shared`` only. ``efficiency_without_refit`` leaves out misses whose
        cause is ``refit_flush``.
        """
        after_flush = self.possible_tokens - self.waste["refit_flush"]
        return {
            "calls": self.calls,
            "unreported_calls": self.unreported_calls,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "possible_tokens": self.possible_tokens,
            "hit_rate": _rate(self.cached_tokens - self.shared_tokens, self.prompt_tokens),
            "ceiling": _rate(self.possible_tokens, self.prompt_tokens),
            "efficiency": _rate(self.useful_tokens, self.possible_tokens),
            "efficiency_without_refit": _rate(self.useful_tokens, after_flush),
            "first_calls": self.first_calls,
            "first_prompt_tokens": self.first_prompt_tokens,
            "shared_tokens": self.shared_tokens,
            "hit_rate_with_shared": _rate(self.cached_tokens, self.prompt_tokens),
            "lost_prefix_tokens": self.lost_prefix_tokens,
            "wasted_tokens": sum(self.waste.values()),
            "waste": {cause: self.waste[cause] for cause in CAUSES if self.waste[cause]},
            "refit_flush_tokens": self.waste["refit_flush"],
            "unknown_tokens": self.waste["unknown"],
        }


class CacheLedger:
    """Figures of a run, of each engine and of each session that is still open."""

    def __init__(self) -> None:
        self.total = CacheFigures()
        self.engines: dict[str, CacheFigures] = {}
        self.sessions: dict[str, CacheFigures] = {}
        self._resting: dict[str, bytes] = {}
        """Figures of sessions that nobody uses, as JSON: one small object each instead of a dozen."""

    def record(
        self,
        session_key: str,
        call: CallFacts,
        *,
        cached: int | None,
        possible: int,
        lost_prefix: int,
        first: bool,
        cause: str | None,
    ) -> Miss | None:
        """Count one call once, in every view. ``cause`` explains ``possible - cached`` when that is positive."""
        views = [self.total]
        views.append(self.engines.setdefault(call.engine_id, CacheFigures()))
        views.append(self._woken(session_key))
        if cached is None:
            for view in views:
                view.unreported_calls += 1
            return None
        waste = max(0, possible - cached)
        miss = Miss(cause or "unknown", waste) if waste else None
        for view in views:
            view.lost_prefix_tokens += lost_prefix
            view.add(
                prompt=call.prompt_tokens,
                cached=cached,
                possible=possible,
                first=first,
                misses=(miss,) if miss else (),
            )
        return miss

    def forget(self, session_key: str) -> None:
        """Drop the view of one session; the totals keep what it added."""
        self.sessions.pop(session_key, None)
        self._resting.pop(session_key, None)

    def rest(self, session_key: str) -> None:
        """Keep the view of a session that is not used now in as little memory as it takes."""
        figures = self.sessions.pop(session_key, None)
        if figures is not None:
            self._resting[session_key] = orjson.dumps(asdict(figures))

    def session(self, session_key: str) -> Mapping[str, object]:
        """Figures of one session."""
        known = session_key in self.sessions or session_key in self._resting
        return self._woken(session_key).summary() if known else CacheFigures().summary()

    def _woken(self, session_key: str) -> CacheFigures:
        rested = self._resting.pop(session_key, None)
        if rested is not None:
            values = orjson.loads(rested)
            self.sessions[session_key] = CacheFigures(**{**values, "waste": Counter(values["waste"])})
        return self.sessions.setdefault(session_key, CacheFigures())

    def summary(self) -> dict[str, object]:
        """Figures of the run and of each engine."""
        return {
            **self.total.summary(),
            "engines": {engine_id: figures.summary() for engine_id, figures in self.engines.items()},
        }


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole > 0 else None
