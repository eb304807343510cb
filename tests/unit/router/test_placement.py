"""Placement: pure rules over the loads of targets."""

from __future__ import annotations

import itertools

import pytest

from tollway.router.placement import choose, most_room, reprefill_s, wait_s, worth_moving
from tollway.router.targets import Target, Wanted


def target(name: str, tokens: int = 0, sessions: int = 0, budget: int | None = None, last: int = 0) -> Target:
    return Target(
        name,
        resident_tokens=tokens,
        reserved_tokens=tokens,
        sessions=sessions,
        budget_tokens=budget,
        last_chosen=last,
    )


def chosen(targets: list[Target], **how: object) -> str | None:
    found = choose(targets, **({"need": 1} | how))  # type: ignore[arg-type]
    return None if found is None else found.engine_id


def test_the_fewest_resident_tokens_win_whatever_the_order() -> None:
    loads = [target("a", 10), target("b", 5), target("c", 7)]
    assert {chosen(list(order)) for order in itertools.permutations(loads)} == {"b"}


def test_ties_go_to_fewer_sessions_then_to_the_one_chosen_longest_ago() -> None:
    assert chosen([target("a", 5, 2), target("b", 5, 1)]) == "b"
    tied = [target("a", 5, 1, last=9), target("b", 5, 1, last=3), target("c", 5, 1, last=7)]
    assert {chosen(list(order)) for order in itertools.permutations(tied)} == {"b"}


def test_a_target_without_room_for_the_expected_growth_is_passed_over() -> None:
    full, roomy = target("a", 5, budget=10), target("b", 50, budget=100)
    assert chosen([full, roomy], need=20) == "b"
    full.reserved_tokens = 10
    assert chosen([full], need=1) is None
    assert chosen([target("empty", budget=10)], need=1000) == "empty"  # it would fit nowhere, ever


def test_where_relatives_are_wins_while_there_is_room() -> None:
    home, empty = target("home", 50, budget=100), target("empty")
    assert chosen([home, empty], need=10, home=home) == "home"
    assert chosen([home, empty], need=60, home=home) == "empty"
    assert chosen([empty], need=10, home=home) == "home"
    assert chosen([home, empty], need=10, home=home, avoid={home}) == "empty"


def test_dead_and_draining_targets_influence_nothing() -> None:
    """Healthy loads 5 and 5, an idle dead one, the prefix known on the second: the second."""
    first, second, dead = target("first", 5), target("second", 5), target("dead", 0)
    dead.admits = dead.serves = False
    assert chosen([dead, first, second], home=second) == "second"
    first.last_chosen = 1
    assert chosen([dead, first, second], home=dead) == "second"
    first.admits = second.admits = False
    assert chosen([dead, first, second]) is None
    assert most_room([dead, first, second]) is None


def test_the_emptiest_load_wins_not_the_smallest_cache() -> None:
    """A: few cached prompts, load 50; B: many, load 0: B. What a cache holds is not even an input."""
    assert chosen([target("a", 50, 10), target("b", 0, 0, last=1000)]) == "b"


@pytest.mark.parametrize(
    ("want", "expected"),
    [(Wanted(), "old"), (Wanted(minimum=4), "new"), (Wanted(exact=3), "old"), (Wanted(exact=5), None)],
)
def test_only_targets_with_the_wanted_weights_are_looked_at(want: Wanted, expected: str | None) -> None:
    old, new, unknown = target("old", 0), target("new", 9), target("unknown", 0, last=1)
    old.version, new.version = 3, 4
    assert chosen([old, new, unknown], want=want) == expected


def test_over_budget_the_least_full_takes_it() -> None:
    a, b = target("a", 120, budget=100), target("b", 500, budget=490)
    assert most_room([a, b]) is b
    assert most_room([a, b], avoid={b}) is a
    assert most_room([a, b, target("endless", 10_000)]).engine_id == "endless"  # type: ignore[union-attr]


def test_a_wait_is_estimated_from_the_limit_and_the_measured_call_time() -> None:
    busy = Target("a", max_in_flight=2, in_flight=2, waiting=3)
    assert wait_s(busy) == 0.0  # nothing measured yet
    for _ in range(10):
        busy.observe(uncached_tokens=100, output_tokens=50, call_s=4.0)
    assert wait_s(busy) == pytest.approx(4 * 4.0 / 2)
    busy.in_flight, busy.waiting = 1, 0
    assert wait_s(busy) == 0.0
    assert wait_s(Target("b", in_flight=1000)) == 0.0


def test_a_session_moves_only_when_the_wait_exceeds_several_of_its_own_prefills() -> None:
    assert not worth_moving(wait_s=6.0, reprefill_s=2.0, factor=3.0)
    assert worth_moving(wait_s=6.1, reprefill_s=2.0, factor=3.0)


def test_prefill_speed_is_learned_from_whole_calls_and_better_from_first_tokens() -> None:
    slow = Target("a")
    assert reprefill_s(slow, 1000) is None
    for number in range(40):
        new, out = 1000 + 700 * (number % 5), 100 + 90 * (number % 3)
        slow.observe(uncached_tokens=new, output_tokens=out, call_s=new / 5000 + out / 50)
    assert reprefill_s(slow, 10_000) == pytest.approx(2.0, rel=0.01)
    slow.observe(uncached_tokens=8000, output_tokens=1, call_s=9.0, first_s=1.0)
    assert reprefill_s(slow, 8000) == pytest.approx(1.0)


def test_calls_of_one_shape_still_give_a_prefill_speed() -> None:
    same = Target("a")
    for _ in range(20):
        same.observe(uncached_tokens=900, output_tokens=100, call_s=2.0)
    assert reprefill_s(same, 1000) == pytest.approx(2.0)
    alone = Target("b")
    alone.observe(uncached_tokens=500, output_tokens=0, call_s=1.0)
    assert reprefill_s(alone, 1000) == pytest.approx(2.0)
