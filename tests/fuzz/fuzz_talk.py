"""Conversations as harnesses of the three dialects hold them: they grow by what the server answered."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from fuzz_wire import Answer

Json = dict[str, Any]
PATHS = {"chat": b"/v1/chat/completions", "responses": b"/v1/responses", "messages": b"/v1/messages"}
LISTS = {"chat": "messages", "responses": "input", "messages": "messages"}
SCHEMAS: dict[str, Json] = {
    "run": {"type": "object", "properties": {}},
    "edit": {"type": "object", "properties": {"rule": {"type": "string"}}},
    "plan": {"type": "object", "properties": {"steps": {"type": "array"}, "more": {"type": "object"}}},
}


@dataclass(frozen=True)
class Said:
    """What an answer said, as far as a harness looks at it."""

    whole: bool
    """It has its body or its last event."""
    failed: bool
    """It is an error, or a stream that ended in an error event."""
    reply_id: str = ""
    text: str = ""
    """Everything that the model wrote: content, reasoning and arguments."""
    first: str = ""
    """The same of the first choice."""
    items: tuple[Json, ...] = ()
    """The reply as the harness sends it back."""
    calls: tuple[str, ...] = ()
    """Ids of tool calls that want a result."""


@dataclass
class Talk:
    """One conversation of one session."""

    dialect: str
    lead: str = ""
    tools: tuple[str, ...] = ()
    items: list[Json] = field(default_factory=list)
    calls: tuple[str, ...] = ()
    previous: str = ""
    """Reply that the next Responses request may name instead of sending everything."""
    behind: int = 0
    """Items up to and with that reply."""
    sound: bool = True
    """Nothing in the history is invalid."""
    sort_keys: bool = False
    """How its harness writes JSON; the order of a tool's keys is part of what the model sees."""
    number: str = ""
    """Of the last reply, as long as the history goes on from it unchanged."""

    def body(self, *, stream: bool, named: bool = False) -> Json:
        """The next request; ``named``: only what is new behind the last reply."""
        items = self.items
        value: Json = {"model": "policy"}
        if named and self.previous and self.dialect == "responses":
            value["previous_response_id"] = self.previous
            items = items[self.behind :]
        value[LISTS[self.dialect]] = copy.deepcopy(items)
        if self.tools:
            value["tools"] = [tool(self.dialect, name) for name in self.tools]
        if self.dialect == "messages":
            value["max_tokens"] = 400
        if self.lead:
            if self.dialect == "chat":
                value["messages"].insert(0, {"role": "system", "content": self.lead})
            else:
                value["instructions" if self.dialect == "responses" else "system"] = self.lead
        if stream:
            value["stream"] = True
        return value

    def tell(self, rng: Random, text: str) -> None:
        """What the harness adds before its next call: results of open calls, then perhaps a message."""
        results = [result(self.dialect, each, text) for each in self.calls]
        if results and rng.random() < 0.9:
            if self.dialect == "messages":
                self.items.append({"role": "user", "content": results})
            else:
                self.items += results
            if rng.random() < 0.8:
                self.calls = ()
                return
        self.calls = ()
        self.items.append({"role": "user", "content": text})

    def hear(self, rng: Random, said: Said) -> None:
        """Take a reply into the history, as some harness would send it back; equal in meaning."""
        self.items += [_ECHOES[self.dialect](rng, copy.deepcopy(item)) for item in _kept(rng, said.items)]
        self.calls = said.calls
        self.previous, self.behind = said.reply_id, len(self.items)


def tool(dialect: str, name: str) -> Json:
    """A tool as the dialect offers it."""
    schema = copy.deepcopy(SCHEMAS[name])
    if dialect == "chat":
        return {"type": "function", "function": {"name": name, "parameters": schema}}
    if dialect == "responses":
        return {"type": "function", "name": name, "parameters": schema}
    return {"name": name, "input_schema": schema}


def result(dialect: str, call_id: str, text: str) -> Json:
    """The result of a tool call; for Messages a block."""
    if dialect == "chat":
        return {"role": "tool", "tool_call_id": call_id, "content": text}
    if dialect == "responses":
        return {"type": "function_call_output", "call_id": call_id, "output": text}
    return {"type": "tool_result", "tool_use_id": call_id, "content": text}


def understand(dialect: str, answer: Answer) -> Said:
    """Read an answer of status 200, whole or streamed; every event has to be what its dialect allows."""
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        events = _events(answer.body)
        last = events[-1] if events else {}
        if last == "[DONE]":
            last = {"type": "[DONE]"}
        failed = "error" in last or last.get("type") in ("error", "response.failed")
        ends = {
            "chat": "[DONE]",
            "responses": ("response.completed", "response.incomplete"),
            "messages": "message_stop",
        }
        whole = last.get("type") in ends[dialect] if not failed else False
        if not whole:
            assert failed, f"a stream ended with {last}"
            assert b'"finish_reason":"' not in answer.body, "a failed stream has a finish reason"
            return Said(False, True)
        return _READERS[dialect](_JOINERS[dialect](events))
    return _READERS[dialect](json.loads(answer.body))


def _kept(rng: Random, items: Sequence[Json]) -> Sequence[Json]:
    """Harnesses may drop reasoning items; a reply of nothing else would be gone with them."""
    rest = [item for item in items if item.get("type") != "reasoning"]
    return rest if rest and rng.random() < 0.5 else items


def _echo_chat(rng: Random, message: Json) -> Json:
    for at, call in enumerate(message.get("tool_calls", ())):
        if rng.random() < 0.5:
            call["index"] = at
        with contextlib.suppress(ValueError):
            if rng.random() < 0.3:
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    if not message.get("content"):
        message.update(rng.choice(({"content": None}, {"content": ""}, {"content": []})))
    elif rng.random() < 0.3:
        message["content"] = [{"type": "text", "text": message["content"]}]
    if rng.random() < 0.5:
        message.pop("reasoning_content", None)
    return message


def _echo_responses(rng: Random, item: Json) -> Json:
    if rng.random() < 0.5:
        item.pop("id", None)
        item.pop("status", None)
    if item["type"] == "message" and rng.random() < 0.3:
        item = {"role": "assistant", "content": "".join(part["text"] for part in item["content"])}
    return item


def _echo_messages(rng: Random, item: Json) -> Json:
    if rng.random() < 0.4:
        item["content"] = [block for block in item["content"] if block["type"] != "thinking"] or item["content"]
    if item["content"] and rng.random() < 0.3:
        item["content"][-1]["cache_control"] = {"type": "ephemeral"}
    if len(item["content"]) == 1 and item["content"][0]["type"] == "text" and rng.random() < 0.3:
        item["content"] = item["content"][0]["text"]
    return item


_ECHOES: dict[str, Callable[[Random, Json], Json]] = {
    "chat": _echo_chat,
    "responses": _echo_responses,
    "messages": _echo_messages,
}


def _events(body: bytes) -> list[Any]:
    assert body.endswith(b"\n\n"), "a stream ends within an event"
    found = []
    for block in body.decode().split("\n\n")[:-1]:
        data = block.rpartition("\n")[2].removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def _join_chat(events: Sequence[Any]) -> Json:
    choices: dict[int, Json] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            made = choices.setdefault(choice["index"], {"message": {"role": "assistant", "content": ""}, "ends": 0})
            message, delta = made["message"], choice["delta"]
            message["content"] += delta.get("content") or ""
            if delta.get("reasoning_content"):
                message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
            for part in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                assert part["index"] == len(calls)
                calls.append({key: value for key, value in part.items() if key != "index"})
            made["ends"] += choice["finish_reason"] is not None
    assert all(choice["ends"] == 1 for choice in choices.values()), "one finish reason for each choice"
    return {"id": events[0]["id"], "choices": [choices[at] for at in sorted(choices)]}


def _join_responses(events: Sequence[Any]) -> Json:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return dict(events[-1]["response"])


def _join_messages(events: Sequence[Any]) -> Json:
    message: Json = dict(events[0]["message"])
    blocks: list[Json] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]) | {"json": ""})
        if event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for key in ("text", "thinking", "signature"):
                if key in delta:
                    block[key] = block.get(key, "") + delta[key]
            block["json"] += delta.get("partial_json", "")
    for block in blocks:
        told = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(told or "{}")
    return message | {"content": blocks}


def _said(reply_id: str, texts: Sequence[str], items: tuple[Json, ...], calls: Sequence[str]) -> Said:
    text = "\n".join(texts)
    return Said(True, False, reply_id, text, text.partition(_NEXT)[0], items, tuple(calls))


_NEXT = "\x00next choice\x00"


def _read_chat(value: Json) -> Said:
    texts = []
    for choice in value["choices"]:
        message = choice["message"]
        texts += [message.get("content") or "", message.get("reasoning_content") or ""]
        texts += [call.get("function", {}).get("arguments", "") for call in message.get("tool_calls", ())]
        texts.append(_NEXT)
    message = value["choices"][0]["message"]
    calls = tuple(call["id"] for call in message.get("tool_calls", ()))
    return _said(value["id"], texts, (message,), calls)


def _read_responses(value: Json) -> Said:
    texts, calls = [], []
    for item in value["output"]:
        texts += [part.get("text", "") for part in item.get("content") or ()]
        texts += [part.get("text", "") for part in item.get("summary") or ()]
        texts.append(item.get("arguments", ""))
        if item["type"] == "function_call":
            calls.append(item["call_id"])
    return _said(value["id"], texts, tuple(value["output"]), calls)


def _read_messages(value: Json) -> Said:
    texts, calls = [], []
    for block in value["content"]:
        texts += [block.get("text", ""), block.get("thinking", "")]
        if block["type"] == "tool_use":
            texts.append(json.dumps(block["input"]))
            calls.append(block["id"])
    item = {"role": "assistant", "content": value["content"]}
    return _said(value["id"], texts, (item,), calls)


_JOINERS: dict[str, Callable[[Sequence[Any]], Json]] = {
    "chat": _join_chat,
    "responses": _join_responses,
    "messages": _join_messages,
}
_READERS: dict[str, Callable[[Json], Said]] = {
    "chat": _read_chat,
    "responses": _read_responses,
    "messages": _read_messages,
}
