"""Where the next call of a session runs: its pin, or a new place, or a move, and a free slot there.

Owns the order of these questions and what is done when the answer is "not yet": new sessions wait in the
admission queue, calls wait for a slot and, within a deadline, for the weight version that they want. A call
of a session that has its place costs a few lookups, however many engines there are. Depends on ``table``,
``admission``, ``fleet`` and ``versions``.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Protocol, TypedDict

from tollway.errors import NoEngine, VersionNotReady
from tollway.records import PolicyVersion
from tollway.router.admission import Admission
from tollway.router.config import RouterConfig
from tollway.router.fleet import Engine, Fleet
from tollway.router.health import EngineState
from tollway.router.placement import takes
from tollway.router.queues import CallTicket
from tollway.router.table import Pin, RoutingTable
from tollway.router.targets import ANY, Target, Wanted
from tollway.router.versions import Changes, ExactHolders, not_ready, will_come

__all__ = ["Placement", "Seat", "Seats", "TermFields", "Terms"]

logger = logging.getLogger(__name__)
_LOOK_S = 0.25
"""Between two looks at engines that pause."""


class TermFields(TypedDict, total=False):
    """The fields of ``Terms``, as keyword arguments."""

    group: str
    model: str
    parent: str
    want: Wanted
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a call asks of its place."""

    group: str = ""
    """Sessions of one group start together."""
    model: str = ""
    """Name of a model in the fleet; "" is the policy."""
    parent: str = ""
    """Key of the session that started this one."""
    want: Wanted = ANY
    priority: int = 0
    """Higher ones are first wherever calls wait."""


class Placement(Protocol):
    """Decides where new sessions go, in place of this router's own admission: a table that servers share."""

    async def place(
        self, key: str, *, model: str, tokens: int, group: str, parent: str, want: Wanted, priority: int
    ) -> Pin:
        """As ``Admission.place``."""

    async def confirm(self, key: str, pin: Pin, want: Wanted = ANY) -> Pin:
        """The pin that holds, for one that this router's table restored or moved by itself. Cheap when nothing did.

        Whoever decides may put the session elsewhere; the table then has the pin that is returned.
        """

    def served(self, key: str, rid: str) -> Pin | None:
        """The new pin of a session whose call another engine served than the one expected; mostly ``None``."""

    def grow(self, key: str, tokens: int, model: str = "") -> None:
        """As ``RoutingTable.grow``."""

    def release(self, key: str) -> None:
        """As ``RoutingTable.release``."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One of a target's places for running calls, held for one call."""

    engine: Engine
    target: Target
    pin: Pin
    priority: int = 0
    """The session's own, and what its length adds."""
    ticket: CallTicket | None = None
    """Its place among the calls of the target."""
    exact: PolicyVersion | None = None
    """The version that its call is fixed to."""


class Seats:
    """Finds the seat of every call of one router."""

    def __init__(
        self,
        config: RouterConfig,
        table: RoutingTable,
        fleet: Fleet,
        admission: Admission,
        placement: Placement | None = None,
    ) -> None:
        self.holders = ExactHolders()
        self.placement = placement
        """Asked for new sessions; ``None``: this router's own admission."""
        self._config = config
        self._table = table
        self._fleet = fleet
        self._admission = admission
        self._changes = Changes()
        self._held: Counter[Pin] = Counter()
        """Seats that calls hold now, by place of their session."""

    def changed(self) -> None:
        """An engine changed: whoever waits for that looks again."""
        self._admission.changed()
        self._changes.notify()

    # -- a seat ------------------------------------------------------------------------------------

    async def take(self, key: str, tokens: int, terms: Terms) -> Seat:
        """A seat for a call of session ``key`` whose prompt has ``tokens`` tokens; ``give`` it back in any case.

        Raises ``NoEngine``, ``CapacityExceeded`` and, after ``router.version_wait_s``, ``VersionNotReady``.
        """
        while True:
            engine, target, pin = await self._found(key, tokens, terms)
            priority = terms.priority + self._table.urgency(pin)
            ticket = await self._admission.enter(target, priority=priority)
            # While the call waited the engine may have gone or got other weights, or the session have moved.
            if target.serves and terms.want.holds(target.version) and self._is_home(key, pin, target):
                self._held[pin] += 1
                self.holders.begin(engine.id, terms.want.exact)
                return Seat(engine, target, pin, priority, ticket, terms.want.exact)
            self._admission.leave(ticket)

    def give(self, seat: Seat) -> None:
        """The call of a seat from ``take`` ended."""
        self.holders.end(seat.engine.id, seat.exact)
        self._held[seat.pin] -= 1
        if not self._held[seat.pin]:
            del self._held[seat.pin]
        if seat.ticket is not None:
            self._admission.leave(seat.ticket)

    def _is_home(self, key: str, pin: Pin, target: Target) -> bool:
        return self._table.pin(key, pin.model) is pin and self._table.target_of(pin) is target

    async def _found(self, key: str, tokens: int, terms: Terms) -> tuple[Engine, Target, Pin]:
        deadline: float | None = None
        patience: float | None = None
        while True:
            try:
                pin = self._table.pin(key, terms.model)
                if pin is None:
                    pin = await self._placed(key, tokens, terms)
                elif pin.target is None:
                    await self._until_joined(pin)
                found = self._settled(key, pin, terms)
                return found if self.placement is None else await self._confirmed(key, found, terms)
            except VersionNotReady:
                now = time.monotonic()
                deadline = now + self._config.version_wait_s if deadline is None else deadline
                versions = self.versions(terms.model)
                if not will_come(terms.want, versions) or not await self._changes.wait(deadline - now):
                    raise not_ready(terms.want, self.versions(terms.model)) from None
            except NoEngine:
                # A pause, or "no room now", is no reason to refuse: nobody gains from trying again.
                now = time.monotonic()
                patience = now + self._config.admission_timeout_s if patience is None else patience
                if now >= patience or not self._soon(terms.model):
                    raise
                # The pause may end between two looks, so nobody trusts in being woken.
                await self._changes.wait(min(patience - now, _LOOK_S))

    async def _until_joined(self, pin: Pin) -> None:
        """A server that was started again knows where its sessions live before it has reached those engines."""
        deadline = time.monotonic() + self._config.connect_timeout_s
        while pin.target is None:
            engine = self._fleet.engines.get(pin.engine_id)
            if engine is None or engine.health.state is not EngineState.JOINING:
                return
            if not await self._changes.wait(deadline - time.monotonic()):
                return

    async def _placed(self, key: str, tokens: int, terms: Terms) -> Pin:
        """A place for a new session, waited for."""
        chooser = self.placement if self.placement is not None else self._admission
        try:
            pin = await chooser.place(
                key,
                model=terms.model,
                tokens=tokens,
                group=terms.group,
                parent=terms.parent,
                want=terms.want,
                priority=terms.priority,
            )
        except NoEngine:
            if self.placement is not None:
                raise
            raise self._fleet.none_left(terms.model) from None  # with every engine's last words
        known = self._table.pin(key, terms.model)
        if known is None:  # chosen elsewhere: load and slots are counted here all the same
            self._table.restore(
                key,
                pin.engine_id,
                dp_rank=pin.dp_rank,
                group=terms.group,
                resident_tokens=pin.resident_tokens,
                model=terms.model,
            )
            known = self._table.pin(key, terms.model)
        return known if known is not None else pin

    def _soon(self, model: str) -> bool:
        """Whether some engine takes sessions again by itself, or does so by now."""
        if self._fleet.soon(model):
            return True
        # The end of a pause may be due and not yet in the table.
        return self.placement is None and bool(self._fleet.serving(model))

    def _settled(self, key: str, pin: Pin, terms: Terms) -> tuple[Engine, Target, Pin]:
        """Engine, target and pin of a session that has a place, after the move that it may need."""
        target = self._table.target_of(pin)
        engine = self._fleet.engines.get(pin.engine_id)
        if pin.resting:
            self._table.wake(key)
        if target is None or engine is None or not target.serves:
            return self._moved(key, pin, self._why_gone(pin), terms)
        if not terms.want.holds(target.version):
            return self._moved(key, pin, "version", terms)
        if self._admission.should_move(pin, want=terms.want):
            # An engine whose calls break looks empty: nobody goes there to save time.
            failing = frozenset(e.id for e in self._fleet.engines.values() if e.doubted or e.health.failures)
            moved = self._table.move(key, "migration", model=terms.model, want=terms.want, exclude=failing)
            if moved is not None:
                return self._settled_at(moved)
        return engine, target, pin

    async def _confirmed(self, key: str, found: tuple[Engine, Target, Pin], terms: Terms) -> tuple[Engine, Target, Pin]:
        """What was found here, or what whoever places sessions makes of it."""
        pin = found[2] if self.placement is None else await self.placement.confirm(key, found[2], terms.want)
        return found if pin is found[2] else self._settled_at(pin)

    def _why_gone(self, pin: Pin) -> str:
        """A lost engine is still known, or was dead when it was taken away; others an operator took away."""
        engine = self._fleet.engines.get(pin.engine_id)
        if engine is None:
            return "engine_lost" if pin.engine_id in self._fleet.died else "drain"
        # It may have come back with another number of ranks: the session's is gone, and another of them will do.
        return "rank" if pin.target is None and engine.health.takes_calls else "engine_lost"

    def _moved(self, key: str, pin: Pin, reason: str, terms: Terms) -> tuple[Engine, Target, Pin]:
        moved = self._table.move(key, reason, model=terms.model, want=terms.want)
        if moved is not None:
            logger.info("a session moved from %s to %s: %s", pin.engine_id, moved.engine_id, reason)
            return self._settled_at(moved)
        if terms.want is not ANY and (reason == "version" or self._fleet.serving(terms.model)):
            raise not_ready(terms.want, self.versions(terms.model))
        raise self._fleet.none_left(terms.model)

    def _settled_at(self, pin: Pin) -> tuple[Engine, Target, Pin]:
        target, engine = self._table.target_of(pin), self._fleet.engines.get(pin.engine_id)
        if target is None or engine is None:
            raise self._fleet.none_left(pin.model)
        return engine, target, pin

    # -- after a failure ---------------------------------------------------------------------------

    def leave(self, key: str, seat: Seat, terms: Terms) -> bool:
        """Take the session off an engine that failed it; False when there is nowhere to go."""
        pin = self._table.pin(key, terms.model)
        if pin is None or pin.engine_id != seat.engine.id:
            return True  # another call of the session was first
        exclude = frozenset((seat.engine.id,))
        reason = self._why_gone(pin)
        return self._table.move(key, reason, model=terms.model, want=terms.want, exclude=exclude) is not None

    def withdraw(self, key: str, seat: Seat, terms: Terms, prompt_tokens: int) -> bool:
        """Undo the placement of a session of which the engine has nothing yet, when another may take it instead.

        A session with another call there stays: one session is on one engine.
        """
        pin = self._table.pin(key, terms.model)
        if pin is not seat.pin or pin.resident_tokens > prompt_tokens or pin in self._held:
            return False
        if not any(
            takes(each, terms.want) and each.engine_id != seat.engine.id for each in self._table.of_model(terms.model)
        ):
            return False
        self._table.unpin(key, pin)
        return True

    def served(self, key: str, rid: str, seat: Seat) -> Seat | None:
        """The seat that really served a call, when an outer gateway sent it elsewhere; mostly ``None``."""
        pin = self.placement.served(key, rid) if self.placement is not None else None
        if pin is None:
            return None
        engine, target, pin = self._settled_at(pin)
        return Seat(engine, target, pin)

    def grow(self, key: str, tokens: int, terms: Terms) -> None:
        """A call left ``tokens`` tokens of prompt plus reply at the session's place."""
        self._table.grow(key, tokens, terms.model)
        if self.placement is not None:
            self.placement.grow(key, tokens, terms.model)

    def release(self, key: str) -> None:
        """The session ended."""
        self._table.release(key)
        self.holders.release(key)
        if self.placement is not None:
            self.placement.release(key)

    async def until_resumed(self, engine: Engine) -> None:
        """Wait while ``engine`` is paused, for as long as a refit may take: an attempt meanwhile would be wasted."""
        deadline = time.monotonic() + self._config.control_timeout_s
        while engine.health.state is EngineState.PAUSED and await self._changes.wait(deadline - time.monotonic()):
            pass

    async def change(self, timeout_s: float) -> bool:
        """Wait for a change of the fleet; False when none came in time."""
        return await self._changes.wait(timeout_s)

    def versions(self, model: str) -> list[PolicyVersion | None]:
        """Versions of the engines that take calls of ``model``, and ``None`` for each that is on its way."""
        return [
            engine.version if engine.health.takes_calls else None
            for engine in self._fleet.engines.values()
            if engine.model == model
        ]
