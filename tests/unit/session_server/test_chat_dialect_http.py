"""Chat Completions over HTTP: streams, tools, usage, refusals, broken engines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
import vocabularies
from server_helpers import CALL_EDIT, RUN, TOOLS, ask, joined, post, rows, say, sse, until, user

from tollway.router.fake import FakeReply
from tollway.session_server.fake import FakeServer
from tollway.session_server.tokens import ControlTokenizer

TOKENIZER = ControlTokenizer(vocabularies.small(), name="small-qwen3")
ID = TOKENIZER.control
IM_END = ID["<|im_end|>"]
TRANSCRIPTS = Path(__file__).parent / "transcripts"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


async def test_deltas_leave_as_the_engine_produces_tokens(server: FakeServer) -> None:
    """The first text arrives while the engine is still held."""
    server.engine.script = say(FakeReply(ids=[*b"abcdefgh", 261], delay_s=0.05))
    session = await server.client.create()
    headers = {"authorization": f"Bearer {session.token}"}
    url = f"{session.openai_base_url}/chat/completions"
    async with server.http.post(url, json={"messages": [user("go")], "stream": True}, headers=headers) as response:
        seen = b""
        async for part in response.content.iter_any():
            seen += part
            if b'"content":"a"' in seen:
                break
        assert server.engine.in_flight == 1, "the text came before the engine ended"
        seen += await response.read()
    assert seen.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(
    "sampled",
    [
        pytest.param([ID["<think>"], *ids("\nhm\n"), ID["</think>"], *ids("\n\nso"), IM_END], id="reasoning"),
        pytest.param(
            [
                *ids("text "),
                *ids('<tool_call>\n{"name": "run", "arguments": {"a": 3}}\n</tool_call>\n'),
                *ids('<tool_call>\n{"name": "run", "arguments": {"a": 4}}\n</tool_call>'),
                IM_END,
            ],
            id="two-calls",
        ),
        pytest.param([*ids('<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>'), IM_END], id="unknown"),
        pytest.param([*ids('a <tool_call>\n{"name": "run", '), IM_END], id="broken-call"),
        pytest.param([0xE2, 0x82, 0xAC, 0xE2, 0x82, IM_END], id="partial-utf8"),
        pytest.param([*ids("<thi"), *ids("nk or <"), IM_END], id="almost-a-marker"),
        pytest.param([*ids("  a \n\n"), *ids("b  "), IM_END], id="white-space"),
    ],
)
async def test_a_stream_ends_as_the_whole_reply(
    qwen_server: FakeServer, sampled: list[int], chunk: int, incremental: bool
) -> None:
    """Same text, calls, reasoning and finish reason; same recorded ids; usage equals their number."""
    qwen_server.engine.script = say(FakeReply(ids=sampled, chunk=chunk, incremental=incremental))
    session = await qwen_server.client.create()
    whole = await post(qwen_server, session, {"messages": [user("go")], "tools": [RUN]})
    message = whole[1]["choices"][0]["message"]
    events = await sse(
        qwen_server, session, {"messages": [user("go")], "tools": [RUN], "stream_options": {"include_usage": True}}
    )
    found = joined(events)
    assert found["content"] == (message["content"] or "")
    assert found["reasoning"] == (message.get("reasoning_content") or "")
    calls = message.get("tool_calls", [])
    assert [(c["name"], c["arguments"]) for c in found["calls"]] == [
        (c["function"]["name"], c["function"]["arguments"]) for c in calls
    ]
    assert len({c["id"] for c in found["calls"]}) == len(calls)
    assert found["finish"] == [whole[1]["choices"][0]["finish_reason"]] == ["tool_calls" if calls else "stop"]
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == len(sampled)
    first, second = await rows(qwen_server, session)
    assert first.token_ids.tolist() == second.token_ids.tolist()


async def test_usage_is_streamed_only_when_asked(server: FakeServer) -> None:
    session = await server.client.create()
    events = await sse(server, session, {"messages": [user("go")]})
    assert all("usage" not in event for event in events[:-1])
    assert all(event["choices"] for event in events[:-1])


async def test_truncated_thinking_is_reasoning_and_plain_text_is_content(qwen_server: FakeServer) -> None:
    session = await qwen_server.client.create()
    qwen_server.engine.script = say(FakeReply(ids=[ID["<think>"], *ids("abc")], finish="length"))
    cut = await ask(qwen_server, session, [user("go")])
    assert (cut["reasoning_content"], cut["content"]) == ("abc", "")
    qwen_server.engine.script = say([*ids("abc"), IM_END])
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    plain = await ask(qwen_server, session, [user("go")], **off)
    assert plain["content"] == "abc"
    assert "reasoning_content" not in plain


async def test_logprobs_are_the_engines(server: FakeServer) -> None:
    server.engine.script = say(FakeReply(ids=[*b"ok", 261], logprobs=[-0.5, -0.25, -0.125]))
    session = await server.client.create()
    body = {"messages": [user("go")], "logprobs": True, "top_logprobs": 2}
    _, value = await post(server, session, body)
    content = value["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["logprob"]) for entry in content] == [("o", -0.5), ("k", -0.25), ("<end>", -0.125)]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    events = await sse(server, session, body)
    streamed = [e for event in events[:-1] if (lp := event["choices"][0]["logprobs"]) for e in lp["content"]]
    assert streamed == content


async def test_no_tools_means_no_calls(server: FakeServer) -> None:
    """tool_choice none keeps the prompt and reads a call as text."""
    server.engine.script = say(CALL_EDIT)
    session = await server.client.create()
    auto = await ask(server, session, [user("go")], TOOLS, tool_choice="auto")
    none = await ask(server, session, [user("go")], TOOLS, tool_choice="none")
    assert auto["tool_calls"][0]["function"] == {"name": "edit", "arguments": '{"rule": "cast"}'}
    assert none["content"] == "<call>edit<sep>cast"
    assert server.engine.requests[0].input_ids == server.engine.requests[1].input_ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("tool_choice", {"type": "function", "function": {"name": "run"}}),
        ("response_format", {"type": "grammar"}),
        ("logit_bias", {"x": 1}),
        ("frequency_penalty", 3),
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_p", 0),
        ("max_tokens", 0),
        ("stop", [""]),
        ("stop", 5),
        ("stream", "yes"),
        ("top_logprobs", 3),
        ("messages", []),
        ("messages", None),
        ("messages", [{"role": "alien", "content": "x"}]),
        ("messages", [{"role": "user", "content": {"a": 1}}]),
        ("messages", [{"role": "user", "content": [{"type": "input_audio"}]}]),
        ("messages", [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]),
        ("messages", ["x"]),
        ("tools", [{"type": "function"}]),
        ("tools", [RUN, RUN]),
        ("chat_template_kwargs", {"foo": 1}),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(server: FakeServer, field: str, value: Any) -> None:
    session = await server.client.create()
    status, answer = await post(server, session, {"messages": [user("go")], field: value})
    assert status == 400
    assert field.rstrip("s") in (answer["error"]["message"] + str(answer["error"]["param"]))
    assert not server.engine.requests


async def test_unknown_fields_are_ignored(server: FakeServer) -> None:
    session = await server.client.create()
    await ask(server, session, [{**user("go"), "y_bar": 1}], y_bar=2, service_tier="auto", store=True, logit_bias={})


@pytest.mark.parametrize("body", [b"", b"[]", b"nul", b'{"messages":', b"\xff\xfe", b'"x"', b"[" * 5000])
async def test_a_body_that_is_no_request_is_a_400(server: FakeServer, body: bytes) -> None:
    session = await server.client.create()
    headers = {"authorization": f"Bearer {session.token}"}
    async with server.http.post(f"{session.openai_base_url}/chat/completions", data=body, headers=headers) as response:
        assert response.status == 400
        assert "error" in await response.json()


async def test_developer_and_late_system_messages_are_in_the_prompt(qwen_server: FakeServer) -> None:
    session = await qwen_server.client.create()
    messages = [
        {"role": "developer", "content": "say BANANA"},
        user("hi"),
        {"role": "system", "content": "be CALM"},
        user("x"),
    ]
    await ask(qwen_server, session, messages)
    text = TOKENIZER.decode(qwen_server.engine.requests[0].input_ids)
    assert "system\nsay BANANA" in text
    assert "system\nbe CALM" in text


async def test_arguments_are_rendered_once_as_an_object(qwen_server: FakeServer) -> None:
    session = await qwen_server.client.create()
    call = {"id": "c", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls"}'}}
    history = [user("go"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    await ask(qwen_server, session, [*history, {"role": "tool", "tool_call_id": "c", "content": "8"}], [RUN])
    text = TOKENIZER.decode(qwen_server.engine.requests[0].input_ids)
    assert '"arguments": {"command": "ls"}' in text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(FakeReply(ids=[*b"abcde", 261], drop_after=2), id="reset"),
        pytest.param(FakeReply(ids=[1], raw=b"{broken"), id="garbage"),
        pytest.param(FakeReply(ids=[1], raw=b'{"output_ids": [1]}'), id="no-meta"),
        pytest.param(FakeReply(ids=[1], status=500, error="boom"), id="500"),
        pytest.param(FakeReply(ids=[1], raw=b"\xff\xff"), id="bytes"),
    ],
)
async def test_a_broken_engine_reply_is_an_error_and_the_session_goes_on(
    server: FakeServer, reply: FakeReply, stream: bool
) -> None:
    """Never a finish reason, never [DONE], nothing recorded, counters back to zero."""
    server.engine.script = say(reply, [*b"ok", 261])
    session = await server.client.create()
    headers = {"authorization": f"Bearer {session.token}"}
    body = {"messages": [user("go")], "stream": stream}
    async with server.http.post(f"{session.openai_base_url}/chat/completions", json=body, headers=headers) as response:
        text = await response.text()
        assert response.status in (502, 503) or '"error"' in text
        assert "[DONE]" not in text
        assert '"finish_reason":"' not in text
    assert await server.client.trajectories(session.session_id) == ()
    assert server.gateway.router.table.in_flight("e0") == 0
    await until(lambda: server.gateway.router.ready, what="the engine serves")
    await ask(server, session, [user("go")])
    (row,) = await rows(server, session)
    assert row.loss_mask.sum() == 3


async def test_a_client_that_leaves_a_stream_aborts_upstream(server: FakeServer) -> None:
    server.engine.script = say(FakeReply(ids=[*b"x" * 1000, 261], delay_s=0.05))
    session = await server.client.create()
    headers = {"authorization": f"Bearer {session.token}"}
    url = f"{session.openai_base_url}/chat/completions"
    async with server.http.post(url, json={"messages": [user("go")], "stream": True}, headers=headers) as response:
        await response.content.readany()
        response.close()
    rid = server.engine.requests[0].rid
    await until(lambda: rid in server.engine.aborts, what="the abort arrives")
    await until(lambda: server.engine.in_flight == 0, what="the engine lets go")
    assert await server.client.trajectories(session.session_id) == ()


async def test_a_keyed_call_survives_its_client_and_waits_for_the_retry(server: FakeServer) -> None:
    server.engine.script = say(FakeReply(ids=[*b"ok", 261], delay_s=0.3))
    session = await server.client.create()
    key = {"idempotency-key": "k"}
    lost = asyncio.ensure_future(post(server, session, {"messages": [user("go")]}, key))
    await until(lambda: server.engine.in_flight == 1, what="the call runs")
    lost.cancel()
    status, _ = await post(server, session, {"messages": [user("go")]}, key)
    assert status == 200
    assert len(server.engine.requests) == 1
    assert len(await rows(server, session)) == 1


async def test_the_openai_sdk_runs_a_tool_loop(server: FakeServer) -> None:
    """Unmodified SDK, streamed and not, one exact trajectory."""
    server.engine.script = say(CALL_EDIT, [*b"done", 261])
    session = await server.client.create()
    async with openai.AsyncOpenAI(base_url=session.openai_base_url, api_key=session.token, max_retries=0) as sdk:
        messages: list[Any] = [user("go")]
        first = await sdk.chat.completions.create(model="m", messages=messages, tools=TOOLS)  # type: ignore[call-overload]
        message = first.choices[0].message
        messages += [
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "applied"},
        ]
        stream = await sdk.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=True)  # type: ignore[call-overload]
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "done"
        assert [model.id async for model in sdk.models.list()] == ["policy"]
    (row,) = await rows(server, session)
    assert len(row.turn_spans) == 2


async def test_recorded_harness_bodies_are_accepted(server: FakeServer) -> None:
    """Shapes of the openai SDK and of mini-swe-agent as they came over the wire."""
    for file in (TRANSCRIPTS / "openai_sdk.jsonl", TRANSCRIPTS / "mini_swe_agent.jsonl"):
        session = await server.client.create()
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["path"].endswith("/chat/completions") and not record["body"].get("stream"):
                status, value = await post(server, session, record["body"], {"x-stainless-retry-count": "0"})
                assert status == 200, value
        assert await rows(server, session)
