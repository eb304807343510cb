"""Tool lists, tool choices and the names of calls: what the dialects share about tools.

A kernel tool is a function with a name and a schema. Tools that sit in a namespace get a name of their own,
and a free-text ("custom") tool becomes a function with one text; ``WireTool`` says how a call of such a tool
is written back. Tools that a provider would run itself are left out and counted, never pretended. Pure
functions; depends on orjson and the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import orjson

from tollway.errors import BadRequest
from tollway.messages import ToolCall, ToolSpec
from tollway.session_server.dialects.fields import boolean, json_text, string
from tollway.session_server.request import AUTO, ToolChoice

__all__ = [
    "NO_NAMES",
    "Space",
    "ToolBook",
    "WireTool",
    "call_input",
    "custom_arguments",
    "kernel_name",
    "named_choice",
    "simple_choice",
]

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class WireTool:
    """How a harness knows a tool whose kernel name is not simply its own."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


NO_NAMES: Mapping[str, WireTool] = {}


def kernel_name(namespace: object, name: str) -> str:
    """The name under which the model sees a tool.

    >>> kernel_name("multi_agent_v1", "wait")
    'multi_agent_v1__wait'
    """
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


@dataclass(slots=True)
class ToolBook:
    """Collects the tools of one request. ``where`` arguments name the field in refusals."""

    specs: list[ToolSpec] = field(default_factory=list)
    names: dict[str, WireTool] = field(default_factory=dict)
    """Kernel name -> how the harness knows it; plain functions are not in here."""
    left_out: list[str] = field(default_factory=list)
    """Types of tools that the model is not shown."""
    _taken: set[str] = field(default_factory=set)

    def function(self, raw: Json, where: str, *, schema: str = "parameters", space: Space | None = None) -> None:
        """Add a function; ``schema`` is the key of its parameters."""
        name = self._name(raw, where, space)
        parameters = raw.get(schema)
        if parameters is not None and not isinstance(parameters, dict):
            raise BadRequest(f"{where}.{schema} must be a JSON schema object", param=where)
        spec = ToolSpec(
            name=name,
            description=_described(string(raw, "description") or "", space),
            parameters=json_text(parameters, where) if parameters else "{}",
            strict=boolean(raw, "strict"),
        )
        self.specs.append(spec)
        if space is not None:
            self.names[name] = WireTool("function", str(raw["name"]), space.name)

    def custom(self, raw: Json, where: str, *, space: Space | None = None) -> None:
        """Add a tool that takes free text: a function with one ``input``.

        A grammar is told to the model; no engine enforces it here.
        """
        name = self._name(raw, where, space)
        told = _grammar(raw.get("format"), where)
        text = {"type": "string", "description": told} if told else {"type": "string"}
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
        self.specs.append(
            ToolSpec(
                name=name,
                description=_described(string(raw, "description") or "", space),
                parameters=orjson.dumps(schema).decode(),
            )
        )
        self.names[name] = WireTool("custom", str(raw["name"]), space.name if space is not None else None)

    def leave_out(self, kind: str) -> None:
        """Note a tool that only a provider could run."""
        self.left_out.append(kind)

    def _name(self, raw: Json, where: str, space: Space | None) -> str:
        own = raw.get("name")
        if not isinstance(own, str) or not own:
            raise BadRequest(f"{where} must have a name", param=where)
        name = kernel_name(space.name, own) if space is not None else own
        if name in self._taken:
            raise BadRequest(f"{where}: two tools have the same name {name!r}; rename one", param="tools")
        self._taken.add(name)
        return name


@dataclass(slots=True)
class Space:
    """A namespace while its tools are read."""

    name: str
    description: str
    """Told to the model once, with the first tool; empty from then on."""


def _described(text: str, space: Space | None) -> str:
    if space is None or not space.description:
        return text
    told, space.description = f"[About all tools of {space.name}: {space.description}]", ""
    return f"{told}\n{text}" if text else told


def _grammar(form: object, where: str) -> str:
    if form is None:
        return ""
    kind = form.get("type") if isinstance(form, dict) else form
    if kind == "text":
        return ""
    inner = form.get("grammar", form) if isinstance(form, dict) else None  # chat nests it, responses does not
    if kind != "grammar" or not isinstance(inner, dict) or not isinstance(inner.get("definition"), str):
        raise BadRequest(f"{where}.format must be text or a grammar with its definition", param=where)
    syntax = inner.get("syntax", "lark")
    if syntax not in ("lark", "regex"):
        raise BadRequest(f"{where}.format has a grammar of an unknown syntax; use lark or regex", param=where)
    return f"Text that follows this {syntax} grammar:\n{inner['definition']}"


# -- choices ----------------------------------------------------------------------------------------


def simple_choice(word: str) -> ToolChoice | None:
    """The choices that are one word in both OpenAI dialects; ``None`` for any other word."""
    if word == "auto":
        return AUTO
    if word == "none":
        return ToolChoice("none")
    return ToolChoice("required") if word == "required" else None


def named_choice(name: object, specs: Sequence[ToolSpec]) -> ToolChoice:
    """A choice of one tool. Raises ``BadRequest`` unless it is offered."""
    if not isinstance(name, str) or not name:
        raise BadRequest("tool_choice names no tool; give its name", param="tool_choice")
    if all(spec.name != name for spec in specs):
        offered = ", ".join(spec.name for spec in specs[:20]) or "none"
        raise BadRequest(f"tool_choice names {name!r}, which is not offered; tools: {offered}", param="tool_choice")
    return ToolChoice("named", name)


# -- calls of free-text tools -----------------------------------------------------------------------


def custom_arguments(text: str) -> str:
    """Kernel arguments of a call of a free-text tool."""
    return orjson.dumps({"input": text}).decode()


def call_input(call: ToolCall) -> str:
    """Free text of a call of a free-text tool.

    Arguments of another form go out as they are, so that the tool can say what is wrong with them.
    """
    try:
        value = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        return call.arguments
    if isinstance(value, dict) and len(value) == 1 and isinstance(value.get("input"), str):
        text: str = value["input"]
        return text
    return call.arguments
