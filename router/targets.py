"""Places for sessions: engines, or data-parallel ranks of them, with their loads and their measured pace.

Holds what decisions read and nothing that decides. All counters belong to ``RoutingTable``, which alone
changes them; the pace is told by whoever runs calls. No I/O, no clock. Depends on ``records``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tollway.records import PolicyVersion

__all__ = ["ANY", "EngineLoad", "Pace", "Target", "Wanted"]

_KEEP = 0.98
"""Share of the past that one more call leaves in an average: about the last fifty calls count."""
_FASTEST_S = 1e-7
"""Seconds per token below which a fitted prefill speed is noise."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Weight versions that a session or a call accepts; by default any."""

    minimum: PolicyVersion | None = None
    exact: PolicyVersion | None = None

    def holds(self, version: PolicyVersion | None) -> bool:
        """Whether an engine with ``version`` may serve; an unknown version satisfies only who wants none.

        >>> Wanted(minimum=3).holds(4), Wanted(exact=3).holds(4), Wanted().holds(None)
        (True, False, True)
        """
        if self.minimum is None and self.exact is None:
            return True
        if version is None or (self.exact is not None and version != self.exact):
            return False
        return self.minimum is None or version >= self.minimum


ANY = Wanted()


@dataclass(slots=True)
class Pace:
    """How fast a target works: decayed least squares of a call's seconds over its new and sampled tokens."""

    calls: float = 0.0
    seconds: float = 0.0
    _first: tuple[float, float] = (0.0, 0.0)
    """Decayed sums of (uncached tokens, seconds to the first token) of calls that streamed."""
    _fit: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """Decayed sums of new*new, new*sampled, sampled*sampled, new*seconds, sampled*seconds."""

    def observe(self, *, uncached_tokens: int, output_tokens: int, call_s: float, first_s: float | None = None) -> None:
        """One call ended. ``first_s`` is the time to its first token; ``None`` when it was not seen."""
        self.calls = self.calls * _KEEP + 1.0
        self.seconds = self.seconds * _KEEP + call_s
        new, out = float(uncached_tokens), float(output_tokens)
        if first_s is not None and new > 0:
            tokens, seconds = self._first
            self._first = (tokens * _KEEP + new, seconds * _KEEP + first_s)
        nn, no, oo, nt, ot = self._fit
        self._fit = (
            nn * _KEEP + new * new,
            no * _KEEP + new * out,
            oo * _KEEP + out * out,
            nt * _KEEP + new * call_s,
            ot * _KEEP + out * call_s,
        )

    @property
    def call_s(self) -> float | None:
        """Mean seconds of a call; ``None`` before the first."""
        return self.seconds / self.calls if self.calls else None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens computed per second; ``None`` while no call tells.

        Times to first tokens say it directly. Without any, whole calls are split by least squares; when new and
        sampled tokens went up and down together that is impossible, and all tokens share the time alike.
        """
        tokens, seconds = self._first
        if tokens > 0:
            return tokens / max(seconds, tokens * _FASTEST_S)
        nn, no, oo, nt, ot = self._fit
        if nn <= 0:
            return None
        det = nn * oo - no * no
        if oo <= 0:
            per_token = nt / nn
        elif det > 1e-3 * nn * oo:
            per_token = (nt * oo - ot * no) / det
        else:
            per_token = (nt + ot) / (nn + 2 * no + oo)
        return 1.0 / max(per_token, _FASTEST_S)


@dataclass(slots=True, eq=False)
class Target:
    """One place for sessions: an engine, or one data-parallel rank of it."""

    engine_id: str
    dp_rank: int | None = None
    """``None`` when the engine has a single one, which then needs no name."""
    model: str = ""
    """Name of the model in the fleet; "" is the policy."""
    budget_tokens: int | None = None
    """KV that sessions may take on this rank; ``None`` when the engine does not say what it has."""
    max_in_flight: int | None = None
    """Calls that may run at once on this rank; ``None`` for no limit."""
    version: PolicyVersion | None = None
    admits: bool = True
    """Takes new sessions."""
    serves: bool = True
    """Takes calls of its own sessions."""
    resident_tokens: int = 0
    """KV that the sessions here hold, those that rest left out."""
    reserved_tokens: int = 0
    """The same plus the growth that is expected of them; never less than ``resident_tokens``."""
    variance: int = 0
    """Of what the sessions here have at their ends, summed, in tokens squared."""
    spread_tokens: int = 0
    """Room that stays free for growth beyond what is expected."""
    sessions: int = 0
    """Sessions pinned here, those that rest left out."""
    in_flight: int = 0
    """Calls running."""
    waiting: int = 0
    """Calls that wait for one of ``max_in_flight`` places."""
    last_chosen: int = 0
    """Count of placements when a session was last placed here; 0 for never."""
    pace: Pace = field(default_factory=Pace)

    @property
    def name(self) -> str:
        """Engine, and rank when it has several."""
        return self.engine_id if self.dp_rank is None else f"{self.engine_id}/{self.dp_rank}"

    def observe(self, *, uncached_tokens: int, output_tokens: int, call_s: float, first_s: float | None = None) -> None:
        """A call ended here: what it had to compute, what it sampled, and how long it took."""
        self.pace.observe(uncached_tokens=uncached_tokens, output_tokens=output_tokens, call_s=call_s, first_s=first_s)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What all ranks of one engine carry."""

    engine_id: str
    resident_tokens: int
    reserved_tokens: int
    sessions: int
    in_flight: int
    waiting: int

    @classmethod
    def of(cls, engine_id: str, ranks: Sequence[Target]) -> EngineLoad:
        """Sums over the ranks of one engine."""
        names = ("resident_tokens", "reserved_tokens", "sessions", "in_flight", "waiting")
        return cls(engine_id, *(sum(getattr(each, name) for each in ranks) for name in names))
