"""Server-sent events as bytes. Depends on orjson."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

__all__ = ["DONE", "data_event", "named_event"]

DONE = b"data: [DONE]\n\n"
"""What ends a stream of Chat Completions."""


def data_event(value: Mapping[str, object]) -> bytes:
    """An event without a name.

    >>> data_event({"a": 1})
    b'data: {"a":1}\\n\\n'
    """
    return b"data: " + orjson.dumps(value) + b"\n\n"


def named_event(value: Mapping[str, object]) -> bytes:
    """An event whose name is the ``type`` of its data.

    >>> named_event({"type": "ping"})
    b'event: ping\\ndata: {"type":"ping"}\\n\\n'
    """
    return f"event: {value['type']}\ndata: ".encode() + orjson.dumps(value) + b"\n\n"
