"""What an engine said, in error texts: short, however much it sent and however deep it lies. Pure.

Replies are quoted in errors, logs and answers to harnesses, so nothing in them is written out whole.
"""

from __future__ import annotations

import reprlib

__all__ = ["said", "said_text"]

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxstring = _SHORT.maxother = 120


def said(value: object) -> str:
    """``value`` of a parsed reply as Python writes it, shortened.

    >>> said({"type": "stop"}), len(said("x" * 1_000_000))
    ("{'type': 'stop'}", 120)
    """
    return _SHORT.repr(value)


def said_text(value: object, most: int) -> str:
    """The first ``most`` characters of a text; of anything else what ``said`` makes of it.

    >>> said_text("0.5.23", 3), said_text(7, 3)
    ('0.5', '7')
    """
    return value[:most] if isinstance(value, str) else said(value)
