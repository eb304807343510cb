"""A seeded endless order over a finite number of tasks: every epoch has each task once, in an order of its own.

Pure. Depends on the standard library.
"""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache

__all__ = ["place"]


def place(seed: int, size: int, index: int) -> int:
    """Which of ``size`` tasks stands at ``index`` of the endless order.

    >>> sorted(place(7, 5, index) for index in range(5, 10))
    [0, 1, 2, 3, 4]
    """
    epoch, at = divmod(index, size)
    return _epoch(seed, size, epoch)[at]


@lru_cache(maxsize=8)
def _epoch(seed: int, size: int, epoch: int) -> tuple[int, ...]:
    # A hash, so that neighbouring seeds and epochs share nothing.
    digest = hashlib.blake2b(f"{seed}/{size}/{epoch}".encode(), digest_size=8).digest()
    order = list(range(size))
    random.Random(int.from_bytes(digest, "little")).shuffle(order)
    return tuple(order)
