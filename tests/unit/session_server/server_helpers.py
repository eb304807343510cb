"""Small helpers shared by the session server's tests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import orjson

from tollway.records import Trajectory
from tollway.router.fake import FakeReply, FakeRequest
from tollway.session_server.client import Session
from tollway.session_server.fake import FakeServer

EDIT = {
    "type": "function",
    "function": {
        "name": "edit",
        "description": "Change the code",
        "parameters": {"type": "object", "properties": {"rule": {"type": "string"}}},
    },
}
RUN = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [RUN, EDIT]
CALL_EDIT = [263, *b"edit", 265, *b"cast", 261]
"""A reply of the byte family that calls ``edit``."""


ROUTES = {"chat/completions": "messages", "responses": "input", "messages": "messages"}
"""Route of every dialect and the field that holds its conversation."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def say(*replies: list[int] | FakeReply) -> Any:
    """A script that answers with ``replies`` in order; the last one repeats."""
    left = list(replies)

    def script(request: FakeRequest) -> FakeReply:
        reply = left.pop(0) if len(left) > 1 else left[0]
        return reply if isinstance(reply, FakeReply) else FakeReply(ids=reply)

    return script


async def post(
    server: FakeServer, session: Session, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """One raw chat call: (status, JSON)."""
    all_headers = {"authorization": f"Bearer {session.token}", **(headers or {})}
    url = f"{session.openai_base_url}/chat/completions"
    async with server.http.post(url, json=body, headers=all_headers) as response:
        return response.status, json.loads(await response.read())


async def ask(
    server: FakeServer, session: Session, messages: list[Any], tools: list[Any] | None = None, **more: Any
) -> dict[str, Any]:
    """The assistant message of a chat call that must succeed, as a harness would echo it."""
    body: dict[str, Any] = {"model": "policy", "messages": messages, **more}
    if tools:
        body["tools"] = tools
    status, value = await post(server, session, body)
    assert status == 200, value
    return dict(value["choices"][0]["message"])


async def sse(
    server: FakeServer, session: Session, body: dict[str, Any], headers: dict[str, str] | None = None
) -> list[Any]:
    """Events of a streamed chat call; the last is ``"[DONE]"`` when it came."""
    all_headers = {"authorization": f"Bearer {session.token}", **(headers or {})}
    url = f"{session.openai_base_url}/chat/completions"
    async with server.http.post(url, json={"stream": True, **body}, headers=all_headers) as response:
        assert response.status == 200, await response.text()
        data = (await response.read()).decode()
    events = [line[6:] for line in data.split("\n\n") if line]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def joined(events: list[Any]) -> dict[str, Any]:
    """What a client makes of stream events."""
    out: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": []}
    for event in events:
        if event == "[DONE]" or "error" in event or not event["choices"]:
            continue
        choice = event["choices"][0]
        delta = choice["delta"]
        out["content"] += delta.get("content") or ""
        out["reasoning"] += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls", []):
            while len(out["calls"]) <= part["index"]:
                out["calls"].append({"id": None, "name": "", "arguments": ""})
            call = out["calls"][part["index"]]
            call["id"] = part.get("id") or call["id"]
            call["name"] += part["function"].get("name") or ""
            call["arguments"] += part["function"].get("arguments") or ""
        if choice["finish_reason"] is not None:
            out["finish"].append(choice["finish_reason"])
    return out


async def call(
    server: FakeServer, session: Session, route: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """One call of any dialect: (status, JSON)."""
    sent = {"x-api-key": session.token, **(headers or {})}
    url = f"{session.base_url}/v1/{route}"
    async with server.http.post(url, data=orjson.dumps(body), headers=sent) as response:
        return response.status, json.loads(await response.read())


async def ok(server: FakeServer, session: Session, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of a call of any dialect that must succeed."""
    status, value = await call(server, session, route, body)
    assert status == 200, value
    return value


def asked(route: str, *messages: Any, **more: Any) -> dict[str, Any]:
    """Body of any dialect."""
    return {"model": "m", ROUTES[route]: list(messages), **({"max_tokens": 64} if route == "messages" else {}), **more}


def echoed(route: str, value: dict[str, Any]) -> list[dict[str, Any]]:
    """An answer of any dialect as its next request carries it."""
    if route == "chat/completions":
        return [value["choices"][0]["message"]]
    return list(value["output"]) if route == "responses" else [{"role": "assistant", "content": value["content"]}]


def reasons(server: FakeServer) -> list[str]:
    """Why each node of the only session is where it is."""
    (session,) = server.gateway.store._loaded.values()
    return [node.reason for node in session.forest.nodes.values()]


async def rows(server: FakeServer, session: Session) -> tuple[Trajectory, ...]:
    """The export, each row proved against what the engine was sent and returned."""
    found = await server.client.trajectories(session.session_id)
    check_rows(found, server)
    return found


def check_rows(found: tuple[Trajectory, ...], server: FakeServer) -> None:
    """Rule 0: every row is one engine call's prompt plus reply, every reply is trained exactly once."""
    seen: dict[str, tuple[list[int], list[int]]] = {}
    for engine in server.engines:
        for request in engine.requests:
            if request.rid in engine.replies:
                seen[request.rid] = (request.input_ids, engine.replies[request.rid])
    whole = {tuple(sent + got) for sent, got in seen.values()}
    for row in found:
        assert tuple(row.token_ids.tolist()) in whole, "a row is not what one call sent and returned"
        assert row.turn_spans[-1].end == row.token_ids.size, "tokens behind the last sampled id"
        spans = np.zeros(row.token_ids.size, np.uint8)
        for span in row.turn_spans:
            spans[span.start : span.end] = 1
        assert not row.loss_mask[spans == 0].any(), "a token that was not sampled is trained"


async def until(condition: Any, *, what: str) -> None:
    """Wait until ``condition()`` holds; the test's own timeout is the limit."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never: {what}")
