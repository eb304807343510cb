"""Placement and the routing table: pure rules."""

from __future__ import annotations

from tollway.router.placement import EngineLoad, choose_engine
from tollway.router.table import RoutingTable


def load(name: str, tokens: int, sessions: int = 0, budget: int | None = None, last: int = 0) -> EngineLoad:
    return EngineLoad(name, tokens, sessions, budget, last)


def test_the_fewest_resident_tokens_win_whatever_the_order() -> None:
    loads = [load("a", 10), load("b", 5), load("c", 7)]
    assert choose_engine(loads, tokens=1) == choose_engine(loads[::-1], tokens=1) == "b"


def test_ties_go_to_fewer_sessions_then_to_the_one_chosen_longest_ago() -> None:
    assert choose_engine([load("a", 5, 2), load("b", 5, 1)], tokens=1) == "b"
    assert choose_engine([load("a", 5, 1, last=9), load("b", 5, 1, last=3)], tokens=1) == "b"


def test_an_engine_without_room_is_passed_over_until_none_has_room() -> None:
    full, roomy = load("a", 5, budget=10), load("b", 50, budget=100)
    assert choose_engine([full, roomy], tokens=20) == "b"
    assert choose_engine([full, load("c", 95, budget=100)], tokens=20) == "a"


def test_no_engine_is_no_engine() -> None:
    assert choose_engine([], tokens=1) is None


def test_group_siblings_go_where_the_group_started_while_there_is_room() -> None:
    loads = [load("a", 50, budget=100), load("b", 0)]
    assert choose_engine(loads, tokens=10, group_engine="a") == "a"
    assert choose_engine(loads, tokens=60, group_engine="a") == "b"
    assert choose_engine(loads, tokens=10, group_engine="gone") == "b"


def table(*engines: str) -> RoutingTable:
    out = RoutingTable()
    for engine in engines:
        out.add_engine(engine, budget_tokens=None)
    return out


def test_sessions_spread_over_idle_engines() -> None:
    routes = table("a", "b", "c", "d")
    for number in range(40):
        pin = routes.place(f"s{number}", ["a", "b", "c", "d"], tokens=10)
        assert pin is not None
        routes.grow(f"s{number}", 10)
    assert [routes.load(each).sessions for each in "abcd"] == [10, 10, 10, 10]


def test_growth_and_release_keep_the_books() -> None:
    routes = table("a", "b")
    routes.place("s", ["a", "b"], tokens=5, group="g")
    first = routes.pins["s"].engine_id
    routes.grow("s", 100)
    routes.grow("s", 60)  # a branch that is shorter
    assert routes.load(first).resident_tokens == 100
    moved = routes.move("s", [each for each in "ab" if each != first], "engine_lost")
    assert moved is not None
    assert (moved.moved, moved.resident_tokens) == ("engine_lost", 100)
    assert routes.load(first).resident_tokens == 0
    assert routes.load(moved.engine_id).resident_tokens == 100
    sibling = routes.place("t", ["a", "b"], tokens=5, group="g")
    assert sibling is not None
    assert sibling.engine_id == moved.engine_id
    for key in ("s", "t", "s", "unknown"):
        routes.release(key)
    assert [routes.load(each).resident_tokens for each in "ab"] == [0, 0]
    assert [routes.load(each).sessions for each in "ab"] == [0, 0]
    assert routes._groups == {}


def test_nowhere_to_move_leaves_the_pin() -> None:
    routes = table("a")
    routes.place("s", ["a"], tokens=5)
    assert routes.move("s", [], "engine_lost") is None
    assert routes.pins["s"].engine_id == "a"


def test_a_removed_engine_is_forgotten_without_harm() -> None:
    routes = table("a")
    routes.place("s", ["a"], tokens=5)
    routes.begin("a")
    routes.remove_engine("a")
    routes.end("a")
    routes.grow("s", 10)
    routes.release("s")
    assert routes.in_flight("a") == 0
