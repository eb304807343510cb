"""Orders, and what of them can be delivered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stockroom.stock import Stock


@dataclass(frozen=True)
class Line:
    """So many of one kind."""

    item: str
    count: int


@dataclass(frozen=True)
class Shortage:
    """What could not be delivered."""

    customer: str
    item: str
    missing: int


@dataclass
class Order:
    """What a customer wants."""

    customer: str
    lines: list[Line] = field(default_factory=list)
    whole: bool = False
    """Deliver everything or nothing."""
    urgent: bool = False

    def counts(self) -> dict[str, int]:
        """How many of each kind, lines added up."""
        found: dict[str, int] = {}
        for line in self.lines:
            found[line.item] = found.get(line.item, 0) + line.count
        return found


def fulfil(orders: Iterable[Order], stock: Stock, day: int = 0) -> tuple[dict[str, dict[str, int]], list[Shortage]]:
    """Serve urgent orders first, then in the order given; returns deliveries by customer, and what is missing."""
    delivered: dict[str, dict[str, int]] = {}
    missing: list[Shortage] = []
    for order in sorted(orders, key=lambda one: not one.urgent):
        wanted = order.counts()
        short = {item: count - stock.count(item, day) for item, count in wanted.items()}
        short = {item: lack for item, lack in short.items() if lack > 0}
        missing += [Shortage(order.customer, item, lack) for item, lack in short.items()]
        if short and order.whole:
            continue
        for item, count in wanted.items():
            possible = count - short.get(item, 0)
            if possible:
                stock.take(item, possible, day)
                served = delivered.setdefault(order.customer, {})
                served[item] = served.get(item, 0) + possible
    return delivered, missing
