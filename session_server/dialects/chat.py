"""OpenAI Chat Completions.

Unknown fields are ignored. A field that changes what is generated and that cannot be honoured is refused by
name; hints that no open model's template takes (``reasoning_effort`` but for ``none``, ``verbosity``,
``prediction``) change nothing. Stateless; depends on orjson and the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import orjson

from tollway.errors import BadRequest, TollwayError
from tollway.messages import ROLES, Message, Role, ToolCall
from tollway.session_server.dialects.base import Dialect, Json, ReplyNames, StreamWriter
from tollway.session_server.dialects.events import DONE, data_event
from tollway.session_server.dialects.fields import (
    boolean,
    integer,
    json_text,
    logit_bias,
    mapping,
    number,
    output_schema,
    refuse_set,
    render_options,
    string,
    strings,
    text_of,
    top_k,
)
from tollway.session_server.dialects.logprobs import logprob_entries
from tollway.session_server.dialects.tools import (
    NO_NAMES,
    ToolBook,
    WireTool,
    call_input,
    custom_arguments,
    named_choice,
    simple_choice,
)
from tollway.session_server.families.base import Family
from tollway.session_server.http import error_body
from tollway.session_server.request import AUTO, ToolChoice, TurnDelta, TurnOutcome, Wish, weight_versions

__all__ = ["CHAT", "ChatDialect"]

_REFUSED = (
    "add_special_tokens",
    "allowed_token_ids",
    "audio",
    "bad_words",
    "best_of",
    "continue_final_message",
    "custom_logit_processor",
    "ebnf",
    "echo",
    "function_call",
    "functions",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "include_stop_str_in_output",
    "length_penalty",
    "lora_path",
    "min_tokens",
    "prompt_logprobs",
    "regex",
    "stop_token_ids",
    "structural_tag",
    "structured_outputs",
    "truncate_prompt_tokens",
    "use_beam_search",
    "web_search_options",
)
"""Fields of OpenAI, SGLang and vLLM that change what is generated and that no engine call of ours carries."""
_TEXT = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}
_KEY = "chat"
_NONE: Json = {}


@dataclass(frozen=True, slots=True)
class _Extras:
    include_usage: bool
    names: Mapping[str, WireTool]


_PLAIN = _Extras(False, NO_NAMES)


class ChatDialect(Dialect):
    """``POST /v1/chat/completions``."""

    name = "chat"
    list_field = "messages"
    id_prefix = "chatcmpl-"
    call_prefix = "call_"

    def wish(self, raw: Json) -> Wish:
        """See ``Dialect.wish``."""
        refuse_set(raw, _REFUSED)
        if raw.get("modalities") not in (None, [], ["text"]):
            raise BadRequest("modalities other than text are not supported here; leave it out", param="modalities")
        stream = boolean(raw, "stream") or False
        logprobs = boolean(raw, "logprobs") or False
        top = integer(raw, "top_logprobs", 0, 20) or 0
        if top and not logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        book = _tools(raw.get("tools"))
        usage = boolean(mapping(raw, "stream_options"), "include_usage") is True and stream
        newer = integer(raw, "max_completion_tokens", 1, 2**31 - 1)
        older = integer(raw, "max_tokens", 1, 2**31 - 1)
        return Wish(
            tools=tuple(book.specs),
            tool_choice=_tool_choice(raw.get("tool_choice"), book),
            parallel_tool_calls=boolean(raw, "parallel_tool_calls") is not False or not book.specs,
            schema=output_schema(raw.get("response_format"), "response_format", "json_schema"),
            stream=stream,
            choices=integer(raw, "n", 1, 128) or 1,
            temperature=number(raw, "temperature", 0.0, 2.0),
            top_p=number(raw, "top_p", 0.0, 1.0, above=True),
            top_k=top_k(raw),
            min_p=number(raw, "min_p", 0.0, 1.0),
            frequency_penalty=number(raw, "frequency_penalty", -2.0, 2.0),
            presence_penalty=number(raw, "presence_penalty", -2.0, 2.0),
            repetition_penalty=number(raw, "repetition_penalty", 0.0, 2.0, above=True),
            logit_bias=logit_bias(raw),
            max_new_tokens=newer if newer is not None else older,
            seed=integer(raw, "seed", -(2**63), 2**63 - 1),
            stop=strings(raw, "stop", 32),
            logprobs=logprobs,
            top_logprobs=top,
            options=render_options(raw, raw.get("reasoning_effort")),
            model=string(raw, "model") or "",
            extras={_KEY: _Extras(usage, book.names)},
        )

    def messages(self, items: Sequence[object], *, first: int = 0) -> list[Message]:
        """See ``Dialect.messages``: one message for each item."""
        return [_message(item, f"messages[{at}]") for at, item in enumerate(items, first)]

    def closed_after(self, item: object) -> bool:
        """Every item is a message of its own."""
        return True

    def reply(self, wish: Wish, outcomes: Sequence[TurnOutcome], names: ReplyNames, family: Family) -> bytes:
        """See ``Dialect.reply``."""
        known = _extras(wish).names
        return orjson.dumps(
            {
                "id": names.reply_id,
                "object": "chat.completion",
                "created": names.created,
                "model": wish.model,
                "choices": [
                    {
                        "index": at,
                        "message": _reply_message(outcome.message, known),
                        "finish_reason": outcome.finish_reason,
                        "logprobs": _logprobs(wish, outcome, family),
                    }
                    for at, outcome in enumerate(outcomes)
                ],
                "usage": _usage(outcomes),
                "tollway": weight_versions(outcomes),
            }
        )

    def stream(self, wish: Wish, names: ReplyNames, family: Family) -> StreamWriter:
        """See ``Dialect.stream``."""
        return _ChatStream(wish, names, family)

    def error(self, error: TollwayError) -> bytes:
        """See ``Dialect.error``."""
        return error_body(error)


class _ChatStream(StreamWriter):
    """Chunks, each with the index of its choice."""

    def __init__(self, wish: Wish, names: ReplyNames, family: Family) -> None:
        self._wish = wish
        self._family = family
        self._extras = _extras(wish)
        self._head = {
            "id": names.reply_id,
            "object": "chat.completion.chunk",
            "created": names.created,
            "model": wish.model,
        }
        self._calls = [0] * wish.choices
        opening = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":[{"index":'
        self._openings = [opening + b'%d,"delta":{"' % at for at in range(wish.choices)]

    def start(self) -> bytes:
        """The role of every choice."""
        opening = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(at, opening) for at in range(self._wish.choices))

    def delta(self, delta: TurnDelta) -> bytes:
        """One piece of one choice."""
        at = delta.choice
        if delta.call is not None:
            index, self._calls[at] = self._calls[at], self._calls[at] + 1
            return self._chunk(at, {"tool_calls": [{"index": index, **_call_json(delta.call, self._extras.names)}]})
        # Written by hand: this is the path of every token.
        name, text = (b"reasoning_content", delta.reasoning) if delta.reasoning else (b"content", delta.content)
        tail = b'},"finish_reason":null,"logprobs":null}]}\n\n'
        return self._openings[at] + name + b'":' + orjson.dumps(text) + tail

    def end(self, outcomes: Sequence[TurnOutcome]) -> bytes:
        """Log-probabilities when asked, one finish reason for each choice, usage when asked, [DONE]."""
        out = []
        for at, outcome in enumerate(outcomes):
            if self._wish.logprobs:
                out.append(self._chunk(at, {}, logprobs=_logprobs(self._wish, outcome, self._family)))
            last = {"tollway": weight_versions(outcomes)} if at == len(outcomes) - 1 else {}
            out.append(self._chunk(at, {}, finish_reason=outcome.finish_reason, more=last))
        if self._extras.include_usage:
            out.append(data_event({**self._head, "choices": [], "usage": _usage(outcomes)}))
        return b"".join(out) + DONE

    def error(self, error: TollwayError) -> bytes:
        """An event that SDKs raise."""
        return b"data: " + error_body(error) + b"\n\n"

    def _chunk(
        self, at: int, delta: Json, *, finish_reason: str | None = None, logprobs: object = None, more: Json = _NONE
    ) -> bytes:
        choice = {"index": at, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return data_event({**self._head, "choices": [choice], **more})


CHAT = ChatDialect()
"""The one instance."""


def _extras(wish: Wish) -> _Extras:
    found = wish.extras.get(_KEY)
    return found if isinstance(found, _Extras) else _PLAIN


# -- requests ---------------------------------------------------------------------------------------


def _tools(raw: object) -> ToolBook:
    book = ToolBook()
    if raw is None:
        return book
    if not isinstance(raw, list):
        raise BadRequest("tools must be a list", param="tools")
    for at, item in enumerate(raw):
        kind = item.get("type") if isinstance(item, dict) else None
        inner = item.get(kind) if isinstance(item, dict) and kind in ("function", "custom") else None
        if not isinstance(inner, dict):
            raise BadRequest(f"tools[{at}] must be a function (or custom tool) with a name", param=f"tools[{at}]")
        if kind == "function":
            book.function(inner, f"tools[{at}]")
        else:
            book.custom(inner, f"tools[{at}]")
    return book


def _tool_choice(choice: object, book: ToolBook) -> ToolChoice:
    if choice is None:
        return AUTO
    if isinstance(choice, str) and (simple := simple_choice(choice)) is not None:
        return simple
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if isinstance(choice, dict) and kind in ("function", "custom"):
        inner = choice.get(kind)
        return named_choice(inner.get("name") if isinstance(inner, dict) else None, book.specs)
    raise BadRequest(
        f"tool_choice {str(kind)[:40]!r} is not supported here; use auto, none, required or one function",
        param="tool_choice",
    )


def _message(raw: object, where: str) -> Message:
    if not isinstance(raw, dict):
        raise BadRequest(f"{where} must be an object", param=where)
    role = raw.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"{where}: unknown role {str(role)[:40]!r}; use one of {', '.join(ROLES)}", param=where)
    if raw.get("function_call") or raw.get("audio"):
        raise BadRequest(f"{where}: function_call and audio are not supported; use tool_calls", param=where)
    content = text_of(raw.get("content"), f"{where}.content", _TEXT)
    if role != "assistant":
        if raw.get("tool_calls"):
            raise BadRequest(f"{where}: a {role} message cannot make tool calls", param=where)
        call_id = _optional(raw, "tool_call_id", where) if role == "tool" else None
        return Message(
            role=cast(Role, role),
            content=content,
            tool_call_id=call_id,
            name=_name(raw),
        )
    refusal = raw.get("refusal")
    if not content and isinstance(refusal, str):
        content = refusal
    reasoning: object = _optional(raw, "reasoning_content", where)
    if reasoning is None:
        reasoning = raw.get("reasoning")
    calls = raw.get("tool_calls")
    return Message(
        role="assistant",
        content=content,
        reasoning=reasoning if isinstance(reasoning, str) and reasoning else None,
        tool_calls=_calls(calls, where) if calls else (),
        name=_name(raw),
    )


def _name(raw: Json) -> str | None:
    name = raw.get("name")
    return name if isinstance(name, str) and name else None


def _optional(raw: Json, name: str, where: str) -> str | None:
    value = raw.get(name)
    if value is None or isinstance(value, str):
        return value
    raise BadRequest(f"{where}.{name} must be text, got {type(value).__name__}", param=where)


def _calls(raw: object, where: str) -> tuple[ToolCall, ...]:
    if not isinstance(raw, list):
        raise BadRequest(f"{where}.tool_calls must be a list", param=where)
    calls = []
    for item in raw:
        kind = item.get("type") if isinstance(item, dict) else ""
        kind = "function" if kind is None else kind
        function = item.get(kind) if isinstance(item, dict) and kind in ("function", "custom") else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"{where}.tool_calls has an entry that is no function call with a name", param=where)
        if kind == "custom":
            arguments: object = custom_arguments(string(function, "input") or "")
        else:
            arguments = function.get("arguments")
        if arguments is None:
            arguments = ""
        elif isinstance(arguments, dict):
            arguments = json_text(arguments, where)
        elif not isinstance(arguments, str):
            raise BadRequest(f"{where}.tool_calls: arguments must be JSON text or an object", param=where)
        calls.append(ToolCall(_optional(item, "id", f"{where}.tool_calls") or "", function["name"], arguments))
    return tuple(calls)


# -- replies ----------------------------------------------------------------------------------------


def _reply_message(message: Message, names: Mapping[str, WireTool]) -> dict[str, object]:
    body: dict[str, object] = {"role": "assistant", "content": message.content}
    if message.reasoning is not None:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["content"] = message.content or None
        body["tool_calls"] = [_call_json(call, names) for call in message.tool_calls]
    return body


def _call_json(call: ToolCall, names: Mapping[str, WireTool]) -> dict[str, object]:
    wire = names.get(call.name)
    if wire is not None and wire.kind == "custom":
        return {"id": call.id, "type": "custom", "custom": {"name": wire.name, "input": call_input(call)}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(outcomes: Sequence[TurnOutcome]) -> dict[str, object]:
    """The prompt counts once; unknown is not zero, and of several choices the first one filled the cache."""
    prompt = outcomes[0].record.prompt_tokens
    completion = sum(int(outcome.record.sampled_ids.size) for outcome in outcomes)
    usage: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    known = [record.cached_tokens for record in (o.record for o in outcomes) if record.cached_tokens is not None]
    if known:
        usage["prompt_tokens_details"] = {"cached_tokens": min(known)}
    return usage


def _logprobs(wish: Wish, outcome: TurnOutcome, family: Family) -> object:
    if not wish.logprobs:
        return None
    return {"content": logprob_entries(outcome.record, wish.top_logprobs, family), "refusal": None}
