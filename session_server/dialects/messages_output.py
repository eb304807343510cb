"""Replies of Anthropic Messages: blocks, stop reasons, usage, the stream, errors.

Depends on orjson and the kernel's records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from tollway.errors import BadRequest, CapacityExceeded, ContextLengthExceeded, TollwayError
from tollway.messages import Message, ToolCall
from tollway.session_server.dialects.base import ReplyNames, StreamWriter
from tollway.session_server.dialects.events import named_event
from tollway.session_server.dialects.messages_input import RAW_ARGUMENTS
from tollway.session_server.dialects.sealed import seal, stamp
from tollway.session_server.request import TurnDelta, TurnOutcome, Wish, weight_versions

__all__ = ["Extras", "MessagesStream", "error_value", "extras_of", "reply_value"]

_KEY = "messages"
Block = dict[str, object]
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class Extras:
    """What a reply of this dialect needs to know of its request."""

    omit_thinking: bool = False
    """Thinking is wished without its text; it then travels in the signature."""

    def into(self) -> dict[str, object]:
        """As ``Wish.extras``."""
        return {_KEY: self}


def extras_of(wish: Wish) -> Extras:
    """The extras of a wish of this dialect."""
    found = wish.extras.get(_KEY)
    return found if isinstance(found, Extras) else Extras()


def reply_value(wish: Wish, outcome: TurnOutcome, names: ReplyNames) -> dict[str, object]:
    """The whole message."""
    reason, matched = _stop(outcome)
    return {
        **_head(wish, names),
        "content": _blocks(outcome.message, extras_of(wish)),
        "stop_reason": reason,
        "stop_sequence": matched,
        "usage": _usage(outcome),
        "tollway": _left_out(wish) | weight_versions([outcome]),
    }


def error_value(error: TollwayError) -> dict[str, object]:
    """The error object that Anthropic's SDKs and Claude Code read."""
    text = str(error)
    if isinstance(error, ContextLengthExceeded):
        # Claude Code compacts when it reads exactly this.
        text = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
    kind = _TYPES.get(error.status, "api_error")
    if isinstance(error, CapacityExceeded):
        kind = "rate_limit_error"
    inner: dict[str, object] = {"type": kind, "message": text, "code": error.code}
    if isinstance(error, BadRequest) and error.param is not None:
        inner["param"] = error.param
    return {"type": "error", "error": inner}


class MessagesStream(StreamWriter):
    """Writes one reply: each block opened, filled with its own kind of delta and closed before the next."""

    def __init__(self, wish: Wish, names: ReplyNames) -> None:
        self._wish = wish
        self._names = names
        self._omit = extras_of(wish).omit_thinking
        self._index = 0
        """Of the open block, or of the next one."""
        self._kind = ""
        """Of the open block; empty when none is."""
        self._head = b""
        self._thoughts: list[str] = []

    def start(self) -> bytes:
        """The message before it has anything; the prompt is counted in the end."""
        value = {
            **_head(self._wish, self._names),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        return named_event({"type": "message_start", "message": value})

    def delta(self, delta: TurnDelta) -> bytes:
        """One piece."""
        if delta.call is not None:
            return self._close() + self._call(delta.call)
        if delta.reasoning:
            return self._text("thinking", delta.reasoning)
        return self._text("text", delta.content)

    def end(self, outcomes: Sequence[TurnOutcome]) -> bytes:
        """Close what is open, then stop reason and usage, then the last event."""
        outcome = outcomes[0]
        reason, matched = _stop(outcome)
        return (
            self._close()
            + named_event(
                {
                    "type": "message_delta",
                    "delta": {"stop_reason": reason, "stop_sequence": matched},
                    "usage": _usage(outcome),
                    "tollway": weight_versions([outcome]),
                }
            )
            + named_event({"type": "message_stop"})
        )

    def error(self, error: TollwayError) -> bytes:
        """An event that SDKs raise."""
        return named_event(error_value(error))

    def _text(self, kind: str, text: str) -> bytes:
        before = b""
        if self._kind != kind:
            before = self._close() + self._opening(kind)
        if kind == "thinking":
            self._thoughts.append(text)
            if self._omit:
                return before
        # Written by hand: this is the path of every token.
        return before + self._head + orjson.dumps(text) + b"}}\n\n"

    def _opening(self, kind: str) -> bytes:
        self._kind = kind
        fields = orjson.dumps({"type": "content_block_delta", "index": self._index})[:-1]
        delta = f',"delta":{{"type":"{kind}_delta","{kind}":'.encode()
        self._head = b"event: content_block_delta\ndata: " + fields + delta
        block = {"type": kind, kind: ""}
        if kind == "thinking":
            block["signature"] = ""
        return self._event("content_block_start", content_block=block)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        out = b""
        if self._kind == "thinking":
            signature = _signature("".join(self._thoughts), self._omit)
            out = self._event("content_block_delta", delta={"type": "signature_delta", "signature": signature})
            self._thoughts.clear()
        out += self._event("content_block_stop")
        self._kind = ""
        self._index += 1
        return out

    def _call(self, call: ToolCall) -> bytes:
        opening = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        out = self._event("content_block_start", content_block=opening)
        out += self._event(
            "content_block_delta", delta={"type": "input_json_delta", "partial_json": _input_json(call).decode()}
        )
        out += self._event("content_block_stop")
        self._index += 1
        return out

    def _event(self, kind: str, **fields: object) -> bytes:
        return named_event({"type": kind, "index": self._index, **fields})


def _head(wish: Wish, names: ReplyNames) -> dict[str, object]:
    head: dict[str, object] = {"id": names.reply_id, "type": "message", "role": "assistant", "model": wish.model}
    if wish.left_out:
        head["tollway"] = _left_out(wish)
    return head


def _left_out(wish: Wish) -> dict[str, object]:
    return {"left_out_tools": wish.left_out} if wish.left_out else {}


def _blocks(message: Message, extras: Extras) -> list[Block]:
    blocks: list[Block] = []
    if message.reasoning:
        text = "" if extras.omit_thinking else message.reasoning
        signature = _signature(message.reasoning, extras.omit_thinking)
        blocks.append({"type": "thinking", "thinking": text, "signature": signature})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        value = orjson.Fragment(_input_json(call))
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": value})
    return blocks


def _signature(thoughts: str, omit: bool) -> str:
    """Claude Code sends back only thinking that is signed."""
    return seal(thoughts) if omit else stamp(thoughts)


def _input_json(call: ToolCall) -> bytes:
    """Arguments as a JSON object, digit for digit as they were sampled.

    Families let only calls through whose arguments parse. Should others get here, the harness receives them
    whole under a key that its tools refuse by name, and the same call is read back from it.
    """
    text = call.arguments or "{}"
    try:
        if isinstance(orjson.loads(text), dict):
            return text.encode()
    except orjson.JSONDecodeError:
        pass
    return orjson.dumps({RAW_ARGUMENTS: call.arguments})


def _stop(outcome: TurnOutcome) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)"""
    if outcome.finish_reason == "length":
        return "max_tokens", None
    if outcome.finish_reason == "tool_calls":
        return "tool_use", None
    matched = outcome.record.matched
    return ("stop_sequence", matched) if isinstance(matched, str) else ("end_turn", None)


def _usage(outcome: TurnOutcome) -> dict[str, object]:
    """Prompt tokens that were not cached, and the cached ones where the engine tells them."""
    record = outcome.record
    usage: dict[str, object] = {"input_tokens": record.prompt_tokens, "output_tokens": int(record.sampled_ids.size)}
    if record.cached_tokens is not None:
        usage["input_tokens"] = record.prompt_tokens - record.cached_tokens
        usage["cache_read_input_tokens"] = record.cached_tokens
        usage["cache_creation_input_tokens"] = 0
    return usage
