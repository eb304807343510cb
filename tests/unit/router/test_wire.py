"""The wire: what is sent, and every way in which a reply can fail to add up."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest

from tollway.errors import UpstreamError
from tollway.records import RoutedExperts, Sampling, TopLogprobs, VersionSpan
from tollway.router.continuation import continue_call, merge_replies
from tollway.router.wire import GenerateCall, GenerateReply, encode_call, parse_reply

CALL = GenerateCall(
    rid="r", input_ids=np.array([1, 2, 3, 4], np.int32), sampling=Sampling(max_new_tokens=10), routing_key="k"
)
REPLY: dict[str, Any] = {
    "output_ids": [7, 8, 9],
    "meta_info": {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "cached_tokens": 2,
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None], [-0.125, 9, None]],
        "finish_reason": {"type": "stop", "matched": [8, 9]},
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
    },
}


def with_(**fields: object) -> GenerateCall:
    from dataclasses import replace

    return replace(CALL, **fields)  # type: ignore[arg-type]


def test_a_good_reply_is_read() -> None:
    reply = parse_reply(CALL, REPLY)
    assert reply.output_ids.tolist() == [7, 8, 9]
    assert reply.logprobs.tolist() == [-0.5, -0.25, -0.125]
    assert (reply.finish_reason, reply.matched, reply.cached_tokens) == ("stop", 9, 2)
    assert reply.versions == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 3))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda r: r.pop("meta_info"), "meta_info"),
        (lambda r: r["meta_info"]["output_token_logprobs"].__setitem__(1, [0.5, 8, None]), "no probability exceeds 1"),
        (lambda r: r.pop("output_ids"), "output_ids"),
        (lambda r: r.update(output_ids=[7, 8]), "3 completion tokens and sent 2"),
        (lambda r: r.update(output_ids=[7, 8, "x"]), "not all integers"),
        (lambda r: r.update(output_ids=[7, 8, 9.5]), "not all integers"),
        (lambda r: r.update(output_ids=[7, 8, "9"]), "not all integers"),
        (lambda r: r.update(output_ids=[7, 8, True]), "not all integers"),
        (lambda r: r.update(output_ids=[7, 8, [9]]), "not all integers"),
        (lambda r: r.update(output_ids=[7, 8, -1]), "int32"),
        (lambda r: r.update(output_ids=[7, 8, 2**31]), "int32"),
        (lambda r: r["meta_info"].update(completion_tokens=True), "completion_tokens"),
        (lambda r: r["meta_info"].update(prompt_tokens=5), "4 ids were sent"),
        (lambda r: r["meta_info"].pop("output_token_logprobs"), "for 3 output ids"),
        (lambda r: r["meta_info"]["output_token_logprobs"].pop(), "2 output logprobs for 3"),
        (lambda r: r["meta_info"]["output_token_logprobs"].__setitem__(0, 5), "not .number, id, text."),
        (lambda r: r["meta_info"]["output_token_logprobs"][1].__setitem__(0, float("inf")), "non-finite"),
        (lambda r: r["meta_info"]["output_token_logprobs"][1].__setitem__(1, 5), "is of id 5, output id is 8"),
        (lambda r: r["meta_info"].update(finish_reason=None), "finish_reason"),
        (lambda r: r["meta_info"].update(finish_reason={"type": "tired"}), "tired"),
        (lambda r: r["meta_info"].update(finish_reason={"type": ["stop"]}), "finish_reason"),
        (lambda r: r["meta_info"]["output_token_logprobs"][1].__setitem__(0, "-0.25"), "not .number, id, text."),
        (lambda r: r["meta_info"]["output_token_logprobs"][1].__setitem__(0, None), "non-finite"),
        (lambda r: r["meta_info"]["output_token_logprobs"][1].__setitem__(1, 8.5), "not .number, id, text."),
        (lambda r: r["meta_info"].update(cached_tokens=5), "5 cached of 4"),
        (lambda r: r["meta_info"].update(weight_versions="3"), "weight_versions"),
        (lambda r: r["meta_info"].update(weight_versions=[{"version": "3"}]), "version, start, end"),
        (lambda r: r["meta_info"]["weight_versions"].pop(), "cover 1 of 3"),
        (lambda r: r["meta_info"]["weight_versions"].pop(0), "gap at token 0"),
        (lambda r: r["meta_info"]["weight_versions"][0].update(version="v3"), "decimal"),
        (lambda r: r["meta_info"]["weight_versions"][0].update(version="2147483648"), "decimal"),
        (lambda r: r["meta_info"]["weight_versions"][0].update(version="9" * 5000), "decimal"),
        (lambda r: r["meta_info"]["weight_versions"][0].update(start=2), "span"),
        (lambda r: r["meta_info"]["weight_versions"][0].update(end=1.0), "version, start, end"),
    ],
)
def test_what_does_not_add_up_is_named(break_it: Callable[[Any], object], words: str) -> None:
    reply = copy.deepcopy(REPLY)
    break_it(reply)
    with pytest.raises(UpstreamError, match=words):
        parse_reply(CALL, reply)


def routes(rows: int, kind: str = "<i4", value: int = 1) -> str:
    return base64.b64encode(np.full((rows, 2, 3), value, kind).tobytes()).decode()


def with_routes(raw: object) -> dict[str, Any]:
    reply = copy.deepcopy(REPLY)
    reply["meta_info"]["routed_experts"] = raw
    return reply


def test_route_rows_are_counted_from_the_start() -> None:
    call = with_(return_routed_experts=True, routed_experts_start=2)
    reply = parse_reply(call, with_routes(routes(4)), route_shape=(2, 3))
    assert reply.routed_experts is not None
    assert (reply.routed_experts.start, reply.routed_experts.ids.shape) == (2, (4, 2, 3))
    assert reply.routed_experts.ids.dtype == np.uint8
    wide = parse_reply(call, with_routes(routes(4, value=300)), route_shape=(2, 3))
    assert wide.routed_experts is not None
    assert wide.routed_experts.ids.dtype == np.uint16


def test_a_prefill_only_reply_has_a_row_for_every_prompt_token() -> None:
    call = with_(return_routed_experts=True)
    empty = copy.deepcopy(REPLY)
    empty["output_ids"] = []
    empty["meta_info"] |= {"completion_tokens": 0, "output_token_logprobs": [], "weight_versions": None}
    empty["meta_info"]["routed_experts"] = routes(4)
    assert parse_reply(call, empty, route_shape=(2, 3)).versions == ()
    empty["meta_info"]["routed_experts"] = routes(3)
    with pytest.raises(UpstreamError, match="72 bytes, want 96"):
        parse_reply(call, empty, route_shape=(2, 3))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (None, "no routed_experts, want 6 rows"),
        ("%%%", "not base64"),
        (routes(5), "120 bytes, want 144"),
        (routes(6, "<i2"), "72 bytes, want 144"),
        (base64.b64encode(b"\x93NUMPY" + b"\x00" * 138 + b"x" * 10).decode(), "bytes, want 144"),
        (routes(6, value=70000), "70000"),
        (routes(6, value=-1), "expert"),
    ],
)
def test_routes_are_never_reshaped_to_fit(raw: object, words: str) -> None:
    with pytest.raises(UpstreamError, match=words):
        parse_reply(with_(return_routed_experts=True), with_routes(raw), route_shape=(2, 3))


def test_routes_of_an_unknown_model_are_refused() -> None:
    with pytest.raises(UpstreamError, match="unknown"):
        parse_reply(with_(return_routed_experts=True), with_routes(routes(6)))


def test_ragged_top_logprobs_are_padded_by_rule() -> None:
    reply = copy.deepcopy(REPLY)
    reply["meta_info"]["output_top_logprobs"] = [[[-0.5, 7, None], [-1.0, 1, None]], None, [[-0.1, 9, None]]]
    top = parse_reply(with_(top_logprobs=2), reply).top_logprobs
    assert top is not None
    assert top.ids.tolist() == [[7, 1], [-1, -1], [9, -1]]
    assert top.logprobs[1].tolist() == [-np.inf, -np.inf]
    reply["meta_info"]["output_top_logprobs"].pop()
    with pytest.raises(UpstreamError, match="2 rows of top logprobs for 3"):
        parse_reply(with_(top_logprobs=2), reply)
    reply["meta_info"]["output_top_logprobs"] = [5, 5, 5]
    with pytest.raises(UpstreamError, match="top logprobs"):
        parse_reply(with_(top_logprobs=2), reply)


def test_the_body_asks_for_what_was_wanted_and_never_for_prompt_logprobs() -> None:
    body = orjson.loads(encode_call(CALL))
    assert body["logprob_start_len"] == -1
    assert (body["rid"], body["routing_key"], body["input_ids"]) == ("r", "k", [1, 2, 3, 4])
    assert "return_routed_experts" not in body
    assert "extra_key" not in body
    rich = orjson.loads(
        encode_call(
            with_(
                sampling=Sampling(temperature=0.5, seed=3, stop=("x",), stop_token_ids=(9,), max_new_tokens=2),
                return_routed_experts=True, routed_experts_start=3, extra_key="v", routed_dp_rank=1, priority=2,
                top_logprobs=4, stream=True, ignore_eos=True,
            )
        )
    )  # fmt: skip
    params = rich["sampling_params"]
    assert (params["temperature"], params["sampling_seed"], params["stop"], params["stop_token_ids"]) == (
        0.5,
        3,
        ["x"],
        [9],
    )
    assert (rich["routed_experts_start_len"], rich["extra_key"], rich["routed_dp_rank"], rich["priority"]) == (
        3,
        "v",
        1,
        2,
    )
    assert (rich["top_logprobs_num"], rich["stream"], params["ignore_eos"]) == (4, True, True)


def piece(ids: list[int], finish: str, version: int, start: int) -> GenerateReply:
    size = len(ids)
    return GenerateReply(
        output_ids=np.array(ids, np.int32), logprobs=np.full(size, -1.0, np.float32),
        finish_reason=finish, matched=None, versions=(VersionSpan(version, 0, size),), prompt_tokens=4, cached_tokens=2,  # type: ignore[arg-type]
        routed_experts=RoutedExperts(start=start, ids=np.zeros((start_rows(start, size), 2, 3), np.uint8)),
        top_logprobs=TopLogprobs(ids=np.zeros((size, 2), np.int32), logprobs=np.zeros((size, 2), np.float32)),
    )  # fmt: skip


def start_rows(start: int, size: int) -> int:
    return 4 + size - 1 if start == 0 else size


def test_a_continued_reply_is_one_reply() -> None:
    """7 of 10 tokens are there: 3 are asked for, routes join without a gap, versions keep their places."""
    first = piece([1] * 7, "abort", 3, 0)
    following = continue_call(CALL, [first])
    assert following is not None
    assert following.sampling.max_new_tokens == 3
    assert following.routed_experts_start == 10
    assert following.input_ids.size == 11
    assert following.rid != CALL.rid
    whole = merge_replies(CALL, [first, piece([2, 3], "stop", 4, 10)])
    assert whole.output_ids.size == whole.logprobs.size == 9
    assert whole.versions == (VersionSpan(3, 0, 7), VersionSpan(4, 7, 9))
    assert whole.routed_experts is not None
    assert whole.routed_experts.ids.shape[0] == 4 + 9 - 1
    assert whole.top_logprobs is not None
    assert whole.top_logprobs.ids.shape == (9, 2)
    assert merge_replies(CALL, [first, piece([2], "stop", 3, 10)]).versions == (VersionSpan(3, 0, 8),)


def test_an_aborted_reply_with_its_budget_used_ended_by_length() -> None:
    full = piece([1] * 10, "abort", 3, 0)
    assert continue_call(CALL, [full]) is None
    assert merge_replies(CALL, [full]).finish_reason == "length"
    done = piece([1], "stop", 3, 0)
    assert continue_call(CALL, [done]) is None
    assert merge_replies(CALL, [done]) is done


def test_a_reply_aborted_while_it_waited_lacks_prefill_facts_and_its_continuation_asks_for_all_routes() -> None:
    """A stock server leaves prompt_tokens, cached_tokens and routed_experts out of it."""
    asked = with_(return_routed_experts=True)
    waited = copy.deepcopy(REPLY)
    waited["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
    for name in ("prompt_tokens", "cached_tokens"):
        del waited["meta_info"][name]
    first = parse_reply(asked, waited, route_shape=(2, 3))
    assert (first.prompt_tokens, first.cached_tokens, first.routed_experts) == (4, None, None)
    following = continue_call(asked, [first])
    assert following is not None
    assert (following.input_ids.size, following.routed_experts_start) == (7, 0)

    finished = copy.deepcopy(REPLY)
    del finished["meta_info"]["prompt_tokens"]
    with pytest.raises(UpstreamError, match="prompt_tokens"):
        parse_reply(asked, finished, route_shape=(2, 3))


def test_more_tokens_than_were_asked_for_are_no_reply() -> None:
    with pytest.raises(UpstreamError, match="3 output ids, 2 were asked for"):
        parse_reply(with_(sampling=Sampling(max_new_tokens=2)), REPLY)
