"""Whatever a client sends: an answer below 500, no hang, and the session works afterwards."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from server_helpers import TOOLS, ask, rows, user

from tollway.session_server.fake import FakeServer

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
