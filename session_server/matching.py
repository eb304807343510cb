"""When two messages are the same: canonical form and chained digests.

Ignores what harnesses are known to change and keeps what changes the meaning. Tool arguments compare as
parsed JSON (1, 1.0 and true differ, duplicate keys and invalid JSON compare as raw text). Reasoning is
compared when it was sent and accepted when it is absent. Pure functions; depends on the kernel and xxhash.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import xxhash

from tollway.messages import Message, ToolSpec

__all__ = ["EMPTY", "canonical_arguments", "chain", "message_key", "reply_keys", "tools_digest"]

Digest = bytes
EMPTY: Digest = b"\x00" * 16
"""Digest of a conversation without messages and tools."""
_SEPARATOR = b"\x1f"


def message_key(message: Message, *, call_ids: bool = True) -> bytes:
    """Canonical bytes of one message.

    >>> one = Message(role="user", content="hi")
    >>> message_key(one) == message_key(Message(role="user", content="hi", name=None))
    True
    """
    return reply_keys(message, call_ids=call_ids)[0]


def reply_keys(message: Message, *, call_ids: bool = True) -> tuple[bytes, bytes]:
    """Canonical bytes of one message, as it is and as a harness sends it that drops reasoning."""
    parts = [message.role.encode(), _text(message.content)]
    if message.name:
        parts.append(b"n" + _text(message.name))
    if message.tool_call_id and call_ids:
        parts.append(b"i" + _text(message.tool_call_id))
    thought = len(parts)
    for call in message.tool_calls:
        call_id = _text(call.id) if call_ids else b""
        parts.append(b"c" + _SEPARATOR.join((call_id, _text(call.name), _text(canonical_arguments(call.arguments)))))
    # Lengths keep "ab" + "c" and "a" + "bc" apart.
    framed = [len(part).to_bytes(8, "little") + part for part in parts]
    bare = b"".join(framed)
    if not message.reasoning:
        return bare, bare
    part = b"r" + _text(message.reasoning)
    framed.insert(thought, len(part).to_bytes(8, "little") + part)
    return b"".join(framed), bare


def chain(before: Digest, key: bytes) -> Digest:
    """[16 bytes] digest of a conversation extended by one message."""
    return xxhash.xxh3_128_digest(before + key)


def tools_digest(tools: Sequence[ToolSpec]) -> Digest:
    """Digest of a tool list. Order, names, texts, schemas and ``strict`` all count."""
    if not tools:
        return EMPTY
    hasher = xxhash.xxh3_128()
    for tool in tools:
        for part in (tool.name, tool.description, tool.parameters, str(tool.strict)):
            data = _text(part)
            hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.digest()


def canonical_arguments(raw: str) -> str:
    """Comparable form of JSON arguments; what is no clean JSON object or value stays raw.

    >>> canonical_arguments('{"b": 1, "a": false}') == canonical_arguments('{"a":false,"b":1}')
    True
    >>> canonical_arguments('{"a": 1}') == canonical_arguments('{"a": 1.0}')
    False
    """
    if not raw or raw == "{}":
        return "{}"
    try:
        value = json.loads(raw, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return "raw:" + raw


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key")
    return value


def _no_constant(name: str) -> object:
    raise ValueError(name)


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
