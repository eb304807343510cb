"""Large base64 values, cut out of a reply before the rest is parsed as JSON.

A reply with expert choices is megabytes of base64 in one string, and a JSON parser reads, checks and copies
each of its characters. Here the value's bytes are found, replaced by a short mark, and decoded in place.

The cut cannot change what the reply means. Outside strings a double quote opens or closes a string, and
inside a string every double quote has a backslash before it. So the bytes ``"name":"`` with no backslash
among them can only be a key, its colon and the opening of its value, and the next double quote ends that
value unless a backslash stands before it. Which key of the reply it was shows after parsing: only where the
plain parser would have put the value does the mark appear. Everything else (a backslash inside the value, a
key met twice or in another place) is parsed plainly. Depends on numpy, orjson and pybase64.
"""

from __future__ import annotations

import binascii
import secrets
from collections.abc import Sequence
from typing import cast

import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray

from tollway.errors import UpstreamError

__all__ = ["Blob", "decode_blob", "load_reply", "narrow_signed", "narrow_unsigned"]

Blob = str | memoryview
"""A base64 value: as parsed, or as bytes of the body."""

_SMALL = 16_384
"""Bodies below this are parsed plainly."""
_MARK = secrets.token_hex(12).encode()
"""What stands for a value that was cut; no engine can know it."""


def load_reply(body: bytes, names: Sequence[str] = ()) -> object:
    """Parse a reply; the values of ``names`` in its ``meta_info`` may come back as views of ``body``.

    Raises ``orjson.JSONDecodeError`` as the plain parser does.
    """
    if not names or len(body) < _SMALL:
        return orjson.loads(body)
    cuts = _cuts(body, names)
    if not cuts:
        return orjson.loads(body)
    parts, at = [], 0
    for number, (_, start, end) in enumerate(cuts):
        parts += [body[at:start], _MARK, b"%d" % number]
        at = end
    parts.append(body[at:])
    try:
        value = orjson.loads(b"".join(parts))
    except orjson.JSONDecodeError:
        return orjson.loads(body)  # so that the error names the place in what was sent
    meta = value.get("meta_info") if isinstance(value, dict) else None
    view = memoryview(body)
    for number, (name, start, end) in enumerate(cuts):
        if not isinstance(meta, dict) or meta.get(name) != f"{_MARK.decode()}{number}":
            return orjson.loads(body)
        meta[name] = view[start:end]
    return cast(object, value)


def decode_blob(what: str, value: object) -> bytes:
    """The bytes of a base64 value. Raises ``UpstreamError`` when it is none."""
    if not isinstance(value, (str, memoryview)):
        raise UpstreamError(f"engine sent {what} of type {type(value).__name__}, want base64")
    try:
        return pybase64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise UpstreamError(f"{what} is not base64 ({len(value)} characters)") from None


def narrow_unsigned(data: bytes | memoryview, what: str) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """[n] little-endian int32 numbers from 0 to 65535 in the smallest type that holds them all."""
    wide = np.frombuffer(data, "<u4")  # a negative number is far above every limit here
    most = int(wide.max()) if wide.size else 0
    if most < 256:
        return wide.astype(np.uint8)
    if most > 65535:
        raise UpstreamError(f"{what} is {int(wide.view(np.int32)[wide.argmax()])}, want 0 to 65535")
    return wide.astype(np.uint16)


def narrow_signed(data: bytes | memoryview, what: str) -> NDArray[np.int16] | NDArray[np.int32]:
    """[n] little-endian int32 numbers, none below -1, in the smaller type that holds them all."""
    wide = np.frombuffer(data, "<i4")
    if wide.size and wide.min() < -1:
        raise UpstreamError(f"{what} holds {int(wide.min())}, want -1 or a position")
    return wide.astype(np.int16) if not wide.size or wide.max() < 2**15 else wide.astype(np.int32)


def _cuts(body: bytes, names: Sequence[str]) -> list[tuple[str, int, int]]:
    """(name, start, end) of each value, in the order of the body; values with a backslash are left alone."""
    found = []
    for name in names:
        key = b'"%b":"' % name.encode()
        at = body.find(key)
        if at < 1 or body[at - 1] not in b"{, \t\r\n":
            continue
        start = at + len(key)
        end = body.find(b'"', start)
        if end < 0 or body.find(b"\\", start, end) >= 0:
            continue
        found.append((name, start, end))
    return sorted(found, key=lambda cut: cut[1])
