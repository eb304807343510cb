"""Which weight versions a session and a request accept: from settings, headers and both together.

Headers, because they are the same in every dialect and every SDK can add them. Pure functions; depends on the
router's ``Wanted``.
"""

from __future__ import annotations

from collections.abc import Iterable

from tollway.errors import BadRequest
from tollway.router.targets import ANY, Wanted
from tollway.router.versions import narrowed
from tollway.session_server.session import Settings

__all__ = ["EXACT_HEADER", "MIN_HEADER", "requested", "session_want", "want_of"]

MIN_HEADER, EXACT_HEADER = b"x-tollway-min-version", b"x-tollway-exact-version"
_PREFIX = b"x-tollway-"
_DIGITS = 18
"""More than any version has, fewer than a 64-bit number."""


def session_want(settings: Settings) -> Wanted:
    """What the creator of a session fixed."""
    if settings.min_version is None and settings.exact_version is None:
        return ANY
    return Wanted(minimum=settings.min_version, exact=settings.exact_version)


def requested(headers: Iterable[tuple[bytes, bytes]]) -> Wanted:
    """What a request asks for by its headers. Raises ``BadRequest`` for what is no version."""
    found: dict[bytes, int] = {}
    for name, value in headers:
        if name.startswith(_PREFIX) and name in (MIN_HEADER, EXACT_HEADER):
            found[name] = _version(name, value)
    return Wanted(minimum=found.get(MIN_HEADER), exact=found.get(EXACT_HEADER)) if found else ANY


def want_of(settings: Settings, request: Wanted) -> Wanted:
    """What a request of a session wants: both wishes. Raises ``BadRequest`` when they exclude each other."""
    return narrowed(session_want(settings), request)


def _version(name: bytes, value: bytes) -> int:
    text = value.strip()
    if not text.isdigit() or len(text) > _DIGITS:
        shown = name.decode("ascii")
        got = value[:40].decode("latin-1")
        raise BadRequest(f"header {shown} must be a weight version, a whole number; got {got!r}", param=shown)
    return int(text)
