"""Plays sampled ids through a real family and a dialect: the whole reply, and the same as a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import vocabularies

from tollway.messages import Message, ToolCall
from tollway.records import FinishReason, Sampling, TopLogprobs, TurnRecord, VersionSpan
from tollway.session_server.dialects.base import Dialect, ReplyNames, StreamWriter
from tollway.session_server.families.base import Family, StreamDelta
from tollway.session_server.request import TurnDelta, TurnOutcome, Wish
from tollway.session_server.tokens import ControlTokenizer

TOKENIZER = ControlTokenizer(vocabularies.small(), name="small-qwen3")
"""Of the ``qwen`` family of these tests."""
ID = TOKENIZER.control
END = [ID["<|im_end|>"]]
USER = {"role": "user", "content": "go"}


def text(words: str) -> list[int]:
    """Ids of template text: control strings are control ids."""
    return TOKENIZER.encode(words)


def think(words: str) -> list[int]:
    """Ids of a finished thought."""
    return [ID["<think>"], *text(f"\n{words}\n"), ID["</think>"], *text("\n\n")]


def call(name: str, arguments: str = "{}") -> list[int]:
    """Ids of a tool call."""
    body = f'\n{{"name": "{name}", "arguments": {arguments}}}\n'
    return [ID["<tool_call>"], *text(body), ID["</tool_call>"]]


@dataclass(frozen=True)
class Played:
    """One reply in both forms."""

    wish: Wish
    outcome: TurnOutcome
    whole: Any
    stream: bytes
    events: list[Any]
    """Data of the events in order; ``[DONE]`` stays text."""


@dataclass(frozen=True)
class Reply:
    """What an engine gave back."""

    ids: Sequence[int]
    finish: FinishReason = "stop"
    matched: int | str | None = None
    cached: int | None = 20
    top: int = 0


def names(dialect: Dialect) -> ReplyNames:
    return ReplyNames(f"{dialect.id_prefix}0a1b", 1_790_000_000)


def wish_of(dialect: Dialect, body: dict[str, Any]) -> Wish:
    """The wish as the server makes it: everything but the list, then its last item."""
    items = body.get(dialect.list_field) or [None]
    return dialect.settle(dialect.wish(body), items[-1])


def outcome_of(dialect: Dialect, wish: Wish, family: Family, reply: Reply, number: int = 0) -> TurnOutcome:
    ids = np.array(reply.ids, np.int32)
    tools = wish.tools if wish.tool_choice.mode != "none" else ()
    stop = reply.matched if isinstance(reply.matched, str) else None
    parsed = family.parse(ids, tools, prompt_end=np.zeros(0, np.int32), stop=stop)
    calls = tuple(ToolCall(_call_id(dialect, at), c.name, c.arguments) for at, c in enumerate(parsed.calls))
    message = Message(role="assistant", content=parsed.content, reasoning=parsed.reasoning, tool_calls=calls)
    return TurnOutcome(
        number=number,
        message=message,
        finish_reason="length" if reply.finish == "length" else "tool_calls" if calls else "stop",
        record=record_of(reply),
    )


def record_of(reply: Reply) -> TurnRecord:
    size = len(reply.ids)
    ids = np.array(reply.ids, np.int32)
    top = None
    if reply.top:
        others = np.stack([ids + at for at in range(reply.top)], axis=1).astype(np.int32)
        top = TopLogprobs(ids=others, logprobs=np.tile(-np.arange(1, reply.top + 1, dtype=np.float32), (size, 1)))
    return TurnRecord(
        suffix_ids=np.zeros(5, np.int32),
        sampled_ids=ids,
        logprobs=np.array([-at / 8 for at in range(size)], np.float32),
        versions=(VersionSpan(0, 0, size),),
        finish_reason=reply.finish,
        sampling=Sampling(temperature=0.5),
        engine_id="e",
        prompt_tokens=50,
        cached_tokens=reply.cached,
        started_at=0.0,
        ended_at=1.0,
        matched=reply.matched,
        top_logprobs=top,
    )


def play(dialect: Dialect, body: dict[str, Any], family: Family, *replies: Reply, chunk: int = 3) -> Played:
    """Parse, write whole and write as a stream what the engine sampled."""
    wish = wish_of(dialect, body)
    outcomes = [outcome_of(dialect, wish, family, reply, at) for at, reply in enumerate(replies)]
    whole = json.loads(dialect.reply(wish, outcomes, names(dialect), family))
    writer = dialect.stream(wish, names(dialect), family)
    stream = writer.start()
    for choice, (reply, outcome) in enumerate(zip(replies, outcomes, strict=True)):
        events, calls = _deltas(dialect, wish, family, writer, reply, choice, chunk)
        assert calls == len(outcome.message.tool_calls)
        stream += events
    stream += writer.end(outcomes)
    return Played(wish, outcomes[0], whole, stream, events_of(stream))


def events_of(stream: bytes) -> list[Any]:
    """Data of every event; an event's name has to be the type of its data."""
    found: list[Any] = []
    assert stream.endswith(b"\n\n")
    for block in stream.decode().split("\n\n")[:-1]:
        lines = block.split("\n")
        assert lines[-1].startswith("data: ")
        data = lines[-1].removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
        if len(lines) == 2:
            assert lines[0] == f"event: {found[-1]['type']}"
    return found


def _deltas(
    dialect: Dialect, wish: Wish, family: Family, writer: StreamWriter, reply: Reply, choice: int, chunk: int
) -> tuple[bytes, int]:
    """(events, tool calls among them)"""
    tools = wish.tools if wish.tool_choice.mode != "none" else ()
    stops = (reply.matched,) if isinstance(reply.matched, str) else ()
    end = np.zeros(0, np.int32)
    parser = family.stream(tools, prompt_end=end, stop=stops)
    deltas: list[StreamDelta] = []
    for at in range(0, len(reply.ids), chunk):
        deltas += parser.feed(list(reply.ids[at : at + chunk]))
    parsed = family.parse(np.array(reply.ids, np.int32), tools, prompt_end=end, stop=stops[0] if stops else None)
    deltas += parser.finish(parsed)
    out, calls = b"", 0
    for delta in deltas:
        call = None
        if delta.call is not None:
            call = ToolCall(_call_id(dialect, calls), delta.call.name, delta.call.arguments)
            calls += 1
        out += writer.delta(TurnDelta(delta.content, delta.reasoning, call, choice))
    return out, calls


def _call_id(dialect: Dialect, at: int) -> str:
    return f"{dialect.call_prefix}{at}"
