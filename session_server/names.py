"""Names that must be unique and need not be secret: request ids, call ids, reply ids.

A process-wide random prefix and a counter: a fresh random number for each costs ten times as much. Depends
on nothing.
"""

from __future__ import annotations

import itertools
import secrets

__all__ = ["fresh"]

_PREFIX = secrets.token_hex(8)
_COUNT = itertools.count(1)


def fresh() -> str:
    """A name that no other call, process or restart gives.

    >>> fresh() != fresh()
    True
    """
    return f"{_PREFIX}{next(_COUNT):06x}"
