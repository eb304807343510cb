"""Whatever a client sends: an answer below 500, no hang, and the session works afterwards."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
import vocabularies
from server_helpers import TOOLS, ask, rows, say, user

from tollway.session_server.dialects.sealed import unseal
from tollway.session_server.fake import FakeServer
from tollway.session_server.families.base import arguments_text
from tollway.session_server.tokens import ControlTokenizer

FIELDS = (
    "messages", "tools", "tool_choice", "stream", "temperature", "top_p", "top_k", "max_tokens", "n", "stop", "seed",
    "logprobs", "top_logprobs", "response_format", "chat_template_kwargs", "stream_options", "model", "logit_bias",
)  # fmt: skip
NAMES = ("role", "content", "tool_calls", "function", "name", "arguments", "type", "text", "id", "reasoning_content")


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def anything(rng: random.Random, level: int = 0) -> Any:
    kind = rng.randrange(12 if level < 3 else 8)
    simple: list[Any] = [None, True, -1, 10**30, 1.5, "", "\x00\u2028\uffff<|im_end|>", "assistant"]
    if kind < 8:
        return simple[kind]
    if kind < 10:
        return [anything(rng, level + 1) for _ in range(rng.randrange(4))]
    return {rng.choice((*NAMES, *FIELDS)): anything(rng, level + 1) for _ in range(rng.randrange(4))}


def body(rng: random.Random) -> Any:
    """A valid request with one to three things replaced by anything."""
    value: Any = {"messages": [user("hi"), {"role": "assistant", "content": "x"}, user("y")], "tools": TOOLS}
    value = json.loads(json.dumps(value))
    for _ in range(rng.randrange(1, 4)):
        where = rng.choice(["field", "message", "tool"])
        if where == "field":
            value[rng.choice(FIELDS)] = anything(rng)
        elif where == "message" and isinstance(value.get("messages"), list) and value["messages"]:
            message = rng.choice(value["messages"])
            if isinstance(message, dict):
                message[rng.choice(NAMES)] = anything(rng)
        elif isinstance(value.get("tools"), list) and value["tools"] and isinstance(value["tools"][0], dict):
            value["tools"][0][rng.choice(NAMES)] = anything(rng)
    return value


async def test_no_chat_request_is_a_server_error(server: FakeServer) -> None:
    session = await server.client.create()
    headers = {"authorization": f"Bearer {session.token}"}
    url = f"{session.openai_base_url}/chat/completions"
    bodies = [body(random.Random(seed)) for seed in range(400)]
    bodies += [
        {"messages": [user("x")], "tools": [{"type": "function", "function": {"name": "f", "parameters": deep(400)}}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep(400)}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 9000}}]}]},
    ]
    seen = set()
    for value in bodies:
        async with server.http.post(url, data=json.dumps(value), headers=headers) as response:
            await response.read()
            assert response.status < 500, value
            seen.add(response.status)
    assert seen == {200, 400}
    await ask(server, session, [user("still here")])
    assert await rows(server, session)


async def test_no_admin_request_is_a_server_error(server: FakeServer) -> None:
    session = await server.client.create()
    headers = {"authorization": f"Bearer {server.admin_key}"}
    values: list[Any] = [anything(random.Random(seed)) for seed in range(60)]
    values += [{"metadata": {"a": 10**30}}, {"sampling": {"seed": 10**30}}, {"reward": 1, "details": deep(400)}]
    values += [{"reward": 1.0, "details": {"a": 10**30}}, {"url": "http://[::1"}, {"url": 5}, {"version": -1}]
    for path in ("/sessions", f"/sessions/{session.session_id}/reward", "/engines", "/engines/e0/refit"):
        for value in values:
            async with server.http.post(server.url + path, data=json.dumps(value), headers=headers) as response:
                await response.read()
                assert response.status < 500, (path, value)
    for path in (f"/sessions/{session.session_id}/trajectories?format=xml", "/sessions/%00", "/engines/%2e%2e"):
        async with server.http.get(server.url + path, headers=headers) as response:
            assert 400 <= response.status < 500, path


async def test_half_a_body_opens_no_session(server: FakeServer) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST /sessions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {server.admin_key}\r\ncontent-length: 50\r\n\r\n"
    )
    writer.write(head.encode() + b'{"task_id": ')
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()
    await asyncio.sleep(0.2)
    assert server.gateway.store.open_sessions == 0


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
LISTED = {CHAT: "messages", RESPONSES: "input", MESSAGES: "messages"}


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


async def answer(server: FakeServer, route: str, text: str) -> tuple[int, dict[str, Any]]:
    session = await server.client.create()
    headers = {"authorization": f"Bearer {session.token}"}
    async with server.http.post(session.base_url + route, data=text.encode(), headers=headers) as response:
        return response.status, json.loads(await response.read())


@pytest.mark.parametrize(
    ("route", "field"),
    [
        (CHAT, "temperature"),
        (CHAT, "tool_choice"),
        (CHAT, "nobody_knows_it"),
        (RESPONSES, "metadata"),
        (RESPONSES, "nobody_knows_it"),
        (MESSAGES, "thinking"),
    ],
)
@pytest.mark.parametrize("levels", [260, 1000, 5000])
async def test_what_is_nested_deeper_than_anyone_can_write_is_a_400(
    server: FakeServer, route: str, field: str, levels: int
) -> None:
    """JSON is read to 1,024 levels, written to 254, and compared and shown to about 1,000."""
    body = json.dumps({LISTED[route]: [user("x")], field: "DEEP"}).replace('"DEEP"', '{"a":' + nested(levels) + "}")
    status, value = await answer(server, route, body)
    assert (status, value["error"]["code"]) == (400, "invalid_request")
    assert not server.engine.requests


async def test_a_deep_new_message_behind_a_known_conversation_is_a_400(server: FakeServer) -> None:
    """What is read without the rest of its body is held to the same rule."""
    session = await server.client.create()
    headers = {"authorization": f"Bearer {session.token}"}
    said = [user("one")]
    said.append(await ask(server, session, said))
    deep_one = {**user("two"), "extra": "DEEP"}
    text = json.dumps({"model": "policy", "messages": [*said, deep_one]}).replace('"DEEP"', nested(300))
    async with server.http.post(session.base_url + CHAT, data=text.encode(), headers=headers) as response:
        assert response.status == 400
    await ask(server, session, [*said, user("two")])


@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        (CHAT, {"messages": [user("x")], "seed": -(2**63) - 1}, "seed"),
        (CHAT, {"messages": [{"role": "tool", "tool_call_id": 5, "content": "x"}]}, "tool_call_id"),
        (CHAT, {"messages": [{"role": "assistant", "reasoning_content": {"a": 1}}]}, "reasoning_content"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]}]}, "id"),
        (MESSAGES, {"messages": [user("x")], "thinking": {"type": "enabled", "display": True}}, "display"),
        (MESSAGES, {"messages": [user("x")], "output_config": {"effort": 3}}, "effort"),
        (
            MESSAGES,
            {"messages": [user([{"type": "tool_result", "tool_use_id": "t", "is_error": 1}])]},  # type: ignore[arg-type]
            "is_error",
        ),
    ],
)
async def test_a_value_of_the_wrong_kind_is_refused_not_guessed(
    server: FakeServer, route: str, body: dict[str, Any], words: str
) -> None:
    status, value = await answer(server, route, json.dumps({"max_tokens": 5, **body} if route == MESSAGES else body))
    assert status == 400
    assert words in value["error"]["message"]


def test_a_seal_that_is_none_of_ours_is_no_text() -> None:
    assert [unseal(value) for value in ("tw1.\u00e9", "tw1.a", "tw1./w==", "x", None)] == [None] * 5


async def test_half_a_character_in_a_calls_arguments_reaches_the_model(server: FakeServer) -> None:
    """A tool call of the history whose JSON spells a lone surrogate."""
    call = {"id": "c", "function": {"name": "edit", "arguments": '{"rule": "\\ud800"}'}}
    said = [
        user("x"),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "y"},
    ]
    status, _ = await answer(server, CHAT, json.dumps({"messages": said, "tools": TOOLS}))
    assert status == 200
    assert bytes(t for t in server.engine.requests[0].input_ids if t < 256).count(b"\\ud800") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", LISTED)
async def test_half_a_character_in_what_the_model_writes_is_a_turn(
    qwen_server: FakeServer, route: str, stream: bool
) -> None:
    """The model may spell a lone surrogate in its arguments; they go out spelled, and the turn is kept."""
    control = ControlTokenizer(vocabularies.small(), name="small-qwen3").control
    inner = b'\n{"name": "run", "arguments": {"x": "\\ud800"}}\n'
    ids = [control["<tool_call>"], *inner, control["</tool_call>"], control["<|im_end|>"]]
    qwen_server.engine.script = say(ids)
    session = await qwen_server.client.create()
    offered = {
        CHAT: {"type": "function", "function": {"name": "run"}},
        RESPONSES: {"type": "function", "name": "run"},
        MESSAGES: {"name": "run", "input_schema": {"type": "object"}},
    }[route]
    body = {LISTED[route]: [user("go")], "tools": [offered], "stream": stream}
    headers = {"authorization": f"Bearer {session.token}"}
    async with qwen_server.http.post(session.base_url + route, json=body, headers=headers) as response:
        data = await response.read()
        assert response.status == 200
    assert b"ud800" in data
    assert b'"error":{' not in data
    (row,) = await rows(qwen_server, session)
    assert row.loss_mask.sum() == len(ids)


@pytest.mark.parametrize("text", ['{"x": 1e999}', '{"x": NaN}', '{"x": [-1e999]}'])
async def test_a_call_with_a_number_that_json_has_no_word_for_is_text(qwen_server: FakeServer, text: str) -> None:
    control = ControlTokenizer(vocabularies.small(), name="small-qwen3").control
    inner = b'\n{"name": "run", "arguments": ' + text.encode() + b"}\n"
    qwen_server.engine.script = say([control["<tool_call>"], *inner, control["</tool_call>"], control["<|im_end|>"]])
    session = await qwen_server.client.create()
    message = await ask(qwen_server, session, [user("go")], TOOLS)
    assert "tool_calls" not in message
    assert text in message["content"]


def test_arguments_are_json_that_travels() -> None:
    assert arguments_text({"a": "\ud800\u00e9"}) == '{"a": "\\ud800\\u00e9"}'
    assert arguments_text({"a": "\u00e9"}) == '{"a": "\u00e9"}'
    with pytest.raises(ValueError):
        arguments_text({"a": float("inf")})
