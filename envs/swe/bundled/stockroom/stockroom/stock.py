"""What lies on the shelves: batches of goods that run out on some day."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Batch:
    """So many of one kind, good until the end of a day; ``None`` for ever."""

    item: str
    count: int
    until: int | None = None


class Stock:
    """Batches, the one that runs out first is used first."""

    def __init__(self) -> None:
        self._batches: list[Batch] = []

    def put(self, item: str, count: int, until: int | None = None) -> None:
        """Lay a batch down; it joins one of the same day."""
        if count < 1:
            raise ValueError(f"want at least one, got {count}")
        for batch in self._batches:
            if batch.item == item and batch.until == until:
                batch.count += count
                return
        self._batches.append(Batch(item, count, until))
        self._batches.sort(key=lambda batch: (batch.until is None, batch.until or 0))

    def count(self, item: str, day: int = 0) -> int:
        """How many are there and still good on ``day``."""
        return sum(batch.count for batch in self._good(item, day))

    def take(self, item: str, count: int, day: int = 0) -> list[tuple[int | None, int]]:
        """Take goods and say from which days how many; all or nothing."""
        if count > self.count(item, day):
            raise LookupError(f"only {self.count(item, day)} of {item}")
        taken = []
        left = count
        for batch in self._good(item, day):
            if not left:
                break
            part = min(left, batch.count)
            batch.count -= part
            left -= part
            taken.append((batch.until, part))
        self._batches = [batch for batch in self._batches if batch.count]
        return taken

    def spoiled(self, day: int) -> dict[str, int]:
        """What is no good any more on ``day``; it is thrown away."""
        lost: dict[str, int] = {}
        kept = []
        for batch in self._batches:
            if batch.until is not None and batch.until < day:
                lost[batch.item] = lost.get(batch.item, 0) + batch.count
            else:
                kept.append(batch)
        self._batches = kept
        return lost

    def items(self) -> list[str]:
        """Kinds of goods, sorted."""
        return sorted({batch.item for batch in self._batches})

    def _good(self, item: str, day: int) -> list[Batch]:
        return [one for one in self._batches if one.item == item and (one.until is None or one.until >= day)]
