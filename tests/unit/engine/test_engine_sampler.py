"""Draws follow the distribution, and filters cut what they name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tollway.engine.batch import Batch
from tollway.engine.params import SamplingParams
from tollway.engine.request import Request
from tollway.engine.sampler import draw, mix_seed
from tollway.errors import BadRequest

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, float("-inf"), -3.0, -3.0])


def drawn(count, **options):
    batch = Batch(count, len(LOGITS))
    for i in range(count):
        params = SamplingParams(**options)
        batch.add(Request(rid="", prompt=np.zeros(1, np.int32), params=params, limit=9, seed=mix_seed(9, i)))
    return draw(LOGITS.repeat(count, 1), batch, 0, count)


def test_frequencies_match_probabilities():
    count = 20_000
    tokens = drawn(count, temperature=0.8).tokens
    expected = (LOGITS / 0.8).softmax(-1).numpy()
    observed = np.bincount(tokens, minlength=len(LOGITS)) / count
    np.testing.assert_allclose(observed, expected, atol=5 * 0.5 / np.sqrt(count))
    assert observed[5] == 0


def test_logprobs_are_of_the_scaled_distribution_before_filters():
    out = drawn(50, temperature=0.5, top_k=2)
    expected = (LOGITS / 0.5).log_softmax(-1).numpy()
    np.testing.assert_allclose(out.logprobs, expected[out.tokens], atol=1e-6)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.6}, {0, 1}),
        ({"min_p": 0.3}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 1e-6}, {0}),
    ],
)
def test_filters_leave_exactly_what_they_name(options, allowed):
    assert set(drawn(500, **options).tokens.tolist()) == allowed


def test_different_seeds_and_steps_draw_differently():
    assert len({mix_seed(1, i) for i in range(100)} | {mix_seed(2, i) for i in range(100)}) == 200


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"regex": "a"}, "regex"),
        ({"stop": "x"}, "stop"),
        ({"logit_bias": {"99": 1.0}}, "logit_bias"),
        ({"logit_bias": {"\u00b2": 1.0}}, "logit_bias"),
        ({"logit_bias": {"5": 1e308}}, "logit_bias"),
        ({"stop_token_ids": [2**64 - 1]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"top_k": 2**64 - 1}, "top_k"),
        ({"max_new_tokens": None, "min_new_tokens": 2**64 - 1}, "min_new_tokens"),
        ({"n": 0}, "n"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"json_schema": "{}"}, "no grammar backend"),
        ({"structural_tag": "{}"}, "structural_tag.*no grammar backend"),
        ({"ebnf": "root ::= 1"}, "no grammar backend"),
    ],
)
def test_wrong_parameters_are_refused_by_name(raw, named):
    with pytest.raises(BadRequest, match=named):
        SamplingParams.parse(raw, vocab_size=8, codec=None)


def test_an_unknown_parameter_is_refused_by_name() -> None:
    with pytest.raises(BadRequest, match="who_knows"):
        SamplingParams.parse({"who_knows": 1}, vocab_size=8, codec=None)
