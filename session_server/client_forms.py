"""How the client writes requests and reads replies, streams and errors. Pure functions; no sockets.

The counterpart of the dialects on the server's side, kept apart from them: what a client reads here is what
any harness would. Depends on the kernel only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import orjson

from tollway import errors
from tollway.errors import (
    BadRequest,
    CapacityExceeded,
    ContextLengthExceeded,
    EngineLost,
    NotFound,
    TollwayError,
    UpstreamError,
    VersionNotReady,
    WorkerDown,
)
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.records import PolicyVersion, Sampling

__all__ = [
    "ChatDelta",
    "ChatReply",
    "Json",
    "StreamReader",
    "Usage",
    "choice_json",
    "count_json",
    "error_of",
    "message_json",
    "object_of",
    "parse_chat",
    "sampling_json",
    "tool_json",
]

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one call."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """``None``: the engine did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """One assistant message."""

    message: Message
    finish_reason: str
    usage: Usage
    weight_versions: tuple[PolicyVersion, PolicyVersion] | None = None
    """Of the first and the last sampled token; ``None``: the server did not say."""
    raw: Json = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """A piece of a streamed reply. The last piece has nothing but ``reply``, the whole."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls that are complete."""
    reply: ChatReply | None = None


_PLAIN = (TollwayError.__init__, ValueError.__init__, BadRequest.__init__, EngineLost.__init__)
"""Constructors that need nothing but a message."""


# -- requests ---------------------------------------------------------------------------------------


def sampling_json(sampling: Sampling) -> dict[str, object]:
    """Sampling as ``POST /sessions`` takes it; what is left to the engine is left out.

    Raises ``BadRequest`` for what a session cannot fix, since it would not be sampled by.
    """
    if sampling.logit_bias or sampling.constraint:
        raise BadRequest("a session cannot fix logit_bias or a constraint; send them with each call", param="sampling")
    out: dict[str, object] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    for name in ("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        if (value := getattr(sampling, name)) is not None:
            out[name] = value
    return out


def message_json(message: Message | Json) -> Json:
    """A message of the chat dialect."""
    if not isinstance(message, Message):
        return message
    out: dict[str, object] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out


def tool_json(tool: ToolSpec | Json) -> Json:
    """A tool of the chat dialect."""
    if not isinstance(tool, ToolSpec):
        return tool
    function: dict[str, object] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": orjson.loads(tool.parameters),
    }
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def choice_json(choice: str | None) -> dict[str, object]:
    """The field of a tool choice: a mode, or the name of the tool that has to be called."""
    if choice is None:
        return {}
    if choice in ("auto", "none", "required"):
        return {"tool_choice": choice}
    return {"tool_choice": {"type": "function", "function": {"name": choice}}}


def count_json(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Json:
    """Body of a token count, in the dialect that has one. Raises ``BadRequest`` for what it cannot carry."""
    body: dict[str, object] = {"model": "policy", "messages": [_block_message(message) for message in messages]}
    if tools:
        body["tools"] = [
            {"name": tool.name, "description": tool.description, "input_schema": orjson.loads(tool.parameters)}
            for tool in tools
        ]
    return body


def _block_message(message: Message) -> Json:
    if message.role == "tool":
        result = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.content}
        return {"role": "user", "content": [result]}
    if message.role == "developer":
        raise BadRequest("tokens of a developer message cannot be counted; send it as system", param="messages")
    if message.role != "assistant":
        return {"role": message.role, "content": message.content}
    blocks: list[Json] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        try:
            value = orjson.loads(call.arguments)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"arguments of tool call {call.id} are not JSON: {error}", param="messages") from None
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": value})
    return {"role": "assistant", "content": blocks}


# -- replies ----------------------------------------------------------------------------------------


def object_of(data: bytes) -> Json:
    """A JSON object; ``{}`` for no body. Raises ``UpstreamError`` for anything that is not JSON."""
    if not data:
        return {}
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise UpstreamError(f"the session server answered {len(data)} bytes that are not JSON: {error}") from error
    return cast(Json, value) if isinstance(value, dict) else {"value": value}


def parse_chat(raw: Json) -> ChatReply:
    """Read a Chat Completions reply. Raises ``UpstreamError`` when it is not one."""
    try:
        choice = cast("list[dict[str, object]]", raw["choices"])[0]
        message = cast("dict[str, object]", choice["message"])
        reasoning = message.get("reasoning_content")
        return ChatReply(
            message=Message(
                role="assistant",
                content=str(message.get("content") or ""),
                reasoning=reasoning if isinstance(reasoning, str) else None,
                tool_calls=tuple(_call(call) for call in cast("list[Json]", message.get("tool_calls") or [])),
            ),
            finish_reason=str(choice["finish_reason"]),
            usage=_usage(cast(Json, raw["usage"])),
            weight_versions=_versions(raw),
            raw=raw,
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise UpstreamError(f"not a chat completion: {error!r}") from error


def _call(raw: Json) -> ToolCall:
    function = cast("dict[str, str]", raw["function"])
    return ToolCall(str(raw["id"]), function["name"], function["arguments"])


def _versions(raw: Json) -> tuple[PolicyVersion, PolicyVersion] | None:
    said = cast(Json, cast(Json, raw.get("tollway") or {}).get("weight_versions") or {})
    start, end = said.get("start"), said.get("end")
    return (start, end) if isinstance(start, int) and isinstance(end, int) else None


def _usage(raw: Json) -> Usage:
    details = cast("dict[str, int]", raw.get("prompt_tokens_details") or {})
    return Usage(cast(int, raw["prompt_tokens"]), cast(int, raw["completion_tokens"]), details.get("cached_tokens"))


class StreamReader:
    """Puts a streamed chat reply together. ``feed`` it bytes; ask for ``reply`` behind the last of them."""

    def __init__(self) -> None:
        self._rest = b""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}
        self._finish: str | None = None
        self._usage: Usage | None = None
        self._versions: tuple[PolicyVersion, PolicyVersion] | None = None
        self._done = False

    def feed(self, data: bytes) -> Iterator[ChatDelta]:
        """Pieces that ``data`` completes. Raises the error that the server sent in place of an end."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            payload = b"".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            if payload == b"[DONE]":
                self._done = True
            elif payload:
                yield from self._read(object_of(payload))

    def reply(self) -> ChatReply:
        """The whole reply. Raises ``EngineLost`` when the stream broke off: half a reply is none."""
        if not self._done or self._finish is None or self._usage is None:
            raise EngineLost("the stream ended before the reply did")
        message = Message(
            role="assistant",
            content="".join(self._content),
            reasoning="".join(self._reasoning) or None,
            tool_calls=tuple(ToolCall(**call) for _, call in sorted(self._calls.items())),
        )
        return ChatReply(message=message, finish_reason=self._finish, usage=self._usage, weight_versions=self._versions)

    def _read(self, event: Json) -> Iterator[ChatDelta]:
        if "error" in event:
            raise error_of(500, orjson.dumps(event), None)
        try:
            if event.get("usage"):
                self._usage = _usage(cast(Json, event["usage"]))
            self._versions = _versions(event) or self._versions
            for choice in cast("list[Json]", event["choices"])[:1]:
                delta = cast(Json, choice["delta"])
                content, reasoning = str(delta.get("content") or ""), str(delta.get("reasoning_content") or "")
                self._content.append(content)
                self._reasoning.append(reasoning)
                before = len(self._calls)
                for part in cast("list[Json]", delta.get("tool_calls") or []):
                    self._add_call(part)
                if choice["finish_reason"] is not None:
                    self._finish = str(choice["finish_reason"])
                # The server sends a call whole, so that a new one is a complete one.
                calls = tuple(ToolCall(**self._calls[at]) for at in sorted(self._calls)[before:])
                if content or reasoning or calls:
                    yield ChatDelta(content=content, reasoning=reasoning, calls=calls)
        except (KeyError, TypeError, AttributeError) as error:
            raise UpstreamError(f"not an event of a chat completion: {error!r}") from error

    def _add_call(self, part: Json) -> None:
        call = self._calls.setdefault(cast(int, part["index"]), {"id": "", "name": "", "arguments": ""})
        function = cast("dict[str, str]", part["function"])
        call["id"] = str(part.get("id") or call["id"])
        call["name"] += function.get("name") or ""
        call["arguments"] += function.get("arguments") or ""


# -- errors -----------------------------------------------------------------------------------------


def error_of(status: int, body: bytes, retry_after: str | None) -> TollwayError:
    """The error of the server as its own class; unknown codes fall back on the status."""
    message, code = body[:300].decode("utf-8", "replace"), ""
    inner: dict[str, object] = {}
    with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError):
        inner = dict(orjson.loads(body)["error"])
        message, code = str(inner["message"]), str(inner.get("code"))
    wait_s = 1.0
    with contextlib.suppress(TypeError, ValueError):  # absent, or a date that a proxy wrote
        wait_s = float(retry_after)  # type: ignore[arg-type]  # None is the absent case
    if code == WorkerDown.code:
        return WorkerDown(message, retry_after_s=wait_s)
    if status == 429 or code == CapacityExceeded.code:
        return CapacityExceeded(message, retry_after_s=wait_s)
    if code == ContextLengthExceeded.code:
        return ContextLengthExceeded(_int(inner, "prompt_tokens") or 0, _int(inner, "limit") or 0)
    if code == VersionNotReady.code:
        found = inner.get("available")
        available = tuple(each for each in found if isinstance(each, int)) if isinstance(found, list) else ()
        return VersionNotReady(
            _int(inner, "wanted") or 0,
            _int(inner, "serving"),
            exact=inner.get("exact") is True,
            available=available,
        )
    for name in errors.__all__:
        kind = getattr(errors, name)
        if kind.code == code and kind.__init__ in _PLAIN:
            return cast(TollwayError, kind(message))
    known: dict[int, type[TollwayError]] = {404: NotFound, 400: BadRequest}
    error = known.get(status, UpstreamError)(message)
    error.code, error.status = code or error.code, status
    return error


def _int(values: Json, name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) else None
