"""Who is next: sessions that wait for KV room, and calls that wait for a place on a target. Pure, no clock.

Times are seconds of one clock, given by the caller, so the simulator runs this code in virtual time. Depends on
``table`` and ``targets``.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass
from itertools import count

from tollway.router.placement import by_room, reprefill_s, takes, wait_s, worth_moving
from tollway.router.table import Ask, Pin, RoutingTable
from tollway.router.targets import ANY, Target, Wanted

__all__ = ["AdmissionQueue", "CallTicket", "SessionTicket", "SlotQueue", "possible", "should_move"]

PRIORITY_S = 60.0
"""Seconds of waiting that one step of priority is worth: urgent ones go first, and nobody waits for ever."""
SIBLINGS_S = 120.0
"""A sibling of a group that is waiting or placed goes in front of whoever came up to this much earlier."""


@dataclass(slots=True, eq=False)
class SessionTicket:
    """One session that wants a place."""

    ask: Ask
    arrived: float
    order: float
    """Smaller is earlier: its arrival, less what priority and siblings are worth."""
    number: int
    pin: Pin | None = None
    """Its place, once it has one."""
    taken: bool = False
    """Somebody uses the place."""


class AdmissionQueue:
    """Sessions in the order of their arrival, per model; large ones are not overtaken for ever."""

    def __init__(self, table: RoutingTable) -> None:
        self._table = table
        self._waiting: dict[str, list[SessionTicket]] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return sum(len(each) for each in self._waiting.values())

    def offer(self, ask: Ask, *, now: float, priority: int = 0) -> SessionTicket:
        """A session arrives; ``pump`` says when it has a place."""
        order = now
        queue = self._waiting.setdefault(ask.model, [])
        if ask.group:
            siblings = (each.order for each in queue if each.ask.group == ask.group)
            first = now - SIBLINGS_S if self._table.has_group(ask.model, ask.group) else min(siblings, default=now)
            order = min(now, max(first, now - SIBLINGS_S))
        ticket = SessionTicket(ask, now, order - priority * PRIORITY_S, next(self._numbers))
        insort(queue, ticket, key=_rank)
        return ticket

    def withdraw(self, ticket: SessionTicket) -> None:
        """The session no longer waits."""
        queue = self._waiting.get(ticket.ask.model, [])
        if ticket in queue:
            queue.remove(ticket)

    def waiting(self) -> list[SessionTicket]:
        """All that wait, in order, model by model."""
        return [ticket for queue in self._waiting.values() for ticket in queue]

    def pump(self) -> list[SessionTicket]:
        """Place whom there is room for, in order; the placed ones leave the queue and carry their pin.

        Whoever finds no room claims the target that is nearest to it, and nobody behind may use that one: later and
        smaller sessions pass only where they delay nobody. Costs a scan of the targets per placed session and target.
        """
        out: list[SessionTicket] = []
        for model, queue in self._waiting.items():
            if queue:
                placed = self._pump(model, queue)
                if placed:
                    queue[:] = [each for each in queue if each.pin is None]
                    out += placed
        return out

    def _pump(self, model: str, queue: list[SessionTicket]) -> list[SessionTicket]:
        table = self._table
        targets = table.of_model(model)
        open_to = sum(each.admits for each in targets)
        if not open_to:
            return []
        claimed: set[Target] = set()
        placed: list[SessionTicket] = []
        ranked: list[Target] = []
        too_large = float("inf")  # what found no room; nothing larger does, since room only shrinks from here on
        for ticket in queue:
            need = table.expected(ticket.ask)
            if need < too_large:
                ticket.pin = table.settle(ticket.ask, avoid=claimed)
            if ticket.pin is not None:
                placed.append(ticket)
                ranked = []
                continue
            if ticket.ask.want is ANY:
                too_large = min(too_large, need)
            ranked = ranked or by_room(targets)
            claim = next((each for each in ranked if each not in claimed and takes(each, ticket.ask.want)), None)
            if claim is not None:
                claimed.add(claim)
                if len(claimed) >= open_to:
                    break
        return placed


def possible(targets: Collection[Target], want: Wanted) -> bool:
    """Whether some target would take a session that wants ``want`` if it had room."""
    return any(takes(each, want) for each in targets)


def should_move(table: RoutingTable, pin: Pin, *, want: Wanted = ANY, factor: float) -> bool:
    """Whether a session should leave by a migration before its next call.

    Only when the wait exceeds ``factor`` times its own re-prefill elsewhere, and another target has room for it.
    """
    if pin.target is None or (waits := wait_s(pin.target)) <= 0:
        return False
    other = table.elsewhere(pin, "migration", want=want)
    if other is None:
        return False
    cost = reprefill_s(other, pin.resident_tokens)
    if cost is None:
        cost = reprefill_s(pin.target, pin.resident_tokens)
    return cost is not None and worth_moving(wait_s=waits, reprefill_s=cost, factor=factor)


def _rank(ticket: SessionTicket) -> tuple[float, int]:
    return ticket.order, ticket.number


@dataclass(slots=True, eq=False)
class CallTicket:
    """One call that wants a place on a target."""

    target: Target
    granted: bool = False
    left: bool = False
    """It no longer waits: withdrawn, or ended."""


class SlotQueue:
    """Calls that run or wait on targets with a limit; urgent ones first, then by arrival."""

    def __init__(self, table: RoutingTable) -> None:
        self._table = table
        self._waiting: dict[Target, list[tuple[float, int, CallTicket]]] = {}
        self._numbers = count()

    def ask(self, target: Target, *, now: float, priority: int = 0) -> CallTicket:
        """A call arrives; it runs at once when ``granted``, otherwise once ``end`` or ``pump`` returns it."""
        ticket = CallTicket(target)
        if not self._waiting.get(target) and _has_place(target):
            self._grant(ticket)
        else:
            entry = (now - priority * PRIORITY_S, next(self._numbers), ticket)
            heapq.heappush(self._waiting.setdefault(target, []), entry)
            target.waiting += 1
        return ticket

    def end(self, ticket: CallTicket) -> list[CallTicket]:
        """The call ended, or no longer waits. Safe to repeat. Returns the calls that run now."""
        if ticket.left:
            return []
        ticket.left = True
        if ticket.granted:
            self._table.end(ticket.target)
        else:
            ticket.target.waiting -= 1
        return self.pump(ticket.target)

    def pump(self, target: Target) -> list[CallTicket]:
        """Start waiting calls while there are places."""
        heap = self._waiting.get(target)
        if heap is None:
            return []
        started = []
        while heap and (heap[0][2].left or _has_place(target)):
            ticket = heapq.heappop(heap)[2]
            if not ticket.left:
                target.waiting -= 1
                self._grant(ticket)
                started.append(ticket)
        if not heap:
            del self._waiting[target]
        return started

    def targets(self) -> list[Target]:
        """Those where calls wait."""
        return list(self._waiting)

    def _grant(self, ticket: CallTicket) -> None:
        ticket.granted = True
        self._table.begin(ticket.target)


def _has_place(target: Target) -> bool:
    return target.max_in_flight is None or target.in_flight < target.max_in_flight
