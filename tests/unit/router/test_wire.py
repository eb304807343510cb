"""The wire: what is sent, and every way in which a reply can fail to add up."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest

from tollway.errors import InvalidRecord, UpstreamError
from tollway.records import IndexerTopk, RoutedExperts, Sampling, SamplingMask, TopLogprobs, VersionSpan
from tollway.router.continuation import continue_call, merge_replies
from tollway.router.facts import EngineFacts
from tollway.router.replies import parse_reply
from tollway.router.wire import CacheTiers, GenerateCall, GenerateReply, Prompt, encode_call

CALL = GenerateCall(
    rid="r", prompt=Prompt.of(np.array([1, 2, 3, 4], np.int32)), sampling=Sampling(max_new_tokens=10), routing_key="k"
)
MOE = EngineFacts(kind="sglang", precision="fp8", route_shape=(2, 3))
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
    assert parse_reply(CALL, REPLY, facts=MOE).versions[0] == VersionSpan(3, 0, 1, "sglang", "fp8")


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


def with_meta(**meta: object) -> dict[str, Any]:
    reply = copy.deepcopy(REPLY)
    reply["meta_info"].update(meta)
    return reply


def test_where_cached_tokens_came_from_is_read_where_the_engine_says_it() -> None:
    assert parse_reply(CALL, REPLY).cached_tiers is None
    details = {"device": 1, "host": 1, "storage": 0, "storage_backend": "file"}
    reply = parse_reply(CALL, with_meta(cached_tokens_details=details, num_retractions=2, reasoning_tokens=1))
    assert reply.cached_tiers == CacheTiers(device=1, host=1)
    assert (reply.retractions, reply.reasoning_tokens) == (2, 1)
    assert parse_reply(CALL, with_meta(cached_tokens_details=None, num_retractions=None)).retractions == 0


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"cached_tokens_details": [1, 2]}, "want device, host and storage"),
        ({"cached_tokens_details": {"host": 1}}, "want device, host and storage"),
        ({"cached_tokens_details": {"device": "2"}}, "device '2', want a count"),
        ({"cached_tokens_details": {"device": 2, "host": -1}}, "host -1, want a count"),
        ({"num_retractions": 1.5}, "num_retractions 1.5, want a count"),
        ({"reasoning_tokens": True}, "reasoning_tokens True, want a count"),
    ],
)
def test_cache_facts_that_are_no_counts_are_named(meta: dict[str, object], words: str) -> None:
    with pytest.raises(UpstreamError, match=words):
        parse_reply(CALL, with_meta(**meta))


def routes(rows: int, kind: str = "<i4", value: int = 1) -> str:
    return base64.b64encode(np.full((rows, 2, 3), value, kind).tobytes()).decode()


def with_routes(raw: object) -> dict[str, Any]:
    reply = copy.deepcopy(REPLY)
    reply["meta_info"]["routed_experts"] = raw
    return reply


def test_route_rows_are_counted_from_the_start() -> None:
    call = with_(return_routed_experts=True, routed_experts_start=2)
    reply = parse_reply(call, with_routes(routes(4)), facts=MOE)
    assert reply.routed_experts is not None
    assert (reply.routed_experts.start, reply.routed_experts.ids.shape) == (2, (4, 2, 3))
    assert reply.routed_experts.ids.dtype == np.uint8
    wide = parse_reply(call, with_routes(routes(4, value=300)), facts=MOE)
    assert wide.routed_experts is not None
    assert wide.routed_experts.ids.dtype == np.uint16


def test_a_prefill_only_reply_has_a_row_for_every_prompt_token() -> None:
    call = with_(return_routed_experts=True)
    empty = copy.deepcopy(REPLY)
    empty["output_ids"] = []
    empty["meta_info"] |= {"completion_tokens": 0, "output_token_logprobs": [], "weight_versions": None}
    empty["meta_info"]["routed_experts"] = routes(4)
    assert parse_reply(call, empty, facts=MOE).versions == ()
    empty["meta_info"]["routed_experts"] = routes(3)
    with pytest.raises(UpstreamError, match="72 bytes, want 96"):
        parse_reply(call, empty, facts=MOE)


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
        parse_reply(with_(return_routed_experts=True), with_routes(raw), facts=MOE)


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


def flat(values: list[list[float]], ids: list[list[int]], **changes: object) -> dict[str, Any]:
    shape = [len(values), len(values[0])]
    fields = {
        "output_top_logprobs_val_flat_b64": base64.b64encode(np.array(values, "<f4").tobytes()).decode(),
        "output_top_logprobs_idx_flat_b64": base64.b64encode(np.array(ids, "<i4").tobytes()).decode(),
        "output_top_logprobs_val_flat_b64_dtype": "float32",
        "output_top_logprobs_shape": shape,
        "output_top_logprobs_null_prefix": 3 - shape[0],
    }
    reply = copy.deepcopy(REPLY)
    reply["meta_info"] |= fields | changes
    return reply


def test_flat_top_logprobs_are_rows_after_the_null_ones() -> None:
    call = with_(top_logprobs=2)
    top = parse_reply(call, flat([[-0.5, -1.0], [-0.25, -2.0], [-0.1, -3.0]], [[7, 1], [8, 2], [9, 3]])).top_logprobs
    assert top is not None
    assert top.ids.tolist() == [[7, 1], [8, 2], [9, 3]]
    np.testing.assert_allclose(top.logprobs, [[-0.5, -1.0], [-0.25, -2.0], [-0.1, -3.0]])
    short = parse_reply(call, flat([[-0.25], [-0.1]], [[8], [9]])).top_logprobs
    assert short is not None
    assert short.ids.tolist() == [[-1, -1], [8, -1], [9, -1]]
    assert short.logprobs[1, 1] == -np.inf
    lists = flat([[-0.5, -1.0]] * 3, [[7, 1]] * 3)
    for name in ("val", "idx"):
        del lists["meta_info"][f"output_top_logprobs_{name}_flat_b64"]
    lists["meta_info"] |= {
        "output_top_logprobs_val_flat": [-0.5, -1.0] * 3,
        "output_top_logprobs_idx_flat": [7, 1] * 3,
    }
    top = parse_reply(call, lists).top_logprobs
    assert top is not None
    assert top.ids.tolist() == [[7, 1]] * 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output_top_logprobs_shape": [2, 2]}, "2 . 0 rows of top logprobs for 3"),
        ({"output_top_logprobs_shape": [3]}, "shape"),
        ({"output_top_logprobs_shape": [3, 3]}, "24 bytes, want 36"),
        ({"output_top_logprobs_null_prefix": True}, "null rows"),
        ({"output_top_logprobs_val_flat_b64_dtype": "float16"}, "float16"),
        ({"output_top_logprobs_val_flat_b64": "AAA="}, "2 bytes, want 24"),
        ({"output_top_logprobs_idx_flat_b64": "?"}, "not base64"),
        ({"output_top_logprobs_idx_flat_b64": None, "output_top_logprobs_idx_flat": ["x"]}, "no list of numbers"),
    ],
)
def test_flat_top_logprobs_are_never_reshaped_to_fit(changes: dict[str, object], words: str) -> None:
    reply = flat([[-0.5, -1.0]] * 3, [[7, 1]] * 3, **changes)
    with pytest.raises(UpstreamError, match=words):
        parse_reply(with_(top_logprobs=2), reply)


def test_sampled_logprobs_are_kept_whether_or_not_alternatives_were_asked_for() -> None:
    """The stub returns output lists only, no prompt ones."""
    reply = copy.deepcopy(REPLY)
    assert "input_token_logprobs" not in reply["meta_info"]
    assert parse_reply(CALL, reply).logprobs.tolist() == [-0.5, -0.25, -0.125]
    reply["meta_info"]["output_top_logprobs"] = [[[-0.1, 1, None]]] * 3
    assert parse_reply(with_(top_logprobs=3), reply).logprobs.tolist() == [-0.5, -0.25, -0.125]


MASKING = with_(return_sampling_mask=True)


def with_mask(rows: object, numbers: object) -> dict[str, Any]:
    reply = copy.deepcopy(REPLY)
    reply["meta_info"] |= {"output_token_sampling_mask": rows, "output_token_sampling_logprobs": numbers}
    return reply


def test_a_sampling_mask_has_a_row_per_sampled_id() -> None:
    mask = parse_reply(MASKING, with_mask([[7, 1], [8], [70000, 9]], [-0.5, 0, -1.5])).sampling_mask
    assert mask is not None
    assert mask.offsets.tolist() == [0, 2, 3, 5]
    assert (mask.ids.tolist(), mask.ids.dtype) == ([7, 1, 8, 70000, 9], np.int32)
    assert mask.logprobs.tolist() == [-0.5, 0.0, -1.5]
    small = parse_reply(MASKING, with_mask([[7], [8], [9]], [0.0, 0.0, 0.0])).sampling_mask
    assert small is not None
    assert small.ids.dtype == np.uint16
    assert parse_reply(CALL, with_mask([[7], [8], [9]], [0.0, 0.0, 0.0])).sampling_mask is None


@pytest.mark.parametrize(
    ("rows", "numbers", "words"),
    [
        (None, [0.0] * 3, "NoneType entries of output_token_sampling_mask for 3"),
        ([[7], [8]], [0.0] * 3, "2 entries of output_token_sampling_mask for 3"),
        ([[7], [8], [9]], [0.0], "1 entries of output_token_sampling_logprobs for 3"),
        ([[7], [8], [1]], [0.0] * 3, "mask 2 lacks the output id 9"),
        ([[7], [8], []], [0.0] * 3, "row without ids"),
        ([[7], [8], [9.5]], [0.0] * 3, "not a row of ids"),
        ([[7], [8], [True]], [0.0] * 3, "not a row of ids"),
        ([[7], [8], [9, -1]], [0.0] * 3, "not a row of ids"),
        ([[7], [8], [9, 2**31]], [0.0] * 3, "not a row of ids"),
        ([[7], [8], 9], [0.0] * 3, "not a row of ids"),
        ([[7], [8], [9]], [0.0, None, 0.0], "not a row of ids"),
        ([[7], [8], [9]], [0.0, float("nan"), 0.0], "finite"),
    ],
)
def test_a_sampling_mask_that_does_not_add_up_is_no_reply(rows: object, numbers: object, words: str) -> None:
    with pytest.raises(UpstreamError, match=words):
        parse_reply(MASKING, with_mask(rows, numbers))


SPARSE = EngineFacts(indexer_shape=(2, 3))


def indexer(rows: int, first: int = 0) -> str:
    return base64.b64encode(np.arange(first, first + rows * 6, dtype="<i4").tobytes()).decode()


def test_indexer_rows_are_cut_to_those_that_are_new() -> None:
    call = with_(return_indexer_topk=True, indexer_topk_start=4)
    reply = copy.deepcopy(REPLY)
    reply["meta_info"]["indexer_topk"] = indexer(6, first=-1)
    chosen = parse_reply(call, reply, facts=SPARSE).indexer_topk
    assert chosen is not None
    assert (chosen.start, chosen.ids.shape, chosen.ids.dtype) == (4, (2, 2, 3), np.int16)
    assert chosen.ids.reshape(-1).tolist() == list(range(23, 35))
    reply["meta_info"]["indexer_topk"] = indexer(6, first=40_000)
    whole = parse_reply(with_(return_indexer_topk=True), reply, facts=SPARSE).indexer_topk
    assert whole is not None
    assert (whole.start, whole.ids.shape[0], whole.ids.dtype) == (0, 6, np.int32)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (None, "no indexer_topk, want 6 rows"),
        (indexer(5), "120 bytes, want 144"),
        (indexer(6, first=-2), "holds -2"),
        (5, "int, want base64"),
    ],
)
def test_indexer_rows_are_never_reshaped_to_fit(raw: object, words: str) -> None:
    reply = copy.deepcopy(REPLY)
    reply["meta_info"]["indexer_topk"] = raw
    with pytest.raises(UpstreamError, match=words):
        parse_reply(with_(return_indexer_topk=True), reply, facts=SPARSE)
    with pytest.raises(UpstreamError, match="unknown"):
        parse_reply(with_(return_indexer_topk=True), reply)


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
    assert "return_flat_raw_output_top_logprobs" not in rich  # stock servers refuse it in a stream


def test_every_sampling_field_travels_under_the_engines_name_and_defaults_do_not() -> None:
    plain = orjson.loads(encode_call(with_(sampling=Sampling())))["sampling_params"]
    assert set(plain) == {"temperature", "top_p", "top_k", "skip_special_tokens", "no_stop_trim"}
    rich = Sampling(
        min_p=0.1, frequency_penalty=0.2, presence_penalty=0.0, repetition_penalty=1.1,
        logit_bias=((5, -1.5), (7, 2.0)), constraint=(("json_schema", '{"type":"object"}'),),
    )  # fmt: skip
    body = orjson.loads(
        encode_call(with_(sampling=rich, return_sampling_mask=True, return_indexer_topk=True, top_logprobs=2))
    )
    params = body["sampling_params"]
    assert (params["min_p"], params["frequency_penalty"], params["repetition_penalty"]) == (0.1, 0.2, 1.1)
    assert params["presence_penalty"] == 0.0  # asked for, so sent
    assert params["logit_bias"] == {"5": -1.5, "7": 2.0}
    assert params["json_schema"] == '{"type":"object"}'
    assert body["return_sampling_mask"] is body["return_indexer_topk"] is True
    assert body["return_flat_raw_output_top_logprobs"] is body["return_flat_raw_top_logprobs_b64"] is True


def piece(ids: list[int], finish: str, version: int, start: int) -> GenerateReply:
    size = len(ids)
    return GenerateReply(
        output_ids=np.array(ids, np.int32), logprobs=np.full(size, -1.0, np.float32),
        finish_reason=finish, matched=None, versions=(VersionSpan(version, 0, size),), prompt_tokens=4, cached_tokens=2,  # type: ignore[arg-type]
        routed_experts=RoutedExperts(start=start, ids=np.zeros((start_rows(start, size), 2, 3), np.uint8)),
        top_logprobs=TopLogprobs(ids=np.zeros((size, 2), np.int32), logprobs=np.zeros((size, 2), np.float32)),
        sampling_mask=SamplingMask(
            offsets=np.arange(size + 1, dtype=np.int32), ids=np.array(ids, np.uint16),
            logprobs=np.zeros(size, np.float32),
        ),
        indexer_topk=IndexerTopk(start=start, ids=np.zeros((start_rows(start, size), 1, 2), np.int16)),
    )  # fmt: skip


def start_rows(start: int, size: int) -> int:
    return 4 + size - 1 if start == 0 else size


def test_a_continued_reply_is_one_reply() -> None:
    """7 of 10 tokens are there: 3 are asked for, routes join without a gap, versions keep their places."""
    first = piece([1] * 7, "abort", 3, 0)
    following = continue_call(CALL, [first])
    assert following is not None
    assert following.sampling.max_new_tokens == 3
    assert following.routed_experts_start == following.indexer_topk_start == 10
    assert following.prompt.ids().tolist() == [1, 2, 3, 4, *[1] * 7]
    assert following.rid != CALL.rid
    whole = merge_replies(CALL, [first, piece([2, 3], "stop", 4, 10)])
    assert whole.output_ids.size == whole.logprobs.size == 9
    assert whole.versions == (VersionSpan(3, 0, 7), VersionSpan(4, 7, 9))
    assert whole.routed_experts is not None
    assert whole.routed_experts.ids.shape[0] == 4 + 9 - 1
    assert whole.top_logprobs is not None
    assert whole.top_logprobs.ids.shape == (9, 2)
    assert whole.sampling_mask is not None
    assert whole.sampling_mask.ids.tolist() == [1] * 7 + [2, 3]
    assert whole.indexer_topk is not None
    assert whole.indexer_topk.ids.shape[0] == 4 + 9 - 1
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
    first = parse_reply(asked, waited, facts=MOE)
    assert (first.prompt_tokens, first.cached_tokens, first.routed_experts) == (4, None, None)
    following = continue_call(asked, [first])
    assert following is not None
    assert (following.prompt.size, following.routed_experts_start) == (7, 0)

    finished = copy.deepcopy(REPLY)
    del finished["meta_info"]["prompt_tokens"]
    with pytest.raises(UpstreamError, match="prompt_tokens"):
        parse_reply(asked, finished, facts=MOE)


def test_routes_that_were_seen_twice_are_refused_not_joined() -> None:
    """Four sampled ids with three rows, then a piece that sends all rows again."""
    again = piece([2, 3], "stop", 4, 0)
    with pytest.raises(InvalidRecord, match="gap"):
        merge_replies(CALL, [piece([1] * 7, "abort", 3, 0), again])


def test_pieces_of_engines_with_other_number_formats_keep_their_spans_apart() -> None:
    from dataclasses import replace

    first, second = piece([1], "abort", 3, 0), piece([2], "stop", 3, 4)
    second = replace(second, versions=(VersionSpan(3, 0, 1, "sglang", "fp8"),))
    assert merge_replies(CALL, [first, second]).versions == (
        VersionSpan(3, 0, 1),
        VersionSpan(3, 1, 2, "sglang", "fp8"),
    )


def test_more_tokens_than_were_asked_for_are_no_reply() -> None:
    with pytest.raises(UpstreamError, match="3 output ids, 2 were asked for"):
        parse_reply(with_(sampling=Sampling(max_new_tokens=2)), REPLY)
