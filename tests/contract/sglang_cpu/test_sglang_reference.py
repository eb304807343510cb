"""Our client and our weight format against the released SGLang, and the embedded engine beside it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sglang_cpu.fixture import MOE

from tollway.errors import EngineRefused
from tollway.fresh_model import write_fresh_model
from tollway.records import Sampling
from tollway.router.engines import EngineClient, GenerateCall, GenerateReply
from tollway.router.facts import EngineFacts, directory_config, read_facts
from tollway.router.wire import GenerateDelta, Prompt
from tollway.trainer.weights.wire import buckets, serialise

pytestmark = pytest.mark.all

PROMPT = np.arange(60, 100, dtype=np.int32)
ROUTES = (MOE.num_hidden_layers, MOE.num_experts_per_tok)
_numbers = itertools.count()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def moe(real_sglang_moe_url: str, http: aiohttp.ClientSession) -> AsyncIterator[EngineClient]:
    """A client of the released SGLang; the weights that it started with are back afterwards."""
    client = EngineClient(real_sglang_moe_url, http, facts=EngineFacts(route_shape=ROUTES))
    path = (await client.model_info()).model_path
    await client.set_weight_version(0)  # a fresh server says "default", which is no version of ours
    yield client
    await client.resume()
    await client.update_weights_from_disk(path)
    await client.flush_cache()
    await client.aclose()


def _call(max_new_tokens: int, **more: object) -> GenerateCall:
    fields: dict[str, object] = {
        "rid": f"call-{next(_numbers)}",
        "prompt": Prompt.of(PROMPT),
        "sampling": Sampling(temperature=0.0, max_new_tokens=max_new_tokens),
        "routing_key": "session",
        "return_routed_experts": True,
        "ignore_eos": True,
        **more,
    }
    return GenerateCall(**fields)  # type: ignore[arg-type]


def _same(left: GenerateReply, right: GenerateReply, *, tolerance: float) -> bool:
    """Equal tokens and routes, and log-probabilities within ``tolerance`` nats."""
    if left.routed_experts is None or right.routed_experts is None:
        raise AssertionError("a reply without routes proves nothing")
    return (
        np.array_equal(left.output_ids, right.output_ids)
        and np.array_equal(np.sort(left.routed_experts.ids), np.sort(right.routed_experts.ids))
        and float(np.abs(left.logprobs - right.logprobs).max()) <= tolerance
    )


async def test_weights_in_our_wire_format_become_the_weights_of_the_engine(moe: EngineClient, tmp_path: Path) -> None:
    write_fresh_model(tmp_path, MOE, seed=2, std=0.2)
    before = await moe.generate(_call(16))
    await moe.update_weights_from_disk(str(tmp_path), 1)
    await moe.flush_cache()
    wanted = await moe.generate(_call(16))
    assert not _same(before, wanted, tolerance=0.1)
    assert [span.version for span in wanted.versions] == [1]

    sent = load_file(tmp_path / "model.safetensors")
    scrambled = {name: torch.flip(tensor, [0]) for name, tensor in sent.items()}
    for version, named in ((2, scrambled), (3, sent)):
        await moe.pause("retract")
        await moe.begin_weight_update()
        payloads = [serialise(bucket) for bucket in buckets(named.items(), 200_000)]
        assert len(payloads) > 3
        for payload in payloads:
            await moe.update_weights_from_tensor(payload)
        await moe.end_weight_update()
        await moe.flush_cache()
        await moe.set_weight_version(version)
        await moe.resume()
        reply = await moe.generate(_call(16))
        assert [span.version for span in reply.versions] == [version]
        assert _same(reply, wanted, tolerance=1e-5) is (version == 3)


async def test_a_call_that_lives_through_a_version_change_reports_both_versions(moe: EngineClient) -> None:
    await moe.set_weight_version(7)
    stream = moe.stream(_call(400, stream=True))
    first = await anext(stream)
    assert not isinstance(first, GenerateReply)
    await moe.pause("in_place")
    await moe.set_weight_version(8)
    await moe.resume()
    reply = [item async for item in stream][-1]
    assert isinstance(reply, GenerateReply)
    assert [span.version for span in reply.versions] == [7, 8]
    assert 1 <= reply.versions[0].end < 400


async def test_an_aborted_call_keeps_what_was_sampled(moe: EngineClient) -> None:
    call = _call(1500, stream=True, return_routed_experts=True)
    stream = moe.stream(call)
    await anext(stream)
    await moe.abort(call.rid)
    reply = [item async for item in stream][-1]
    assert isinstance(reply, GenerateReply)
    assert reply.finish_reason == "abort"
    assert 1 <= reply.output_ids.size < 1500


async def test_a_second_turn_fetches_only_the_routes_that_it_lacks(moe: EngineClient) -> None:
    first = await moe.generate(_call(20))
    whole = np.concatenate([PROMPT, first.output_ids, np.asarray([5, 6, 7], np.int32)])
    known = PROMPT.size + first.output_ids.size - 1
    second = await moe.generate(_call(8, prompt=Prompt.of(whole), routed_experts_start=known))
    full = await moe.generate(_call(8, prompt=Prompt.of(whole)))
    assert first.routed_experts is not None
    assert second.routed_experts is not None
    assert full.routed_experts is not None
    assert second.cached_tokens == known
    joined = np.concatenate([first.routed_experts.ids, second.routed_experts.ids])
    assert np.array_equal(joined, full.routed_experts.ids)


async def test_a_real_server_says_what_it_is(moe: EngineClient) -> None:
    info, server = await moe.model_info(), await moe.server_info()
    facts = read_facts(info.raw, server.raw, directory_config(info.model_path))
    assert (facts.kind, facts.precision, facts.route_shape) == ("sglang", "float32", ROUTES)
    assert facts.release.count(".") >= 2
    assert facts.cumulative_streams


@pytest.mark.parametrize("top_k", [1, 5])
async def test_sampling_masks_hold_what_could_have_been_drawn(moe: EngineClient, top_k: int) -> None:
    sampling = Sampling(temperature=1.0, top_k=top_k, max_new_tokens=30, seed=3)
    asked = {"sampling": sampling, "return_sampling_mask": True, "top_logprobs": top_k}
    whole = await moe.generate(_call(30, **asked))
    streamed = [item async for item in moe.stream(_call(30, stream=True, **asked))][-1]
    assert isinstance(streamed, GenerateReply)
    for reply in (whole, streamed):
        mask, top = reply.sampling_mask, reply.top_logprobs
        assert mask is not None
        assert top is not None
        assert mask.rows == reply.output_ids.size == 30
        for at in range(30):
            row = mask.ids[mask.offsets[at] : mask.offsets[at + 1]].tolist()
            assert sorted(row) == sorted(top.ids[at].tolist())
        among = np.take_along_axis(top.logprobs, np.argmax(top.ids == reply.output_ids[:, None], 1)[:, None], 1)[:, 0]
        np.testing.assert_allclose(mask.logprobs, among - np.logaddexp.reduce(top.logprobs, 1), atol=1e-3)
    with pytest.raises(EngineRefused, match="top_k"):
        await moe.generate(_call(3, return_sampling_mask=True, sampling=Sampling(max_new_tokens=3)))


async def test_arrays_and_lists_of_top_logprobs_are_the_same_record(moe: EngineClient) -> None:
    flat = await moe.generate(_call(16, top_logprobs=3))
    nested = [item async for item in moe.stream(_call(16, top_logprobs=3, stream=True))][-1]
    assert isinstance(nested, GenerateReply)
    assert flat.top_logprobs is not None
    assert nested.top_logprobs is not None
    assert flat.top_logprobs.ids[:, 0].tolist() == flat.output_ids.tolist()
    assert flat.top_logprobs.ids.tolist() == nested.top_logprobs.ids.tolist()
    np.testing.assert_allclose(flat.top_logprobs.logprobs, nested.top_logprobs.logprobs, atol=1e-5)


async def test_every_sampling_field_is_taken(moe: EngineClient) -> None:
    sampling = Sampling(
        temperature=0.0,
        max_new_tokens=6,
        min_p=0.0,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias=((77, 1000.0),),
    )
    assert (await moe.generate(_call(6, sampling=sampling))).output_ids.tolist() == [77] * 6


async def test_streams_bring_the_reply_in_pieces(moe: EngineClient) -> None:
    items = [item async for item in moe.stream(_call(60, stream=True))]
    reply = items[-1]
    assert isinstance(reply, GenerateReply)
    deltas = [item for item in items[:-1] if isinstance(item, GenerateDelta)]
    assert np.concatenate([delta.output_ids for delta in deltas]).tolist() == reply.output_ids.tolist()
    assert np.concatenate([delta.logprobs for delta in deltas]).tolist() == reply.logprobs.tolist()
    assert _same(reply, await moe.generate(_call(60)), tolerance=1e-4)


async def test_the_embedded_engine_computes_what_sglang_computes(
    moe: EngineClient, http: aiohttp.ClientSession
) -> None:
    with _embedded((await moe.model_info()).model_path) as url:
        embedded = EngineClient(url, http, facts=EngineFacts(route_shape=ROUTES))
        await embedded.set_weight_version(0)
        assert _same(await embedded.generate(_call(48)), await moe.generate(_call(48)), tolerance=1e-4)
        await embedded.aclose()


@contextmanager
def _embedded(model_path: str) -> Iterator[str]:
    command = [sys.executable, "-m", "tollway.engine", "--model-path", model_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
