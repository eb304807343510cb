"""Finds the final answer in a reply: the last box, what follows "the answer is", or the last number.

Pure. Depends on the standard library.
"""

from __future__ import annotations

import re

__all__ = ["final_answer", "last_boxed"]

MAX_REPLY = 200_000
"""Characters from the end of a reply that are looked at."""
_BOXES = ("\\boxed", "\\fbox")
_SAID = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)\s*:?\s*(.+)|^\s*####\s*(.+)$", re.IGNORECASE | re.MULTILINE)
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?%?")


def final_answer(reply: str, *, boxed_only: bool = False) -> str | None:
    """The answer that a reply ends with; ``None`` when there is none.

    >>> final_answer(r"So \\boxed{\\frac{1}{2}} it is."), final_answer("I get 3, then 4.")
    ('\\\\frac{1}{2}', '4')
    """
    reply = reply[-MAX_REPLY:]
    boxed = last_boxed(reply)
    if boxed is not None or boxed_only:
        return boxed
    said = None
    for said in _SAID.finditer(reply):  # noqa: B007 - the last one is wanted
        pass
    if said is not None and (text := _sentence(said[1] or said[2])):
        return text
    numbers = _NUMBER.findall(reply)
    return numbers[-1].strip().rstrip(",") if numbers else None


def last_boxed(text: str) -> str | None:
    """Contents of the last ``\\boxed{...}`` with balanced braces; ``None`` without one."""
    at = max(text.rfind(name) for name in _BOXES)
    if at < 0:
        return None
    start = at + len("\\boxed" if text.startswith("\\boxed", at) else "\\fbox")
    while start < len(text) and text[start] == " ":
        start += 1
    if start >= len(text):
        return None
    if text[start] != "{":  # \boxed 5 is \boxed{5}
        return text[start]
    depth, escaped = 0, False
    for place in range(start, len(text)):
        mark = text[place]
        if escaped:
            escaped = False
        elif mark == "\\":
            escaped = True
        elif mark == "{":
            depth += 1
        elif mark == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : place].strip()
    return None


def _sentence(text: str) -> str:
    """Up to the end of the sentence, without quotes and emphasis around it."""
    text = re.split(r"(?:\.\s|\.$|\n)", text.strip(), maxsplit=1)[0]
    return text.strip().strip("*`\"'").strip()
