"""After any sequence of operations the routing table's counters are what its pins say, and 0 in the end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tollway.router.queues import AdmissionQueue, CallTicket, SlotQueue
from tollway.router.table import Ask, RoutingTable
from tollway.router.targets import ANY, Target, Wanted

keys = st.sampled_from([f"s{number}" for number in range(8)])
models = st.sampled_from(["", "", "judge"])
groups = st.sampled_from(["", "g", "h"])
wants = st.sampled_from([ANY, ANY, Wanted(minimum=1), Wanted(exact=2)])
engines = st.sampled_from(["a", "b", "c"])
tokens = st.integers(0, 3000)
reasons = st.sampled_from(["engine_lost", "migration", "drain", "version"])
facts = st.fixed_dictionaries(
    {
        "model": models,
        "ranks": st.integers(1, 3),
        "budget_tokens": st.none() | st.integers(1, 8000),
        "max_in_flight": st.none() | st.integers(1, 4),
        "version": st.none() | st.integers(0, 3),
        "admits": st.booleans(),
    }
)
operations = st.one_of(
    st.tuples(st.just("set"), engines, facts),
    st.tuples(st.just("remove"), engines),
    st.tuples(st.just("place"), keys, models, tokens, groups, keys | st.just(""), wants, st.booleans()),
    st.tuples(st.just("offer"), keys, models, tokens, groups, wants, st.integers(0, 2)),
    st.tuples(st.just("withdraw"), st.integers(0, 7)),
    st.tuples(st.just("restore"), keys, engines, st.none() | st.integers(0, 2), tokens),
    st.tuples(st.just("move"), keys, models, reasons, wants),
    st.tuples(st.just("grow"), keys, models, tokens),
    st.tuples(st.just("rest"), keys),
    st.tuples(st.just("wake"), keys),
    st.tuples(st.just("unpin"), keys, models),
    st.tuples(st.just("release"), keys),
    st.tuples(st.just("call"), keys, models, st.integers(0, 2)),
    st.tuples(st.just("hang up"), st.integers(0, 7)),
)


class Player:
    """Plays operations against a table with its queues, as router and sessions would."""

    def __init__(self) -> None:
        self.table = RoutingTable()
        self.queue, self.slots = AdmissionQueue(self.table), SlotQueue(self.table)
        self.calls: list[CallTicket] = []
        self.seen: set[Target] = set()
        self.now = 0.0

    def play(self, operation: tuple[object, ...]) -> None:
        self.now += 1.0
        getattr(self, str(operation[0]).replace(" ", "_"))(*operation[1:])
        self.seen.update(each for name in "abc" for each in self.table.targets(name))
        for placed in self.queue.pump():
            assert placed.pin is not None
        self.check()

    def set(self, engine: str, known: dict[str, object]) -> None:
        self.table.set_engine(engine, **known)  # type: ignore[arg-type]
        for target in self.slots.targets():
            self.slots.pump(target)

    def remove(self, engine: str) -> None:
        self.table.remove_engine(engine)

    def place(self, key: str, model: str, size: int, group: str, parent: str, want: Wanted, over: bool) -> None:
        pin = self.table.place(key, model=model, tokens=size, group=group, parent=parent, want=want, over_budget=over)
        if pin is not None:
            assert pin is self.table.pin(key, model)

    def offer(self, key: str, model: str, size: int, group: str, want: Wanted, priority: int) -> None:
        self.queue.offer(Ask(key, size, model, group, "", want), now=self.now, priority=priority)

    def withdraw(self, number: int) -> None:
        waiting = self.queue.waiting()
        if waiting:
            self.queue.withdraw(waiting[number % len(waiting)])

    def restore(self, key: str, engine: str, rank: int | None, size: int) -> None:
        self.table.restore(key, engine, dp_rank=rank, group="g", resident_tokens=size)

    def move(self, key: str, model: str, reason: str, want: Wanted) -> None:
        old = self.table.pin(key, model)
        if old is None:
            return
        new = self.table.move(key, reason, model=model, want=want)
        if new is not None:
            assert new.target is not None
            assert new.target is not old.target
            assert new.target.admits
            assert new.target.model == model
            assert want.holds(new.target.version)

    def grow(self, key: str, model: str, size: int) -> None:
        self.table.grow(key, size, model)

    def rest(self, key: str) -> None:
        self.table.rest(key)

    def wake(self, key: str) -> None:
        self.table.wake(key)

    def unpin(self, key: str, model: str) -> None:
        if (pin := self.table.pin(key, model)) is not None:
            self.table.unpin(key, pin)

    def release(self, key: str) -> None:
        self.table.release(key)

    def call(self, key: str, model: str, priority: int) -> None:
        pin = self.table.pin(key, model)
        if pin is not None and pin.target is not None:
            self.calls.append(self.slots.ask(pin.target, now=self.now, priority=priority))

    def hang_up(self, number: int) -> None:
        if self.calls:
            self.slots.end(self.calls.pop(number % len(self.calls)))

    def check(self) -> None:
        pins = [pin for model in ("", "judge") for key in range(8) if (pin := self.table.pin(f"s{key}", model))]
        for target in self.seen:
            here = [pin for pin in pins if pin.target is target and not pin.resting]
            assert target.sessions == len(here)
            assert target.resident_tokens == sum(pin.resident_tokens for pin in here)
            assert target.reserved_tokens == sum(pin.reserved_tokens for pin in here) >= target.resident_tokens
            calls = [ticket for ticket in self.calls if ticket.target is target]
            assert target.in_flight == sum(ticket.granted for ticket in calls)
            assert target.waiting == sum(not ticket.granted for ticket in calls)


@settings(max_examples=300, deadline=None)
@given(st.lists(operations, min_size=10, max_size=60))
def test_counters_are_what_the_pins_say_and_zero_once_everything_is_released(
    played: list[tuple[object, ...]],
) -> None:
    player = Player()
    player.set("a", {"budget_tokens": 4000, "max_in_flight": 2, "version": 1})
    player.set("b", {"ranks": 2, "version": 2})
    for operation in played:
        player.play(operation)
    for ticket in player.queue.waiting():
        player.queue.withdraw(ticket)
    for number in range(8):
        player.table.release(f"s{number}")
    for call in player.calls:
        player.slots.end(call)
    for target in player.seen:
        left = (target.sessions, target.resident_tokens, target.reserved_tokens, target.in_flight, target.waiting)
        assert left == (0, 0, 0, 0, 0)
    assert not any(player.table.has_group(model, group) for model in ("", "judge") for group in "gh")
    assert player.slots.targets() == []
    for growth in player.table._growth.values():
        assert not any(growth._live)
        assert not any(growth._live_from)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 3)), min_size=1, max_size=40), st.randoms())
def test_everybody_who_waits_is_admitted_in_the_end(sessions: list[tuple[int, int]], order: object) -> None:
    """Whatever the sizes and the order in which sessions end, nobody waits for ever."""
    table = RoutingTable()
    table.set_engine("a", budget_tokens=2000)
    table.set_engine("b", budget_tokens=1000)
    queue = AdmissionQueue(table)
    for number, (size, priority) in enumerate(sessions):
        queue.offer(Ask(f"s{number}", size), now=float(number), priority=priority)
    inside: list[str] = []
    for _ in range(len(sessions) + 1):
        inside += [ticket.ask.key for ticket in queue.pump()]
        assert inside or not len(queue)
        if inside:
            table.release(inside.pop(order.randrange(len(inside))))  # type: ignore[attr-defined]
    assert len(queue) == 0
