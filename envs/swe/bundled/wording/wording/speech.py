"""Numbers and lists as one would say them."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))
_IRREGULAR = {"child": "children", "person": "people", "mouse": "mice", "foot": "feet"}


def plural(count: int, noun: str) -> str:
    """``2, "box"`` becomes ``2 boxes``."""
    if abs(count) == 1:
        return f"{count} {noun}"
    if noun in _IRREGULAR:
        return f"{count} {_IRREGULAR[noun]}"
    if noun.endswith("y") and noun[-2:-1] not in tuple("aeiou"):
        return f"{count} {noun[:-1]}ies"
    if noun.endswith(("s", "x", "z", "ch", "sh")):
        return f"{count} {noun}es"
    return f"{count} {noun}s"


def join(words: Sequence[str], *, last: str = "and", most: int = 0) -> str:
    """A list in words; beyond ``most`` the rest is counted."""
    shown = list(words)
    if 0 < most < len(shown):
        rest = len(shown) - most
        shown = [*shown[:most], plural(rest, "other")]
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} {last} {shown[-1]}"


def duration(seconds: int, *, parts: int = 2) -> str:
    """The largest ``parts`` units; what is smaller is cut off."""
    if seconds < 0:
        return "-" + duration(-seconds, parts=parts)
    found: list[tuple[int, str]] = []
    rest = seconds
    for name, size in _UNITS:
        count, rest = divmod(rest, size)
        if count or (found and len(found) < parts):
            found.append((count, name))
        if len(found) == parts:
            break
    said = [plural(count, name) for count, name in found if count]
    return join(said) or "0 seconds"
