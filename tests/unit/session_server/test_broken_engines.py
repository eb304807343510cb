"""Every way in which an engine can answer wrongly, in every dialect, streamed and not.

Each time: 502 with a reason (503 where a retry can help), in streams an error event and no finish; nothing is
recorded, counters are back at zero, and the session's next turn is exact.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from server_helpers import ask, rows, until, user

from tollway.router.config import RouterConfig
from tollway.router.fake import FakeEngine, FakeReply, FakeRequest
from tollway.session_server.client import Session
from tollway.session_server.fake import FakeServer

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROUTES = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
FINISHES = (b"[DONE]", b'"finish_reason":"', b"message_stop", b"message_delta", b"response.completed")
GOOD = FakeReply(ids=[*b"abcd", 261])
Edit = Callable[[dict[str, Any], dict[str, Any]], object]


@dataclass(slots=True)
class RawReply(FakeReply):
    """Bytes in place of an HTTP answer, and what happens to the connection then."""

    ids: Any = (1,)
    wire: bytes = b""
    then: str = "close"
    """``close``, ``reset``, ``hold`` (keep it open without a word) or ``chatter`` (say ``again`` for ever)."""
    again: bytes = b""


class RawEngine(FakeEngine):
    """A scripted engine that can also speak no HTTP."""

    async def _answer(
        self, http: web.Request, request: FakeRequest, reply: FakeReply, running: Any
    ) -> web.StreamResponse:
        if not isinstance(reply, RawReply):
            return await super()._answer(http, request, reply, running)
        transport = http.transport
        assert transport is not None
        transport.write(reply.wire)  # type: ignore[attr-defined]  # a connection's transport
        if reply.then == "hold":
            await running.aborted.wait()
        elif reply.then == "chatter":
            while not running.aborted.is_set():
                transport.write(reply.again)  # type: ignore[attr-defined]  # as above
                await asyncio.sleep(0.02)
        transport.abort() if reply.then == "reset" else transport.close()  # type: ignore[attr-defined]  # as above
        raise asyncio.CancelledError


def edited(change: Edit, ids: Any = GOOD.ids) -> FakeReply:
    """A reply whose last JSON is changed: (the whole, its meta_info)."""
    return replace(GOOD, ids=ids, edit=lambda value: change(value, value["meta_info"]) and None)


def http(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK", length: int | None = None) -> bytes:
    """An answer with a length, true or not."""
    told = len(body) if length is None else length
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (status, kind, told) + body


def chunked(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    """A stream as it comes over the wire."""
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    )
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + end


def event(count: int = 1, **meta: Any) -> bytes:
    """One event of a stream with so many tokens of 7s and no end yet."""
    value = {
        "output_ids": [97] * count,
        "meta_info": {
            "prompt_tokens": 0, "completion_tokens": count, "output_token_logprobs": [[-0.5, 97, None]] * count,
            "finish_reason": None, **meta,
        },
    }  # fmt: skip
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def put(holder: dict[str, Any], **values: Any) -> None:
    holder.update(values)


REPLIES: dict[str, tuple[FakeReply, str]] = {
    "fewer logprobs": (edited(lambda v, m: m["output_token_logprobs"].pop()), "logprobs"),
    "more logprobs": (edited(lambda v, m: m["output_token_logprobs"].append([-1.0, 1, None])), "logprobs"),
    "no logprobs": (edited(lambda v, m: m.pop("output_token_logprobs")), "logprobs"),
    "null logprob": (edited(lambda v, m: put(m, output_token_logprobs=[[None, t, None] for t in v["output_ids"]])), ""),
    "infinite": (
        edited(lambda v, m: put(m, output_token_logprobs=[[-1e39, t, None] for t in v["output_ids"]])),
        "finite",
    ),
    "positive": (
        edited(lambda v, m: put(m, output_token_logprobs=[[0.5, t, None] for t in v["output_ids"]])),
        "exceeds",
    ),
    "text logprob": (edited(lambda v, m: put(m, output_token_logprobs=[["1", t, None] for t in v["output_ids"]])), ""),
    "flat logprobs": (edited(lambda v, m: put(m, output_token_logprobs=[-0.5] * 5)), "logprobs"),
    "logprobs of others": (edited(lambda v, m: put(m, output_token_logprobs=[[-0.5, 1, None]] * 5)), ""),
    "ids as text": (edited(lambda v, m: put(v, output_ids=[str(t) for t in v["output_ids"]])), ""),
    "ids as floats": (edited(lambda v, m: put(v, output_ids=[t + 0.5 for t in v["output_ids"]])), ""),
    "ids beyond int32": (edited(lambda v, m: put(v, output_ids=[2**31] * 5)), ""),
    "ids below nothing": (edited(lambda v, m: put(v, output_ids=[-1] * 5)), ""),
    "ids beyond the vocabulary": (FakeReply(ids=[*b"ab", 300_000, 261]), "300000"),
    "no ids": (edited(lambda v, m: v.pop("output_ids")), ""),
    "other count": (edited(lambda v, m: put(m, completion_tokens=4)), "4"),
    "no count": (edited(lambda v, m: put(m, completion_tokens=None)), "completion_tokens"),
    "no token": (FakeReply(ids=[]), ""),
    "too many tokens": (FakeReply(ids=[97] * 65), "64"),
    "another prompt": (edited(lambda v, m: put(m, prompt_tokens=99)), "99 prompt tokens"),
    "no prompt count": (edited(lambda v, m: m.pop("prompt_tokens")), "prompt_tokens"),
    "all cached and more": (edited(lambda v, m: put(m, cached_tokens=10**6)), "cached"),
    "cached below nothing": (edited(lambda v, m: put(m, cached_tokens=-1)), "cached"),
    "cached as text": (edited(lambda v, m: put(m, cached_tokens="3")), "cached"),
    "unknown finish": (edited(lambda v, m: put(m, finish_reason={"type": "magic"})), "magic"),
    "finish as text": (edited(lambda v, m: put(m, finish_reason="stop")), "finish_reason"),
    "aborts for ever": (FakeReply(ids=[97], finish="abort"), "aborted"),
    "no versions": (edited(lambda v, m: m.pop("weight_versions")), "weight_versions"),
    "a gap between versions": (replace(GOOD, versions=[("0", 0, 1), ("1", 2, 5)]), "gap"),
    "versions twice": (replace(GOOD, versions=[("0", 0, 3), ("1", 2, 5)]), "gap"),
    "versions end early": (replace(GOOD, versions=[("0", 0, 4)]), "4 of 5"),
    "a named version": (replace(GOOD, versions=[("main", 0, 5)]), "main"),
    "a version below zero": (replace(GOOD, versions=[("-1", 0, 5)]), "-1"),
    "half a version": (replace(GOOD, versions=[("1.5", 0, 5)]), "1.5"),
    "versions as numbers": (edited(lambda v, m: put(m, weight_versions=[0])), "weight_versions"),
    "no facts": (edited(lambda v, m: v.pop("meta_info")), "meta_info"),
    "facts as a list": (edited(lambda v, m: put(v, meta_info=[])), "meta_info"),
    "an error": (FakeReply(ids=[1], status=500, error="boom"), "boom"),
    "unavailable": (FakeReply(ids=[1], status=503, error="loading"), "loading"),
}
"""What is wrong -> (reply, words of the reason), streamed or not."""

WIRES: dict[str, RawReply] = {
    "half an object": RawReply(wire=http(b'{"output_ids": [1]')),
    "no JSON": RawReply(wire=http(b"<html>It works!</html>", b"text/html")),
    "broken UTF-8": RawReply(wire=http(b'{"text": "\xff\xfe", "output_ids": [1], "meta_info": {}}')),
    "nothing": RawReply(wire=http(b"")),
    "no content": RawReply(wire=b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n"),
    "a list": RawReply(wire=http(b"[]")),
    "null": RawReply(wire=http(b"null")),
    "depth": RawReply(wire=http(b"[" * 100_000)),
    "NaN": RawReply(wire=http(b'{"output_ids": [1], "meta_info": {"output_token_logprobs": [[NaN, 1, null]]}}')),
    "a page with 502": RawReply(wire=http(b"<html>bad gateway</html>", b"text/html", b"502 Bad Gateway")),
    "elsewhere": RawReply(
        wire=b"HTTP/1.1 302 Found\r\nlocation: /model_info\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    ),
    "elsewhere, again": RawReply(
        wire=b"HTTP/1.1 307 Temporary Redirect\r\nlocation: /generate\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    ),
    "gzip that is none": RawReply(wire=b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 5\r\n\r\nabcde"),
    "no HTTP": RawReply(wire=b"\x00\x01\x02 hello\r\n\r\n"),
    "a length beyond the end": RawReply(wire=http(b'{"output_ids": [1]}', length=500)),
    "a length before the end": RawReply(wire=http(b'{"output_ids": [1], "meta_info": {}}', length=20)),
    "headers only": RawReply(wire=b"HTTP/1.1 200 OK\r\ncontent-le"),
    "silence, then the end": RawReply(),
    "a reset": RawReply(then="reset"),
    "a reset within the body": RawReply(wire=http(b'{"output_ids"', length=500), then="reset"),
    "a chunk that is none": RawReply(wire=chunked(event(), end=b"zzz\r\n")),
    "chunks without an end": RawReply(wire=chunked(event(), end=b"")),
}
"""What comes over the wire, streamed or not."""

STREAMS: dict[str, RawReply] = {
    "half a stream": RawReply(wire=chunked(event(1), event(2))),
    "half a stream, then reset": RawReply(wire=chunked(event(1), event(2), end=b""), then="reset"),
    "done without a finish": RawReply(wire=chunked(event(1), b"data: [DONE]\n\n")),
    "done at once": RawReply(wire=chunked(b"data: [DONE]\n\n")),
    "comments only": RawReply(wire=chunked(b": ping\n\n", b": ping\n\n")),
    "an event that is no JSON": RawReply(wire=chunked(event(1), b"data: {broken\n\n")),
    "an event of bytes": RawReply(wire=chunked(event(1), b'data: {"a": "\xff"}\n\n')),
    "an empty event": RawReply(wire=chunked(event(1), b"data:\n\n")),
    "an error event": RawReply(
        wire=chunked(event(1), b'data: {"error": {"message": "out of memory", "code": 500}}\n\n')
    ),
    "fewer tokens than before": RawReply(wire=chunked(event(3), event(2))),
    "other tokens than before": RawReply(wire=chunked(event(1), event(2).replace(b"[97, 97]", b"[98, 97]"))),
    "tokens that jump": RawReply(
        wire=chunked(event(1), event(9).replace(b'"completion_tokens": 9', b'"completion_tokens": 11'))
    ),
    "text in place of a finish": RawReply(wire=chunked(event(1), b"and then it said: goodbye")),
}
"""What only a stream can do wrong."""


EXTRAS: dict[str, tuple[Edit, str]] = {
    "routes of another size": (lambda v, m: put(m, routed_experts="AAAA"), "routed_experts"),
    "routes that are no base64": (lambda v, m: put(m, routed_experts="!!"), "base64"),
    "routes as numbers": (lambda v, m: put(m, routed_experts=[1, 2]), "base64"),
    "routes with a header": (
        lambda v, m: put(m, routed_experts=b64(b"\x93NUMPY\x01\x00" + unb64(m["routed_experts"]))),
        "",
    ),
    "routes in 16 bits": (lambda v, m: put(m, routed_experts=b64(unb64(m["routed_experts"])[::2])), "bytes"),
    "routes below nothing": (
        lambda v, m: put(m, routed_experts=b64(b"\xff" * len(unb64(m["routed_experts"])))),
        "65535",
    ),
    "no routes": (lambda v, m: m.pop("routed_experts"), "routed_experts"),
    "indexer rows of another size": (lambda v, m: put(m, indexer_topk="AAAA"), "indexer_topk"),
    "no indexer rows": (lambda v, m: m.pop("indexer_topk"), "indexer_topk"),
    "a mask too few": (lambda v, m: m["output_token_sampling_mask"].pop(), ""),
    "a mask without the drawn id": (lambda v, m: put(m, output_token_sampling_mask=[[1]] * 5), "lacks"),
    "an infinite mask logprob": (lambda v, m: put(m, output_token_sampling_logprobs=[-1e39] * 5), ""),
    "no mask": (lambda v, m: m.pop("output_token_sampling_mask"), ""),
}
"""What is wrong with what is recorded beside the tokens -> (change, words of the reason)."""

TOPS: dict[str, tuple[Edit, str]] = {
    "tops as text": (lambda v, m: put(m, output_top_logprobs_val_flat_b64="!!"), "base64"),
    "tops of another size": (lambda v, m: put(m, output_top_logprobs_val_flat_b64="AAAA"), "bytes"),
    "tops of another type": (lambda v, m: put(m, output_top_logprobs_idx_flat_b64_dtype="int64"), "int64"),
    "tops of another shape": (lambda v, m: put(m, output_top_logprobs_shape=[4, 2]), "4"),
    "tops without a shape": (lambda v, m: m.pop("output_top_logprobs_shape"), ""),
}
"""The same of top log-probabilities, which come as arrays when the reply is not streamed."""


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def unb64(text: str) -> bytes:
    return base64.b64decode(text)


PROGRESS_S, CALL_S = 0.4, 3.0


@asynccontextmanager
async def over(folder: Path, engine: FakeEngine, **more: Any) -> AsyncIterator[FakeServer]:
    """A server over an engine that is told what to answer."""
    async with engine, FakeServer(folder, engines=[engine], **more) as running:
        await running.gateway.router.fleet.wait_serving(10.0, 1)
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def broken(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeServer]:
    """One server for all the wrong answers: it has to get over each of them."""
    async with over(tmp_path_factory.mktemp("broken"), RawEngine()) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def impatient(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeServer]:
    """A server with short deadlines."""
    router = RouterConfig(probe_interval_s=0.2, progress_timeout_s=PROGRESS_S, call_timeout_s=CALL_S)
    async with over(tmp_path_factory.mktemp("impatient"), RawEngine(), router=router) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recording(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeServer]:
    """A server that records whatever an engine can tell beside its tokens."""
    settings: dict[str, object] = dict.fromkeys(("routed_experts", "sampling_masks", "indexer_topk"), True)
    settings["top_logprobs"] = 2
    engine = FakeEngine(route_shape=(2, 2), indexer_shape=(2, 4))
    async with over(tmp_path_factory.mktemp("recording"), engine, settings=settings) as running:
        yield running


def body_of(dialect: str, **more: Any) -> dict[str, Any]:
    """A request for at most 64 tokens."""
    limit = {"chat": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}[dialect]
    said = [user("go")]
    return {("input" if dialect == "responses" else "messages"): said, limit: 64, **more}


async def call(server: FakeServer, session: Session, dialect: str, body: dict[str, Any]) -> tuple[int, bytes]:
    headers = {"authorization": f"Bearer {session.token}"}
    async with server.http.post(session.base_url + ROUTES[dialect], json=body, headers=headers) as response:
        return response.status, await response.read()


def reason(status: int, data: bytes) -> dict[str, Any]:
    """The error of an answer or of a stream's last event; a failed stream has no finish."""
    assert not any(finish in data for finish in FINISHES), data
    if status == 200:
        last = json.loads(data.decode().strip().rpartition("data: ")[2])
        return dict(last.get("error") or last["response"]["error"])
    return dict(json.loads(data)["error"])


async def check(
    server: FakeServer, reply: FakeReply, stream: bool, words: str = "", dialects: Iterable[str] = ROUTES, **more: Any
) -> None:
    """Every dialect gets a reason; then the session takes a turn that is recorded exactly."""
    engine = server.engine
    for dialect in dialects:
        session = await server.client.create()
        await until(lambda: server.gateway.router.ready, what="the engine serves")
        engine.script = lambda request: reply
        before = len(engine.requests)
        status, data = await call(server, session, dialect, body_of(dialect, stream=stream, **more))
        if isinstance(reply, RawReply):
            assert len(engine.requests) == before + 1, "sent once"
        assert status in (502, 503) or (stream and status == 200), (status, data)
        error = reason(status, data)
        assert error["code"] in ("upstream_error", "engine_lost", "engine_busy"), error
        assert words in error["message"], error
        assert len(error["message"]) > 10, "a reason that says something"
        state = await server.client.session(session.session_id)
        assert (state["turns"], state["in_flight"], state["stored_bytes"]) == (0, 0, 0)
        assert server.gateway.router.table.in_flight("e0") == 0
        engine.script = lambda request: FakeReply(ids=[*b"ok", 261])
        await until(lambda: server.gateway.router.ready, what="the engine serves again")
        await ask(server, session, [user("go")], **more)
        (row,) = await rows(server, session)
        assert row.loss_mask.sum() == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REPLIES)
async def test_a_reply_that_does_not_add_up_is_no_turn(broken: FakeServer, name: str, stream: bool) -> None:
    reply, words = REPLIES[name]
    await check(broken, reply, stream, words)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WIRES)
async def test_what_is_no_reply_at_all_is_no_turn(broken: FakeServer, name: str, stream: bool) -> None:
    await check(broken, WIRES[name], stream)


@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_that_goes_wrong_is_no_turn(broken: FakeServer, name: str) -> None:
    await check(broken, STREAMS[name], True)


ENDLESS: dict[str, RawReply] = {
    "silence": RawReply(wire=chunked(event(1), end=b""), then="hold"),
    "comments": RawReply(wire=chunked(event(1), end=b""), then="chatter", again=b"8\r\n: ping\n\n\r\n"),
    "the same event": RawReply(
        wire=chunked(event(1), end=b""), then="chatter", again=chunked(event(1), end=b"").partition(b"\r\n\r\n")[2]
    ),
    "a line without an end": RawReply(wire=chunked(event(1), end=b""), then="chatter", again=b"1\r\nx\r\n"),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_a_stream_without_progress_ends_at_its_deadline(impatient: FakeServer, name: str) -> None:
    """Bytes are no progress, tokens are."""
    aborts = len(impatient.engine.aborts)
    started = time.monotonic()
    await check(impatient, ENDLESS[name], True, dialects=["chat"])
    assert time.monotonic() - started < CALL_S
    await until(lambda: len(impatient.engine.aborts) == aborts + 1, what="the engine is told")


async def test_a_call_that_is_never_answered_ends_at_its_deadline(impatient: FakeServer) -> None:
    await check(impatient, RawReply(then="hold"), False, dialects=["chat"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", EXTRAS)
async def test_what_is_recorded_beside_the_tokens_has_to_fit(recording: FakeServer, name: str, stream: bool) -> None:
    change, words = EXTRAS[name]
    await check(recording, edited(change), stream, words, top_k=5)


@pytest.mark.parametrize("name", TOPS)
async def test_top_logprobs_have_to_fit(recording: FakeServer, name: str) -> None:
    change, words = TOPS[name]
    await check(recording, edited(change), False, words, top_k=5)


async def test_a_stream_that_has_its_finish_needs_no_done(broken: FakeServer) -> None:
    """The finish reason is the end; stock servers and proxies differ in what comes behind it."""
    size = 6  # prompt ids of one user message "go"
    spans = [{"version": "0", "start": 0, "end": 1}]
    end = event(1, prompt_tokens=size, finish_reason={"type": "length", "length": 1}, weight_versions=spans)
    session = await broken.client.create()
    broken.engine.script = lambda request: RawReply(wire=chunked(end))
    status, data = await call(broken, session, "chat", body_of("chat", stream=True))
    assert (status, data.endswith(b"[DONE]\n\n")) == (200, True)
    assert (await broken.client.session(session.session_id))["turns"] == 1
