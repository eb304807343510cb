"""Typed access to fields of a request body; every refusal names the field. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from tollway.errors import BadRequest

__all__ = ["boolean", "integer", "number", "refuse_set", "string", "strings"]

Json = Mapping[str, object]


def boolean(raw: Json, name: str) -> bool | None:
    """An optional true or false."""
    value = raw.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise BadRequest(f"{name} must be true or false, got {type(value).__name__}", param=name)


def string(raw: Json, name: str) -> str | None:
    """An optional text."""
    value = raw.get(name)
    if value is None or isinstance(value, str):
        return value
    raise BadRequest(f"{name} must be text, got {type(value).__name__}", param=name)


def integer(raw: Json, name: str, low: int, high: int) -> int | None:
    """An optional whole number in [low, high]."""
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadRequest(f"{name} must be a whole number from {low} to {high}, got {value!r}", param=name)
    return value


def number(raw: Json, name: str, low: float, high: float, *, above: bool = False) -> float | None:
    """An optional number in [low, high], or in (low, high] with ``above``."""
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadRequest(f"{name} must be a number, got {value!r}", param=name)
    if not low <= value <= high or (above and value == low):
        raise BadRequest(f"{name} must be in {'(' if above else '['}{low}, {high}], got {value!r}", param=name)
    return float(value)


def strings(raw: Json, name: str, most: int) -> tuple[str, ...]:
    """An optional text or list of texts; empty texts are refused."""
    value = raw.get(name)
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > most or not all(isinstance(x, str) and x for x in items):
        raise BadRequest(f"{name} must be a text or at most {most} non-empty texts", param=name)
    return tuple(items)


def refuse_set(raw: Json, names: Iterable[str]) -> None:
    """Refuse fields that are set to something; null, zero, false and empty are no wish."""
    for name in names:
        if raw.get(name):
            raise BadRequest(f"{name} is not supported here; leave it out", param=name)
