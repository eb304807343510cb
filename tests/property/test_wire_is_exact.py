"""Fast paths of the wire mean exactly what the plain ones mean: bodies, cut values, streams."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from tollway.records import Sampling
from tollway.router.blobs import load_reply
from tollway.router.facts import EngineFacts
from tollway.router.replies import parse_reply
from tollway.router.streams import Assembly
from tollway.router.wire import GenerateCall, Prompt, encode_call, ids_json

NAMES = ("routed_experts", "indexer_topk")
LONG = base64.b64encode(bytes(12_500)).decode()
ids = st.lists(st.integers(0, 2**31 - 1), max_size=12)
hostile = st.lists(
    st.sampled_from(
        ['"routed_experts":"', '","routed_experts":"AA', "\\", '"', "{", ",", "output_ids", '"output_ids":[', "]]", "é"]
    ),
    max_size=6,
).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | hostile | st.just(LONG),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(hostile | st.sampled_from([*NAMES, "meta_info", "text"]), inner, max_size=3)
    ),
    max_leaves=8,
)


def call(size: int, **more: Any) -> GenerateCall:
    return GenerateCall(
        rid="r", prompt=Prompt.of(np.arange(size, dtype=np.int32)), sampling=Sampling(), routing_key="k", **more
    )


@given(st.lists(ids, max_size=6), hostile, st.booleans())
def test_a_prompt_in_pieces_travels_as_the_ids_it_is_made_of(pieces: list[list[int]], rid: str, stream: bool) -> None:
    prompt = Prompt.of(np.zeros(0, np.int32))
    for piece in pieces:
        prompt = prompt.extended(ids_json(np.array(piece, np.int32)), len(piece))
    flat = [token for piece in pieces for token in piece]
    assert prompt.size == len(flat)
    assert prompt.ids().tolist() == flat
    asked = replace(call(0, stream=stream), prompt=prompt, rid=rid)
    body = encode_call(asked)
    assert body == encode_call(replace(asked, prompt=Prompt.of(np.array(flat, np.int32))))
    read = orjson.loads(body)
    assert (read["input_ids"], read["rid"], read["stream"]) == (flat, rid, stream)


def plain(value: object) -> object:
    if isinstance(value, memoryview):
        return bytes(value).decode()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


@given(JSON, JSON, st.sampled_from([None, 1]), st.booleans())
@settings(max_examples=300)
def test_cut_replies_say_what_the_plain_parser_reads(
    inner: object, other: object, indent: int | None, ascii_: bool
) -> None:
    value = {"text": other, "meta_info": inner, "routed_experts": other, "end": LONG}
    for separators in ((",", ":"), (", ", ": ")):
        body = json.dumps(value, indent=indent, separators=separators, ensure_ascii=ascii_).encode()
        assert plain(load_reply(body, NAMES)) == orjson.loads(body)


@given(st.data())
@settings(max_examples=150)
def test_streams_add_up_to_the_reply_however_they_are_cut(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12))
    tokens = data.draw(st.lists(st.integers(0, 99), min_size=size, max_size=size))
    text = data.draw(hostile)
    strings = data.draw(st.booleans())
    asked = call(3, stream=True, top_logprobs=2, return_sampling_mask=True, return_routed_experts=True)
    meta: dict[str, Any] = {
        "output_token_logprobs": [[-t / 7, t, '"]]' if strings else None] for t in tokens],
        "output_top_logprobs": [[[-0.5, t, None], [-1.5, 1, None]] if t % 5 else None for t in tokens],
        "output_token_sampling_mask": [[t, *range(200, 200 + t % 3)] for t in tokens],
        "output_token_sampling_logprobs": [-t / 9 for t in tokens],
    }
    rest = {
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "weight_versions": [{"version": "1", "start": 0, "end": size}],
        "finish_reason": {"type": "stop", "matched": tokens[-1]},
        "routed_experts": base64.b64encode(np.zeros((size + 2) * 4, "<i4").tobytes()).decode(),
    }
    facts = EngineFacts(route_shape=(2, 2))
    whole = {"text": text, "output_ids": tokens, "meta_info": meta | rest | {"completion_tokens": size}}
    want = parse_reply(asked, whole, facts=facts)
    assembly, at, seen = Assembly(asked), 0, []
    incremental = data.draw(st.booleans())
    while at < size:
        before, at = at, data.draw(st.integers(at + 1, size))
        first = before if incremental else 0
        lists = {name: values[first:at] for name, values in meta.items()}
        tail = rest if at == size else {"finish_reason": None, "prompt_tokens": 3}
        event = {
            "text": text * at,
            "output_ids": tokens[first:at],
            "meta_info": {"id": text, **lists, **tail, "completion_tokens": at},
        }
        for payload in assembly.worth_reading([orjson.dumps(event), b"[DONE]"]):
            delta = assembly.add(assembly.read(payload))
            assert delta is not None
            seen += delta.output_ids.tolist()
            assert delta.logprobs.tolist() == [np.float32(-t / 7) for t in delta.output_ids.tolist()]
    found = parse_reply(asked, assembly.whole(), facts=facts)
    assert seen == tokens
    assert found.sampling_mask is not None
    assert want.sampling_mask is not None
    assert found.top_logprobs is not None
    assert want.top_logprobs is not None
    for one, two in (
        (found.output_ids, want.output_ids),
        (found.logprobs, want.logprobs),
        (found.top_logprobs.ids, want.top_logprobs.ids),
        (found.top_logprobs.logprobs, want.top_logprobs.logprobs),
        (found.sampling_mask.ids, want.sampling_mask.ids),
        (found.sampling_mask.offsets, want.sampling_mask.offsets),
    ):
        np.testing.assert_array_equal(one, two)
    assert found.versions == want.versions
