"""What one engine promises about ids, log-probabilities, caching, versions and routes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from engine_reference import forward, sampled_logprobs


def prompt(seed, length=20):
    source = random.Random(seed)
    return [source.randrange(272) for _ in range(length)]


@pytest.mark.parametrize("kind", ["dense", "untied", "moe"])
def test_logprobs_equal_an_independent_full_forward(models, driver, kind):
    engine = driver(kind)
    tickets = [engine.submit(prompt(i, 5 + 9 * i), 12, seed=i, temperature=0.7) for i in range(5)]
    engine.run()
    for ticket in tickets:
        expected = sampled_logprobs(models[kind], ticket.request.prompt.tolist(), ticket.ids, 0.7)
        assert len(ticket.ids) == 12
        np.testing.assert_allclose(ticket.result.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_prefix_cache_changes_nothing_but_the_work(driver, kind):
    outcomes = []
    for cached in (True, False):
        engine = driver(kind, prefix_cache=cached)
        first = engine.submit(prompt(1, 40), 10, seed=5)
        engine.run()
        follow_up = first.request.prompt.tolist() + first.ids + prompt(2, 7)
        second = engine.submit(follow_up, 10, seed=6)
        engine.run()
        assert second.result.cached_tokens == (40 + 10 - 1 if cached else 0)
        outcomes.append((first, second))
    for with_cache, without in zip(*outcomes, strict=True):
        assert with_cache.ids == without.ids
        np.testing.assert_allclose(with_cache.result.logprobs, without.result.logprobs, atol=1e-5)


def test_the_last_prompt_position_is_always_computed(driver):
    engine = driver()
    for expected in (0, 19):
        ticket = engine.submit(prompt(3), 2)
        engine.run()
        assert ticket.result.cached_tokens == expected


def test_prompt_logprobs_cap_the_cache_and_equal_a_full_forward(models, driver):
    engine = driver()
    engine.submit(prompt(3), 2)
    engine.run()
    ticket = engine.submit(prompt(3), 2, logprob_start=6, top_logprobs=2)
    engine.run()
    assert ticket.result.cached_tokens == 6
    logprobs, _ = forward(models["dense"], prompt(3))
    expected = [logprobs[i, prompt(3)[i + 1]].item() for i in range(6, 19)]
    np.testing.assert_allclose(ticket.result.input_logprobs, expected, atol=1e-5)
    np.testing.assert_array_equal(ticket.result.input_tops[0][1], logprobs[6].topk(2)[1])
    assert len(ticket.result.input_tops) == 13


def test_namespaces_never_share_a_prefix(driver):
    engine = driver()
    for namespace, expected in (("a", 0), ("b", 0), ("a", 19), ("b", 19)):
        ticket = engine.submit(prompt(4), 1, namespace=namespace)
        engine.run()
        assert ticket.result.cached_tokens == expected


def test_a_flush_forgets_everything_and_is_refused_while_requests_hold_positions(driver):
    engine = driver()
    engine.submit(prompt(5), 4)
    engine.steps(2)
    assert not engine.do(lambda g: g.flush())
    engine.run()
    assert engine.do(lambda g: g.flush())
    ticket = engine.submit(prompt(5), 1)
    engine.run()
    assert ticket.result.cached_tokens == 0


def test_eviction_takes_the_least_recently_used_and_keeps_the_budget(driver):
    engine = driver(max_tokens=150)  # two entries, and a running request beside its own entry
    for seed in (1, 2, 1, 3):  # 1 is used again before 3 needs room
        engine.submit(prompt(seed, 40), 2)
        engine.run()
        assert engine.generation.cached_tokens + engine.generation.row_tokens <= 150
    kept = engine.submit(prompt(1, 40), 1)
    engine.run()
    gone = engine.submit(prompt(2, 40), 1)
    engine.run()
    assert (kept.result.cached_tokens, gone.result.cached_tokens) == (39, 0)
    assert engine.generation.cache.evicted_tokens > 0


def test_siblings_hit_the_prompt_of_a_request_that_still_runs(driver):
    engine = driver()
    engine.submit(prompt(6), 30)
    engine.steps(3)
    sibling = engine.submit(prompt(6), 2)
    engine.steps(3)
    assert sibling.result.cached_tokens == 19


def test_siblings_that_arrive_together_compute_their_prompt_once(driver):
    engine = driver()
    tickets = [engine.submit(prompt(6, 50), 2, seed=i) for i in range(4)]
    engine.run()
    assert sorted(t.result.cached_tokens for t in tickets) == [0, 49, 49, 49]


def test_a_seed_draws_the_same_tokens_whatever_else_runs(driver):
    alone = driver()
    expected = [alone.submit(prompt(i, 10 + i), 15, seed=i) for i in range(3)]
    for _ in range(3):
        alone.run()
    crowded = driver(max_running=5)
    for i in range(20, 24):
        crowded.submit(prompt(i, 30), 9)
    crowded.steps(4)
    tickets = [crowded.submit(prompt(i, 10 + i), 15, seed=i) for i in reversed(range(3))]
    crowded.run()
    assert [t.ids for t in reversed(tickets)] == [t.ids for t in expected]
    assert len({tuple(t.ids) for t in expected}) == 3


def test_a_token_budget_smaller_than_the_load_retracts_and_changes_no_token(driver):
    def run(**options):
        engine = driver(prefix_cache=False, **options)
        tickets = [engine.submit(prompt(i, 20), 40, seed=i) for i in range(4)]
        engine.run()
        return tickets

    roomy, tight = run(), run(max_tokens=130)
    assert sum(t.result.retractions for t in tight) > 0
    assert sum(t.result.retractions for t in roomy) == 0
    assert [t.ids for t in tight] == [t.ids for t in roomy]


def test_a_retracted_request_is_not_taken_back_only_to_be_retracted_again(driver):
    engine = driver(max_tokens=130)
    tickets = [engine.submit(prompt(i, 20), 40, seed=i) for i in range(4)]
    engine.run()
    assert sum(t.result.retractions for t in tickets) <= 8


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_refit_in_flight_is_seen_in_the_version_spans(driver, models, mode):
    from tollway.engine.weights import load_directory

    engine = driver()
    tickets = [engine.submit(prompt(i), 12, seed=i) for i in range(3)]
    engine.steps(5)
    if mode == "retract":
        engine.do(lambda g: g.retract())
    engine.generation.paused = True
    assert not engine.generation.step()
    flushed = engine.do(lambda g: g.flush())
    assert flushed == (mode == "retract")
    load_directory(engine.generation.decoder, models["other"])
    engine.do(lambda g: g.set_version("2"))
    engine.generation.paused = False
    engine.run()
    for ticket in tickets:
        assert ticket.result.versions == (("1", 0, 5), ("2", 5, 12))
        assert ticket.result.weight_version == "2"
        assert ticket.result.retractions == (mode == "retract")
        old = sampled_logprobs(models["dense"], ticket.request.prompt.tolist(), ticket.ids)
        np.testing.assert_allclose(ticket.result.logprobs[:5], old[:5], atol=1e-5)
        if mode == "retract":  # re-prefilled: everything after the refit is the new model's alone
            new = sampled_logprobs(models["other"], ticket.request.prompt.tolist(), ticket.ids)
            np.testing.assert_allclose(ticket.result.logprobs[5:], new[5:], atol=1e-5)


def test_aborting_returns_what_was_generated(driver):
    engine = driver(max_running=2)
    running, other, waiting = (engine.submit(prompt(i), 30) for i in range(3))
    engine.steps(4)
    assert engine.do(lambda g: g.abort(running.request.rid)) == 1
    assert running.result.finish.kind == "abort"
    assert len(running.ids) == 4
    assert running.result.versions == (("1", 0, 4),)
    assert engine.do(lambda g: g.abort(waiting.request.rid)) == 1
    assert waiting.ids == []
    assert engine.do(lambda g: g.abort("unknown")) == 0
    engine.run()
    assert len(other.ids) == 30


def test_routed_experts_equal_the_router_also_at_cached_positions(driver, models):
    engine = driver("moe")
    first = engine.submit(prompt(8, 30), 6, return_routes=True)
    engine.run()
    ids = first.request.prompt.tolist() + first.ids
    _, chosen = forward(models["moe"], ids)
    assert first.result.routes.shape == (30 + 6 - 1, 2, 2)
    np.testing.assert_array_equal(first.result.routes, chosen[:-1])
    second = engine.submit([*ids, 7], 3, return_routes=True, routes_start=10)
    engine.run()
    assert second.result.cached_tokens == 35
    _, chosen = forward(models["moe"], [*ids, 7, *second.ids])
    np.testing.assert_array_equal(second.result.routes, chosen[10:-1])


def test_routes_of_retracted_tokens_are_those_they_were_sampled_with(driver, models):
    from tollway.engine.weights import load_directory

    engine = driver("moe")
    ticket = engine.submit(prompt(9), 8, return_routes=True, routes_start=4)
    engine.steps(4)
    engine.do(lambda g: g.retract())
    load_directory(engine.generation.decoder, models["other_moe"])
    engine.generation.paused = True
    assert engine.do(lambda g: g.flush())
    engine.do(lambda g: g.set_version("2"))
    engine.generation.paused = False
    engine.run()
    _, old = forward(models["moe"], ticket.request.prompt.tolist() + ticket.ids)
    _, new = forward(models["other_moe"], ticket.request.prompt.tolist() + ticket.ids)
    known = 20 + 4 - 1  # positions stored at the retraction
    np.testing.assert_array_equal(ticket.result.routes[: known - 4], old[4:known])
    np.testing.assert_array_equal(ticket.result.routes[known - 4 :], new[known:-1])
    assert not torch.equal(old[:known], new[:known])


def test_a_prefill_only_request_has_a_route_row_for_every_prompt_position(driver):
    engine = driver("moe")
    ticket = engine.submit(prompt(1, 5), 0, return_routes=True)
    engine.run()
    assert ticket.result.finish.kind == "length"
    assert (ticket.ids, ticket.result.routes.shape[0]) == ([], 5)


def test_stop_ids_and_stop_strings_end_generation(driver):
    engine = driver()
    free = engine.submit(prompt(1), 20, seed=1)
    engine.run()
    stop = free.ids[6]
    first = free.ids.index(stop)
    by_id = engine.submit(prompt(1), 20, seed=1, stop_token_ids=[stop])
    engine.run()
    assert by_id.ids == free.ids[: first + 1]
    assert (by_id.result.finish.kind, by_id.result.finish.matched) == ("stop", stop)


def test_a_stop_string_that_straddles_tokens_is_found(driver):
    engine = driver()
    bias = {"logit_bias": {str(ord("a")): 60.0, str(ord("b")): 60.0}}
    ticket = engine.submit(prompt(1), 60, seed=3, stop=["ab", "ba"], **bias)
    engine.run()
    text = bytes(ticket.ids).decode()
    assert set(text) == {"a", "b"}
    assert ticket.result.finish.matched == text[-2:]
    assert "ab" not in text[:-1]
    assert "ba" not in text[:-1]


def test_min_new_tokens_holds_stop_ids_back(driver):
    engine = driver()
    every = list(range(0, 272, 2))
    ticket = engine.submit(prompt(1), 30, seed=1, stop_token_ids=every, min_new_tokens=9)
    engine.run()
    assert len(ticket.ids) > 9
    assert not set(ticket.ids[:9]) & set(every)


def test_a_stop_id_beyond_the_vocabulary_never_matches_and_harms_nothing(driver):
    engine = driver()
    ticket = engine.submit(prompt(1), 5, seed=1, stop_token_ids=[99_999], min_new_tokens=3)
    engine.run()
    assert len(ticket.ids) == 5


def test_penalties_and_bias_change_what_is_drawn(driver):
    engine = driver()
    plain = engine.submit(prompt(1), 30, temperature=0.0)
    varied = engine.submit(
        prompt(1), 30, temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=2.0
    )
    forced = engine.submit(prompt(1), 5, temperature=0.0, logit_bias={"7": 100.0})
    engine.run()
    assert len(set(varied.ids)) > len(set(plain.ids))
    assert forced.ids == [7] * 5


def test_greedy_takes_the_most_likely_token_at_temperature_one(driver, models):
    engine = driver()
    ticket = engine.submit(prompt(2), 6, temperature=0.0, top_logprobs=3)
    engine.run()
    logprobs, _ = forward(models["dense"], prompt(2) + ticket.ids)
    assert ticket.ids == logprobs[19:-1].argmax(-1).tolist()
    np.testing.assert_allclose(ticket.result.logprobs, logprobs[19:-1].amax(-1), atol=1e-5)
    assert [ids[0] for _, ids in ticket.result.tops] == ticket.ids
    assert all(len(values) == 3 for values, _ in ticket.result.tops)


def test_long_prompts_are_prefilled_in_chunks_with_the_same_result(driver, models, monkeypatch):
    import tollway.engine.forward as forward_module
    import tollway.engine.generation as generation_module

    for module in (forward_module, generation_module):
        monkeypatch.setattr(module, "PREFILL_TOKENS", 16)
    engine = driver()
    ticket = engine.submit(prompt(2, 120), 4, seed=2, logprob_start=3)
    engine.run()
    expected = sampled_logprobs(models["dense"], prompt(2, 120), ticket.ids)
    np.testing.assert_allclose(ticket.result.logprobs, expected, atol=1e-5)
    full, _ = forward(models["dense"], prompt(2, 120))
    wanted = [full[i, prompt(2, 120)[i + 1]].item() for i in range(3, 119)]
    np.testing.assert_allclose(ticket.result.input_logprobs, wanted, atol=1e-5)


def test_non_finite_weights_are_an_error_not_a_sample(driver):
    engine = driver()
    engine.generation.decoder.norm.fill_(float("nan"))
    ticket = engine.submit(prompt(1), 5)
    engine.run()
    assert ticket.result.finish.status == 500
    assert "non-finite" in ticket.result.finish.message


def test_streams_see_every_token_as_it_comes(driver):
    engine = driver()
    ticket = engine.submit(prompt(1), 5, stream=True)
    engine.run()
    assert [p.ids.tolist() for p in ticket.progress] == [ticket.ids[:n] for n in range(1, 5)]
