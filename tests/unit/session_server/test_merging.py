"""Figures of several workers are those that one worker would have had."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tollway.router.cache_ledger import CacheLedger, Entry
from tollway.router.causes import CAUSES, Miss
from tollway.session_server.merging import merge_cache, merge_engines, merge_health, merge_ready


def entry(engine: str, prompt: int, cached: int | None, possible: int, misses: list[tuple[str, int]]) -> Entry:
    """A call whose missed tokens are shared out among the causes that are named."""
    left = 0 if cached is None else max(0, possible - cached)
    found = []
    for cause, tokens in misses:
        take = min(left, tokens)
        left -= take
        found.append(Miss(cause, take, "drain" if cause == "moved" else ""))
    return Entry(
        engine_id=engine,
        model="" if engine == "e0" else "judge",
        prompt=prompt,
        cached=cached,
        host=None if prompt % 3 else min(cached or 0, 5),
        possible=possible,
        first=possible == 0,
        misses=(*found, Miss("unknown", left)) if left else tuple(found),
        beyond=(Miss("new", prompt - possible),),
        lost_prefix=3,
        outcome="ok" if prompt % 2 else "cancelled",
        retractions=prompt % 5,
        versions=1 + prompt % 2,
    )


calls = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from("stuv"),
        st.sampled_from(["e0", "e1"]),
        st.integers(1, 100),
        st.none() | st.integers(0, 100),
        st.integers(0, 100),
        st.lists(st.tuples(st.sampled_from(CAUSES), st.integers(1, 60)), max_size=2),
    ),
    max_size=12,
)


@given(calls)
def test_merged_cache_figures_are_those_of_one_ledger(given_calls: list[Any]) -> None:
    whole, parts = CacheLedger(), {index: CacheLedger() for index in range(3)}
    for worker, session, engine, prompt, cached, possible, misses in given_calls:
        made = entry(engine, prompt, None if cached is None else min(cached, prompt), min(possible, prompt), misses)
        for ledger in (whole, parts[worker]):
            ledger.record(f"{worker}.{session}", made)  # a session belongs to one worker
    expected: dict[str, Any] = whole.summary(sessions=4)
    answers = {index: part.summary(sessions=4) for index, part in parts.items()}
    merged = dict(merge_cache(answers, [], sessions=4))
    assert merged.pop("workers_down") == []
    for kind in ("engines", "models"):
        expected[kind] = dict(sorted(expected[kind].items()))
    assert merged == expected
    assert sum(expected["waste"].values()) == expected["wasted_tokens"]
    assert expected["possible_tokens"] - expected["useful_tokens"] == expected["wasted_tokens"]
    assert expected["prompt_tokens"] - expected["possible_tokens"] == sum(expected["beyond"].values())
    assert sum(expected["moved"].values()) == expected["waste"].get("moved", 0)


def test_an_unknown_hit_stays_unknown_when_figures_are_merged() -> None:
    ledger = CacheLedger()
    ledger.record("s", entry("e0", 100, None, 50, []))
    merged = merge_cache({0: ledger.summary(), 1: CacheLedger().summary()}, [2])
    assert (merged["unreported_calls"], merged["hit_rate"], merged["efficiency"]) == (1, None, None)
    assert (merged["unreported_prompt_tokens"], merged["prompt_tokens"]) == (100, 0)
    assert merged["workers_down"] == [2]
    assert "sessions" not in merged


def row(state: str, version: int | None, **loads: int) -> dict[str, object]:
    return {"id": "e0", "url": "u", "state": state, "version": version, "failures": 1, "last_error": state, **loads}


def test_an_engine_is_as_good_as_its_worst_worker_finds_it() -> None:
    answers = {
        0: {"engines": [row("serving", 3, sessions=2, in_flight=1, resident_tokens=10)]},
        1: {"engines": [row("lost", 2, sessions=1, in_flight=0, resident_tokens=5)]},
        2: {"engines": [row("joining", None)]},
    }
    (engine,) = merge_engines(answers, [3])["engines"]  # type: ignore[misc,attr-defined]
    assert engine["state"] == engine["last_error"] == "lost"
    assert engine["states"] == {"0": "serving", "1": "lost", "2": "joining"}
    assert (engine["version"], engine["failures"]) == (2, 3)
    assert (engine["sessions"], engine["in_flight"], engine["resident_tokens"]) == (3, 1, 15)
    (same,) = merge_engines({0: {"engines": [row("draining", 1)]}, 1: {"engines": [row("draining", 1)]}}, [])["engines"]  # type: ignore[misc,attr-defined]
    assert "states" not in same


def test_ready_means_every_worker() -> None:
    yes, no = {"ready": True, "engines": ["a"]}, {"ready": False, "engines": ["a", "b"]}
    assert merge_ready({0: yes, 1: yes}, []) == {"ready": True, "engines": ["a"], "fleet": []}
    assert merge_ready({0: yes, 1: no}, []) == {"ready": False, "engines": ["a", "b"], "fleet": []}
    assert merge_ready({0: yes}, [1]) == {"ready": False, "engines": ["a", "worker 1 is down"], "fleet": []}


def test_a_fleet_is_as_ready_as_the_worker_that_finds_it_worst() -> None:
    good = {"id": "e0", "url": "u", "model": "", "state": "serving", "version": 3, "reason": ""}
    bad = {**good, "state": "lost", "version": 2, "reason": "it is gone"}
    merged = merge_ready({i: {"ready": True, "engines": [], "fleet": [row]} for i, row in enumerate((good, bad))}, [])
    assert merged["fleet"] == [{**bad, "states": {"0": "serving", "1": "lost"}}]
    one, two = ({"engines": [], "policy_version": v, "down_s": s} for v, s in ((4, 0.0), (None, 9.0)))
    fleet = merge_engines({0: one, 1: two}, [])
    assert (fleet["policy_version"], fleet["down_s"]) == (4, 0.0)


def test_health_sums_and_says_who_is_down() -> None:
    one = {"status": "ok", "open_sessions": 2}
    assert merge_health({0: one, 1: one}, [])["open_sessions"] == 4
    assert merge_health({0: one}, [1]) == {"status": "degraded", "open_sessions": 2, "workers": 2, "workers_down": [1]}
