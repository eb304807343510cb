"""Policies of the routing simulator: the router's own decision code, and what others do.

A policy says when a session may start, where each of its calls goes, and hears what happened. Engines are numbers.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash
from sim_engine import Call, EngineModel

from tollway.router.queues import AdmissionQueue, CallTicket, SlotQueue, should_move
from tollway.router.table import Ask, RoutingTable

__all__ = ["POLICIES", "Policy", "Tollway"]


class Policy(ABC):
    """Decides; all times are virtual seconds. ``start(name)`` and ``send(call, engine)`` make it so."""

    name = ""

    def __init__(
        self, model: EngineModel, seed: int, *, start: Callable[[str], None], send: Callable[[Call, int], None]
    ) -> None:
        self.model, self.rng = model, random.Random(seed)
        self.start, self.send = start, send
        self.engines: list[int] = []
        """Alive, in order of their numbers."""

    def engine_joined(self, now: float, engine: int) -> None:
        """An engine takes calls."""
        self.engines.append(engine)

    def engine_lost(self, now: float, engine: int) -> None:
        """An engine is gone."""
        self.engines.remove(engine)

    def arrive(self, now: float, session: str, group: str, tokens: int) -> None:
        """An agent wants to start."""
        self.start(session)

    @abstractmethod
    def call(self, now: float, call: Call) -> None:
        """A call is to be sent; ``send`` it now or later."""

    def replied(self, now: float, call: Call, engine: int, seconds: float) -> None:  # noqa: B027 - most need not know
        """A call ended."""

    def failed(self, now: float, call: Call, engine: int) -> None:  # noqa: B027 - most need not know
        """A call was lost with its engine; it comes again by ``call``."""

    def ended(self, now: float, session: str) -> None:  # noqa: B027 - most need not know
        """A session is over."""


class Tollway(Policy):
    """The router's table, admission queue and call slots, driven in virtual time."""

    name = "tollway"

    def __init__(
        self, model: EngineModel, seed: int, *, start: Callable[[str], None], send: Callable[[Call, int], None]
    ) -> None:
        super().__init__(model, seed, start=start, send=send)
        self.table = RoutingTable()
        self.queue, self.slots = AdmissionQueue(self.table), SlotQueue(self.table)
        self.moves = 0
        self._tickets: dict[Call, CallTicket] = {}
        self._calls: dict[CallTicket, Call] = {}
        self._lost: set[str] = set()

    def engine_joined(self, now: float, engine: int) -> None:
        self.engines.append(engine)
        self.table.set_engine(
            f"e{engine}", budget_tokens=self.model.kv_tokens, max_in_flight=self.model.max_running, version=0
        )
        self._pump()

    def engine_lost(self, now: float, engine: int) -> None:
        self.engines.remove(engine)
        self._lost.add(f"e{engine}")
        self.table.remove_engine(f"e{engine}")

    def arrive(self, now: float, session: str, group: str, tokens: int) -> None:
        self.queue.offer(Ask(session, tokens, group=group), now=now)
        self._pump()

    def _pump(self) -> None:
        for ticket in self.queue.pump():
            self.start(ticket.ask.key)

    def call(self, now: float, call: Call) -> None:
        pin = self.table.pins[call.session]
        if pin.engine_id in self._lost:
            pin = self.table.move(call.session, "engine_lost") or pin
        elif should_move(self.table, pin, factor=3.0):
            pin = self.table.move(call.session, "migration") or pin
            self.moves += 1
        target = self.table.target_of(pin)
        if target is None:
            raise RuntimeError(f"session {call.session} has no engine left")
        ticket = self.slots.ask(target, now=now)
        self._tickets[call], self._calls[ticket] = ticket, call
        if ticket.granted:
            self.send(call, int(target.engine_id[1:]))

    def _end_slot(self, call: Call) -> None:
        ticket = self._tickets.pop(call)
        del self._calls[ticket]
        for each in self.slots.end(ticket):
            self.send(self._calls[each], int(each.target.engine_id[1:]))

    def replied(self, now: float, call: Call, engine: int, seconds: float) -> None:
        target = self._tickets[call].target
        target.observe(uncached_tokens=call.prompt - (call.cached or 0), output_tokens=call.sampled, call_s=seconds)
        self.table.grow(call.session, call.room)
        self._end_slot(call)

    def failed(self, now: float, call: Call, engine: int) -> None:
        self._end_slot(call)

    def ended(self, now: float, session: str) -> None:
        self.table.release(session)
        self._pump()


class _Sticky(Policy):
    """A session stays on the engine that it got; after a loss it gets another one the same way."""

    def __init__(
        self, model: EngineModel, seed: int, *, start: Callable[[str], None], send: Callable[[Call, int], None]
    ) -> None:
        super().__init__(model, seed, start=start, send=send)
        self.homes: dict[str, int] = {}

    @abstractmethod
    def choose(self, session: str) -> int:
        """Engine of a session that has none."""

    def call(self, now: float, call: Call) -> None:
        home = self.homes.get(call.session)
        if home is None or home not in self.engines:
            home = self.homes[call.session] = self.choose(call.session)
        self.send(call, home)

    def ended(self, now: float, session: str) -> None:
        self.homes.pop(session, None)


class StickySessions(_Sticky):
    """New sessions go to the engine with the fewest sessions."""

    name = "sticky, fewest sessions"

    def choose(self, session: str) -> int:
        counts = dict.fromkeys(self.engines, 0)
        for home in self.homes.values():
            if home in counts:
                counts[home] += 1
        return min(self.engines, key=lambda each: counts[each])


class StickyRoundRobin(_Sticky):
    """New sessions go round."""

    name = "sticky, round robin"
    _next = 0

    def choose(self, session: str) -> int:
        self._next += 1
        return self.engines[self._next % len(self.engines)]


class StickyRandom(_Sticky):
    """New sessions go anywhere."""

    name = "sticky, random"

    def choose(self, session: str) -> int:
        return self.rng.choice(self.engines)


class ConsistentHash(_Sticky):
    """A ring with 128 points per engine; sessions move when the ring changes."""

    name = "consistent hash"
    _ring: tuple[list[int], list[int]] = ([], [])

    def _build(self) -> None:
        points = sorted(
            (xxhash.xxh64_intdigest(f"{each}#{at}".encode()), each) for each in self.engines for at in range(128)
        )
        self._ring = [point for point, _ in points], [each for _, each in points]

    def engine_joined(self, now: float, engine: int) -> None:
        super().engine_joined(now, engine)
        self._build()

    def engine_lost(self, now: float, engine: int) -> None:
        super().engine_lost(now, engine)
        self._build()

    def choose(self, session: str) -> int:
        points, owners = self._ring
        return owners[bisect(points, xxhash.xxh64_intdigest(session.encode())) % len(owners)]

    def call(self, now: float, call: Call) -> None:
        self.send(call, self.choose(call.session))


class Random(Policy):
    """Every call goes anywhere."""

    name = "random per call"

    def call(self, now: float, call: Call) -> None:
        self.send(call, self.rng.choice(self.engines))


class LeastCalls(Policy):
    """Every call goes to the engine with the fewest calls; the cache does not count."""

    name = "fewest calls per call"

    def __init__(
        self, model: EngineModel, seed: int, *, start: Callable[[str], None], send: Callable[[Call, int], None]
    ) -> None:
        super().__init__(model, seed, start=start, send=send)
        self.running: dict[int, int] = defaultdict(int)

    def call(self, now: float, call: Call) -> None:
        engine = min(self.engines, key=lambda each: (self.running[each], self.rng.random()))
        self.running[engine] += 1
        self.send(call, engine)

    def replied(self, now: float, call: Call, engine: int, seconds: float) -> None:
        self.running[engine] -= 1

    def failed(self, now: float, call: Call, engine: int) -> None:
        self.running[engine] -= 1


@dataclass(slots=True)
class _Tree:
    """What a gateway believes of one engine's cache."""

    tokens: dict[str, int] = field(default_factory=dict)
    total: int = 0


class CacheAware(LeastCalls):
    """As gateways do it: longest known prefix while loads are even, fewest calls otherwise.

    Even means that the busiest engine has at most 1.5 times and 64 calls more than the idlest; a prompt of which less
    than half is known goes to the engine with the smallest tree. Trees know no eviction.
    """

    name = "cache aware per call"

    def __init__(
        self, model: EngineModel, seed: int, *, start: Callable[[str], None], send: Callable[[Call, int], None]
    ) -> None:
        super().__init__(model, seed, start=start, send=send)
        self.trees: dict[int, _Tree] = defaultdict(_Tree)

    def call(self, now: float, call: Call) -> None:
        loads = [self.running[each] for each in self.engines]
        if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
            engine = min(self.engines, key=lambda each: self.running[each])
        else:
            engine = max(self.engines, key=lambda each: self._known(each, call))
            if self._known(engine, call) < call.prompt / 2:
                engine = min(self.engines, key=lambda each: self.trees[each].total)
        tree = self.trees[engine]
        tree.total += call.room - tree.tokens.get(call.session, 0)
        tree.tokens[call.session] = call.room
        if call.shared:
            tree.tokens.setdefault(f"/{call.group}", call.shared)
        self.running[engine] += 1
        self.send(call, engine)

    def _known(self, engine: int, call: Call) -> int:
        known = self.trees[engine].tokens
        own = known.get(call.session, 0)
        return own or (known.get(f"/{call.group}", 0) if call.shared else 0)


POLICIES: tuple[type[Policy], ...] = (
    Tollway,
    StickySessions,
    StickyRoundRobin,
    StickyRandom,
    ConsistentHash,
    CacheAware,
    LeastCalls,
    Random,
)
