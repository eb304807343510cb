"""What an order costs, in whole cents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Discount:
    """Per cent off when at least so many of one kind are bought."""

    item: str
    least: int
    percent: int

    def __post_init__(self) -> None:
        if not 0 <= self.percent <= 100:
            raise ValueError(f"percent must lie between 0 and 100, got {self.percent}")


def total(counts: Mapping[str, int], prices: Mapping[str, int], discounts: Sequence[Discount] = ()) -> int:
    """The sum, with the best discount for each kind; halves of a cent are rounded up."""
    amount = 0
    for item, count in counts.items():
        if item not in prices:
            raise KeyError(item)
        fitting = [one.percent for one in discounts if one.item == item and count >= one.least]
        percent = max(fitting, default=0)
        full = count * prices[item]
        amount += (full * (100 - percent) + 50) // 100
    return amount
