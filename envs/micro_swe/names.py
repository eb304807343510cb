"""Names and constants of generated projects; the train and held-out pools share none.

Names are short and all of one shape, so that nothing but the tool output tells the kinds of bugs apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["POOLS", "Pool", "Split"]

Split = Literal["train", "heldout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What one split draws from."""

    modules: tuple[str, ...]
    functions: tuple[str, ...]
    helpers: tuple[str, ...]
    """Names of the functions that are not buggy."""
    tables: tuple[str, ...]
    words: tuple[str, ...]
    variables: tuple[str, ...]
    constants: tuple[int, ...]


POOLS: dict[Split, Pool] = {
    "train": Pool(
        modules=("calc", "shop", "bank", "ship", "mail", "news", "food", "game", "farm", "taxi", "chat", "poll"),
        functions=("price", "score", "total", "level", "quote", "count", "value", "stock"),
        helpers=("clip", "pick", "fold", "trim", "grow", "tidy", "fuse", "span"),
        tables=("RATES", "COSTS", "SEATS", "UNITS", "POINTS", "FEES"),
        words=("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "jay", "kid", "owl", "pig"),
        variables=("result", "amount", "answer", "output"),
        constants=(2, 3, 4, 5, 6, 7, 8, 9),
    ),
    "heldout": Pool(
        modules=("rent", "trip", "lamp", "wine", "yarn", "zoom"),
        functions=("grade", "margin", "weight", "charge", "length"),
        helpers=("bend", "cut", "drop", "hold", "join", "peel"),
        tables=("TIERS", "LOADS", "BANDS", "TOLLS"),
        words=("ivy", "oak", "elm", "ash", "fir", "yew", "bay", "box", "fig", "nut"),
        variables=("outcome", "figure", "product", "reading"),
        constants=(11, 12, 13, 14, 16, 17, 18, 19),
    ),
}
