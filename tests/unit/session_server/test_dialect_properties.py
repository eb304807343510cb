"""What holds for every dialect: lists can be read in pieces, replies come back as they went, nothing crashes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import orjson
import pytest
from dialect_helpers import Reply, events_of, names, record_of, wish_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tollway.errors import BadRequest
from tollway.messages import Message, ToolCall
from tollway.session_server.dialects.base import Dialect
from tollway.session_server.dialects.chat import CHAT
from tollway.session_server.dialects.messages import MESSAGES
from tollway.session_server.dialects.responses import RESPONSES
from tollway.session_server.families.compact import CompactFamily
from tollway.session_server.matching import message_key
from tollway.session_server.request import TurnDelta, TurnOutcome

DIALECTS: list[Dialect] = [CHAT, RESPONSES, MESSAGES]
FAMILY = CompactFamily()
words = st.text(max_size=8)
some = st.text(min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(some, values, max_size=3).map(lambda value: orjson.dumps(value).decode())
calls = st.lists(st.tuples(st.sampled_from(["run", "edit"]), arguments), max_size=3)


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def chat_items() -> st.SearchStrategy[Any]:
    plain = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "system"]), words)
    said = st.builds(
        lambda text, why, made: {
            "role": "assistant",
            "content": text,
            "reasoning_content": why,
            "tool_calls": [{"id": f"c{at}", "function": {"name": n, "arguments": a}} for at, (n, a) in enumerate(made)],
        },
        words,
        words,
        calls,
    )
    result = st.builds(lambda text: {"role": "tool", "tool_call_id": "c0", "content": text}, words)
    return plain | said | result


def response_items() -> st.SearchStrategy[Any]:
    plain = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "developer"]), words)
    said = st.builds(lambda text: part("message", role="assistant", content=[part("output_text", text=text)]), words)
    why = st.builds(lambda text: part("reasoning", summary=[], content=[part("reasoning_text", text=text)]), words)
    made = st.builds(lambda text: part("function_call", call_id="c", name="run", arguments=text), arguments)
    free = st.builds(lambda text: part("custom_tool_call", call_id="c", name="patch", input=text), words)
    result = st.builds(lambda text: part("function_call_output", call_id="c", output=text), words)
    return plain | said | why | made | free | result


def message_items() -> st.SearchStrategy[Any]:
    block = st.builds(lambda text: part("text", text=text), words)
    result = st.builds(
        lambda text, bad: part("tool_result", tool_use_id="t", content=text, is_error=bad), words, st.booleans()
    )
    user = st.builds(lambda content: {"role": "user", "content": content}, words | st.lists(block | result, max_size=4))
    made = st.builds(lambda text: part("tool_use", id="t", name="run", input=json.loads(text)), arguments)
    why = st.builds(lambda text: part("thinking", thinking=text, signature="s"), words)
    said = st.builds(
        lambda content: {"role": "assistant", "content": content}, st.lists(block | made | why, max_size=4)
    )
    return user | said


ITEMS = {"chat": chat_items(), "responses": response_items(), "messages": message_items()}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@given(data=st.data())
@settings(deadline=None)
def test_a_list_can_be_read_in_pieces(dialect: Dialect, data: st.DataObject) -> None:
    """messages(a) + messages(b) == messages(a + b) wherever the dialect says that a is closed."""
    items = data.draw(st.lists(ITEMS[dialect.name], min_size=1, max_size=8))
    whole = dialect.messages(items)
    for at in range(1, len(items)):
        if dialect.closed_after(items[at - 1]):
            assert dialect.messages(items[:at]) + dialect.messages(items[at:], first=at) == whole


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@given(content=words, reasoning=st.none() | some, made=calls, pieces=st.integers(1, 4), stream=st.booleans())
@settings(deadline=None)
def test_what_a_client_sends_back_is_what_the_model_said(
    dialect: Dialect, content: str, reasoning: str | None, made: Sequence[tuple[str, str]], pieces: int, stream: bool
) -> None:
    said = Message(
        role="assistant",
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(ToolCall(f"c{at}", name, text) for at, (name, text) in enumerate(made)),
    )
    echoed = streamed(dialect, said, pieces) if stream else written(dialect, said)
    # A client in another language may write the same JSON anew.
    (back,) = dialect.messages(json.loads(json.dumps(echoed)))
    assert message_key(back) == message_key(said)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_no_body_is_worse_than_a_refusal(dialect: Dialect, data: st.DataObject) -> None:
    odd = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats() | words | st.sampled_from(KINDS),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
        max_leaves=8,
    )
    body = data.draw(st.dictionaries(st.sampled_from(FIELDS), odd, max_size=4))
    items = data.draw(st.lists(odd, min_size=1, max_size=3))
    for attempt in (lambda: wish_of(dialect, {**body, dialect.list_field: items}), lambda: dialect.messages(items)):
        refusal = refused(attempt)
        assert refusal is None or 10 < len(refusal) < 1000


def refused(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except BadRequest as error:
        return str(error)
    return None


KINDS = [
    "function",
    "custom",
    "namespace",
    "web_search",
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "compaction",
    "tool_result",
    "tool_use",
    "thinking",
    "text",
    "input_text",
    "user",
    "assistant",
    "json_schema",
    "auto",
    "required",
    "enabled",
]


FIELDS = [
    "tools",
    "tool_choice",
    "stream",
    "stop",
    "stop_sequences",
    "response_format",
    "text",
    "n",
    "temperature",
    "top_k",
    "logit_bias",
    "reasoning",
    "thinking",
    "context_management",
    "output_config",
    "system",
    "instructions",
    "include",
    "metadata",
    "stream_options",
    "truncation",
    "chat_template_kwargs",
    "parallel_tool_calls",
    "max_tokens",
    "seed",
    "previous_response_id",
    "modalities",
]
KEYS = [
    "type",
    "role",
    "content",
    "name",
    "function",
    "id",
    "input",
    "call_id",
    "tools",
    "text",
    "tool_calls",
    "summary",
    "parameters",
    "format",
]


def outcome(said: Message) -> TurnOutcome:
    reason = "tool_calls" if said.tool_calls else "stop"
    return TurnOutcome(number=0, message=said, finish_reason=reason, record=record_of(Reply(list(b"abc"))))


def written(dialect: Dialect, said: Message) -> list[Any]:
    """List items that a client makes of the whole reply."""
    body = json.loads(dialect.reply(wish_of(dialect, {}), [outcome(said)], names(dialect), FAMILY))
    if dialect is CHAT:
        return [body["choices"][0]["message"]]
    items: list[Any] = body["output"] if dialect is RESPONSES else [{"role": "assistant", "content": body["content"]}]
    return items


def streamed(dialect: Dialect, said: Message, pieces: int) -> list[Any]:
    """The same from a stream, put together by the simplest client."""
    writer = dialect.stream(wish_of(dialect, {}), names(dialect), FAMILY)
    out = writer.start()
    for text in split(said.reasoning or "", pieces):
        out += writer.delta(TurnDelta(reasoning=text))
    for text in split(said.content, pieces):
        out += writer.delta(TurnDelta(content=text))
    for call in said.tool_calls:
        out += writer.delta(TurnDelta(call=call))
    events = events_of(out + writer.end([outcome(said)]))
    if dialect is CHAT:
        return [chat_message(events)]
    if dialect is RESPONSES:
        return [event["item"] for event in events if event["type"] == "response.output_item.done"]
    return [{"role": "assistant", "content": blocks(events)}]


def chat_message(events: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for event in events[:-1]:
        delta = event["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        message["tool_calls"] += delta.get("tool_calls") or []
    return message


def blocks(events: list[Any]) -> list[Any]:
    found: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            found.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], found[-1]
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            else:
                block[delta["type"].removesuffix("_delta")] += delta[delta["type"].removesuffix("_delta")]
    return found


def split(text: str, pieces: int) -> list[str]:
    size = max(1, -(-len(text) // pieces))
    return [text[at : at + size] for at in range(0, len(text), size)]
