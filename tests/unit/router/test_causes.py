"""The ten rules of a cache miss, each with exact numbers, and what no cache could have had."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollway.router.causes import (
    BEYOND,
    CAUSES,
    MOVES,
    CallFacts,
    EngineKeys,
    Evidence,
    Miss,
    explain,
    reach,
)

PARENT = CallFacts(
    engine_id="e0", incarnation=0, flush_epoch=0, end_version=1, prompt_tokens=100, output_tokens=20, started_at=0.0,
    ended_at=1.0, engine_url="http://a",
)  # fmt: skip
CALL = replace(PARENT, prompt_tokens=150, started_at=2.0, ended_at=3.0)
PLAIN = EngineKeys()


def cause(
    call: CallFacts = CALL, parent: CallFacts = PARENT, *, waste: int = 50, page: int = 1, **seen: object
) -> Miss:
    """The one cause of ``waste`` tokens."""
    (miss,) = explain(call, parent, waste, Evidence(**seen), page=page)  # type: ignore[arg-type]
    assert miss.tokens == waste
    return miss


# -- what could have been cached -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "common", "page", "possible"),
    [(150, 120, 1, 119), (100, 120, 1, 99), (150, 120, 64, 64), (150, 40, 1, 40), (1, 120, 1, 0), (150, 0, 1, 0)],
)
def test_the_possible_hit_is_as_defined(prompt: int, common: int, page: int, possible: int) -> None:
    found = reach(replace(CALL, prompt_tokens=prompt), PARENT, common, keys=EngineKeys(page=page))
    assert found.possible == possible


def test_rule_1_a_first_call_can_have_nothing_of_its_own() -> None:
    assert reach(CALL, None, 0, keys=PLAIN).beyond == (Miss("first_call", 150),)
    assert reach(CALL, None, 0, keys=PLAIN).possible == 0


def test_rule_2_a_changed_prefix_lowers_the_ceiling_and_says_by_how_much() -> None:
    found = reach(CALL, PARENT, 40, keys=PLAIN)
    assert found.possible == 40
    assert found.beyond == (Miss("new", 31), Miss("prefix_mismatch", 79))
    assert found.lost_prefix == 80, "of the parent's 120 ids"


def test_rule_3_prompt_logprobs_and_embeddings_cap_what_is_reused() -> None:
    capped = reach(CALL, PARENT, 120, keys=PLAIN, logprob_start=30)
    assert (capped.possible, capped.beyond) == (30, (Miss("new", 31), Miss("logprob_cap", 89)))
    assert reach(CALL, PARENT, 120, keys=PLAIN, logprob_start=0).possible == 0
    assert reach(CALL, PARENT, 120, keys=PLAIN, logprob_start=-1).possible == 119
    embedded = reach(CALL, PARENT, 120, keys=PLAIN, embeds=True)
    assert (embedded.possible, embedded.beyond) == (0, (Miss("new", 31), Miss("embeds", 119)))


def test_keys_of_pairs_find_one_position_less() -> None:
    assert reach(CALL, PARENT, 120, keys=EngineKeys(bigram=True)).possible == 118


def test_an_engine_that_drops_thinking_keeps_the_parents_prompt_only() -> None:
    keys = EngineKeys(strips_thinking=True)
    assert reach(CALL, PARENT, 120, keys=keys).possible == 119, "that call did not reason"
    found = reach(CALL, replace(PARENT, reasoning=True), 120, keys=keys)
    assert (found.possible, found.beyond) == (100, (Miss("new", 31), Miss("thinking_stripped", 19)))


def test_what_does_not_fill_a_page_is_told_apart() -> None:
    found = reach(CALL, PARENT, 120, keys=EngineKeys(page=64))
    assert found.beyond == (Miss("new", 31), Miss("page_alignment", 55))


# -- why less was there --------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["engine_lost", "migration", "drain", "version"])
def test_rule_4_a_move_has_the_routers_reason(reason: str) -> None:
    assert cause(replace(CALL, engine_id="e1", moved=reason)) == Miss("moved", 50, reason)


def test_rule_4_another_rank_of_the_same_engine_is_a_move() -> None:
    assert cause(replace(CALL, dp_rank=1, moved="drain")) == Miss("moved", 50, "rank")
    assert cause(replace(CALL, engine_id="e1")) == Miss("moved", 50, "unrecorded")
    assert cause(replace(CALL, engine_id="e1", moved="the weather")) == Miss("moved", 50, "unrecorded")
    assert set(MOVES) >= {"engine_lost", "migration", "drain", "version", "rank", "unrecorded"}


def test_rule_5_an_engine_that_came_back_has_nothing() -> None:
    assert cause(replace(CALL, incarnation=1)).cause == "engine_restarted"


def test_rule_6_a_flush_or_another_namespace_hides_what_was_there() -> None:
    assert cause(replace(CALL, flush_epoch=1)).cause == "refit_flush"
    assert cause(flushed=True).cause == "refit_flush"
    assert cause(replace(CALL, extra_key="v2")).cause == "namespace"


def test_rule_7_a_branch_that_began_before_its_parent_ended_finds_nothing_yet() -> None:
    assert cause(replace(CALL, started_at=0.5)).cause == "parent_in_flight"


def test_rule_8_less_than_a_page_is_alignment() -> None:
    assert cause(waste=63, page=64, evicted=True).cause == "page_alignment"
    assert cause(waste=64, page=64, evicted=True).cause == "eviction"


def test_rule_9_what_lies_on_the_host_is_told_apart_from_the_rest() -> None:
    assert explain(CALL, PARENT, 50, Evidence(host_missed=20, evicted=True), page=1) == (
        Miss("host_tier", 20),
        Miss("eviction", 30),
    )
    assert explain(CALL, PARENT, 50, Evidence(host_missed=80), page=1) == (Miss("host_tier", 50),)


def test_rule_10_an_eviction_needs_evidence() -> None:
    assert cause(evicted=True).cause == "eviction"
    assert cause().cause == "unknown"


def test_the_first_cause_that_holds_wins() -> None:
    everything = replace(
        CALL, engine_id="e1", dp_rank=1, incarnation=1, flush_epoch=1, extra_key="x", started_at=0.0, moved="drain"
    )
    seen = Evidence(flushed=True, evicted=True, host_missed=9)
    steps = [
        ({}, "moved"),
        ({"engine_id": "e0"}, "moved"),
        ({"dp_rank": None}, "engine_restarted"),
        ({"incarnation": 0}, "refit_flush"),
    ]
    for change, expected in steps:
        everything = replace(everything, **change)  # type: ignore[arg-type]
        assert explain(everything, PARENT, 50, seen, page=100)[0].cause == expected
    rest = replace(everything, flush_epoch=0)
    quiet = Evidence(evicted=True, host_missed=9)
    assert explain(rest, PARENT, 50, quiet, page=100)[0].cause == "namespace"
    assert explain(replace(rest, extra_key=None), PARENT, 50, quiet, page=100)[0].cause == "parent_in_flight"


def test_after_a_restart_of_the_server_only_what_is_still_known_counts() -> None:
    """Its clock, incarnations and flushes began anew; urls, ranks and the engine's own counter did not."""
    before = replace(PARENT, earlier_run=True, started_at=900.0, ended_at=990.0, incarnation=3, flush_epoch=7)
    assert cause(CALL, before).cause == "server_restarted"
    assert cause(CALL, before, evicted=True).cause == "eviction"
    assert cause(replace(CALL, engine_id="e5"), before).cause == "server_restarted", "engines are numbered anew"
    moved = replace(CALL, engine_url="http://b")
    assert cause(moved, before) == Miss("moved", 50, "server_restarted")


numbers = st.integers(0, 400)
calls = st.builds(
    lambda e, r, i, f, x, s, m: replace(
        CALL, engine_id=e, dp_rank=r, incarnation=i, flush_epoch=f, extra_key=x, started_at=s, moved=m
    ),
    st.sampled_from(["e0", "e1"]),
    st.none() | st.just(1),
    st.integers(0, 1),
    st.integers(0, 1),
    st.none() | st.just("x"),
    st.sampled_from([0.5, 2.0]),
    st.none() | st.sampled_from(MOVES[:4]),
)
keys = st.builds(EngineKeys, page=st.sampled_from([1, 16, 64]), bigram=st.booleans(), strips_thinking=st.booleans())


parents = st.builds(
    lambda prompt, output, reasoned: replace(PARENT, prompt_tokens=prompt, output_tokens=output, reasoning=reasoned),
    numbers,
    numbers,
    st.booleans(),
)
evidence = st.builds(Evidence, flushed=st.booleans(), evicted=st.booleans(), host_missed=numbers)


@given(calls, parents, keys, evidence, st.data())
def test_every_token_of_a_prompt_has_exactly_one_reason(
    call: CallFacts, parent: CallFacts, keyed: EngineKeys, seen: Evidence, data: st.DataObject
) -> None:
    prompt = data.draw(st.integers(1, 400))
    call = replace(call, prompt_tokens=prompt)
    start = data.draw(st.integers(-1, 300))
    found = reach(call, parent, data.draw(numbers), keys=keyed, logprob_start=start)
    assert 0 <= found.possible < prompt
    assert found.possible % keyed.page == 0
    assert found.possible + sum(miss.tokens for miss in found.beyond) == prompt
    assert {miss.cause for miss in found.beyond} <= set(BEYOND)
    assert all(miss.tokens > 0 for miss in found.beyond)
    waste = found.possible - data.draw(st.integers(0, found.possible))
    misses = explain(call, parent, waste, seen, page=keyed.page)
    assert sum(miss.tokens for miss in misses) == waste
    assert {miss.cause for miss in misses} <= set(CAUSES)
    assert all(miss.tokens > 0 and (not miss.reason or miss.reason in MOVES) for miss in misses)
