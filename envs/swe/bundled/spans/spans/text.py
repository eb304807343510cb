"""Spans as people write them: ``1-3,7``."""

from __future__ import annotations

from spans.core import SpanSet


def parse_spans(text: str) -> SpanSet:
    """Read single numbers and inclusive ranges, separated by commas."""
    found = SpanSet()
    for part in text.split(","):
        word = part.strip()
        if not word:
            continue
        first, dash, last = word.partition("-")
        if not first.strip().isdigit() or (dash and not last.strip().isdigit()):
            raise ValueError(f"not a number or a range: {word!r}")
        start = int(first)
        stop = int(last) if dash else start
        if stop < start:
            start, stop = stop, start
        found.add(start, stop + 1)
    return found


def format_spans(spans: SpanSet) -> str:
    """Write a set so that ``parse_spans`` reads it back."""
    words = []
    for start, stop in spans:
        if stop - start == 1:
            words.append(str(start))
        elif stop - start == 2:
            words.append(f"{start},{start + 1}")
        else:
            words.append(f"{start}-{stop - 1}")
    return ",".join(words)
