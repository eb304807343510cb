"""The routing table: pins, ranks, groups, children, moves, rest, and books that close."""

from __future__ import annotations

from tollway.router.table import Pin, RoutingTable
from tollway.router.targets import Target, Wanted


def table(*engines: str, budget: int | None = None) -> RoutingTable:
    out = RoutingTable()
    for engine in engines:
        out.set_engine(engine, budget_tokens=budget, version=1)
    return out


def place(routes: RoutingTable, key: str, tokens: int = 10, **how: object) -> Pin:
    pin = routes.place(key, tokens=tokens, **how)  # type: ignore[arg-type]
    assert pin is not None
    return pin


def only(routes: RoutingTable, engine: str) -> Target:
    (target,) = routes.targets(engine)
    return target


def test_sessions_spread_over_idle_engines() -> None:
    routes = table("a", "b", "c", "d")
    for number in range(40):
        place(routes, f"s{number}")
        routes.grow(f"s{number}", 100)
    assert [routes.load(each).sessions for each in "abcd"] == [10, 10, 10, 10]


def test_a_burst_of_new_sessions_spreads_by_the_size_of_their_prompts() -> None:
    routes = table("a", "b")
    place(routes, "long", 1000)
    assert len({place(routes, f"s{number}", 100).engine_id for number in range(10)}) == 1


def test_a_pinned_session_keeps_its_place() -> None:
    routes = table("a", "b")
    first = place(routes, "s")
    for number in range(5):
        place(routes, f"t{number}")
    assert routes.pin("s") is routes.pins["s"] is first
    assert place(routes, "s", 999) is first


def test_growth_moves_and_release_keep_the_books() -> None:
    routes = table("a", "b")
    first = place(routes, "s", 5, group="g")
    routes.grow("s", 100)
    routes.grow("s", 60)  # a branch that is shorter
    assert routes.load(first.engine_id).resident_tokens == 100
    moved = routes.move("s", "engine_lost")
    assert moved is not None
    assert (moved.moved, moved.resident_tokens) == ("engine_lost", 100)
    assert routes.load(first.engine_id).resident_tokens == 0
    assert routes.load(moved.engine_id).resident_tokens == 100
    assert place(routes, "t", 5, group="g").engine_id == moved.engine_id
    for key in ("s", "t", "s", "unknown"):
        routes.release(key)
    for each in ("a", "b"):
        load = routes.load(each)
        assert (load.resident_tokens, load.reserved_tokens, load.sessions) == (0, 0, 0)
    assert not routes.has_group("", "g")


def test_nowhere_to_move_leaves_the_pin() -> None:
    routes = table("a")
    pin = place(routes, "s")
    assert routes.move("s", "engine_lost") is None
    assert routes.pins["s"] is pin
    assert routes.load("a").sessions == 1


def test_a_move_in_the_middle_goes_over_budget_and_a_migration_does_not() -> None:
    routes = table("a", "b", budget=1000)
    place(routes, "s", 700)
    place(routes, "t", 700)
    assert routes.move("s", "migration") is None
    assert routes.move("s", "drain") is not None
    assert {routes.pins["s"].engine_id} == {routes.pins["t"].engine_id}


def test_excluded_engines_and_wrong_versions_are_not_moved_to() -> None:
    routes = table("a", "b", "c", "d")
    home = place(routes, "s").engine_id
    others = [each for each in "abcd" if each != home]
    routes.set_engine(others[1], version=2)
    moved = routes.move("s", "version", want=Wanted(minimum=2), exclude={others[0]})
    assert moved is not None
    assert moved.engine_id == others[1]
    assert routes.move("s", "version", want=Wanted(exact=7)) is None


def test_a_lost_engine_is_left_with_all_its_ranks_and_a_migration_may_take_another_rank() -> None:
    routes = RoutingTable()
    routes.set_engine("a", ranks=2)
    pin = place(routes, "s")
    assert routes.move("s", "engine_lost") is None
    other = routes.move("s", "migration")
    assert other is not None
    assert (other.engine_id, other.dp_rank) == ("a", 1 - (pin.dp_rank or 0))


def test_ranks_are_targets_of_their_own() -> None:
    routes = RoutingTable()
    routes.set_engine("a", ranks=4, budget_tokens=40_000, max_in_flight=10)
    ranks = routes.targets("a")
    assert [each.dp_rank for each in ranks] == [0, 1, 2, 3]
    assert {each.budget_tokens for each in ranks} == {9500}
    assert {each.max_in_flight for each in ranks} == {2}
    pins = [place(routes, f"s{number}", 100) for number in range(8)]
    assert sorted(pin.dp_rank for pin in pins if pin.dp_rank is not None) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert routes.target_of(pins[0]) in ranks
    routes.set_engine("a", ranks=2)  # it came back with another layout
    left = [pin for pin in pins if routes.target_of(pin) is not None]
    assert sorted(pin.dp_rank for pin in left if pin.dp_rank is not None) == [0, 0, 1, 1]
    assert routes.load("a").sessions == 4


def test_updating_an_engine_keeps_its_load() -> None:
    routes = table("a")
    place(routes, "s", 100)
    routes.begin(only(routes, "a"))
    routes.set_engine("a", version=5, admits=False)
    target = only(routes, "a")
    assert (target.version, target.admits, target.resident_tokens, target.in_flight) == (5, False, 100, 1)
    assert routes.place("t", tokens=1) is None
    assert routes.place("t", tokens=1, over_budget=True) is None


def test_a_removed_engine_is_forgotten_without_harm_and_counts_again_when_it_returns() -> None:
    routes = table("a")
    pin = place(routes, "s", 5, group="g")
    target = only(routes, "a")
    routes.begin(target)
    routes.remove_engine("a")
    assert routes.target_of(pin) is None
    routes.end(target)
    assert (target.in_flight, target.sessions, target.resident_tokens, target.reserved_tokens) == (0, 0, 0, 0)
    routes.grow("s", 10)
    assert routes.in_flight("a") == 0
    routes.set_engine("a")
    assert routes.load("a").resident_tokens == 10
    assert routes.target_of(pin) is only(routes, "a")
    routes.release("s")
    assert routes.load("a").sessions == 0


def test_a_restored_session_counts_once_its_engine_is_known() -> None:
    routes = RoutingTable()
    routes.restore("s", "a", dp_rank=1, group="g", resident_tokens=70)
    routes.restore("s", "b", resident_tokens=9)  # the first word stands
    routes.set_engine("a", ranks=2)
    assert [each.resident_tokens for each in routes.targets("a")] == [0, 70]
    assert place(routes, "t", group="g").dp_rank == 0  # its group had no home yet
    routes.release("s")
    assert routes.targets("a")[1].sessions == 0


def test_children_go_to_their_parent_even_over_its_budget() -> None:
    routes = table("a", "b", budget=1000)
    parent = place(routes, "parent", 900)
    for number in range(3):
        assert place(routes, f"child{number}", 500, parent="parent").engine_id == parent.engine_id
    assert routes.place("stranger", tokens=2000) is not None  # the other engine is empty
    assert routes.place("late", tokens=100) is None
    routes.set_engine(parent.engine_id, budget_tokens=1000, version=1, admits=False)
    assert place(routes, "child", 100, parent="parent").engine_id != parent.engine_id


def test_siblings_share_an_engine_while_it_has_room() -> None:
    routes = table("a", "b", "c", budget=100_000)
    place(routes, "before", 1)
    homes = [place(routes, f"s{number}", 1000, group="g").engine_id for number in range(40)]
    assert len(set(homes[:4])) == 1
    assert len(set(homes)) > 1
    assert max(routes.load(each).reserved_tokens for each in "abc") <= 95_000


def test_pins_are_scoped_by_model() -> None:
    """Key K uses models A, B, C, then A: its place at A is the first one."""
    routes = RoutingTable()
    for number in range(3):
        for model in ("A", "B", "C"):
            routes.set_engine(f"{model}{number}", model=model)
    first = place(routes, "K", model="A")
    for model in ("B", "C"):
        assert place(routes, "K", model=model).engine_id[0] == model
        place(routes, "other", model=model)
    assert place(routes, "K", model="A") is first
    assert routes.pin("K") is None
    assert routes.place("K", tokens=1) is None  # nothing serves the policy
    routes.release("K")
    assert [routes.pin("K", model) for model in "ABC"] == [None, None, None]


def test_an_engine_that_serves_another_model_now_leaves_its_sessions() -> None:
    routes = RoutingTable()
    routes.set_engine("a", model="judge")
    pin = place(routes, "s", model="judge")
    routes.set_engine("a", model="policy")
    assert routes.target_of(pin) is None
    assert routes.place("t", tokens=1, model="judge") is None


def test_a_resting_session_counts_nowhere_until_it_is_used_again() -> None:
    routes = table("a", budget=1000)
    place(routes, "s", 800)
    assert routes.place("t", tokens=500) is None
    routes.rest("s")
    routes.rest("s")
    assert (routes.load("a").resident_tokens, routes.load("a").sessions) == (0, 0)
    place(routes, "t", 500)
    routes.wake("s")
    assert routes.load("a").resident_tokens == 1300
    routes.rest("s")
    routes.grow("s", 900)  # a call of it ended after all
    assert routes.load("a").resident_tokens == 1400
    routes.rest("s")
    routes.release("s")
    routes.release("t")
    assert (routes.load("a").resident_tokens, routes.load("a").sessions) == (0, 0)


def test_room_is_announced() -> None:
    heard: list[str] = []
    routes = table("a", "b")
    routes.on_room = lambda: heard.append("room")
    pin = place(routes, "s")
    assert not heard
    routes.rest("s")
    routes.move("s", "drain")
    routes.set_engine("c")
    routes.unpin("s", pin)  # it has another pin by now
    assert routes.pin("s") is not None
    routes.release("s")
    assert len(heard) == 4
