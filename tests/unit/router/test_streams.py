"""Streams: what is new is read once, whatever the engine repeats."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest

from tollway.errors import EngineRefused, UpstreamError
from tollway.records import Sampling
from tollway.router.engines import EngineClient
from tollway.router.facts import EngineFacts
from tollway.router.fake import FakeEngine, FakeReply
from tollway.router.streams import Assembly, whole_body
from tollway.router.wire import GenerateCall, GenerateDelta, GenerateReply, Prompt

CALL = GenerateCall(
    rid="r",
    prompt=Prompt.of(np.array([1, 2], np.int32)),
    sampling=Sampling(max_new_tokens=900, top_k=5),
    routing_key="k",
    stream=True,
)


def event(tokens: list[int], total: int, *, logprobs: list[int] | None = None) -> bytes:
    meta: dict[str, Any] = {
        "output_token_logprobs": [[-0.5, token, None] for token in (tokens if logprobs is None else logprobs)],
        "completion_tokens": total,
        "finish_reason": None,
    }
    return orjson.dumps({"text": "]", "output_ids": tokens, "meta_info": meta})


def fed(*events: bytes) -> list[list[int]]:
    assembly = Assembly(CALL)
    deltas = [assembly.add(assembly.read(each)) for each in events]
    return [[] if delta is None else delta.output_ids.tolist() for delta in deltas]


def test_cumulative_and_incremental_events_bring_the_same_tokens() -> None:
    assert fed(event([7], 1), event([7, 8], 2), event([7, 8], 2), event([7, 8, 9, 1], 4)) == [[7], [8], [], [9, 1]]
    assert fed(event([7], 1), event([8], 2), event([], 2), event([9, 1], 4)) == [[7], [8], [], [9, 1]]


def test_once_events_repeat_themselves_only_the_last_of_those_that_arrived_counts() -> None:
    assembly = Assembly(CALL)
    first = [event([7], 1), event([7, 8], 2)]
    assert assembly.worth_reading([*first, b"[DONE]"]) == first
    for each in first:
        assembly.add(assembly.read(each))
    late = [event([7, 8, 9], 3), event([7, 8, 9, 1], 4)]
    assert assembly.worth_reading([*late, b"[DONE]"]) == late[1:]
    delta = assembly.add(assembly.read(late[1]))
    assert delta is not None
    assert delta.output_ids.tolist() == [9, 1]
    last = event([7, 8, 9, 1, 5], 5)
    assert assembly.read(last)["output_ids"] == [5]  # what is known is not parsed again
    assert assembly.read(last)["output_ids"] == []


def test_a_request_aborted_in_the_queue_repeats_what_is_known() -> None:
    """Stock servers then send the last id alone, and all log-probabilities."""
    assert fed(event([7], 1), event([8], 2), event([8], 2, logprobs=[7, 8])) == [[7], [8], []]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([event([7], 1), event([8, 9], 4)], "2 output_ids after 1, engine counts 4"),
        ([event([7, 8], 2), event([7, 8, 9], 3), event([7, 7, 9, 1], 4)], "changed output_ids"),
        ([event([7, 8], 2), event([9], 2)], "1 output_ids after 2, engine counts 2"),
        ([event([7], 1, logprobs=[])], "0 output_token_logprobs after 0, engine counts 1"),
        ([event([7], 1, logprobs=[8])], "is of id 8, output id is 7"),
        ([orjson.dumps({"output_ids": ["x"], "meta_info": {"completion_tokens": 1}})], "logprobs"),
        ([b"{}"], "meta_info"),
        ([b"[]"], "JSON list"),
        ([b'{"a'], "not JSON"),
    ],
)
def test_events_that_do_not_add_up_end_the_stream(events: list[bytes], words: str) -> None:
    with pytest.raises(UpstreamError, match=words):
        fed(*events)


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 400])
async def test_a_stream_and_a_call_without_one_bring_the_same_record(incremental: bool, chunk: int) -> None:
    facts = EngineFacts(kind="fake", precision="fp8", route_shape=(3, 2), indexer_shape=(2, 4))
    wanted: dict[str, Any] = {
        "top_logprobs": 2,
        "return_sampling_mask": True,
        "return_routed_experts": True,
        "return_indexer_topk": True,
        "indexer_topk_start": 1,
    }
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, 70_000, 400)]
    async with FakeEngine(route_shape=(3, 2), indexer_shape=(2, 4)) as engine, aiohttp.ClientSession() as http:
        engine.script = lambda _: FakeReply(ids=tokens, incremental=incremental, chunk=chunk)
        client = EngineClient(engine.url, http, facts=facts)
        items = [item async for item in client.stream(replace(CALL, **wanted))]
        whole = await client.generate(replace(CALL, rid="w", stream=False, **wanted))
    deltas, reply = items[:-1], items[-1]
    assert isinstance(reply, GenerateReply)
    assert [t for d in deltas if isinstance(d, GenerateDelta) for t in d.output_ids.tolist()] == tokens
    assert reply.versions == whole.versions
    assert (reply.versions[0].kind, reply.versions[0].precision) == ("fake", "fp8")
    for one, two in (
        (reply.routed_experts, whole.routed_experts),
        (reply.indexer_topk, whole.indexer_topk),
        (reply.top_logprobs, whole.top_logprobs),
        (reply.sampling_mask, whole.sampling_mask),
    ):
        assert one is not None
        assert two is not None
        np.testing.assert_array_equal(one.ids, two.ids)
    assert whole.indexer_topk is not None
    assert (whole.indexer_topk.start, whole.indexer_topk.ids.shape) == (1, (400, 2, 4))


async def test_what_the_model_has_no_rows_of_is_refused_before_it_is_asked_for() -> None:
    async with FakeEngine() as engine, aiohttp.ClientSession() as http:
        client = EngineClient(engine.url, http)
        for asked in ({"return_routed_experts": True}, {"return_indexer_topk": True}):
            with pytest.raises(EngineRefused, match=r"config\.json"):
                await client.generate(replace(CALL, stream=False, **asked))  # type: ignore[arg-type]
            with pytest.raises(EngineRefused, match=r"config\.json"):
                await anext(client.stream(replace(CALL, **asked)))  # type: ignore[arg-type]
        assert not engine.requests
        with pytest.raises(EngineRefused, match="top_k"):
            await client.generate(replace(CALL, stream=False, return_sampling_mask=True, sampling=Sampling()))


async def test_an_error_event_or_an_early_end_is_no_reply() -> None:
    async with FakeEngine() as engine, aiohttp.ClientSession() as http:
        client = EngineClient(engine.url, http)
        raw = b"data: " + event([7], 1) + b"\n\n"
        refusal = b'data: {"error":{"message":"no","code":400}}\n\ndata: [DONE]\n\n'
        for tail, kind in ((refusal, EngineRefused), (b"data: [DONE]\n\n", UpstreamError), (b"", UpstreamError)):
            engine.script = lambda _, tail=tail: FakeReply(ids=[], raw=raw + b": ping\n\n" + tail)  # type: ignore[misc]
            with pytest.raises(kind):
                assert [item async for item in client.stream(CALL)]


async def test_a_prompt_of_more_than_a_megabyte_is_sent_without_a_warning() -> None:
    """Warnings are errors here, and aiohttp has one for large bodies."""
    prompt = Prompt.of(np.arange(250_000, dtype=np.int32))
    async with FakeEngine() as engine, aiohttp.ClientSession() as http:
        engine.script = lambda request: FakeReply(ids=[request.input_ids[-1] % 100])
        reply = await EngineClient(engine.url, http).generate(replace(CALL, prompt=prompt, stream=False))
    assert reply.output_ids.tolist() == [99]
    assert engine.requests[0].prompt_tokens == reply.prompt_tokens == 250_000


@pytest.mark.parametrize("waits", [False, True], ids=["read at once", "read when the buffer is full"])
@pytest.mark.parametrize("head", ["200 OK", "304 Not Modified"])
@pytest.mark.parametrize("size", [0, 10, 100_000, 130_000, 5_000_000])
async def test_a_body_of_any_length_is_read_whole(head: str, size: int, waits: bool) -> None:
    body = bytes(index % 251 for index in range(min(size, 251))) * (size // 251 + 1)
    body = body[: size if head.startswith("200") else 0]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {head}\r\nContent-Length: {size}\r\n\r\n".encode() + body)
        await reader.read()  # until the client goes
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with (
        server,
        asyncio.timeout(20),
        aiohttp.ClientSession(read_bufsize=65_536) as http,
        http.get(f"http://127.0.0.1:{port}/") as response,
    ):
        await asyncio.sleep(0.1 * waits)
        assert await whole_body(response, 1 << 29) == body
