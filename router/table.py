"""Which session lives on which target, and how loaded targets are: pure state, no I/O, no clock.

A pinned lookup is one dictionary access. Every ``begin`` is matched by one ``end``, every pin by a ``release`` or a
move, and after all of them every counter is 0. Pins are scoped by model: a key that also asks a judge keeps its
place at the policy. Depends on ``placement``, ``growth`` and ``targets``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from math import sqrt
from typing import TypedDict, Unpack

from tollway.records import PolicyVersion
from tollway.router.growth import Growth
from tollway.router.placement import NO_TARGETS, choose, has_place, most_room, takes
from tollway.router.targets import ANY, EngineLoad, Target, Wanted

__all__ = ["Ask", "EngineFacts", "EngineLoad", "MoveReason", "Pin", "RoutingTable"]

FILLED = 0.95
"""Share of an engine's KV room that sessions may take with their expected growth. The rest is for KV of ended
sessions, which is newer than that of sessions whose tools take long."""
SPREAD = 0.5
"""Standard deviations of the sessions' ends that stay free beside their expected growth. docs/routing.md has what the
simulator says of both: without them scarce KV loses 1 to 3 % of the possible hits, with twice as much runs take
longer and gain 0.2 %."""
MoveReason = str
"""Why a session left its target: ``engine_lost``, ``migration``, ``drain`` (its operator took it away), ``version``."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a new session asks for."""

    key: str
    tokens: int
    """Of its first prompt."""
    model: str = ""
    group: str = ""
    parent: str = ""
    """Key of the session that started this one."""
    want: Wanted = ANY


@dataclass(slots=True, eq=False)
class Pin:
    """A session's place."""

    engine_id: str
    dp_rank: int | None = None
    model: str = ""
    group: str = ""
    resident_tokens: int = 0
    """Longest prompt plus reply so far: what its KV takes at most."""
    reserved_tokens: int = 0
    """Resident tokens plus the growth that is expected."""
    variance: int = 0
    """Of what it has at its end, in tokens squared."""
    moved: MoveReason | None = None
    """Why the session last moved: also branches of calls from before it have that reason for their misses."""
    resting: bool = False
    """Nobody has used it for a while: it counts nowhere."""
    target: Target | None = None
    """``None`` while its engine is not known."""
    first_tokens: int = 0
    """Of its first prompt, or what it had when it was restored."""


class EngineFacts(TypedDict, total=False):
    """What ``set_engine`` takes; numbers are the whole engine's, and an absent one is as in ``Target``."""

    model: str
    ranks: int
    budget_tokens: int | None
    max_in_flight: int | None
    version: PolicyVersion | None
    admits: bool
    serves: bool


@dataclass(slots=True)
class _Group:
    home: Target | None = None
    """Where its siblings go."""
    sessions: int = 0


def _nobody() -> None:
    """Nobody waits for room."""


class RoutingTable:
    """Targets, pins, resident tokens and calls in flight."""

    def __init__(self) -> None:
        self.pins: dict[str, Pin] = {}
        """Of the policy; ``pin(key, model)`` reaches those of other models."""
        self.on_room: Callable[[], None] = _nobody
        """Called when a session may fit that did not before."""
        self._pins: dict[str, dict[str, Pin]] = {"": self.pins}
        self._engines: dict[str, list[Target]] = {}
        self._models: dict[str, list[Target]] = {}
        self._groups: dict[tuple[str, str], _Group] = {}
        self._growth: defaultdict[str, Growth] = defaultdict(Growth)
        self._placed = 0

    # -- targets -----------------------------------------------------------------------------------

    def set_engine(self, engine_id: str, **facts: Unpack[EngineFacts]) -> None:
        """Make an engine known, or update it. Its sessions from before it was known count from now on."""
        ranks, model = max(1, facts.get("ranks", 1)), facts.get("model", "")
        old = {target.dp_rank: target for target in self._engines.get(engine_id, ())}
        names = [None] if ranks == 1 else list(range(ranks))
        if old and (set(old) != set(names) or next(iter(old.values())).model != model):
            self.remove_engine(engine_id)
            old = {}
        targets = [old.get(rank) or Target(engine_id, rank, model) for rank in names]
        budget, limit = facts.get("budget_tokens"), facts.get("max_in_flight")
        for target in targets:
            target.budget_tokens = None if budget is None else int(budget * FILLED) // ranks
            target.max_in_flight = None if limit is None else max(1, limit // ranks)
            target.version = facts.get("version")
            target.admits, target.serves = facts.get("admits", True), facts.get("serves", True)
        if not old:
            self._engines[engine_id] = targets
            self._models.setdefault(model, []).extend(targets)
            for pin in self._pins.get(model, {}).values():
                if pin.engine_id == engine_id and pin.target is None:
                    pin.target = next((each for each in targets if each.dp_rank == pin.dp_rank), None)
                    _count(pin, 1)
        self.on_room()

    def remove_engine(self, engine_id: str) -> None:
        """Forget an engine. Its pins stay until their sessions move or end; its calls still end by ``end``."""
        gone = self._engines.pop(engine_id, [])
        for target in gone:
            self._models[target.model].remove(target)
        for pins in self._pins.values():
            for pin in pins.values():
                if pin.engine_id == engine_id and pin.target is not None:
                    _count(pin, -1)
                    pin.target = None
        for group in self._groups.values():
            if group.home in gone:
                group.home = None

    def targets(self, engine_id: str) -> list[Target]:
        """Ranks of an engine, in order; empty when it is not known."""
        return list(self._engines.get(engine_id, ()))

    def of_model(self, model: str) -> list[Target]:
        """All targets of a model."""
        return list(self._models.get(model, ()))

    def target_of(self, pin: Pin) -> Target | None:
        """Where a session's calls go; ``None`` when its engine, or its rank, is no longer known."""
        return pin.target

    def load(self, engine_id: str) -> EngineLoad:
        """Sums over the ranks of one engine. ``KeyError`` when unknown."""
        return EngineLoad.of(engine_id, self._engines[engine_id])

    def in_flight(self, engine_id: str) -> int:
        """Calls running on an engine; 0 when it is not known."""
        return sum(each.in_flight for each in self._engines.get(engine_id, ()))

    def begin(self, target: Target) -> None:
        """A call starts."""
        target.in_flight += 1

    def end(self, target: Target) -> None:
        """A call ended, however it ended and whether or not its engine is still known."""
        target.in_flight -= 1

    # -- sessions ----------------------------------------------------------------------------------

    def places(self) -> list[tuple[str, Pin]]:
        """Every session that has a place, once for each of its models."""
        return [(key, pin) for pins in self._pins.values() for key, pin in pins.items()]

    def pin(self, key: str, model: str = "") -> Pin | None:
        """A session's place; ``None`` when it has none yet."""
        pins = self._pins.get(model)
        return None if pins is None else pins.get(key)

    def place(
        self,
        key: str,
        *,
        model: str = "",
        tokens: int,
        group: str = "",
        parent: str = "",
        want: Wanted = ANY,
        over_budget: bool = False,
    ) -> Pin | None:
        """Pin a new session, or return its pin. ``None`` when no target that takes it has room.

        With ``over_budget`` the target that is least over takes it: the engine then evicts, which costs time and
        loses nothing. A child of a pinned session is never refused for room: its parent waits for it.
        """
        return self.settle(Ask(key, tokens, model, group, parent, want), over_budget=over_budget)

    def expected(self, ask: Ask) -> int:
        """Tokens that a new session needs with its expected growth."""
        return max(ask.tokens, self._growth[ask.model].reserve(ask.tokens))

    def settle(self, ask: Ask, *, avoid: Collection[Target] = NO_TARGETS, over_budget: bool = False) -> Pin | None:
        """As ``place``; ``avoid`` are targets that others have claimed."""
        if (pin := self.pin(ask.key, ask.model)) is not None:
            return pin
        targets = self._models.get(ask.model, ())
        need = self.expected(ask)
        parent = self.pin(ask.parent, ask.model) if ask.parent else None
        if parent is not None and parent.target is not None and takes(parent.target, ask.want):
            target: Target | None = parent.target
        else:
            group = self._groups.get((ask.model, ask.group)) if ask.group else None
            home = group.home if group is not None else None
            target = choose(targets, need=need, want=ask.want, home=home, avoid=avoid)
        if target is None and (over_budget or parent is not None):
            target = most_room(targets, want=ask.want)
        if target is None:
            return None
        growth = self._growth[ask.model]
        growth.started(ask.tokens)
        variance = growth.variance(ask.tokens)
        pin = Pin(
            target.engine_id, target.dp_rank, ask.model, ask.group, ask.tokens, need, variance, first_tokens=ask.tokens
        )
        self._attach(ask.key, pin, target)
        return pin

    def restore(
        self,
        key: str,
        engine_id: str,
        *,
        dp_rank: int | None = None,
        group: str = "",
        resident_tokens: int = 0,
        model: str = "",
    ) -> None:
        """Take over a pin from before a restart; the engine may become known later."""
        if self.pin(key, model) is not None:
            return
        growth = self._growth[model]
        growth.restored(resident_tokens)
        reserved = growth.reserve(resident_tokens)
        pin = Pin(
            engine_id,
            dp_rank,
            model,
            group,
            resident_tokens,
            reserved,
            growth.variance(resident_tokens),
            first_tokens=resident_tokens,
        )
        known = (each for each in self._models.get(model, ()) if each.engine_id == engine_id)
        self._attach(key, pin, next((each for each in known if each.dp_rank == dp_rank), None))

    def move(
        self,
        key: str,
        reason: MoveReason,
        *,
        model: str = "",
        want: Wanted = ANY,
        exclude: Collection[str] = frozenset(),
    ) -> Pin | None:
        """Re-place a pinned session ``elsewhere``; ``None`` (and the old pin stays) when there is nowhere to go."""
        old = self._pins[model][key]
        target = self.elsewhere(old, reason, want=want, exclude=exclude)
        if target is None:
            return None
        return self.move_to(key, target, reason)

    def move_to(self, key: str, target: Target, reason: MoveReason) -> Pin:
        """Re-place a pinned session where somebody else decided."""
        old = self._pins[target.model][key]
        self._detach(key, old)
        pin = replace(old, engine_id=target.engine_id, dp_rank=target.dp_rank, moved=reason, resting=False)
        self._attach(key, pin, target)
        self.on_room()
        return pin

    def elsewhere(
        self, pin: Pin, reason: MoveReason, *, want: Wanted = ANY, exclude: Collection[str] = frozenset()
    ) -> Target | None:
        """Target that ``move`` would take. ``exclude`` names engines.

        A migration needs KV room and a free place among the calls; every other move goes over budget if it must,
        since the session is in the middle. After a lost engine no rank of it is taken.
        """
        lost, migration = reason == "engine_lost", reason == "migration"
        targets = self._models.get(pin.model, ())
        avoid = {
            each
            for each in targets
            if each is pin.target
            or each.engine_id in exclude
            or (lost and each.engine_id == pin.engine_id)
            or (migration and not has_place(each))
        }
        target = choose(targets, need=pin.reserved_tokens, want=want, avoid=avoid)
        return target if target is not None or migration else most_room(targets, want=want, avoid=avoid)

    def grow(self, key: str, tokens: int, model: str = "") -> None:
        """A call of the session left ``tokens`` tokens of prompt plus reply on its target."""
        pin = self.pin(key, model)
        if pin is None:
            return
        if pin.resting:
            self._wake(pin)
        if tokens <= pin.resident_tokens:
            return
        growth = self._growth[model]
        growth.grew(pin.resident_tokens, tokens)
        _count(pin, -1)
        pin.resident_tokens, pin.reserved_tokens = tokens, growth.reserve(tokens)
        pin.variance = growth.variance(tokens)
        _count(pin, 1)

    def urgency(self, pin: Pin) -> int:
        """Steps of priority that a session has earned by its length: the longest ones decide when a run ends."""
        return self._growth[pin.model].doublings(pin.resident_tokens)

    def rest(self, key: str) -> None:
        """Nobody has used the session for a while: its KV is what the engine evicts first, so it counts no more."""
        for pin in self._of_key(key):
            if not pin.resting:
                _count(pin, -1)
                pin.resting = True
        self.on_room()

    def wake(self, key: str) -> None:
        """The session is used again. It counts at once, room or not: a session never waits in its middle."""
        for pin in self._of_key(key):
            self._wake(pin)

    def release(self, key: str) -> None:
        """Forget a session, at all models. Unknown sessions are fine."""
        for model, pins in self._pins.items():
            if (pin := pins.get(key)) is not None:
                self._detach(key, pin)
                self._growth[model].ended(pin.first_tokens, pin.resident_tokens)
        self.on_room()

    def unpin(self, key: str, pin: Pin) -> None:
        """Take back a placement that was not used; another pin of the key stays."""
        if self.pin(key, pin.model) is pin:
            self._detach(key, pin)
            self._growth[pin.model].abandoned(pin.first_tokens, pin.resident_tokens)
            self.on_room()

    def has_group(self, model: str, group: str) -> bool:
        """Whether a session of the group is pinned."""
        return (model, group) in self._groups

    # -- inside ------------------------------------------------------------------------------------

    def _of_key(self, key: str) -> Iterator[Pin]:
        return (pin for pins in self._pins.values() if (pin := pins.get(key)) is not None)

    def _wake(self, pin: Pin) -> None:
        if pin.resting:
            pin.resting = False
            _count(pin, 1)

    def _attach(self, key: str, pin: Pin, target: Target | None) -> None:
        self._placed += 1
        self._pins.setdefault(pin.model, {})[key] = pin
        pin.target = target
        _count(pin, 1)
        if target is not None:
            target.last_chosen = self._placed
        if pin.group:
            group = self._groups.setdefault((pin.model, pin.group), _Group())
            group.sessions += 1
            group.home = target or group.home  # after a move later siblings follow

    def _detach(self, key: str, pin: Pin) -> None:
        del self._pins[pin.model][key]
        _count(pin, -1)
        if pin.group:
            group = self._groups[pin.model, pin.group]
            group.sessions -= 1
            if group.sessions <= 0:
                del self._groups[pin.model, pin.group]


def _count(pin: Pin, sign: int) -> None:
    """Add a session that is used to its target's load, or take it away."""
    if (target := pin.target) is not None and not pin.resting:
        target.sessions += sign
        target.resident_tokens += sign * pin.resident_tokens
        target.reserved_tokens += sign * pin.reserved_tokens
        target.variance += sign * pin.variance
        target.spread_tokens = int(SPREAD * sqrt(target.variance))
