"""Text that a client carries for us in a field whose content only the server reads.

Providers encrypt such fields; here they are plain text in base64 behind a mark of ours. Nothing secret goes
in: the client has seen the conversation. What comes back changed is a changed conversation, which starts a
branch like any other edit. Pure functions; depends on xxhash.
"""

from __future__ import annotations

import base64

import xxhash

__all__ = ["seal", "stamp", "unseal"]

_MARK = "tw1."
_STAMP = "tws1."


def seal(text: str) -> str:
    """Opaque form of a text.

    >>> unseal(seal("why"))
    'why'
    """
    return _MARK + base64.b64encode(text.encode("utf-8", "replace")).decode()


def unseal(value: object) -> str | None:
    """The text of ``seal``; ``None`` for anything that is not ours."""
    if not isinstance(value, str) or not value.startswith(_MARK):
        return None
    try:
        return base64.b64decode(value[len(_MARK) :], validate=True).decode()
    except ValueError:  # not base64, not ASCII, or not UTF-8 inside
        return None


def stamp(text: str) -> str:
    """A short mark of a text that travels in clear beside it, where a dialect wants a signature."""
    return _STAMP + xxhash.xxh3_128_hexdigest(text.encode("utf-8", "replace"))
