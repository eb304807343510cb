"""What the prefix cache could have given, what it gave, and why the rest is missing: sums over calls.

Hit rate, ceiling and efficiency are reported together, for the run, for each engine, model and session. Every
prompt token of a counted call is in exactly one place: useful, wasted (with its cause), or beyond reach (with
its cause). ``causes`` has the definitions. Pure state, no I/O. Depends on ``causes`` only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, cast

from tollway.router.causes import BEYOND, CAUSES, MOVES, Miss

__all__ = ["CacheFigures", "CacheLedger", "Entry"]

Json = Mapping[str, object]
_WORST = 64
"""Sessions whose waste is kept in order; a few of them may close before others are counted among the worst."""
_FAULTS = ("moved", "engine_restarted", "server_restarted", "refit_flush")
"""Causes that are events of the run and not of the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model call as it is counted: once, however often it was sent, continued or replayed."""

    engine_id: str
    model: str = ""
    """Name of the model in the fleet; empty for the policy."""
    prompt: int
    cached: int | None
    """``None``: the engine did not say. The call is then in no sum but the unreported ones."""
    host: int | None = None
    """Cached tokens that came from the host's memory; ``None``: the engine does not tell tiers apart."""
    storage: int = 0
    possible: int = 0
    first: bool = False
    """No call of the session came before it on its path."""
    misses: tuple[Miss, ...] = ()
    """``max(0, possible - cached)`` tokens by cause."""
    beyond: tuple[Miss, ...] = ()
    """``prompt - possible`` tokens by cause."""
    lost_prefix: int = 0
    outcome: Literal["ok", "failed", "cancelled"] = "ok"
    retractions: int = 0
    versions: int = 1
    """Weight versions that sampled its output."""
    resumed: int = 0
    """Times that an abort of the engine cut it and it was continued."""
    resumed_tokens: int = 0
    """Tokens computed again for that."""

    def __post_init__(self) -> None:
        if self.cached is None:
            return
        wasted, beyond = sum(m.tokens for m in self.misses), sum(m.tokens for m in self.beyond)
        if wasted != max(0, self.possible - self.cached) or beyond != self.prompt - self.possible:
            raise ValueError(
                f"{wasted} wasted and {beyond} tokens beyond reach do not explain {self.cached} cached tokens of "
                f"{self.prompt}, of which {self.possible} were possible"
            )


@dataclass(slots=True)
class CacheFigures:
    """Sums over calls. Rates are ``None`` while nothing was possible."""

    calls: int = 0
    """Those whose engine said what was cached: all other sums are over them."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    possible_tokens: int = 0
    useful_tokens: int = 0
    """sum of min(C, I)"""
    shared_tokens: int = 0
    """Cached tokens beyond a session's own prefix: what it owes to others, such as group siblings."""
    first_calls: int = 0
    first_prompt_tokens: int = 0
    first_cached_tokens: int = 0
    lost_prefix_tokens: int = 0
    """Tokens of parents that a changed prefix made useless (``prefix_mismatch``); they lower the ceiling."""
    host_tokens: int = 0
    storage_tokens: int = 0
    tiered_tokens: int = 0
    """Cached tokens of calls whose engine tells device, host and storage apart."""
    failed_calls: int = 0
    """Calls that ended without a reply and may have been computed; they are in the other sums, too."""
    cancelled_calls: int = 0
    unreported_calls: int = 0
    """Calls whose engine did not say what was cached: in no other sum but failed and cancelled."""
    unreported_prompt_tokens: int = 0
    retractions: int = 0
    """Times that an engine took the KV of a running call away. What it cost shows in no hit rate."""
    spanning_calls: int = 0
    """Calls whose output was sampled by more than one weight version."""
    resumed_calls: int = 0
    """Calls that an engine aborted and that were continued."""
    resumed_tokens: int = 0
    """Tokens computed again for those."""
    waste: Counter[str] = field(default_factory=Counter)
    """Missed tokens by cause."""
    moved: Counter[str] = field(default_factory=Counter)
    """``waste["moved"]`` by the router's reason."""
    beyond: Counter[str] = field(default_factory=Counter)
    """Tokens that could not have been cached, by cause."""

    @property
    def wasted_tokens(self) -> int:
        """sum of max(0, I - C)"""
        return self.possible_tokens - self.useful_tokens

    def add(self, entry: Entry) -> None:
        """Count one call."""
        self.failed_calls += entry.outcome == "failed"
        self.cancelled_calls += entry.outcome == "cancelled"
        self.retractions += entry.retractions
        self.spanning_calls += entry.versions > 1
        self.resumed_calls += entry.resumed > 0
        self.resumed_tokens += entry.resumed_tokens
        if entry.cached is None:
            self.unreported_calls += 1
            self.unreported_prompt_tokens += entry.prompt
            return
        self.calls += 1
        self.prompt_tokens += entry.prompt
        self.cached_tokens += entry.cached
        self.possible_tokens += entry.possible
        self.useful_tokens += min(entry.cached, entry.possible)
        self.shared_tokens += max(0, entry.cached - entry.possible)
        self.lost_prefix_tokens += entry.lost_prefix
        if entry.first:
            self.first_calls += 1
            self.first_prompt_tokens += entry.prompt
            self.first_cached_tokens += entry.cached
        if entry.host is not None:
            self.host_tokens += entry.host
            self.storage_tokens += entry.storage
            self.tiered_tokens += entry.cached
        for miss in entry.misses:
            self.waste[miss.cause] += miss.tokens
            if miss.reason:
                self.moved[miss.reason] += miss.tokens
        for miss in entry.beyond:
            self.beyond[miss.cause] += miss.tokens

    def summary(self) -> dict[str, object]:
        """JSON form.

        ``hit_rate`` compares with ``ceiling``: hits beyond a session's own prefix, on what it shares with
        others, are in ``hit_rate_with_shared`` only. ``efficiency_without_refit`` leaves out misses whose
        cause is ``refit_flush``, ``efficiency_without_faults`` also those of moves and restarts.
        """
        faults = sum(self.waste[cause] for cause in _FAULTS)
        return {
            **{name: getattr(self, name) for name in COUNTS},
            "hit_rate": _rate(self.useful_tokens, self.prompt_tokens),
            "ceiling": _rate(self.possible_tokens, self.prompt_tokens),
            "efficiency": _rate(self.useful_tokens, self.possible_tokens),
            "efficiency_without_refit": _rate(self.useful_tokens, self.possible_tokens - self.waste["refit_flush"]),
            "efficiency_without_faults": _rate(self.useful_tokens, self.possible_tokens - faults),
            "hit_rate_with_shared": _rate(self.cached_tokens, self.prompt_tokens),
            "wasted_tokens": self.wasted_tokens,
            "waste": _named(self.waste, CAUSES),
            "moved": _named(self.moved, MOVES),
            "beyond": _named(self.beyond, BEYOND),
            "refit_flush_tokens": self.waste["refit_flush"],
            "unknown_tokens": self.waste["unknown"],
        }

    def include(self, summary: Json) -> None:
        """Add the sums of another ledger's ``summary()``."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + summary[name])
        for name in _KINDS:
            getattr(self, name).update(cast("dict[str, int]", summary[name]))

    def packed(self) -> bytes:
        """The sums in a few dozen bytes; ``unpacked`` reads them."""
        numbers = [getattr(self, name) for name in COUNTS]
        for name, causes in _KINDS.items():
            known: Counter[str] = getattr(self, name)
            numbers += [known[cause] for cause in causes]
        while numbers and not numbers[-1]:
            numbers.pop()
        return b"".join(map(_varint, numbers))

    @classmethod
    def unpacked(cls, data: bytes) -> CacheFigures:
        """Back from ``packed``."""
        numbers, figures = iter(_varints(data)), cls()
        for name in COUNTS:
            setattr(figures, name, next(numbers, 0))
        for name, causes in _KINDS.items():
            for cause in causes:
                if tokens := next(numbers, 0):
                    getattr(figures, name)[cause] = tokens
        return figures


_KINDS = {"waste": CAUSES, "moved": MOVES, "beyond": BEYOND}
COUNTS = tuple(each.name for each in fields(CacheFigures) if each.name not in _KINDS)
"""Plain sums of ``CacheFigures``, in order."""


class CacheLedger:
    """Figures of a run, of each engine and model, and of each session that is known."""

    def __init__(self) -> None:
        self.total = CacheFigures()
        self.engines: dict[str, CacheFigures] = {}
        self.models: dict[str, CacheFigures] = {}
        self.sessions: dict[str, CacheFigures] = {}
        self._resting: dict[str, bytes] = {}
        """Figures of sessions that nobody uses, packed: one small object each instead of a dozen. Beyond
        512 bytes it would lie alone on a page of the C library's heap and hold all of it."""
        self._worst: dict[str, int] = {}
        """Wasted tokens of the most wasteful sessions."""

    def record(self, session_key: str, entry: Entry, *, known_only: bool = False) -> None:
        """Count one call once, in every view; with ``known_only`` in that of the session only if there is one."""
        known = session_key in self.sessions or session_key in self._resting
        session = self._woken(session_key) if known or not known_only else CacheFigures()
        for view in (
            self.total,
            self.engines.setdefault(entry.engine_id, CacheFigures()),
            self.models.setdefault(entry.model, CacheFigures()),
            session,
        ):
            view.add(entry)
        if entry.misses and session_key in self.sessions:
            self._rank(session_key, session.wasted_tokens)

    def forget(self, session_key: str) -> None:
        """Drop the view of one session; the totals keep what it added."""
        self.sessions.pop(session_key, None)
        self._resting.pop(session_key, None)
        self._worst.pop(session_key, None)

    def rest(self, session_key: str) -> None:
        """Keep the view of a session that is not used now in as little memory as it takes."""
        figures = self.sessions.pop(session_key, None)
        if figures is not None:
            self._resting[session_key] = figures.packed()

    def session(self, session_key: str) -> dict[str, object]:
        """Figures of one session; all 0 when it is not known."""
        figures = self.sessions.get(session_key)
        return (figures or CacheFigures.unpacked(self._resting.get(session_key, b""))).summary()

    def summary(self, *, sessions: int = 0) -> dict[str, object]:
        """Figures of the run, of each engine and model, and of the ``sessions`` most wasteful sessions."""
        out: dict[str, object] = {
            **self.total.summary(),
            "engines": {name: figures.summary() for name, figures in self.engines.items()},
            "models": {name: figures.summary() for name, figures in self.models.items()},
        }
        if sessions:
            order = sorted(self._worst.items(), key=lambda each: (-each[1], each[0]))[:sessions]
            out["sessions"] = [{"session_id": key, **self.session(key)} for key, _ in order]
        return out

    def _woken(self, session_key: str) -> CacheFigures:
        rested = self._resting.pop(session_key, None)
        if rested is not None:
            self.sessions[session_key] = CacheFigures.unpacked(rested)
        return self.sessions.setdefault(session_key, CacheFigures())

    def _rank(self, session_key: str, wasted: int) -> None:
        self._worst[session_key] = wasted
        if len(self._worst) > _WORST:
            del self._worst[min(self._worst, key=lambda key: self._worst[key])]


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole > 0 else None


def _named(counter: Counter[str], names: tuple[str, ...]) -> dict[str, int]:
    return {name: counter[name] for name in names if counter[name]}


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the top bit says that more follow."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _varints(data: bytes) -> list[int]:
    numbers, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(value)
            value = shift = 0
    return numbers
