"""Who is next: the admission queue and the call slots, in virtual time."""

from __future__ import annotations

from tollway.router.queues import PRIORITY_S, SIBLINGS_S, AdmissionQueue, SlotQueue, should_move
from tollway.router.table import Ask, RoutingTable
from tollway.router.targets import Target, Wanted


def fleet(*budgets: int, **facts: object) -> tuple[RoutingTable, AdmissionQueue]:
    routes = RoutingTable()
    for number, budget in enumerate(budgets):
        routes.set_engine(f"e{number}", **({"budget_tokens": budget, "version": 1} | facts))  # type: ignore[arg-type]
    never_growing(routes)
    return routes, AdmissionQueue(routes)


def never_growing(routes: RoutingTable) -> None:
    """Teach the table that sessions keep the size they begin with, so that room can be counted by hand."""
    for _ in range(300):
        routes.place("tiny", tokens=1, over_budget=True)
        routes.release("tiny")


def arrive(queue: AdmissionQueue, key: str, tokens: int, now: float, **how: object) -> None:
    priority = how.pop("priority", 0)
    queue.offer(Ask(key, tokens, **how), now=now, priority=priority)  # type: ignore[arg-type]


def started(queue: AdmissionQueue) -> list[str]:
    return [ticket.ask.key for ticket in queue.pump()]


def test_sessions_start_in_the_order_of_their_arrival() -> None:
    routes, queue = fleet(1000)
    for number in range(6):
        arrive(queue, f"s{number}", 300, now=number)
    assert started(queue) == ["s0", "s1", "s2"]
    assert started(queue) == []
    for number in range(3):
        routes.release(f"s{number}")
        assert started(queue) == [f"s{number + 3}"]
    assert len(queue) == 0


def test_growth_of_those_inside_is_reserved_for() -> None:
    routes, queue = fleet(100_000)
    for number in range(200):  # what sessions become here
        routes.place(f"old{number}", tokens=1000, over_budget=True)
        routes.grow(f"old{number}", 20_000)
        routes.release(f"old{number}")
    for number in range(50):
        arrive(queue, f"s{number}", 1000, now=number)
    inside = started(queue)
    assert 4 <= len(inside) <= 6  # not 95
    for key in inside:
        routes.grow(key, 18_000)
    assert routes.load("e0").resident_tokens <= 100_000


def test_a_large_session_is_not_overtaken_for_ever() -> None:
    routes, queue = fleet(1000)
    arrive(queue, "first", 500, now=0)
    assert started(queue) == ["first"]
    arrive(queue, "large", 900, now=1)
    for number in range(100):
        arrive(queue, f"small{number}", 10, now=2 + number)
    assert started(queue) == []
    routes.release("first")
    assert started(queue)[0] == "large"


def test_smaller_ones_pass_where_they_delay_nobody() -> None:
    routes, queue = fleet(1000, 1000)
    for key in ("a", "b"):
        arrive(queue, key, 500, now=0)
    assert len(started(queue)) == 2
    arrive(queue, "large", 900, now=1)
    arrive(queue, "small", 10, now=2)
    assert started(queue) == ["small"]
    claimed = ({"e0", "e1"} - {routes.pins["small"].engine_id}).pop()
    arrive(queue, "more", 300, now=3)
    arrive(queue, "too much", 300, now=4)
    assert started(queue) == ["more"]
    for key in ("a", "b"):
        if routes.pins[key].engine_id == claimed:
            routes.release(key)
    assert started(queue) == ["large"]
    assert routes.pins["large"].engine_id == claimed


def test_a_session_larger_than_every_engine_gets_an_empty_one() -> None:
    routes, queue = fleet(1000)
    arrive(queue, "a", 100, now=0)
    assert started(queue) == ["a"]
    arrive(queue, "huge", 50_000, now=1)
    arrive(queue, "b", 100, now=2)
    assert started(queue) == []
    routes.release("a")
    assert started(queue) == ["huge"]
    routes.release("huge")
    assert started(queue) == ["b"]


def test_siblings_of_an_admitted_group_go_before_others_and_together() -> None:
    routes, queue = fleet(1000, 1000)
    arrive(queue, "full", 900, now=0)
    arrive(queue, "g-first", 400, now=1, group="g")
    assert len(started(queue)) == 2
    home = routes.pins["g-first"].engine_id
    arrive(queue, "big", 800, now=2)
    arrive(queue, "other", 500, now=3)
    arrive(queue, "g-second", 400, now=4, group="g")
    assert started(queue) == ["g-second"]
    assert routes.pins["g-second"].engine_id == home


def test_siblings_that_wait_stay_next_to_each_other() -> None:
    routes, queue = fleet(1000)
    arrive(queue, "a", 900, now=0)
    assert started(queue) == ["a"]
    for at, (key, group) in enumerate([("g1", "g"), ("x", ""), ("h1", "h"), ("g2", "g"), ("y", ""), ("h2", "h")]):
        arrive(queue, key, 100, now=1 + at, group=group)
    routes.release("a")
    assert started(queue) == ["g1", "g2", "x", "h1", "h2", "y"]


def test_a_group_that_never_ends_does_not_starve_others() -> None:
    routes, queue = fleet(1000)
    arrive(queue, "g0", 900, now=0, group="g")
    assert started(queue) == ["g0"]
    arrive(queue, "patient", 900, now=10)
    order = []
    for number in range(1, 100):
        now = 10.0 + 20 * number
        arrive(queue, f"g{number}", 900, now=now, group="g")
        routes.release(order[-1] if order else "g0")
        order += started(queue)
        if order[-1] == "patient":
            break
    assert order[-1] == "patient"
    assert len(order) <= SIBLINGS_S / 20 + 2


def test_priority_is_worth_so_much_waiting_and_no_more() -> None:
    routes, queue = fleet(1000)
    arrive(queue, "a", 900, now=0)
    assert started(queue) == ["a"]
    arrive(queue, "plain", 900, now=1)
    arrive(queue, "urgent", 900, now=2, priority=1)
    arrive(queue, "late", 900, now=3 + PRIORITY_S, priority=1)
    order = []
    for _ in range(3):
        routes.release(order[-1] if order else "a")
        order += started(queue)
    assert order == ["urgent", "plain", "late"]


def test_a_queue_of_one_model_does_not_block_another() -> None:
    routes, queue = fleet(100)
    routes.set_engine("judge", model="judge", budget_tokens=1000)
    arrive(queue, "a", 90, now=0)
    arrive(queue, "b", 90, now=1)
    arrive(queue, "j", 90, now=2, model="judge")
    assert started(queue) == ["a", "j"]
    assert routes.pin("j", "judge") is not None


def test_who_wants_weights_that_nobody_has_blocks_nobody() -> None:
    routes, queue = fleet(1000)
    arrive(queue, "future", 100, now=0, want=Wanted(minimum=9))
    arrive(queue, "now", 100, now=1)
    assert started(queue) == ["now"]
    routes.set_engine("e0", budget_tokens=1000, version=9)
    assert started(queue) == ["future"]


def test_nobody_starts_while_no_engine_takes_sessions() -> None:
    routes, queue = fleet(1000, admits=False)
    arrive(queue, "a", 10, now=0)
    assert started(queue) == []
    routes.set_engine("e0", budget_tokens=1000)
    assert started(queue) == ["a"]


def test_who_withdraws_frees_what_it_had_claimed() -> None:
    _, queue = fleet(1000)
    arrive(queue, "a", 500, now=0)
    started(queue)
    large = queue.offer(Ask("large", 900), now=1)
    arrive(queue, "small", 10, now=2)
    assert started(queue) == []
    queue.withdraw(large)
    queue.withdraw(large)
    assert started(queue) == ["small"]


def test_sessions_that_nobody_uses_make_room() -> None:
    routes, queue = fleet(1000)
    arrive(queue, "a", 900, now=0)
    arrive(queue, "b", 900, now=1)
    assert started(queue) == ["a"]
    routes.rest("a")
    assert started(queue) == ["b"]


def busy(limit: int | None = 1) -> tuple[RoutingTable, Target, SlotQueue]:
    routes = RoutingTable()
    routes.set_engine("e0", max_in_flight=limit)
    (target,) = routes.targets("e0")
    return routes, target, SlotQueue(routes)


def test_calls_beyond_the_limit_wait_and_urgent_ones_go_first() -> None:
    _, target, slots = busy(2)
    first, second = slots.ask(target, now=0), slots.ask(target, now=0)
    assert first.granted
    assert second.granted
    plain, urgent, late = slots.ask(target, now=1), slots.ask(target, now=2, priority=1), slots.ask(target, now=3)
    assert (target.in_flight, target.waiting) == (2, 3)
    assert slots.end(first) == [urgent]
    assert slots.end(first) == []
    assert slots.end(second) == [plain]
    slots.end(late)  # cancelled while it waited
    assert (target.in_flight, target.waiting) == (2, 0)
    slots.end(urgent)
    slots.end(plain)
    assert (target.in_flight, target.waiting, slots.targets()) == (0, 0, [])


def test_a_raised_limit_starts_who_waits() -> None:
    routes, target, slots = busy(1)
    slots.ask(target, now=0)
    waiting = [slots.ask(target, now=1) for _ in range(3)]
    routes.set_engine("e0", max_in_flight=3)
    assert slots.pump(target) == waiting[:2]
    routes.set_engine("e0", max_in_flight=None)
    assert slots.pump(target) == waiting[2:]


def test_calls_of_a_removed_engine_still_end() -> None:
    routes, target, slots = busy(1)
    first, second = slots.ask(target, now=0), slots.ask(target, now=1)
    routes.remove_engine("e0")
    assert slots.end(first) == [second]
    assert slots.end(second) == []
    assert (target.in_flight, target.waiting) == (0, 0)


def test_a_session_leaves_only_a_long_queue_and_only_for_a_free_place() -> None:
    routes = RoutingTable()
    routes.set_engine("a", max_in_flight=1)
    pin = routes.place("s", tokens=1000)
    assert pin is not None
    (home,) = routes.targets("a")
    slots = SlotQueue(routes)
    for number in range(4):
        slots.ask(home, now=number)
    home.observe(uncached_tokens=1000, output_tokens=0, call_s=1.0)  # 1,000 tokens a second: 1 s to move
    assert not should_move(routes, pin, factor=3.0)  # nowhere to go
    routes.set_engine("b", max_in_flight=1)
    assert should_move(routes, pin, factor=3.0)  # 4 s of waiting
    assert not should_move(routes, pin, factor=4.0)
    routes.grow("s", 2000)
    assert not should_move(routes, pin, factor=3.0)
    (other,) = routes.targets("b")
    slots.ask(other, now=9)
    assert not should_move(routes, pin, factor=1.0)  # no free place there
    assert routes.move("s", "migration") is None
