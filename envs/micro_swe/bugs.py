"""The eight kinds of bugs: how the buggy function reads, and what it should return.

Each kind writes one function over the project's table and constants, with inputs that show the bug and
other, hidden inputs that only right behaviour answers. The reference answers are computed here, never in a
sandbox. Pure functions of a random generator; depends on nothing but ``names``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tollway.envs.micro_swe.names import Pool

__all__ = ["KINDS", "Bug", "Case", "Material"]

Case = tuple[tuple[object, ...], object]
"""Arguments and the right answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What a project gives its buggy function to work with."""

    pool: Pool
    table_name: str
    table: Mapping[str, int]
    function: str
    factor: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One buggy function."""

    rule: str
    """The edit that repairs it."""
    lines: tuple[str, ...]
    visible: tuple[Case, ...]
    """At least one of them raises the kind's error."""
    hidden: tuple[Case, ...]


def _key_error(material: Material, rng: random.Random) -> Bug:
    table, factor = material.table, material.factor
    known, other = rng.sample(sorted(table), 2)
    missing, unknown = rng.sample([word for word in material.pool.words if word not in table], 2)
    return Bug(
        rule="default",
        lines=(
            f"def {material.function}(key):",
            f"    found = {material.table_name}[key]",
            f"    return found * {factor}",
        ),
        visible=(((known,), table[known] * factor), ((missing,), 0)),
        hidden=(((other,), table[other] * factor), ((unknown,), 0), ((missing + "s",), 0)),
    )


def _type_error(material: Material, rng: random.Random) -> Bug:
    first, second, third = rng.sample(sorted(material.table), 3)

    def answer(key: str) -> str:
        return key + str(material.table[key] + material.offset)

    return Bug(
        rule="cast",
        lines=(
            f"def {material.function}(key):",
            f"    tail = {material.table_name}[key] + {material.offset}",
            "    return key + tail",
        ),
        visible=(((first,), answer(first)),),
        hidden=(((second,), answer(second)), ((third,), answer(third))),
    )


def _zero_division(material: Material, rng: random.Random) -> Bug:
    def answer(values: list[int]) -> object:
        return sum(values) * material.factor / len(values) if values else 0

    visible, hidden = _numbers(material, rng, 2), _numbers(material, rng, 4)
    return Bug(
        rule="guard",
        lines=(
            f"def {material.function}(values):",
            f"    total = sum(values) * {material.factor}",
            "    size = len(values)",
            "    return total / size",
        ),
        visible=(((visible,), answer(visible)), (([],), 0)),
        hidden=(((hidden,), answer(hidden)), (([],), 0), (([material.offset],), answer([material.offset]))),
    )


def _index_error(material: Material, rng: random.Random) -> Bug:
    def answer(values: list[int]) -> int:
        return material.offset + sum(value * (at + material.factor) for at, value in enumerate(values))

    visible, hidden = _numbers(material, rng, 2), _numbers(material, rng, 3)
    return Bug(
        rule="bound",
        lines=(
            f"def {material.function}(values):",
            f"    total = {material.offset}",
            "    for at in range(len(values) + 1):",
            f"        total += values[at] * (at + {material.factor})",
            "    return total",
        ),
        visible=(((visible,), answer(visible)),),
        hidden=(((hidden,), answer(hidden)), (([],), material.offset)),
    )


def _name_error(material: Material, rng: random.Random) -> Bug:
    def answer(value: int) -> int:
        return value * material.factor + material.offset

    result = rng.choice(material.pool.variables)
    return Bug(
        rule="name",
        lines=(
            f"def {material.function}(value):",
            f"    {result} = value * {material.factor} + {material.offset}",
            f"    return {result}_",
        ),
        visible=(((2,), answer(2)),),
        hidden=(((7,), answer(7)), ((-3,), answer(-3))),
    )


def _value_error(material: Material, rng: random.Random) -> Bug:
    def case(number: int, text: str) -> Case:
        return (text,), number + material.offset

    small, big, huge = rng.randrange(10, 99), rng.randrange(1000, 9999), rng.randrange(10**6, 10**7)
    other = rng.randrange(10000, 99999)
    return Bug(
        rule="parse",
        lines=(
            f"def {material.function}(text):",
            "    number = int(text)",
            f"    return number + {material.offset}",
        ),
        visible=(case(small, str(small)), case(big, f"{big:,}")),
        hidden=(case(huge, f"{huge:,}"), case(other, f"{other:,}"), case(small + 1, str(small + 1))),
    )


def _attribute_error(material: Material, rng: random.Random) -> Bug:
    def answer(values: list[int]) -> list[int]:
        return [value + material.offset for value in values]

    visible, hidden = _numbers(material, rng, 2), _numbers(material, rng, 3)
    return Bug(
        rule="method",
        lines=(
            f"def {material.function}(values):",
            "    found = []",
            "    for value in values:",
            f"        found.push(value + {material.offset})",
            "    return found",
        ),
        visible=(((visible,), answer(visible)),),
        hidden=(((hidden,), answer(hidden)), (([],), [])),
    )


def _assertion_error(material: Material, rng: random.Random) -> Bug:
    def case(low: int, high: int) -> Case:
        return (low, high), (high - low) * material.factor

    low = rng.randrange(1, 20)
    return Bug(
        rule="sign",
        lines=(
            f"def {material.function}(low, high):",
            "    width = low - high",
            "    assert width >= 0",
            f"    return width * {material.factor}",
        ),
        visible=(case(low, low + material.offset),),
        hidden=(case(low, low + 50), case(low + 3, low + 3), case(-low, low)),
    )


def _numbers(material: Material, rng: random.Random, count: int) -> list[int]:
    return [rng.choice(material.pool.constants) for _ in range(count)]


KINDS: dict[str, Callable[[Material, random.Random], Bug]] = {
    "KeyError": _key_error,
    "TypeError": _type_error,
    "ZeroDivisionError": _zero_division,
    "IndexError": _index_error,
    "NameError": _name_error,
    "ValueError": _value_error,
    "AttributeError": _attribute_error,
    "AssertionError": _assertion_error,
}
"""By the exception that the bug raises."""
