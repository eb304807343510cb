"""Which session lives on which engine, and how loaded engines are: pure state, no I/O, no clock.

A pinned lookup is one dictionary access. Every ``begin`` is matched by one ``end``, every ``pin`` by a
``release`` or a move. Depends on ``placement``.
"""

from __future__ import annotations

from dataclasses import dataclass

from tollway.router.placement import EngineLoad, choose_engine

__all__ = ["MoveReason", "Pin", "RoutingTable"]

MoveReason = str
"""Why a session left its engine; ``engine_lost`` so far, removed ones included."""


@dataclass(slots=True)
class Pin:
    """A session's place."""

    engine_id: str
    group: str
    dp_rank: int | None = None
    resident_tokens: int = 0
    """Longest prompt plus reply so far: what its KV takes at most."""
    moved: MoveReason | None = None
    """Set by the last move, cleared by the first call after it."""


@dataclass(slots=True)
class _Engine:
    budget_tokens: int | None
    resident_tokens: int = 0
    sessions: int = 0
    in_flight: int = 0
    last_chosen: int = 0


@dataclass(slots=True)
class _Group:
    engine_id: str
    sessions: int = 0


class RoutingTable:
    """Pins, resident tokens and calls in flight."""

    def __init__(self) -> None:
        self.pins: dict[str, Pin] = {}
        self._engines: dict[str, _Engine] = {}
        self._groups: dict[str, _Group] = {}
        self._placed = 0

    # -- engines -----------------------------------------------------------------------------------

    def add_engine(self, engine_id: str, *, budget_tokens: int | None) -> None:
        """Make an engine known; adding a known one updates its budget."""
        known = self._engines.setdefault(engine_id, _Engine(budget_tokens))
        known.budget_tokens = budget_tokens

    def remove_engine(self, engine_id: str) -> None:
        """Forget an engine. Its pins stay until their sessions move or end."""
        self._engines.pop(engine_id, None)

    def in_flight(self, engine_id: str) -> int:
        """Calls running on an engine."""
        engine = self._engines.get(engine_id)
        return engine.in_flight if engine else 0

    def load(self, engine_id: str) -> EngineLoad:
        """Snapshot of one engine. ``KeyError`` when unknown."""
        engine = self._engines[engine_id]
        return EngineLoad(engine_id, engine.resident_tokens, engine.sessions, engine.budget_tokens, engine.last_chosen)

    def begin(self, engine_id: str) -> None:
        """A call starts on an engine."""
        self._engines[engine_id].in_flight += 1

    def end(self, engine_id: str) -> None:
        """A call ended, however it ended."""
        if (engine := self._engines.get(engine_id)) is not None:
            engine.in_flight -= 1

    # -- sessions ----------------------------------------------------------------------------------

    def place(self, key: str, serving: list[str], *, tokens: int, group: str = "") -> Pin | None:
        """Pin a new session to one of ``serving``; ``None`` when there is none."""
        sibling = self._groups.get(group) if group else None
        engine_id = choose_engine(
            [self.load(each) for each in serving],
            tokens=tokens,
            group_engine=sibling.engine_id if sibling else None,
        )
        if engine_id is None:
            return None
        pin = Pin(engine_id, group)
        self._attach(key, pin)
        return pin

    def restore(self, key: str, engine_id: str, *, group: str = "", resident_tokens: int = 0) -> None:
        """Take over a pin from before a restart."""
        if key not in self.pins:
            self._attach(key, Pin(engine_id, group, resident_tokens=resident_tokens))

    def move(self, key: str, serving: list[str], reason: MoveReason) -> Pin | None:
        """Re-place a pinned session; ``None`` (and the old pin stays) when no engine is left."""
        old = self.pins[key]
        engine_id = choose_engine([self.load(each) for each in serving], tokens=old.resident_tokens)
        if engine_id is None:
            return None
        self.release(key)
        pin = Pin(engine_id, old.group, resident_tokens=old.resident_tokens, moved=reason)
        self._attach(key, pin)
        return pin

    def grow(self, key: str, tokens: int) -> None:
        """A call of the session left ``tokens`` tokens of prompt plus reply on its engine."""
        pin = self.pins.get(key)
        if pin is None or tokens <= pin.resident_tokens:
            return
        if (engine := self._engines.get(pin.engine_id)) is not None:
            engine.resident_tokens += tokens - pin.resident_tokens
        pin.resident_tokens = tokens

    def release(self, key: str) -> None:
        """Forget a session. Unknown sessions are fine."""
        pin = self.pins.pop(key, None)
        if pin is None:
            return
        if (engine := self._engines.get(pin.engine_id)) is not None:
            engine.resident_tokens -= pin.resident_tokens
            engine.sessions -= 1
        if (group := self._groups.get(pin.group)) is not None:
            group.sessions -= 1
            if group.sessions <= 0:
                del self._groups[pin.group]

    def _attach(self, key: str, pin: Pin) -> None:
        self._placed += 1
        self.pins[key] = pin
        if (engine := self._engines.get(pin.engine_id)) is not None:
            engine.sessions += 1
            engine.resident_tokens += pin.resident_tokens
            engine.last_chosen = self._placed
        if pin.group:
            group = self._groups.setdefault(pin.group, _Group(pin.engine_id))
            group.sessions += 1
            group.engine_id = pin.engine_id  # after a move later siblings follow
