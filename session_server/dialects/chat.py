"""OpenAI Chat Completions: request bodies to ``TurnRequest``, outcomes to bodies and stream events.

Unknown fields are ignored; a field whose meaning the engine cannot honour is refused by name. Pure
functions; depends on orjson and the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import orjson

from tollway.errors import BadRequest
from tollway.messages import ROLES, Message, Role, ToolCall, ToolSpec
from tollway.session_server.dialects.fields import boolean, integer, number, refuse_set, string, strings
from tollway.session_server.families.base import Family, RenderOptions
from tollway.session_server.request import TurnDelta, TurnOutcome, TurnRequest

__all__ = ["ChatStream", "ChatWish", "parse_request", "render_reply"]

Json = Mapping[str, object]

_REFUSED = (
    "audio",
    "function_call",
    "functions",
    "logit_bias",
    "frequency_penalty",
    "presence_penalty",
    "modalities",
    "prediction",
    "web_search_options",
)
"""Fields that change what is generated and that no engine call of ours carries yet."""


@dataclass(frozen=True, slots=True)
class ChatWish:
    """A parsed request and how its answer is to be written."""

    turn: TurnRequest
    model: str
    logprobs: bool
    top_logprobs: int
    include_usage: bool


def parse_request(body: bytes) -> ChatWish:
    """Read one request body. Raises ``BadRequest`` naming the field."""
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise BadRequest(f"the body is a JSON {type(raw).__name__}, want an object")
    refuse_set(raw, _REFUSED)
    _check_constants(raw)
    stream = boolean(raw, "stream") or False
    stream_options = raw.get("stream_options")
    include_usage = stream and isinstance(stream_options, dict) and stream_options.get("include_usage") is True
    logprobs = boolean(raw, "logprobs") or False
    top = integer(raw, "top_logprobs", 0, 20) or 0
    if top and not logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    tools = _tools(raw.get("tools"))
    turn = TurnRequest(
        messages=_messages(raw.get("messages")),
        tools=tools,
        calls_allowed=_tool_choice(raw.get("tool_choice")),
        stream=stream,
        temperature=number(raw, "temperature", 0.0, 2.0),
        top_p=number(raw, "top_p", 0.0, 1.0, above=True),
        top_k=integer(raw, "top_k", -1, 2**31 - 1),
        max_new_tokens=_limit(raw),
        seed=integer(raw, "seed", -(2**63), 2**63 - 1),
        stop=strings(raw, "stop", 32),
        top_logprobs=top,
        options=_options(raw),
    )
    return ChatWish(turn, string(raw, "model") or "", logprobs, top, include_usage)


def render_reply(wish: ChatWish, outcome: TurnOutcome, family: Family, *, reply_id: str, created: int) -> bytes:
    """The whole answer as JSON."""
    message = outcome.message
    body: dict[str, object] = {"role": "assistant", "content": message.content or None}
    if message.reasoning is not None:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [_call_json(call) for call in message.tool_calls]
    else:
        body["content"] = message.content
    choice = {
        "index": 0,
        "message": body,
        "finish_reason": outcome.finish_reason,
        "logprobs": _logprobs(wish, outcome, family),
    }
    return orjson.dumps(
        {
            "id": reply_id,
            "object": "chat.completion",
            "created": created,
            "model": wish.model,
            "choices": [choice],
            "usage": _usage(outcome),
        }
    )


class ChatStream:
    """Writes one answer as server-sent events."""

    def __init__(self, wish: ChatWish, family: Family, *, reply_id: str, created: int) -> None:
        self._wish = wish
        self._family = family
        self._head = {"id": reply_id, "object": "chat.completion.chunk", "created": created, "model": wish.model}
        self._calls = 0

    def start(self) -> bytes:
        """First event: the role."""
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: TurnDelta) -> bytes:
        """One piece of the reply."""
        if delta.call is not None:
            index, self._calls = self._calls, self._calls + 1
            return self._chunk({"tool_calls": [{"index": index, **_call_json(delta.call)}]})
        if delta.reasoning:
            return self._chunk({"reasoning_content": delta.reasoning})
        return self._chunk({"content": delta.content})

    def end(self, outcome: TurnOutcome) -> bytes:
        """Everything after the last piece; sent only once the turn is committed."""
        out = b""
        if self._wish.logprobs:
            out += self._chunk({}, logprobs=_logprobs(self._wish, outcome, self._family))
        out += self._chunk({}, finish_reason=outcome.finish_reason)
        if self._wish.include_usage:
            out += _event({**self._head, "choices": [], "usage": _usage(outcome)})
        return out + b"data: [DONE]\n\n"

    def _chunk(self, delta: Json, *, finish_reason: str | None = None, logprobs: object = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return _event({**self._head, "choices": [choice]})


def _event(value: Json) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


# -- requests ---------------------------------------------------------------------------------------


def _check_constants(raw: Json) -> None:
    if (n := raw.get("n")) not in (None, 1):
        raise BadRequest(f"n is {n!r}; this server gives one choice per call, ask several times instead", param="n")
    if raw.get("parallel_tool_calls") is False:
        raise BadRequest("parallel_tool_calls false cannot be enforced here; leave it out", param="parallel_tool_calls")
    form = raw.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise BadRequest("response_format other than text is not supported here", param="response_format")


def _limit(raw: Json) -> int | None:
    newer = integer(raw, "max_completion_tokens", 1, 2**31 - 1)
    older = integer(raw, "max_tokens", 1, 2**31 - 1)
    return newer if newer is not None else older


def _options(raw: Json) -> RenderOptions:
    switches = raw.get("chat_template_kwargs")
    if switches is None:
        return RenderOptions()
    if not isinstance(switches, dict):
        raise BadRequest("chat_template_kwargs must be an object", param="chat_template_kwargs")
    unknown = sorted(set(switches) - {"enable_thinking"})
    if unknown:
        raise BadRequest(f"chat_template_kwargs {unknown[0]!r} is not supported here", param="chat_template_kwargs")
    return RenderOptions(thinking=boolean(switches, "enable_thinking"))


def _tool_choice(choice: object) -> bool:
    if choice in (None, "auto"):
        return True
    if choice == "none":
        return False
    kind = choice.get("type") if isinstance(choice, dict) else choice
    raise BadRequest(f"tool_choice {kind!r} is not supported here; use auto or none", param="tool_choice")


def _tools(raw: object) -> tuple[ToolSpec, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise BadRequest("tools must be a list", param="tools")
    tools = []
    for at, item in enumerate(raw):
        function = item.get("function") if isinstance(item, dict) and item.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRequest(f"tools[{at}] must be a function with a name", param=f"tools[{at}]")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise BadRequest(f"tools[{at}].function.parameters must be a JSON schema object", param=f"tools[{at}]")
        tools.append(
            ToolSpec(
                name=function["name"],
                description=string(function, "description") or "",
                parameters=_json_text(parameters or {}, f"tools[{at}]"),
                strict=boolean(function, "strict"),
            )
        )
    if len({tool.name for tool in tools}) != len(tools):
        raise BadRequest("two tools have the same name", param="tools")
    return tuple(tools)


def _messages(raw: object) -> tuple[Message, ...]:
    if not isinstance(raw, list) or not raw:
        raise BadRequest("messages must be a non-empty list", param="messages")
    return tuple(_message(item, f"messages[{at}]") for at, item in enumerate(raw))


def _message(raw: object, where: str) -> Message:
    if not isinstance(raw, dict):
        raise BadRequest(f"{where} must be an object", param=where)
    role = raw.get("role")
    if role not in ROLES:
        raise BadRequest(f"{where}: unknown role {role!r}; use one of {', '.join(ROLES)}", param=where)
    if raw.get("function_call") or raw.get("audio"):
        raise BadRequest(f"{where}: function_call and audio are not supported; use tool_calls", param=where)
    reasoning = raw.get("reasoning_content")
    if reasoning is None:
        reasoning = raw.get("reasoning")
    calls = raw.get("tool_calls")
    call_id = raw.get("tool_call_id")
    name = raw.get("name")
    return Message(
        role=cast(Role, role),
        content=_content(raw.get("content"), where),
        reasoning=reasoning if isinstance(reasoning, str) and reasoning and role == "assistant" else None,
        tool_calls=_calls(calls, where) if calls else (),
        tool_call_id=call_id if isinstance(call_id, str) and role == "tool" else None,
        name=name if isinstance(name, str) and name else None,
    )


def _content(raw: object, where: str) -> str:
    """Text of a message: a string, null, or a list of text parts."""
    if raw is None:
        return ""
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise BadRequest(f"{where}.content must be text or a list of parts", param=where)
    parts = []
    for part in raw:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if isinstance(part, dict) and kind in ("text", "refusal") and isinstance(part.get(kind), str):
            parts.append(part[kind])
            continue
        raise BadRequest(f"{where}.content has a part of type {kind!r}; this model takes text only", param=where)
    return "".join(parts)


def _calls(raw: object, where: str) -> tuple[ToolCall, ...]:
    if not isinstance(raw, list):
        raise BadRequest(f"{where}.tool_calls must be a list", param=where)
    calls = []
    for item in raw:
        function = item.get("function") if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"{where}.tool_calls has an entry without function name", param=where)
        arguments = function.get("arguments")
        if arguments is None:
            arguments = ""
        elif not isinstance(arguments, str):
            arguments = _json_text(arguments, where)
        calls.append(ToolCall(str(item.get("id") or ""), function["name"], arguments))
    return tuple(calls)


def _json_text(value: object, where: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        # Nested deeper than JSON writers go.
        raise BadRequest(f"{where}: {error}", param=where) from None


# -- replies ----------------------------------------------------------------------------------------


def _call_json(call: ToolCall) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(outcome: TurnOutcome) -> dict[str, object]:
    record = outcome.record
    prompt, completion = record.prompt_tokens, int(record.sampled_ids.size)
    usage: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if record.cached_tokens is not None:  # unknown is not zero
        usage["prompt_tokens_details"] = {"cached_tokens": record.cached_tokens}
    return usage


def _logprobs(wish: ChatWish, outcome: TurnOutcome, family: Family) -> object:
    if not wish.logprobs:
        return None
    record = outcome.record
    top = record.top_logprobs
    entries = []
    ids: list[int] = record.sampled_ids.tolist()
    values: list[float] = record.logprobs.tolist()
    for at, (token, value) in enumerate(zip(ids, values, strict=True)):
        entry = _token(family, token, value)
        alternatives: Sequence[tuple[int, float]] = ()
        if top is not None and wish.top_logprobs:
            row = zip(top.ids[at].tolist(), top.logprobs[at].tolist(), strict=True)
            alternatives = [pair for pair in row if pair[0] >= 0][: wish.top_logprobs]
        entry["top_logprobs"] = [_token(family, *pair) for pair in alternatives]
        entries.append(entry)
    return {"content": entries, "refusal": None}


def _token(family: Family, token: int, value: float) -> dict[str, object]:
    data = family.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": value, "bytes": list(data)}
