"""Messages and tools as template libraries take them: plain dicts in which foreign text is guarded.

Owns the translation from our messages, nothing of any family. Every string that a harness or a model wrote
goes through ``guard``, call ids and names included: some templates print them. Depends on ``tokens``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache

from tollway.messages import Message, ToolCall, ToolSpec

__all__ = ["ForeignText", "merge_leading_system", "plain_tools"]

Dicts = list[dict[str, object]]


class ForeignText:
    """Turns messages and tools into guarded dicts; tool lists are remembered, they repeat at every turn."""

    def __init__(self, guard: Callable[[str], str], *, objects: bool = False, parts: bool = False) -> None:
        """``objects``: templates that dump call arguments themselves want objects, not JSON text; ``parts``: those
        of models that see images want content as a list.
        """
        self._guard = guard
        self._objects = objects
        self._parts = parts
        self._cached_tools = lru_cache(maxsize=32)(self._build_tools)

    def messages(self, messages: Sequence[Message]) -> Dicts:
        """One dict per message."""
        return [self._message(message) for message in messages]

    def tools(self, tools: Sequence[ToolSpec]) -> Dicts | None:
        """OpenAI's form of the tools, ``None`` when there are none."""
        return self._cached_tools(tuple(tools)) if tools else None

    def _message(self, message: Message) -> dict[str, object]:
        guard = self._guard
        # Templates know no developer role; its text must not be lost.
        role = "system" if message.role == "developer" else message.role
        text = guard(message.content)
        out: dict[str, object] = {"role": role, "content": [{"type": "text", "text": text}] if self._parts else text}
        if message.reasoning is not None:
            out["reasoning_content"] = guard(message.reasoning)
        if message.tool_calls:
            out["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            out["tool_call_id"] = guard(message.tool_call_id)
        if message.name is not None:
            out["name"] = guard(message.name)
        return out

    def _call(self, call: ToolCall) -> dict[str, object]:
        function = {"name": self._guard(call.name), "arguments": self._arguments(call.arguments)}
        return {"id": self._guard(call.id), "type": "function", "function": function}

    def _arguments(self, text: str) -> object:
        """Raw text where a template that parses it finds every string guarded, else the guarded object."""
        guarded = self._guard(text)
        if guarded == text and "\\" not in text and not self._objects:
            return text
        try:
            value = self._guard_all(json.loads(text))
        except (ValueError, RecursionError):
            return guarded
        if self._objects:
            return value
        try:
            return guarded if json.loads(guarded) == value else value
        except ValueError:
            # A vocabulary with a control string that begins with a bracket.
            return value

    def _build_tools(self, tools: tuple[ToolSpec, ...]) -> Dicts:
        return [{key: self._guard_all(value) for key, value in tool.items()} for tool in _plain(tools)]

    def _guard_all(self, value: object) -> object:
        if isinstance(value, str):
            return self._guard(value)
        if isinstance(value, dict):
            return {self._guard(str(key)): self._guard_all(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._guard_all(inner) for inner in value]
        return value


@lru_cache(maxsize=32)
def _plain(tools: tuple[ToolSpec, ...]) -> Dicts:
    out: Dicts = []
    for tool in tools:
        function: dict[str, object] = {
            "name": tool.name,
            "description": tool.description,
            "parameters": json.loads(tool.parameters),
        }
        if tool.strict is not None:
            function["strict"] = tool.strict
        out.append({"type": "function", "function": function})
    return out


def plain_tools(tools: Sequence[ToolSpec]) -> Dicts | None:
    """OpenAI's form of the tools as they are, for parsing replies; ``None`` when there are none."""
    return _plain(tuple(tools)) if tools else None


def merge_leading_system(messages: Sequence[Message]) -> Sequence[Message]:
    """System and developer messages at the beginning as one, for templates that take one only.

    >>> merged = merge_leading_system([Message(role="system", content="a"), Message(role="developer", content="b")])
    >>> [message.content for message in merged]
    ['a\\n\\nb']
    """
    lead = next((at for at, each in enumerate(messages) if each.role not in ("system", "developer")), len(messages))
    if lead < 2:
        return messages
    whole = Message(role="system", content="\n\n".join(each.content for each in messages[:lead]))
    return [whole, *messages[lead:]]
