"""Anthropic Messages.

Server tools (web search, ...) cannot run here: the model is not shown them, and ``tollway.left_out_tools`` of
the reply names them; Anthropic's own client tools (bash, text editor, ...), whose schema only its models
know, are refused by name. ``cache_control``, ``metadata``, effort and thinking budgets change nothing.
Stateless; depends on orjson and the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from tollway.errors import BadRequest, TollwayError
from tollway.messages import Message
from tollway.session_server.dialects.base import Dialect, Json, ReplyNames, StreamWriter
from tollway.session_server.dialects.fields import (
    boolean,
    integer,
    mapping,
    number,
    output_schema,
    refuse_set,
    string,
    strings,
    top_k,
)
from tollway.session_server.dialects.messages_input import read_messages, system_text
from tollway.session_server.dialects.messages_output import Extras, MessagesStream, error_value, reply_value
from tollway.session_server.dialects.tools import ToolBook, named_choice
from tollway.session_server.families.base import Family, RenderOptions
from tollway.session_server.request import AUTO, ToolChoice, TurnOutcome, Wish

__all__ = ["MESSAGES", "MessagesDialect", "count_reply"]

_REFUSED = ("container", "mcp_servers")
"""Fields that change what is generated and that cannot be honoured."""
_HOSTED = ("advisor_", "code_execution_", "mcp_toolset", "tool_search_tool_", "web_fetch_", "web_search_")
"""Beginnings of the types of tools that run at the provider."""


class MessagesDialect(Dialect):
    """``POST /v1/messages`` and, without generating, ``POST /v1/messages/count_tokens``."""

    name = "messages"
    list_field = "messages"
    id_prefix = "msg_"
    call_prefix = "toolu_"

    def wish(self, raw: Json) -> Wish:
        """See ``Dialect.wish``."""
        refuse_set(raw, _REFUSED)
        _check_edits(mapping(raw, "context_management"))
        system = system_text(raw.get("system"))
        book = _tools(raw.get("tools"))
        choice, parallel = _tool_choice(raw.get("tool_choice"), book)
        options, omit = _thinking(raw)
        output = mapping(raw, "output_config")
        string(output, "effort")  # a hint that changes nothing, but not of any form
        form = output.get("format")
        return Wish(
            lead=(Message(role="system", content=system),) if system else (),
            tools=tuple(book.specs),
            tool_choice=choice,
            parallel_tool_calls=parallel or not book.specs,
            schema=output_schema(form if form is not None else raw.get("output_format"), "output_config.format"),
            stream=boolean(raw, "stream") or False,
            temperature=number(raw, "temperature", 0.0, 2.0),
            top_p=number(raw, "top_p", 0.0, 1.0, above=True),
            top_k=top_k(raw),
            max_new_tokens=integer(raw, "max_tokens", 1, 2**31 - 1),
            stop=strings(raw, "stop_sequences", 32),
            options=options,
            model=string(raw, "model") or "",
            left_out=tuple(book.left_out),
            extras=Extras(omit).into(),
        )

    def messages(self, items: Sequence[object], *, first: int = 0) -> list[Message]:
        """See ``Dialect.messages``: at least one message for each item."""
        return read_messages(items, first)

    def closed_after(self, item: object) -> bool:
        """No item goes on in the next one."""
        return True

    def reply(self, wish: Wish, outcomes: Sequence[TurnOutcome], names: ReplyNames, family: Family) -> bytes:
        """See ``Dialect.reply``."""
        return orjson.dumps(reply_value(wish, outcomes[0], names))

    def stream(self, wish: Wish, names: ReplyNames, family: Family) -> StreamWriter:
        """See ``Dialect.stream``."""
        return MessagesStream(wish, names)

    def error(self, error: TollwayError) -> bytes:
        """See ``Dialect.error``."""
        return orjson.dumps(error_value(error))


MESSAGES = MessagesDialect()
"""The one instance."""


def count_reply(tokens: int) -> bytes:
    """Answer of ``count_tokens``.

    >>> count_reply(3)
    b'{"input_tokens":3}'
    """
    return orjson.dumps({"input_tokens": tokens})


def _check_edits(management: Json) -> None:
    """Keeping all thinking is what happens here anyway; every other edit would change the conversation."""
    edits = management.get("edits")
    if edits is None:
        edits = []
    if not isinstance(edits, list):
        raise BadRequest("context_management.edits must be a list", param="context_management")
    for edit in edits:
        kind = edit.get("type") if isinstance(edit, dict) else None
        keep = edit.get("keep") if isinstance(edit, dict) else None
        if kind != "clear_thinking_20251015" or keep not in ("all", {"type": "all"}):
            raise BadRequest(
                f"context_management edit {str(kind)[:60]!r} would change the conversation and is not supported here; "
                'leave it out, or use clear_thinking_20251015 with keep "all"',
                param="context_management",
            )


def _thinking(body: Json) -> tuple[RenderOptions, bool]:
    """(template switches, whether the text of thinking is to stay out of sight)"""
    raw = mapping(body, "thinking")
    kind = raw.get("type")
    if body.get("thinking") is not None and kind not in ("enabled", "disabled", "adaptive", "between_tools"):
        raise BadRequest(f"thinking.type is {str(kind)[:40]!r}; use enabled, disabled or adaptive", param="thinking")
    switch = {"enabled": True, "disabled": False}.get(kind) if isinstance(kind, str) else None
    return RenderOptions(thinking=switch), string(raw, "display") == "omitted"


def _tools(raw: object) -> ToolBook:
    book = ToolBook()
    if raw is None:
        return book
    if not isinstance(raw, list):
        raise BadRequest("tools must be a list", param="tools")
    for at, item in enumerate(raw):
        where = f"tools[{at}]"
        if not isinstance(item, dict):
            raise BadRequest(f"{where} must be an object", param=where)
        kind = item.get("type")
        if kind is None or kind == "custom":
            if not isinstance(item.get("input_schema"), dict):
                raise BadRequest(f"{where} must have an input_schema object", param=where)
            book.function(item, where, schema="input_schema")
        elif isinstance(kind, str) and kind.startswith(_HOSTED):
            book.leave_out(kind)
        else:
            raise BadRequest(
                f"{where} has type {str(kind)[:60]!r}, which only its provider's models know; offer it with a name, a "
                "description and an input_schema",
                param=where,
            )
    return book


def _tool_choice(choice: object, book: ToolBook) -> tuple[ToolChoice, bool]:
    """(choice, whether several calls may follow each other)"""
    if choice is None:
        return AUTO, True
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if not isinstance(choice, dict) or kind not in ("auto", "any", "tool", "none"):
        raise BadRequest(f"tool_choice {str(kind)[:40]!r} is unknown; use auto, any, tool or none", param="tool_choice")
    parallel = boolean(choice, "disable_parallel_tool_use") is not True
    if kind == "tool":
        return named_choice(choice.get("name"), book.specs), parallel
    return {"auto": AUTO, "any": ToolChoice("required"), "none": ToolChoice("none")}[kind], parallel
