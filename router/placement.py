"""Where a session goes: pure functions over a snapshot of loads. Must not do I/O or keep state.

A new session goes to the engine with the fewest resident tokens among those that have room; ties go to
fewer sessions, then to the engine that was chosen longest ago, so list order never decides. Group siblings
go where the group started, as long as there is room. Depends on nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["EngineLoad", "choose_engine"]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine that may take sessions, at the moment of the decision."""

    engine_id: str
    resident_tokens: int
    """Tokens of the sessions pinned here."""
    sessions: int
    budget_tokens: int | None = None
    """KV room in tokens; ``None`` when the engine does not say."""
    last_chosen: int = 0
    """Counter value when a session was last placed here; 0 for never."""


def choose_engine(loads: Iterable[EngineLoad], *, tokens: int, group_engine: str | None = None) -> str | None:
    """Engine for a session of ``tokens`` tokens; ``None`` when there is no engine at all.

    Without room anywhere the least loaded engine takes it: the engine then evicts, which costs time and
    loses nothing.

    >>> choose_engine([EngineLoad("a", 10, 1), EngineLoad("b", 5, 1)], tokens=1)
    'b'
    """
    candidates = list(loads)
    if not candidates:
        return None
    roomy = [load for load in candidates if _fits(load, tokens)]
    if group_engine is not None and any(load.engine_id == group_engine for load in roomy):
        return group_engine
    best = min(roomy or candidates, key=lambda load: (load.resident_tokens, load.sessions, load.last_chosen))
    return best.engine_id


def _fits(load: EngineLoad, tokens: int) -> bool:
    return load.budget_tokens is None or load.resident_tokens + tokens <= load.budget_tokens
