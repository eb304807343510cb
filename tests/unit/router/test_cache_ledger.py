"""The cache ledger: definitions, causes in order, figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tollway.router.cache_ledger import CacheLedger, CallFacts, classify, possible_hit

PARENT = CallFacts(
    engine_id="e0", incarnation=0, flush_epoch=0, end_version=1, prompt_tokens=100, output_tokens=20, started_at=0.0,
    ended_at=1.0,
)  # fmt: skip
CALL = replace(PARENT, prompt_tokens=150, started_at=2.0, ended_at=3.0)


def cause(
    call: CallFacts = CALL, *, waste: int = 50, flushed: bool = False, page: int = 1, evicted: bool = False
) -> str:
    return classify(call, PARENT, waste=waste, flushed_between=flushed, page=page, evicted=evicted)


def test_the_possible_hit_is_as_defined() -> None:
    assert possible_hit(common=120, parent_sequence=120, prompt=150, page=1) == 119
    assert possible_hit(common=120, parent_sequence=120, prompt=100, page=1) == 99
    assert possible_hit(common=120, parent_sequence=120, prompt=150, page=64) == 64
    assert possible_hit(common=40, parent_sequence=120, prompt=150, page=1) == 40
    assert possible_hit(common=0, parent_sequence=1, prompt=1, page=1) == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"engine_id": "e1"}, "moved"),
        ({"dp_rank": 1}, "moved"),
        ({"incarnation": 1}, "engine_restarted"),
        ({"flush_epoch": 1}, "refit_flush"),
        ({"extra_key": "v2"}, "namespace"),
        ({"started_at": 0.5}, "parent_in_flight"),
        ({}, "unknown"),
    ],
)
def test_every_cause_is_found(change: dict[str, object], expected: str) -> None:
    assert cause(replace(CALL, **change)) == expected  # type: ignore[arg-type]


def test_the_first_cause_that_holds_wins() -> None:
    everything = replace(CALL, engine_id="e1", incarnation=1, flush_epoch=1, extra_key="x", started_at=0.0)
    assert cause(everything, flushed=True, evicted=True, page=1000) == "moved"
    assert cause(replace(everything, engine_id="e0"), evicted=True) == "engine_restarted"
    assert cause(flushed=True, evicted=True) == "refit_flush"
    assert cause(waste=10, page=64, evicted=True) == "page_alignment"
    assert cause(evicted=True) == "eviction"


def test_a_whole_session_adds_up() -> None:
    """The worked example: 29 turns, ceiling 95.7 % at page 1 and 95.5 % at page 64."""
    for page, ceiling in ((1, 0.957), (64, 0.955)):
        ledger = CacheLedger()
        parent = None
        for turn in range(29):
            prompt = 4000 + 670 * turn
            facts = replace(CALL, prompt_tokens=prompt, output_tokens=220)
            possible = 0
            if parent is not None:
                sequence = parent.prompt_tokens + parent.output_tokens
                possible = possible_hit(common=sequence, parent_sequence=sequence, prompt=prompt, page=page)
            ledger.record(
                "s", facts, cached=possible, possible=possible, lost_prefix=0, first=parent is None, cause=None
            )
            parent = facts
        figures = ledger.summary()
        assert figures["prompt_tokens"] == 388_020
        assert figures["ceiling"] == pytest.approx(ceiling, abs=5e-4)
        assert figures["efficiency"] == 1.0


def test_a_flush_is_counted_apart() -> None:
    ledger = CacheLedger()
    ledger.record("s", PARENT, cached=0, possible=0, lost_prefix=0, first=True, cause=None)
    ledger.record("s", CALL, cached=0, possible=119, lost_prefix=0, first=False, cause="refit_flush")
    ledger.record("s", CALL, cached=119, possible=119, lost_prefix=0, first=False, cause=None)
    figures = ledger.summary()
    assert figures["efficiency"] == 0.5
    assert figures["efficiency_without_refit"] == 1.0
    assert figures["refit_flush_tokens"] == 119
    assert figures["unknown_tokens"] == 0
    assert figures["waste"] == {"refit_flush": 119}


def test_shared_prompts_and_unreported_calls_stand_apart() -> None:
    ledger = CacheLedger()
    ledger.record("s", PARENT, cached=80, possible=0, lost_prefix=0, first=True, cause=None)
    ledger.record("s", CALL, cached=None, possible=119, lost_prefix=0, first=False, cause=None)
    figures = ledger.summary()
    assert (figures["shared_tokens"], figures["unreported_calls"]) == (80, 1)
    assert figures["efficiency"] is None
    assert (figures["hit_rate"], figures["hit_rate_with_shared"]) == (0.0, 0.8)
    assert figures["prompt_tokens"] == 100


def test_views_of_engines_and_sessions_sum_to_the_run() -> None:
    ledger = CacheLedger()
    for session, engine in (("s", "e0"), ("t", "e1"), ("t", "e1")):
        facts = replace(CALL, engine_id=engine)
        ledger.record(session, facts, cached=10, possible=20, lost_prefix=3, first=False, cause="eviction")
    figures = ledger.summary()
    engines = figures["engines"]
    assert isinstance(engines, dict)
    assert sum(each["wasted_tokens"] for each in engines.values()) == figures["wasted_tokens"] == 30
    assert ledger.session("t")["wasted_tokens"] == 20
    ledger.forget("t")
    assert ledger.session("t")["calls"] == 0
    assert ledger.summary()["calls"] == 3
