"""Output items and the response object of OpenAI Responses, whole and piece by piece.

The ids of items follow from the reply's id and their place, so that a streamed and a whole reply name them
alike. Depends on orjson, the kernel's records and a family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from tollway.messages import Message, ToolCall
from tollway.session_server.dialects.base import ReplyNames
from tollway.session_server.dialects.sealed import seal
from tollway.session_server.dialects.tools import NO_NAMES, WireTool
from tollway.session_server.dialects.tools import call_input as text_input
from tollway.session_server.families.base import Family
from tollway.session_server.request import TurnOutcome, Wish, weight_versions

__all__ = [
    "Extras",
    "call_item",
    "compaction_item",
    "extras_of",
    "item_id",
    "message_item",
    "output_items",
    "reasoning_item",
    "response_object",
    "usage",
]

_KEY = "responses"
_OPENING = 8
"""Tokens in which thinking begins, and bytes by which its beginning is found."""
Item = dict[str, object]


@dataclass(frozen=True, slots=True)
class Extras:
    """What a reply of this dialect needs to know of its request."""

    names: Mapping[str, WireTool] = field(default_factory=lambda: NO_NAMES)
    tools: bytes = b"[]"
    """JSON of the tools that the model was shown, as they were sent."""
    summary: str | None = None
    """Reasoning is wished as a summary; there is no other text of it than itself."""
    sealed: bool = False
    """``include`` asks for reasoning that the client can carry back."""
    logprobs: bool = False
    compaction: bool = False
    """The reply is one compaction item."""
    echo: Mapping[str, object] = field(default_factory=dict)
    """Request fields that the response object repeats."""

    def into(self) -> dict[str, object]:
        """As ``Wish.extras``."""
        return {_KEY: self}


def extras_of(wish: Wish) -> Extras:
    """The extras of a wish of this dialect."""
    found = wish.extras.get(_KEY)
    return found if isinstance(found, Extras) else Extras()


# -- items ------------------------------------------------------------------------------------------


def item_id(prefix: str, names: ReplyNames, at: int) -> str:
    """Id of the output item at index ``at``."""
    return f"{prefix}_{names.reply_id.removeprefix('resp_')}_{at}"


def reasoning_item(name: str, text: str, extras: Extras, status: str) -> Item:
    """Reasoning: in clear as content, or as the summary that was asked for."""
    item: Item = {"id": name, "type": "reasoning", "status": status}
    if extras.summary is not None:
        item["summary"] = [{"type": "summary_text", "text": text}]
    else:
        item["summary"] = []
        item["content"] = [{"type": "reasoning_text", "text": text}]
    if extras.sealed:
        item["encrypted_content"] = seal(text)
    return item


def message_item(name: str, text: str, status: str, logprobs: Sequence[object] = ()) -> Item:
    """Text of the reply."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"id": name, "type": "message", "status": status, "role": "assistant", "content": [part]}


def call_item(call: ToolCall, extras: Extras, names: ReplyNames, at: int, status: str = "completed") -> Item:
    """A call under the name and in the form in which the harness offered the tool."""
    wire = extras.names.get(call.name)
    if wire is not None and wire.kind == "custom":
        item: Item = {"id": item_id("ctc", names, at), "type": "custom_tool_call", "status": status}
        item |= {"call_id": call.id, "name": wire.name, "input": text_input(call)}
    else:
        item = {"id": item_id("fc", names, at), "type": "function_call", "status": status}
        name = wire.name if wire is not None else call.name
        item |= {"call_id": call.id, "name": name, "arguments": call.arguments}
    if wire is not None and wire.namespace is not None:
        item["namespace"] = wire.namespace
    return item


def compaction_item(message: Message, names: ReplyNames) -> Item:
    """The summary that stands for the conversation from now on."""
    text = message.content or message.reasoning or ""
    return {"id": item_id("cmp", names, 0), "type": "compaction", "encrypted_content": seal(text)}


def output_items(
    message: Message, extras: Extras, names: ReplyNames, status: str, logprobs: Sequence[object] = ()
) -> list[Item]:
    """Items of a whole reply; ``status`` is that of the last one."""
    if extras.compaction:
        return [compaction_item(message, names)]
    items: list[Item] = []
    if message.reasoning:
        items.append(reasoning_item(item_id("rs", names, 0), message.reasoning, extras, "completed"))
    if message.content or not (message.reasoning or message.tool_calls):
        name = item_id("msg", names, len(items))
        items.append(message_item(name, message.content, "completed", logprobs))
    for call in message.tool_calls:
        items.append(call_item(call, extras, names, len(items)))
    items[-1]["status"] = status
    return items


# -- the response -----------------------------------------------------------------------------------


def response_object(
    wish: Wish,
    names: ReplyNames,
    *,
    status: str,
    output: Sequence[Item] = (),
    outcome: TurnOutcome | None = None,
    family: Family | None = None,
    error: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """The ``response`` of a body or an event; usage is there once an outcome is."""
    extras = extras_of(wish)
    reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
    value: dict[str, object] = {
        "id": names.reply_id,
        "object": "response",
        "created_at": names.created,
        "status": status,
        "background": False,
        "error": error,
        "incomplete_details": reason,
        "model": wish.model,
        "output": output,
        "parallel_tool_calls": wish.parallel_tool_calls,
        "previous_response_id": wish.previous,
        # No template here takes an effort.
        "reasoning": {"effort": None, "summary": extras.summary},
        "store": wish.store,
        "temperature": wish.temperature,
        "top_p": wish.top_p,
        "max_output_tokens": wish.max_new_tokens,
        "top_logprobs": wish.top_logprobs,
        "truncation": "disabled",
        "tools": orjson.Fragment(extras.tools),
        "usage": None,
        **extras.echo,
    }
    ours: dict[str, object] = {"left_out_tools": wish.left_out} if wish.left_out else {}
    if outcome is not None:
        ours |= weight_versions([outcome])
    if ours:
        value["tollway"] = ours
    if outcome is not None and family is not None:
        sampling = outcome.record.sampling
        value |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "usage": usage(outcome, family)}
    return value


def usage(outcome: TurnOutcome, family: Family) -> dict[str, object]:
    """Token counts; the cached ones are left out when the engine does not tell them."""
    record = outcome.record
    prompt, completion = record.prompt_tokens, int(record.sampled_ids.size)
    value: dict[str, object] = {
        "input_tokens": prompt,
        "output_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if record.cached_tokens is not None:
        value["input_tokens_details"] = {"cached_tokens": record.cached_tokens, "cache_write_tokens": 0}
    value["output_tokens_details"] = {"reasoning_tokens": _reasoning_tokens(outcome, family)}
    return value


def _reasoning_tokens(outcome: TurnOutcome, family: Family) -> int:
    """How many sampled ids stand up to the end of the reasoning."""
    message = outcome.message
    ids = outcome.record.sampled_ids
    if not message.reasoning:
        return 0
    if not message.content and not message.tool_calls:
        return int(ids.size)
    wanted = message.reasoning.encode("utf-8", "replace")
    # Only the thinking is looked at, and only its beginning is searched: a marker and white space stand before it.
    opening = b"".join(map(family.token_bytes, ids[:_OPENING].tolist()))
    left = max(opening.find(wanted[:_OPENING]), 0) + len(wanted)
    for count, token in enumerate(ids.tolist(), 1):
        left -= len(family.token_bytes(token))
        if left <= 0:
            return count
    return int(ids.size)
