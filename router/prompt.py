"""The ids of a prompt as they travel: pieces of decimal text, joined once into a request body.

A conversation keeps the pieces of its earlier turns, so a turn writes only the ids that are new. Pure
values; depends on numpy, orjson and the kernel's records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import orjson

from tollway.errors import InvalidRecord
from tollway.records import Ids

__all__ = ["Prompt", "ids_json"]


def ids_json(ids: Ids) -> bytes:
    """Decimal ids joined by commas; empty for no ids.

    >>> import numpy as np
    >>> ids_json(np.array([7, 8], np.int32))
    b'7,8'
    """
    return orjson.dumps(np.ascontiguousarray(ids), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids as JSON text in pieces. Extending one shares the pieces that it has.

    >>> prompt = Prompt.of(np.array([1, 2], np.int32)).extended(b"30,4", 2)
    >>> prompt.json(), prompt.size
    (b'1,2,30,4', 4)
    """

    chunks: tuple[bytes, ...]
    """Each holds decimal ids joined by commas, without one at either end, and is never empty."""
    size: int
    """Number of ids in all chunks."""

    def __post_init__(self) -> None:
        if not all(self.chunks) or self.size < len(self.chunks):
            raise InvalidRecord(f"a prompt of {self.size} ids in {len(self.chunks)} chunks, none of which may be empty")

    @classmethod
    def of(cls, ids: Ids) -> Prompt:
        """The prompt of these ids, in one chunk."""
        return cls((ids_json(ids),) if ids.size else (), int(ids.size))

    def extended(self, chunk: bytes, count: int) -> Prompt:
        """This prompt and ``count`` more ids, already as text. No ids: the prompt itself."""
        return Prompt((*self.chunks, chunk), self.size + count) if count else self

    def json(self) -> bytes:
        """All ids joined by commas, without brackets."""
        return b",".join(self.chunks)

    def ids(self) -> Ids:
        """[size] the ids as numbers: reads all of them again, which no turn needs."""
        return np.array(orjson.loads(b"[" + self.json() + b"]"), np.int32)
