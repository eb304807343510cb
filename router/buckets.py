"""The body of ``update_weights_from_tensor``: JSON around base64, made while it is sent.

A bucket is tens of megabytes: encoded whole it would hold the event loop for a good part of a second and be copied
three times on its way. Depends on aiohttp.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterator

import aiohttp
import orjson
from aiohttp.abc import AbstractStreamWriter

__all__ = ["BucketBody"]

_STEP_BYTES = 3 << 16
"""Encoded at once, within a tenth of a millisecond or so; a multiple of 3, so that base64 pads only the end."""
_TAIL = b"]}"


class BucketBody(aiohttp.Payload):
    """One bucket for ``ranks`` tensor-parallel ranks, each of which reads an item of its own. Keeps no encoded copy."""

    _value: bytes
    _autoclose = True

    def __init__(self, payload: bytes, *, load_format: str | None, ranks: int) -> None:
        super().__init__(payload, content_type="application/json")
        rest = orjson.dumps({"load_format": load_format, "flush_cache": False})
        self._head = rest[:-1] + b',"serialized_named_tensors":['
        self._ranks = ranks
        item = 2 + 4 * -(-len(payload) // 3)
        self._size = len(self._head) + ranks * item + max(0, ranks - 1) + len(_TAIL)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The whole body as text, for whoever prints it."""
        return b"".join(self._pieces()).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """See ``aiohttp.Payload``; waits whenever the engine is slower than this."""
        for piece in self._pieces():
            await writer.write(piece)

    def _pieces(self) -> Iterator[bytes]:
        view = memoryview(self._value)
        yield self._head
        for rank in range(self._ranks):
            yield b',"' if rank else b'"'
            for at in range(0, len(view), _STEP_BYTES):
                yield b2a_base64(view[at : at + _STEP_BYTES], newline=False)
            yield b'"'
        yield _TAIL
