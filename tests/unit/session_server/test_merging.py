"""Figures of several workers are those that one worker would have had."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tollway.router.cache_ledger import CAUSES, CacheLedger, CallFacts
from tollway.session_server.merging import merge_cache, merge_engines, merge_health, merge_ready


def facts(engine: str, prompt: int) -> CallFacts:
    return CallFacts(
        engine_id=engine,
        incarnation=0,
        flush_epoch=0,
        end_version=0,
        prompt_tokens=prompt,
        output_tokens=1,
        started_at=0.0,
        ended_at=1.0,
    )


calls = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["e0", "e1"]),
        st.integers(1, 100),
        st.none() | st.integers(0, 100),
        st.integers(0, 100),
        st.booleans(),
        st.sampled_from(CAUSES),
    ),
    max_size=12,
)


@given(calls)
def test_merged_cache_figures_are_those_of_one_ledger(given_calls: list[Any]) -> None:
    whole, parts = CacheLedger(), {index: CacheLedger() for index in range(3)}
    for worker, engine, prompt, cached, possible, first, cause in given_calls:
        for ledger in (whole, parts[worker]):
            ledger.record(
                "s",
                facts(engine, prompt),
                cached=None if cached is None else min(cached, prompt),
                possible=min(possible, prompt),
                lost_prefix=3,
                first=first,
                cause=cause,
            )
    expected = whole.summary()
    merged = dict(merge_cache({index: part.summary() for index, part in parts.items()}, []))
    assert merged.pop("workers_down") == []
    assert merged == {**expected, "engines": dict(sorted(expected["engines"].items()))}  # type: ignore[attr-defined]


def test_an_unknown_hit_stays_unknown_when_figures_are_merged() -> None:
    ledger = CacheLedger()
    ledger.record("s", facts("e0", 100), cached=None, possible=50, lost_prefix=0, first=False, cause=None)
    merged = merge_cache({0: ledger.summary(), 1: CacheLedger().summary()}, [2])
    assert (merged["unreported_calls"], merged["hit_rate"], merged["efficiency"]) == (1, None, None)
    assert merged["workers_down"] == [2]


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
    assert merge_ready({0: yes, 1: yes}, []) == {"ready": True, "engines": ["a"]}
    assert merge_ready({0: yes, 1: no}, []) == {"ready": False, "engines": ["a", "b"]}
    assert merge_ready({0: yes}, [1]) == {"ready": False, "engines": ["a", "worker 1 is down"]}


def test_health_sums_and_says_who_is_down() -> None:
    one = {"status": "ok", "open_sessions": 2}
    assert merge_health({0: one, 1: one}, [])["open_sessions"] == 4
    assert merge_health({0: one}, [1]) == {"status": "degraded", "open_sessions": 2, "workers": 2, "workers_down": [1]}
