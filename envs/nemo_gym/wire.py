"""The Responses schema as NeMo Gym's data and servers use it, to and from our messages. Pure but for reading files."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tollway.envs.json_lines import read_json_lines
from tollway.errors import ConfigError
from tollway.messages import Message, ToolCall, ToolSpec

__all__ = ["Row", "answer_item", "call_items", "read_rows", "response_of"]

Json = Mapping[str, object]
_ROLES: Mapping[str, Literal["system", "developer", "user", "assistant"]] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of data."""

    raw: Json
    """The whole line, as ``/seed_session`` and ``/verify`` get it."""
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]

    @property
    def params(self) -> Json:
        """Its ``responses_create_params``."""
        params = self.raw["responses_create_params"]
        return params if isinstance(params, dict) else {}


def read_rows(path: Path | None) -> tuple[Row, ...]:
    """The lines of a data file. Raises ``ConfigError`` that names the line."""
    if path is None:
        raise ConfigError("env.nemo_gym.data is not set; name a file of JSON lines with responses_create_params")
    return tuple(_row(line.raw, line.where) for line in read_json_lines(path, "env.nemo_gym.data", "lines"))


def call_items(call: ToolCall, output: str) -> list[dict[str, object]]:
    """A tool call and its output as Responses items."""
    return [
        {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.id, "output": output},
    ]


def answer_item(text: str) -> dict[str, object]:
    """The last reply as a Responses item."""
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_last", "role": "assistant", "status": "completed", "content": [part]}


def response_of(row: Row, output: Sequence[Json]) -> dict[str, object]:
    """A whole Responses object around an episode's items."""
    return {
        "id": "resp_episode",
        "object": "response",
        "created_at": time.time(),
        "model": "policy",
        "output": list(output),
        "parallel_tool_calls": row.params.get("parallel_tool_calls", True),
        "tool_choice": row.params.get("tool_choice", "auto"),
        "tools": row.params.get("tools", []),
    }


def _row(raw: Json, where: str) -> Row:
    params = raw.get("responses_create_params")
    if not isinstance(params, dict) or "input" not in params:
        raise ConfigError(f"{where} has no responses_create_params.input")
    messages = [Message(role="system", content=params["instructions"])] if params.get("instructions") else []
    said = params["input"]
    items = [{"role": "user", "content": said}] if isinstance(said, str) else said
    if not isinstance(items, list) or not items:
        raise ConfigError(f"{where}: responses_create_params.input is {said!r:.80}, want text or items")
    messages += [_message(item, where) for item in items]
    tools = params.get("tools") or []
    return Row(raw=raw, messages=tuple(messages), tools=tuple(_tool(tool, where) for tool in tools))


def _message(item: object, where: str) -> Message:
    if not isinstance(item, dict) or item.get("type", "message") != "message" or item.get("role") not in _ROLES:
        raise ConfigError(f"{where}: an input item that is no message of text: {item!r:.120}")
    content = item.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{where}: an input message with parts that are no text")
        content = "\n".join(map(str, texts))
    if not isinstance(content, str):
        raise ConfigError(f"{where}: an input message without content")
    return Message(role=_ROLES[item["role"]], content=content)


def _tool(tool: object, where: str) -> ToolSpec:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise ConfigError(f"{where}: a tool that is no function: {tool!r:.120}")
    description, strict = tool.get("description"), tool.get("strict")
    return ToolSpec(
        name=tool["name"],
        description=description if isinstance(description, str) else "",
        parameters=json.dumps(tool.get("parameters") or {"type": "object", "properties": {}}, separators=(",", ":")),
        strict=strict if isinstance(strict, bool) else None,
    )
