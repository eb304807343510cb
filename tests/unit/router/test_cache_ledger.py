"""The cache ledger: figures of a run, of engines, models and sessions, and what a session at rest costs."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollway.router.cache_ledger import COUNTS, CacheFigures, CacheLedger, Entry
from tollway.router.causes import BEYOND, CAUSES, MOVES, CallFacts, EngineKeys, Miss, reach

FACTS = CallFacts(
    engine_id="e0", incarnation=0, flush_epoch=0, end_version=1, prompt_tokens=100, output_tokens=220, started_at=0.0,
    ended_at=1.0,
)  # fmt: skip


def entry(
    prompt: int = 150, cached: int | None = 119, possible: int = 119, cause: str = "unknown", **more: Any
) -> Entry:
    """One call whose missed tokens have one cause."""
    wasted = 0 if cached is None else max(0, possible - cached)
    more.setdefault("misses", (Miss(cause, wasted),) if wasted else ())
    more.setdefault("beyond", (Miss("new", prompt - possible),) if prompt > possible else ())
    return Entry(**{"engine_id": "e0", "prompt": prompt, "cached": cached, "possible": possible, **more})


def first(prompt: int = 100, cached: int | None = 0, **more: Any) -> Entry:
    return entry(prompt, cached, 0, first=True, beyond=(Miss("first_call", prompt),), **more)


@pytest.mark.parametrize(("page", "ceiling"), [(1, 0.957), (64, 0.955)])
def test_the_worked_example(page: int, ceiling: float) -> None:
    """29 turns of 220 sampled and 450 tool tokens on a prompt of 4,000: a 96 % headline is the ceiling."""
    ledger, parent = CacheLedger(), None
    for turn in range(29):
        facts = replace(FACTS, prompt_tokens=4000 + 670 * turn)
        found = reach(facts, parent, 10**9, keys=EngineKeys(page=page))
        ledger.record(
            "s",
            entry(facts.prompt_tokens, found.possible, found.possible, first=parent is None, beyond=found.beyond),
        )
        parent = facts
    figures = ledger.summary()
    assert figures["prompt_tokens"] == 388_020
    assert figures["ceiling"] == figures["hit_rate"] == pytest.approx(ceiling, abs=5e-4)
    assert figures["possible_tokens"] == sum((4219 + 670 * turn) // page * page for turn in range(28))
    assert (figures["efficiency"], figures["wasted_tokens"]) == (1.0, 0)
    beyond = figures["beyond"]
    assert isinstance(beyond, dict)
    assert (beyond["first_call"], beyond["new"]) == (4000, 28 * 451)
    assert sum(beyond.values()) == 388_020 - figures["possible_tokens"]  # type: ignore[operator]


def test_one_flush_at_length_n_costs_n_tokens() -> None:
    ledger = CacheLedger()
    ledger.record("s", entry(4890, 0, 4219, "refit_flush"))
    assert ledger.summary()["waste"] == {"refit_flush": 4219}


def test_a_rate_stays_readable_while_nothing_happens() -> None:
    """Turn 1: 100 prompt, 0 cached; turn 2: 150 and 100. Sums, not a gauge of the last call."""
    ledger = CacheLedger()
    ledger.record("s", first(100, 0))
    ledger.record("s", entry(150, 100, 100))
    for _ in range(2):
        figures = ledger.session("s")
        assert (figures["prompt_tokens"], figures["cached_tokens"], figures["hit_rate"]) == (250, 100, 0.4)


def test_a_flush_and_the_faults_of_a_run_are_counted_apart() -> None:
    ledger = CacheLedger()
    ledger.record("s", first(100, 0))
    ledger.record("s", entry(150, 0, 119, "refit_flush"))
    ledger.record("s", entry(150, 0, 119, misses=(Miss("moved", 119, "engine_lost"),)))
    ledger.record("s", entry(150, 119, 119))
    figures = ledger.summary()
    assert figures["efficiency"] == pytest.approx(1 / 3)
    assert (figures["efficiency_without_refit"], figures["efficiency_without_faults"]) == (0.5, 1.0)
    assert (figures["refit_flush_tokens"], figures["unknown_tokens"]) == (119, 0)
    assert figures["waste"] == {"moved": 119, "refit_flush": 119}
    assert figures["moved"] == {"engine_lost": 119}


def test_shared_prompts_and_unreported_calls_stand_apart() -> None:
    ledger = CacheLedger()
    ledger.record("s", first(100, 80))
    ledger.record("s", entry(150, None, 119, misses=()))
    figures = ledger.summary()
    assert (figures["shared_tokens"], figures["first_cached_tokens"]) == (80, 80)
    assert (figures["unreported_calls"], figures["unreported_prompt_tokens"]) == (1, 150)
    assert figures["efficiency"] is None
    assert (figures["hit_rate"], figures["hit_rate_with_shared"]) == (0.0, 0.8)
    assert (figures["calls"], figures["prompt_tokens"]) == (1, 100)


def test_failed_and_aborted_calls_are_kept() -> None:
    ledger = CacheLedger()
    ledger.record("s", entry(150, 100, 119, "eviction", outcome="cancelled"))
    ledger.record("s", entry(150, None, 119, misses=(), outcome="failed"))
    figures = ledger.summary()
    assert (figures["cancelled_calls"], figures["failed_calls"]) == (1, 1)
    assert (figures["calls"], figures["unreported_calls"], figures["wasted_tokens"]) == (1, 1, 19)


def test_what_no_hit_rate_shows_is_counted_beside_it() -> None:
    ledger = CacheLedger()
    ledger.record("s", entry(retractions=2, versions=2, resumed=1, resumed_tokens=40, host=9, storage=1, lost_prefix=7))
    ledger.record("s", entry())
    figures = ledger.summary()
    names = ("retractions", "spanning_calls", "resumed_calls", "resumed_tokens", "lost_prefix_tokens")
    assert tuple(figures[name] for name in names) == (2, 1, 1, 40, 7)
    assert (figures["host_tokens"], figures["storage_tokens"], figures["tiered_tokens"]) == (9, 1, 119)


def test_an_entry_whose_tokens_do_not_add_up_is_refused() -> None:
    with pytest.raises(ValueError, match="0 wasted and 31 tokens beyond reach do not explain 100 cached"):
        entry(150, 100, 119, misses=())
    with pytest.raises(ValueError, match="19 wasted and 0 tokens"):
        entry(150, 100, 119, beyond=())


def test_views_of_engines_models_and_sessions_sum_to_the_run() -> None:
    ledger = CacheLedger()
    for session, engine, model in (("s", "e0", ""), ("t", "e1", "judge"), ("t", "e1", "judge")):
        ledger.record(session, entry(30, 10, 20, "eviction", engine_id=engine, model=model))
    figures: Any = ledger.summary(sessions=8)
    for kind in ("engines", "models"):
        assert sum(each["wasted_tokens"] for each in figures[kind].values()) == figures["wasted_tokens"] == 30
    assert [(each["session_id"], each["wasted_tokens"]) for each in figures["sessions"]] == [("t", 20), ("s", 10)]
    assert set(figures["models"]) == {"", "judge"}
    assert ledger.session("t")["wasted_tokens"] == 20
    ledger.forget("t")
    assert ledger.session("t")["calls"] == 0
    after: Any = ledger.summary(sessions=8)
    assert (after["calls"], [each["session_id"] for each in after["sessions"]]) == (3, ["s"])
    assert "sessions" not in ledger.summary()


def test_the_most_wasteful_sessions_are_known_among_many() -> None:
    ledger = CacheLedger()
    for number in range(500):
        ledger.record(f"s{number}", entry(1000 + number, 0, number * 7 % 500, "eviction"))
        ledger.rest(f"s{number}")
    figures: Any = ledger.summary(sessions=10)
    assert [each["wasted_tokens"] for each in figures["sessions"]] == list(range(499, 489, -1))
    assert not ledger.sessions, "looking does not wake them"


def _counter(names: tuple[str, ...], numbers: list[int]) -> Counter[str]:
    return Counter(dict(zip(names, numbers, strict=True)))


counts = st.integers(0, 10**7)
figures_of = st.builds(
    lambda numbers, waste, moved, beyond: CacheFigures(
        *numbers, waste=+_counter(CAUSES, waste), moved=+_counter(MOVES, moved), beyond=+_counter(BEYOND, beyond)
    ),
    st.lists(counts, min_size=len(COUNTS), max_size=len(COUNTS)),
    st.lists(counts, min_size=len(CAUSES), max_size=len(CAUSES)),
    st.lists(counts, min_size=len(MOVES), max_size=len(MOVES)),
    st.lists(counts, min_size=len(BEYOND), max_size=len(BEYOND)),
)


@given(figures_of)
def test_figures_at_rest_are_the_same_figures(figures: CacheFigures) -> None:
    assert CacheFigures.unpacked(figures.packed()) == figures
    assert CacheFigures.unpacked(b"") == CacheFigures()


def test_a_session_at_rest_costs_less_than_200_bytes() -> None:
    """Figures of a 29-turn session with two causes, its place in the dictionary included."""
    ledger, names = CacheLedger(), [f"session-{number}" for number in range(2000)]

    def run(name: str) -> None:
        ledger.record(name, first(4000, 1200, lost_prefix=3))
        ledger.record(name, entry(384_020, 364_000, 371_252, misses=(Miss("eviction", 7000), Miss("host_tier", 252))))
        ledger.rest(name)

    for name in names[:1000]:
        run(name)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for name in names[1000:]:
            run(name)
        cost = (tracemalloc.get_traced_memory()[0] - before) / 1000
    finally:
        tracemalloc.stop()
    assert cost < 200
    assert ledger.session(names[-1])["waste"] == {"host_tier": 252, "eviction": 7000}


def test_a_session_that_wakes_goes_on_with_its_figures() -> None:
    ledger = CacheLedger()
    ledger.record("s", entry(150, 100, 119, "eviction"))
    ledger.rest("s")
    ledger.rest("s")
    ledger.rest("never seen")
    ledger.record("s", entry(150, 119, 119))
    figures = ledger.session("s")
    assert (figures["calls"], figures["wasted_tokens"]) == (2, 19)
