"""Replies as clients get them in every dialect, over a whole server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import vocabularies
from aiohttp import web
from dialect_helpers import events_of, text
from server_helpers import ROUTES, RUN, TOOLS, ask, asked, call, echoed, joined, ok, post, reasons, rows, say, sse, user
from test_messages_dialect import assembled

from tollway.router.fake import FakeEngine, FakeReply
from tollway.session_server import metrics
from tollway.session_server.client import Session
from tollway.session_server.fake import FakeServer

CALL = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'


async def events(server: FakeServer, session: Session, route: str, body: dict[str, Any]) -> list[Any]:
    """Events of a streamed call of any dialect."""
    url = f"{session.base_url}/v1/{route}"
    async with server.http.post(url, json={**body, "stream": True}, headers={"x-api-key": session.token}) as response:
        assert response.status == 200
        return events_of(await response.read())


def text_of(route: str, value: dict[str, Any]) -> str:
    """Text of a whole answer."""
    (said,) = echoed(route, value)
    content = said["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


# -- histories in every form ------------------------------------------------------------------------


async def test_a_history_has_the_same_ids_in_every_form_that_harnesses_give_it(qwen_server: FakeServer) -> None:
    """Reports B2 and B3: no content, null, empty, parts of text."""
    session = await qwen_server.client.create()
    calls = [{"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}}]
    part = [{"type": "text", "text": "8"}]
    for content in ({}, {"content": None}, {"content": ""}, {"content": []}):
        for system, result in (("S", "8"), ([{"type": "text", "text": "S"}], part)):
            history = [
                {"role": "system", "content": system},
                user("go"),
                {"role": "assistant", "tool_calls": calls, **content},
                {"role": "tool", "tool_call_id": "c", "content": result},
            ]
            await ask(qwen_server, session, history, [RUN])
    assert len({tuple(request.input_ids) for request in qwen_server.engine.requests}) == 1
    status, value = await post(
        qwen_server, session, {"messages": [{"role": "user", "content": [{"type": "strange", "text": "x"}]}]}
    )
    assert (status, "strange" in value["error"]["message"]) == (400, True)


async def test_a_reply_that_is_only_a_call_is_continued_however_its_missing_text_is_sent_back(
    qwen_server: FakeServer,
) -> None:
    """Report A5: null, absent, empty and no parts are one; nothing is rendered anew."""

    def rerendered() -> float:
        return sum(metrics.BRANCHES.labels(reason)._value.get() for reason in ("rerendered", "edited"))

    before = rerendered()
    sampled = text(CALL + "<|im_end|>")
    qwen_server.engine.script = say(sampled, text("ok<|im_end|>"))
    session = await qwen_server.client.create()
    reply = await ask(qwen_server, session, [user("go")], [RUN])
    bare = {name: value for name, value in reply.items() if name != "content"}
    for at, said in enumerate((bare, {**bare, "content": None}, {**bare, "content": ""}, {**bare, "content": []})):
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": f"{at}"}
        await ask(qwen_server, session, [user("go"), said, result], [RUN])
    first, *others = qwen_server.engine.requests
    stored = [*first.input_ids, *sampled]
    assert all(request.input_ids[: len(stored)] == stored for request in others)
    assert reasons(qwen_server) == ["root", "continuation", "fork", "fork", "fork"]
    assert rerendered() == before


@pytest.mark.parametrize("route", ROUTES)
async def test_half_a_character_is_refused_in_every_dialect(server: FakeServer, route: str) -> None:
    """Row 30."""
    session = await server.client.create()
    body = b'{"%b":[{"role":"user","content":"\\ud800"}],"max_tokens":5}' % ROUTES[route].encode()
    url = f"{session.base_url}/v1/{route}"
    async with server.http.post(url, data=body, headers={"x-api-key": session.token}) as response:
        assert response.status == 400


# -- calls and reasons to stop ----------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "run"}}])
async def test_a_reply_with_a_call_ends_for_it_streamed_or_not(qwen_server: FakeServer, choice: Any) -> None:
    """Report B5: the same reason for a named tool, and one reason in a stream."""
    qwen_server.engine.script = say(text(CALL + "<|im_end|>"))
    session = await qwen_server.client.create()
    body = {"messages": [user("go")], "tools": [RUN], "tool_choice": choice}
    _, value = await post(qwen_server, session, body)
    assert value["choices"][0]["finish_reason"] == "tool_calls"
    found = joined(await sse(qwen_server, session, body))
    assert found["finish"] == ["tool_calls"]
    assert [each["name"] for each in found["calls"]] == ["run"]


@pytest.mark.parametrize(
    ("name", "call_", "end"),
    [
        ("glm-4.5", "<tool_call>run\n</tool_call>", "<|observation|>"),
        ("qwen3", '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>', "<|im_end|>"),
    ],
)
@pytest.mark.parametrize("finish", ["stop", "length"])
async def test_blocks_of_every_kind_are_bracketed_and_the_reason_is_the_calls(
    tmp_path: Path, finish: str, name: str, call_: str, end: str
) -> None:
    """Reports B9 and B10: thinking, text, a call, text again."""
    family = vocabularies.small_family(name)
    sampled = family.tokenizer.encode(f"<think>hm</think>\nso {call_}\nand on")
    tail = [] if finish == "length" else [family.tokenizer.control[end]]
    async with FakeServer(tmp_path, family=family) as server:
        server.engine.script = say(FakeReply(ids=[*sampled, *tail], finish=finish, chunk=2))
        session = await server.client.create()
        tools = [{"name": "run", "input_schema": {"type": "object", "properties": {}}}]
        body = asked("messages", user("go"), tools=tools)
        whole = await ok(server, session, "messages", body)
        message = assembled(await events(server, session, "messages", body))
        for value in (whole, message):
            assert value["stop_reason"] == ("max_tokens" if finish == "length" else "tool_use")
            kinds = [block["type"] for block in value["content"]]
            assert kinds[:2] == ["thinking", "text"]
            assert kinds.count("tool_use") == 1
            said = "".join(block.get("text", "") for block in value["content"])
            assert said.split() == ["so", "and", "on"]
        one, two = await rows(server, session)
        assert one.token_ids.tolist() == two.token_ids.tolist()


async def test_a_stop_sequence_reaches_the_engine_and_is_named_in_the_answer(server: FakeServer) -> None:
    """Report B11: the engine would write 1,2,3,4,5."""
    server.engine.script = say(FakeReply(ids=[*b"1,2,3,4"], matched="4"))
    session = await server.client.create()
    body = asked("messages", user("count"), stop_sequences=["4"])
    whole = await ok(server, session, "messages", body)
    message = assembled(await events(server, session, "messages", body))
    for value in (whole, message):
        assert (value["stop_reason"], value["stop_sequence"]) == ("stop_sequence", "4")
        assert value["content"] == [{"type": "text", "text": "1,2,3,"}]
    for request in server.engine.requests:
        params: Any = request.body["sampling_params"]
        assert params["stop"] == ["4"]
    assert [row.token_ids[-1] for row in await rows(server, session)] == [ord("4")] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_text_behind_thinking_that_the_prompt_opened_is_reasoning_and_without_it_is_content(
    tmp_path: Path, stream: bool
) -> None:
    """Report B17: the first reply is cut, the second is not; the ids are those that were sampled."""
    family = vocabularies.small_family("qwen3.5")
    sampled = family.tokenizer.encode("abc")
    async with FakeServer(tmp_path, family=family) as server:
        session = await server.client.create()
        found = []
        for thinking, reply in (
            (True, FakeReply(ids=sampled, finish="length")),
            (False, FakeReply(ids=[*sampled, family.stop_ids[0]])),
        ):
            server.engine.script = say(reply)
            body = {"messages": [user("go")], "chat_template_kwargs": {"enable_thinking": thinking}}
            if stream:
                told = joined(await sse(server, session, body))
                found.append((told["reasoning"], told["content"]))
            else:
                _, value = await post(server, session, body)
                message = value["choices"][0]["message"]
                found.append((message.get("reasoning_content") or "", message["content"]))
        assert found == [("abc", ""), ("", "abc")]
        prompts = [family.tokenizer.decode(request.input_ids) for request in server.engine.requests]
        assert prompts[0].rstrip().endswith("<think>")
        assert prompts[1].rstrip().endswith("</think>")
        one, two = await rows(server, session)
        assert one.token_ids[one.loss_mask == 1].tolist() == sampled
        assert two.token_ids[two.loss_mask == 1].tolist() == [*sampled, family.stop_ids[0]]


# -- what comes from upstream -----------------------------------------------------------------------


def event(tokens: list[int], total: int, *, done: bool) -> bytes:
    meta: dict[str, Any] = {
        "completion_tokens": total,
        "prompt_tokens": 5,
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "finish_reason": {"type": "stop", "matched": 261} if done else None,
        "weight_versions": [{"version": "0", "start": 0, "end": total}] if done else None,
    }
    return b"data: " + orjson.dumps({"output_ids": tokens, "meta_info": meta}) + b"\n\n"


@pytest.mark.parametrize("route", ROUTES)
async def test_a_last_event_that_brings_no_token_does_not_break_the_end_of_a_stream(
    server: FakeServer, route: str
) -> None:
    """Report B7: content, the finish, then figures alone, then the end."""
    raw = event([111], 1, done=False) + event([107, 261], 3, done=True) + event([], 3, done=True)
    server.engine.script = say(FakeReply(ids=[111, 107, 261], raw=raw + b"data: [DONE]\n\n"))
    session = await server.client.create()
    body = asked(route, user("g"), **({"stream_options": {"include_usage": True}} if "chat" in route else {}))
    got = await events(server, session, route, body)
    last = {"chat/completions": "[DONE]", "messages": "message_stop", "responses": "response.completed"}[route]
    assert (got[-1] if route == "chat/completions" else got[-1]["type"]) == last
    counted = {
        "chat/completions": lambda: got[-2]["usage"]["completion_tokens"],
        "messages": lambda: got[-2]["usage"]["output_tokens"],
        "responses": lambda: got[-1]["response"]["usage"]["output_tokens"],
    }[route]()
    assert counted == 3
    (row,) = await server.client.trajectories(session.session_id)
    assert row.trained_tokens == 3


class Zipping(FakeEngine):
    """Sends its replies compressed."""

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        response = await super()._generate(http)
        response.enable_compression(web.ContentCoding.gzip)
        return response


@pytest.mark.parametrize("route", ROUTES)
async def test_an_answer_has_its_own_length_and_no_encoding_of_the_engine(tmp_path: Path, route: str) -> None:
    """Report B13."""
    async with Zipping() as engine, FakeServer(tmp_path, engines=[engine]) as server:
        engine.script = say([*b"x" * 900, 261])
        session = await server.client.create()
        headers = {"x-api-key": session.token, "accept-encoding": "gzip"}
        async with server.http.post(
            f"{session.base_url}/v1/{route}", json=asked(route, user("go")) | {"max_tokens": 2000}, headers=headers
        ) as response:
            data = await response.read()
            assert response.status == 200
            assert "content-encoding" not in response.headers
            assert int(response.headers["content-length"]) == len(data)
            assert text_of(route, json.loads(data)) == "x" * 900


def unknown_fields(value: dict[str, Any]) -> None:
    value |= {"service_tier": "provisioned", "x_foo": {"a": [1]}}
    value["meta_info"] |= {"e2e_latency": 0.5, "x_foo": None, "usage": {"prompt_tokens": 1}}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_fields_that_nobody_knows_are_no_error_from_either_side(
    server: FakeServer, route: str, stream: bool
) -> None:
    """Report B14."""
    server.engine.script = say(FakeReply(ids=[*b"ok", 261], edit=unknown_fields))
    session = await server.client.create()
    body = asked(route, {**user("go"), "y_bar": 1}, y_bar={"deep": [None]}, service_tier="auto")
    if stream:
        assert await events(server, session, route, body)
    else:
        assert text_of(route, await ok(server, session, route, body)) == "ok"
    assert len(await rows(server, session)) == 1


# -- the context's end ------------------------------------------------------------------------------


@asynccontextmanager
async def short(folder: Path) -> AsyncIterator[FakeServer]:
    async with FakeServer(folder, settings={"context_length": 32}) as server:
        yield server


@pytest.mark.parametrize("route", ROUTES)
async def test_a_conversation_that_outgrew_the_context_is_exported_as_truncated_and_can_go_on(
    tmp_path: Path, route: str
) -> None:
    """Report B18 and row 41: 40 ids for a context of 32, and 8 more are wished for."""
    async with short(tmp_path) as server:
        session = await server.client.create()
        first = await ok(server, session, route, asked(route, user("go")) | {"max_tokens": 8})
        said = echoed(route, first)
        long = asked(route, user("go"), *said, user("x" * 26)) | {"max_tokens": 8}
        assert server.engine.requests[0].prompt_tokens + 3 + 26 + 3 >= 38
        for _ in range(2):
            status, value = await call(server, session, route, long)
            assert status == 400
            named = value["error"].get("code") or value["error"]["message"]
            assert named == "context_length_exceeded" or named.startswith("prompt is too long: ")
        assert len(server.engine.requests) == 1
        (row,) = await rows(server, session)
        assert (row.truncated, row.error, row.finish_reasons, row.trainable) == (True, None, ("stop",), True)
    async with short(tmp_path) as server:
        (row,) = await server.client.trajectories(session.session_id)
        assert row.truncated, "a restart does not forget it"
        url = f"{server.url}/sessions/{session.session_id}/v1/{route}"
        body = asked(route, user("go"), *said, user("y"))
        async with server.http.post(url, json=body, headers={"x-api-key": session.token}) as response:
            assert response.status == 200
        (row,) = await server.client.trajectories(session.session_id)
        assert (len(row.turn_spans), row.truncated) == (2, False)


async def test_an_engine_that_finds_the_context_too_short_truncates_alike(server: FakeServer) -> None:
    words = "Input length (40 tokens) is longer than the model's context length (32 tokens)"
    server.engine.script = say([*b"ok", 261], FakeReply(ids=[], status=400, error=words))
    session = await server.client.create()
    reply = await ask(server, session, [user("go")], TOOLS)
    status, _ = await post(server, session, {"messages": [user("go"), reply, user("on")], "tools": TOOLS})
    assert status == 400
    (row,) = await rows(server, session)
    assert row.truncated
    shown: Any = await server.client.session(session.session_id)
    assert shown["nodes"][0]["overflowed"]
    assert shown["failed_calls"] == {"context_length_exceeded": 1}
