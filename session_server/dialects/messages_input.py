"""Anthropic messages and system blocks to kernel messages. Pure functions; depends on orjson and the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tollway.errors import BadRequest
from tollway.messages import Message, ToolCall
from tollway.session_server.dialects.base import Json
from tollway.session_server.dialects.fields import boolean, json_text, not_text, string, text_of
from tollway.session_server.dialects.sealed import unseal

__all__ = ["RAW_ARGUMENTS", "read_messages", "system_text"]

RAW_ARGUMENTS = "_arguments_that_are_no_json_object"
"""Key of a tool input that carries arguments which are no JSON object: tools refuse it, and it reads back."""
_BILLING = "x-anthropic-billing-header:"
"""Claude Code's first system block: a line for its provider's accounts that changes from call to call."""
_TEXT = {"text": "text"}
_TOOL_ERROR = "[tool error]\n"
"""Before the text of a tool result with ``is_error``: the kernel's tool messages have no flag for it."""


def system_text(raw: object) -> str:
    """The system prompt without the billing line.

    >>> system_text([{"type": "text", "text": "x-anthropic-billing-header: a=1;"}, {"type": "text", "text": "Be."}])
    'Be.'
    """
    if isinstance(raw, list):
        raw = [
            {**part, "text": _unbilled(part["text"])}
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else part
            for part in raw
        ]
    text = text_of(raw, "system", _TEXT)
    return _unbilled(text) if isinstance(raw, str) else text


def read_messages(items: Sequence[object], first: int) -> list[Message]:
    """Messages of consecutive items. Raises ``BadRequest`` naming the item."""
    messages: list[Message] = []
    for at, item in enumerate(items, first):
        where = f"messages[{at}]"
        if not isinstance(item, dict):
            raise BadRequest(f"{where} must be an object", param=where)
        role = item.get("role")
        content = item.get("content")
        if role == "user":
            messages += _user(content, where)
        elif role == "assistant":
            messages.append(_assistant(content, where))
        elif role == "system":
            messages.append(Message(role="system", content=text_of(content, f"{where}.content", _TEXT)))
        else:
            raise BadRequest(f"{where}: unknown role {str(role)[:40]!r}; use user, assistant or system", param=where)
    return messages


def _unbilled(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def _user(content: object, where: str) -> list[Message]:
    """Tool results become tool messages, text between them user messages, in their order."""
    if content is None or isinstance(content, str):
        return [Message(role="user", content=content or "")]
    messages: list[Message] = []
    texts: list[str] = []
    for block in _blocks(content, where):
        kind = block.get("type")
        if kind != "tool_result":
            texts.append(_text(block, where))
            continue
        if texts:
            messages.append(Message(role="user", content="".join(texts)))
            texts = []
        messages.append(_result(block, where))
    if texts or not messages:
        messages.append(Message(role="user", content="".join(texts)))
    return messages


def _result(block: Json, where: str) -> Message:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str) or not call_id:
        raise BadRequest(f"{where}: a tool_result needs tool_use_id", param=where)
    text = text_of(block.get("content"), f"{where}: content of a tool_result", _TEXT)
    failed = boolean(block, "is_error") is True
    return Message(role="tool", content=_TOOL_ERROR + text if failed else text, tool_call_id=call_id)


def _assistant(content: object, where: str) -> Message:
    if content is None or isinstance(content, str):
        return Message(role="assistant", content=content or "")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in _blocks(content, where):
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_call(block, where))
        elif kind == "thinking":
            thoughts.append(_thought(block, where))
        elif kind != "redacted_thinking":  # never ours, and nobody here can read it: like reasoning left out
            texts.append(_text(block, where))
    return Message(
        role="assistant", content="".join(texts), reasoning="".join(thoughts) or None, tool_calls=tuple(calls)
    )


def _thought(block: Json, where: str) -> str:
    text = block.get("thinking")
    if not isinstance(text, str):
        raise BadRequest(f"{where}: a thinking block needs its text in thinking", param=where)
    signature = string(block, "signature")
    # Display "omitted": the text travels in the signature.
    return text or unseal(signature) or ""


def _call(block: Json, where: str) -> ToolCall:
    call_id, name, value = block.get("id"), block.get("name"), block.get("input")
    if not isinstance(call_id, str) or not isinstance(name, str) or not name:
        raise BadRequest(f"{where}: a tool_use needs id and name", param=where)
    if value is None:
        return ToolCall(call_id, name, "{}")
    if not isinstance(value, dict):
        raise BadRequest(f"{where}: input of a tool_use must be an object", param=where)
    raw = value.get(RAW_ARGUMENTS)
    if len(value) == 1 and isinstance(raw, str):
        return ToolCall(call_id, name, raw)
    return ToolCall(call_id, name, json_text(value, where))


def _blocks(content: object, where: str) -> list[Json]:
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content must be text or a list of blocks", param=where)
    for block in content:
        if not isinstance(block, dict):
            raise BadRequest(f"{where}.content has an entry that is no block", param=where)
    return content


def _text(block: Json, where: str) -> str:
    kind: object | Literal["text"] = block.get("type")
    text = block.get("text")
    if kind == "text" and isinstance(text, str):
        return text
    raise not_text(kind, f"{where}.content")
