"""OpenAI Responses.

The conversation is ``input``, a text or a list of items; ``instructions`` lead it. Tools in a namespace and
free-text tools are offered as functions and their calls written back as the harness knows them. Hosted tools
(web search, ...) cannot run here: the model is not shown them, the reply's ``tools`` lacks them, and
``tollway.left_out_tools`` names them. A last item ``compaction_trigger`` asks for one compaction item: the
model is asked for a summary, and a later request that carries the item continues from it.
Stateless; depends on orjson and the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import orjson

from tollway.errors import BadRequest, ContextLengthExceeded, TollwayError
from tollway.messages import Message
from tollway.session_server.dialects.base import Dialect, Json, ReplyNames, StreamWriter
from tollway.session_server.dialects.fields import (
    boolean,
    integer,
    logit_bias,
    mapping,
    number,
    output_schema,
    refuse_set,
    render_options,
    string,
    strings,
    top_k,
)
from tollway.session_server.dialects.logprobs import logprob_entries
from tollway.session_server.dialects.responses_input import TRIGGER, is_assistant_side, read_items
from tollway.session_server.dialects.responses_output import Extras, extras_of, output_items, response_object
from tollway.session_server.dialects.responses_stream import ResponsesStream
from tollway.session_server.dialects.tools import Space, ToolBook, kernel_name, named_choice, simple_choice
from tollway.session_server.families.base import Family
from tollway.session_server.http import error_body
from tollway.session_server.request import AUTO, ToolChoice, TurnOutcome, Wish

__all__ = ["RESPONSES", "ResponsesDialect"]

_REFUSED = ("background", "context_management", "conversation", "prompt")
"""Fields that change what is generated or where the conversation is, and that cannot be honoured."""
_TOO_LONG = ContextLengthExceeded.code
_HOSTED = ("code_interpreter", "file_search", "image_generation", "mcp", "programmatic_tool_calling", "tool_search")
_HARNESS_RUN = ("apply_patch", "computer", "computer_use_preview", "local_shell", "shell")
"""Tools that the harness runs but that models know only at their provider."""


class ResponsesDialect(Dialect):
    """``POST /v1/responses``."""

    name = "responses"
    list_field = "input"
    id_prefix = "resp_"
    call_prefix = "call_"

    def wish(self, raw: Json) -> Wish:
        """See ``Dialect.wish``."""
        refuse_set(raw, _REFUSED)
        if raw.get("truncation") not in (None, "disabled"):
            raise BadRequest(
                "truncation would drop parts of the conversation; leave it out or use disabled", param="truncation"
            )
        include = strings(raw, "include", 32)
        reasoning = mapping(raw, "reasoning")
        text = mapping(raw, "text")
        string(text, "verbosity")  # a hint that changes nothing, but not of any form
        book, shown = _tools(raw.get("tools"))
        instructions = string(raw, "instructions")
        extras = Extras(
            names=book.names,
            tools=orjson.dumps(shown),
            summary=string(reasoning, "summary") or string(reasoning, "generate_summary"),
            sealed="reasoning.encrypted_content" in include,
            logprobs="message.output_text.logprobs" in include,
            echo={
                "instructions": instructions,
                "metadata": mapping(raw, "metadata"),
                "text": {"format": text.get("format") or {"type": "text"}},
                "tool_choice": raw.get("tool_choice") or "auto",
                "user": string(raw, "user"),
            },
        )
        return Wish(
            lead=(Message(role="system", content=instructions),) if instructions else (),
            tools=tuple(book.specs),
            tool_choice=_tool_choice(raw.get("tool_choice"), book),
            parallel_tool_calls=boolean(raw, "parallel_tool_calls") is not False or not book.specs,
            schema=output_schema(text.get("format"), "text.format"),
            stream=boolean(raw, "stream") or False,
            temperature=number(raw, "temperature", 0.0, 2.0),
            top_p=number(raw, "top_p", 0.0, 1.0, above=True),
            top_k=top_k(raw),
            min_p=number(raw, "min_p", 0.0, 1.0),
            frequency_penalty=number(raw, "frequency_penalty", -2.0, 2.0),
            presence_penalty=number(raw, "presence_penalty", -2.0, 2.0),
            repetition_penalty=number(raw, "repetition_penalty", 0.0, 2.0, above=True),
            logit_bias=logit_bias(raw),
            max_new_tokens=integer(raw, "max_output_tokens", 1, 2**31 - 1),
            seed=integer(raw, "seed", -(2**63), 2**63 - 1),
            stop=strings(raw, "stop", 32),
            logprobs=extras.logprobs,
            top_logprobs=integer(raw, "top_logprobs", 0, 20) or 0,
            options=render_options(raw, string(reasoning, "effort")),
            model=string(raw, "model") or "",
            previous=string(raw, "previous_response_id"),
            store=boolean(raw, "store") is not False,
            left_out=tuple(book.left_out),
            extras=extras.into(),
        )

    def messages(self, items: Sequence[object], *, first: int = 0) -> list[Message]:
        """See ``Dialect.messages``."""
        return read_items(items, first)

    def closed_after(self, item: object) -> bool:
        """What a model said may go on with the next item; a trigger is settled with the item itself at hand."""
        return not is_assistant_side(item) and not _is_trigger(item)

    def items_of_text(self, text: str) -> list[object]:
        """The whole input may be one text; an entry of a list may not."""
        return [{"role": "user", "content": text}]

    def settle(self, wish: Wish, last: object) -> Wish:
        """A compaction is a plain text reply to the same prompt."""
        if not _is_trigger(last):
            return wish
        extras = replace(extras_of(wish), compaction=True, logprobs=False)
        return replace(wish, tool_choice=ToolChoice("none"), schema=None, logprobs=False, extras=extras.into())

    def reply(self, wish: Wish, outcomes: Sequence[TurnOutcome], names: ReplyNames, family: Family) -> bytes:
        """See ``Dialect.reply``."""
        outcome = outcomes[0]
        status = "incomplete" if outcome.finish_reason == "length" else "completed"
        extras = extras_of(wish)
        logprobs = logprob_entries(outcome.record, wish.top_logprobs, family) if extras.logprobs else ()
        output = output_items(outcome.message, extras, names, status, logprobs)
        return orjson.dumps(response_object(wish, names, status=status, output=output, outcome=outcome, family=family))

    def stream(self, wish: Wish, names: ReplyNames, family: Family) -> StreamWriter:
        """See ``Dialect.stream``."""
        return ResponsesStream(wish, names, family)

    def error(self, error: TollwayError) -> bytes:
        """See ``Dialect.error``."""
        body = error_body(error)
        # The kernel's error names the list as the other dialects call it.
        return body.replace(b'"param":"messages"', b'"param":"input"') if error.code == _TOO_LONG else body


RESPONSES = ResponsesDialect()
"""The one instance."""


def _is_trigger(item: object) -> bool:
    return isinstance(item, dict) and item.get("type") == TRIGGER


def _tools(raw: object) -> tuple[ToolBook, list[Json]]:
    """(the tools, those of the list that the model is shown)"""
    book = ToolBook()
    shown: list[Json] = []
    if raw is None:
        return book, shown
    if not isinstance(raw, list):
        raise BadRequest("tools must be a list", param="tools")
    for at, item in enumerate(raw):
        where = f"tools[{at}]"
        kind = item.get("type") if isinstance(item, dict) else None
        if not isinstance(kind, str):
            raise BadRequest(f"{where} must be an object with a type", param=where)
        if kind in _HOSTED or kind.startswith("web_search"):
            book.leave_out(kind)
            continue
        shown.append({"parameters": None, "strict": None, **item} if kind == "function" else item)
        if kind == "namespace":
            _namespace(item, where, book)
        else:
            _tool(item, kind, where, book)
    return book, shown


def _tool(item: Json, kind: object, where: str, book: ToolBook, space: Space | None = None) -> None:
    if kind == "function":
        book.function(item, where, space=space)
    elif kind == "custom":
        book.custom(item, where, space=space)
    elif kind in _HARNESS_RUN:
        raise BadRequest(f"{where}: this model does not know {kind} tools; offer it as a function", param=where)
    else:
        raise BadRequest(
            f"{where} has type {str(kind)[:40]!r}, which is not supported here; offer functions, custom tools or "
            "namespaces of them",
            param=where,
        )


def _namespace(item: Json, where: str, book: ToolBook) -> None:
    name, tools = item.get("name"), item.get("tools")
    if not isinstance(name, str) or not name or not isinstance(tools, list):
        raise BadRequest(f"{where} must have a name and a list of tools", param=where)
    space = Space(name, string(item, "description") or "")
    for at, tool in enumerate(tools):
        inner = f"{where}.tools[{at}]"
        if not isinstance(tool, dict):
            raise BadRequest(f"{inner} must be an object with a type", param=inner)
        _tool(cast(Mapping[str, object], tool), tool.get("type"), inner, book, space)


def _tool_choice(choice: object, book: ToolBook) -> ToolChoice:
    if choice is None:
        return AUTO
    if isinstance(choice, str) and (simple := simple_choice(choice)) is not None:
        return simple
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if isinstance(choice, dict) and kind in ("function", "custom"):
        name = choice.get("name")
        space = string(choice, "namespace")
        return named_choice(kernel_name(space, name) if isinstance(name, str) else None, book.specs)
    raise BadRequest(
        f"tool_choice {str(kind)[:40]!r} is not supported here; use auto, none, required or one function",
        param="tool_choice",
    )
