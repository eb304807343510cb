"""Input items of OpenAI Responses to kernel messages.

Reasoning, text and calls of one model turn are separate items on the wire; here consecutive ones become one
assistant message. Items that nothing here could have produced are refused by name. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from tollway.errors import BadRequest
from tollway.messages import Message, Role, ToolCall
from tollway.session_server.dialects.base import Json
from tollway.session_server.dialects.fields import json_text, string, text_of
from tollway.session_server.dialects.sealed import unseal
from tollway.session_server.dialects.tools import custom_arguments, kernel_name

__all__ = ["TRIGGER", "is_assistant_side", "read_items"]

TRIGGER = "compaction_trigger"
"""Item type that asks for a summary in place of an answer; it comes last."""
_TEXT = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_THOUGHT = {"reasoning_text": "text", "summary_text": "text", "text": "text"}
_ROLES = ("user", "assistant", "system", "developer")
_SIDE = ("reasoning", "function_call", "custom_tool_call")
_ASK_SUMMARY = (
    "The conversation has become too long and will be replaced by a summary that you write now. Another model "
    "goes on with nothing but the summary and the user's messages. Write down what the task is, what was done and "
    "found so far (files, commands, values, errors), what was decided and why, and what remains to be done. "
    "Answer with the summary only and call no tool."
)
_SUMMARY = "Summary of the conversation so far, which it replaces:\n\n"


def is_assistant_side(item: object) -> bool:
    """Whether an item is a part of what a model said, so that the next item may belong to the same message."""
    if not isinstance(item, dict):
        return False
    kind = item.get("type")
    if kind is None or kind == "message":
        return item.get("role") == "assistant"
    return kind in _SIDE


def read_items(items: Sequence[object], first: int) -> list[Message]:
    """Messages of consecutive items. Raises ``BadRequest`` naming the item."""
    messages: list[Message] = []
    draft: _Draft | None = None
    for at, item in enumerate(items, first):
        where = f"input[{at}]"
        if not isinstance(item, dict):
            raise BadRequest(f"{where} must be an object, got {type(item).__name__}", param=where)
        raw: Json = item
        if is_assistant_side(raw):
            draft = draft or _Draft()
            draft.add(raw, where)
            continue
        if draft is not None:
            messages.append(draft.message())
            draft = None
        if raw.get("type") == TRIGGER and at - first != len(items) - 1:
            raise BadRequest(f"{where}: a {TRIGGER} must be the last item", param=where)
        messages.append(_closed(raw, where))
    if draft is not None:
        messages.append(draft.message())
    return messages


class _Draft:
    """An assistant message while its items come in."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, raw: Json, where: str) -> None:
        kind = raw.get("type")
        if kind == "reasoning":
            self._reasoning.append(_thought(raw, where))
        elif kind in ("function_call", "custom_tool_call"):
            self._calls.append(_call(raw, where))
        else:
            self._content.append(text_of(raw.get("content"), f"{where}.content", _TEXT))

    def message(self) -> Message:
        return Message(
            role="assistant",
            content="".join(self._content),
            reasoning="".join(self._reasoning) or None,
            tool_calls=tuple(self._calls),
        )


def _thought(raw: Json, where: str) -> str:
    """Text of a reasoning item: what we sealed, else what is in clear.

    Another provider's encrypted reasoning cannot be read by anybody but it; without clear text the message
    has no reasoning, which harnesses that drop it send as well.
    """
    sealed = unseal(string(raw, "encrypted_content"))
    if sealed is not None:
        return sealed
    text, summary = (text_of(raw.get(name), f"{where}.{name}", _THOUGHT) for name in ("content", "summary"))
    return text or summary


def _call(raw: Json, where: str) -> ToolCall:
    name, call_id = raw.get("name"), raw.get("call_id")
    if not isinstance(name, str) or not name or not isinstance(call_id, str) or not call_id:
        raise BadRequest(f"{where}: a {raw['type']} needs name and call_id", param=where)
    name = kernel_name(string(raw, "namespace"), name)
    if raw["type"] == "custom_tool_call":
        text = raw.get("input")
        if not isinstance(text, str):
            raise BadRequest(f"{where}.input must be text", param=where)
        return ToolCall(call_id, name, custom_arguments(text))
    arguments = raw.get("arguments")
    if arguments is None:
        arguments = ""
    elif isinstance(arguments, dict):
        arguments = json_text(arguments, where)
    elif not isinstance(arguments, str):
        raise BadRequest(f"{where}.arguments must be JSON text or an object", param=where)
    return ToolCall(call_id, name, arguments)


def _closed(raw: Json, where: str) -> Message:
    """The message of an item that stands alone."""
    kind = raw.get("type")
    if kind == "message" or (kind is None and "role" in raw):
        role = raw.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise BadRequest(f"{where}: unknown role {str(role)[:40]!r}; use one of {', '.join(_ROLES)}", param=where)
        return Message(role=cast(Role, role), content=text_of(raw.get("content"), f"{where}.content", _TEXT))
    if kind in ("function_call_output", "custom_tool_call_output"):
        call_id = raw.get("call_id")
        if not isinstance(call_id, str) or not call_id:
            raise BadRequest(f"{where}: a {kind} needs call_id", param=where)
        return Message(role="tool", content=text_of(raw.get("output"), f"{where}.output", _TEXT), tool_call_id=call_id)
    if kind == TRIGGER:
        return Message(role="user", content=_ASK_SUMMARY)
    if kind == "compaction":
        summary = unseal(raw.get("encrypted_content"))
        if summary is None:
            raise BadRequest(
                f"{where}: this compaction was not made here and cannot be read; send the summary as a message",
                param=where,
            )
        return Message(role="user", content=_SUMMARY + summary)
    if kind == "item_reference" or (kind is None and "id" in raw):
        raise BadRequest(
            f"{where}: item_reference is not supported; send the item itself, or name the reply that it came with "
            "in previous_response_id",
            param=where,
        )
    raise BadRequest(
        f"{where} has type {str(kind)[:40]!r}, which is not supported here; send message, reasoning, function_call, "
        "function_call_output, custom_tool_call, custom_tool_call_output or compaction items",
        param=where,
    )
