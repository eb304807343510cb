"""How much room an admitted session gets for its growth."""

from __future__ import annotations

import itertools
import random

from tollway.router.growth import Growth


def lived(growth: Growth, *sizes: int) -> None:
    growth.started(sizes[0])
    for before, now in itertools.pairwise(sizes):
        growth.grew(before, now)
    growth.ended(sizes[0], sizes[-1])


def test_nothing_known_reserves_what_is_there() -> None:
    assert Growth().reserve(1234) == 1234
    assert Growth().reserve(0) == 0


def test_the_first_sessions_are_expected_to_grow_although_none_has_ended() -> None:
    growth = Growth()
    growth.started(4000)
    assert 12_000 < growth.reserve(4000) < 20_000


def test_sessions_of_one_size_reserve_that_size() -> None:
    growth = Growth()
    for _ in range(300):
        lived(growth, 1000, 4000, 9000)
    assert 8_000 < growth.reserve(1000) < 9_200
    assert 8_000 < growth.reserve(5000) < 9_200
    assert growth.reserve(20_000) == 20_000


def test_the_reservation_is_the_peak_of_the_expected_footprint() -> None:
    """Exponential lives of mean M: x * exp(-x / M) peaks at x = M with M / e."""
    rng = random.Random(0)
    growth = Growth()
    for _ in range(3000):
        lived(growth, 1, max(2, int(rng.expovariate(1 / 20_000))))
    assert 0.8 < growth.reserve(1) / (20_000 / 2.71828) < 1.25
    assert growth.reserve(60_000) < 75_000


def test_short_sessions_that_end_first_do_not_pass_for_typical() -> None:
    """A tenth ended at 2,000 while the others go on at 30,000: room for 30,000 is needed."""
    growth = Growth()
    for number in range(200):
        if number % 10 == 0:
            lived(growth, 1000, 2000)
        else:
            growth.started(1000)
            growth.grew(1000, 30_000)
    assert growth.reserve(1000) > 20_000


def test_who_began_large_says_nothing_about_those_that_begin_small() -> None:
    growth = Growth()
    for _ in range(300):
        lived(growth, 100, 200)
        lived(growth, 50_000, 60_000)
    assert growth.reserve(100) < 300
    assert 50_000 < growth.reserve(50_000) < 65_000


def test_lengths_that_drift_are_followed() -> None:
    growth = Growth()
    for _ in range(1000):
        lived(growth, 1000, 4000)
    before = growth.reserve(1000)
    for _ in range(2000):
        lived(growth, 1000, 16_000)
    assert before < 5000
    assert growth.reserve(1000) > 12_000


def test_placements_that_were_taken_back_leave_no_trace() -> None:
    growth = Growth()
    for _ in range(1000):
        growth.started(100)
        growth.abandoned(100, 100)
    assert set(growth._live) == set(growth._live_from) == {0}
    assert set(growth._ended) == {0.0}


def test_a_long_run_does_not_wear_the_weights_out() -> None:
    growth = Growth()
    for _ in range(12_000):
        lived(growth, 1000, 9000)
    assert 8_000 < growth.reserve(1000) < 9_200
    assert max(growth._ended) < 1e10


def test_only_the_long_tail_has_doubled_what_is_usual() -> None:
    growth = Growth()
    assert growth.doublings(10**9) == 0  # none has ended
    for _ in range(100):
        growth.started(1000)
        growth.grew(1000, 8000)
        growth.ended(1000, 8000)
    assert [growth.doublings(tokens) for tokens in (1000, 8000, 15_000, 17_000, 33_000, 70_000)] == [0, 0, 0, 1, 2, 3]
