"""Spans and sets of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Span(NamedTuple):
    """The numbers from ``start`` up to, not including, ``stop``."""

    start: int
    stop: int

    def touches(self, other: Span) -> bool:
        """Whether the two overlap or stand side by side."""
        return self.start <= other.stop and other.start <= self.stop

    def overlap(self, other: Span) -> Span | None:
        """The part that both have."""
        start = max(self.start, other.start)
        stop = min(self.stop, other.stop)
        if start >= stop:
            return None
        return Span(start, stop)


class SpanSet:
    """A set of numbers, kept as few spans as possible."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._spans: list[Span] = []
        for start, stop in spans:
            self.add(start, stop)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def __len__(self) -> int:
        return sum(span.stop - span.start for span in self._spans)

    def __bool__(self) -> bool:
        return bool(self._spans)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpanSet) and self._spans == other._spans

    def __hash__(self) -> int:
        return hash(tuple(self._spans))

    def __contains__(self, number: int) -> bool:
        low, high = 0, len(self._spans)
        while low < high:
            middle = (low + high) // 2
            span = self._spans[middle]
            if number < span.start:
                high = middle
            elif number >= span.stop:
                low = middle + 1
            else:
                return True
        return False

    def add(self, start: int, stop: int) -> None:
        """Put in the numbers from ``start`` up to ``stop``."""
        if start > stop:
            raise ValueError(f"a span cannot end before it starts: {start}, {stop}")
        if start == stop:
            return
        new = Span(start, stop)
        kept = []
        for span in self._spans:
            if span.touches(new):
                new = Span(min(span.start, new.start), max(span.stop, new.stop))
            else:
                kept.append(span)
        kept.append(new)
        self._spans = sorted(kept)

    def remove(self, start: int, stop: int) -> None:
        """Take out the numbers from ``start`` up to ``stop``; those that are not there do not matter."""
        if start >= stop:
            return
        kept = []
        for span in self._spans:
            if span.stop <= start or span.start >= stop:
                kept.append(span)
                continue
            if span.start < start:
                kept.append(Span(span.start, start))
            if span.stop > stop:
                kept.append(Span(stop, span.stop))
        self._spans = kept

    def union(self, other: SpanSet) -> SpanSet:
        """Numbers in either."""
        return SpanSet([*self._spans, *other._spans])

    def intersection(self, other: SpanSet) -> SpanSet:
        """Numbers in both."""
        found = SpanSet()
        mine, theirs = 0, 0
        while mine < len(self._spans) and theirs < len(other._spans):
            one, two = self._spans[mine], other._spans[theirs]
            common = one.overlap(two)
            if common is not None:
                found.add(*common)
            if one.stop < two.stop:
                mine += 1
            else:
                theirs += 1
        return found

    def gaps(self, start: int, stop: int) -> SpanSet:
        """Numbers from ``start`` up to ``stop`` that are not in the set."""
        missing = SpanSet([(start, stop)])
        for span in self._spans:
            missing.remove(span.start, span.stop)
        return missing

    def nearest(self, number: int) -> int:
        """The number of the set that is closest; of two equally close ones the smaller."""
        if not self._spans:
            raise ValueError("the set is empty")
        best = None
        for span in self._spans:
            candidate = min(max(number, span.start), span.stop - 1)
            if best is None or abs(candidate - number) < abs(best - number):
                best = candidate
        return best if best is not None else number
