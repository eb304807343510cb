"""Names in one style and another."""

from __future__ import annotations

_SMALL = {"a", "an", "and", "of", "the", "to", "in"}


def words_of(name: str) -> list[str]:
    """The words of a name in any style, as they are written."""
    words: list[str] = []
    current = ""
    for at, char in enumerate(name):
        if not char.isalnum():
            if current:
                words.append(current)
            current = ""
            continue
        following = name[at + 1] if at + 1 < len(name) else ""
        starts = char.isupper() and current and (not current[-1].isupper() or following.islower())
        if starts:
            words.append(current)
            current = ""
        current += char
    if current:
        words.append(current)
    return words


def snake(name: str) -> str:
    """``HTTPServer`` becomes ``http_server``."""
    return "_".join(word.lower() for word in words_of(name))


def camel(name: str, *, first: bool = True) -> str:
    """``http_server`` becomes ``HttpServer``, or ``httpServer`` without ``first``."""
    words = [word.lower() for word in words_of(name)]
    found = [word.capitalize() for word in words]
    if found and not first:
        found[0] = words[0]
    return "".join(found)


def title(text: str) -> str:
    """Headline style: small words stay small, except at either end."""
    words = text.split()
    found = []
    for at, word in enumerate(words):
        inner = 0 < at < len(words) - 1
        if inner and word.lower() in _SMALL:
            found.append(word.lower())
        else:
            found.append(word[:1].upper() + word[1:])
    return " ".join(found)
