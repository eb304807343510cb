"""The shipped questions, made from a seed: arithmetic, algebra, geometry, counting, with exact answers.

Every answer is computed here, by a way of its own, so the set needs no download and no file. Pure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from tollway.envs.json_lines import Line, read_json_lines
from tollway.errors import ConfigError

__all__ = ["Problem", "read_problems", "shipped"]

SHIPPED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question and the answer that is compared with."""

    id: str
    question: str
    answer: str


def shipped(split: str) -> tuple[Problem, ...]:
    """The shipped questions of a split; "train" and "heldout" share none.

    >>> len(shipped("train")), set(p.question for p in shipped("train")) & set(p.question for p in shipped("heldout"))
    (50, set())
    """
    made: list[Problem] = []
    seen = {problem.question for problem in shipped("train")} if split != "train" else set()
    rng = random.Random(f"tollway maths {split}")
    at = 0
    while len(made) < SHIPPED:
        question, answer = _MAKERS[at % len(_MAKERS)](rng)
        at += 1
        if question not in seen:
            seen.add(question)
            made.append(Problem(id=f"{split}-{len(made):02d}", question=question, answer=answer))
    return tuple(made)


def read_problems(path: Path) -> tuple[Problem, ...]:
    """Questions from JSON lines. Raises ``ConfigError`` that names the line."""
    found = [_problem(line) for line in read_json_lines(path, "env.maths.data", "questions")]
    ids = [problem.id for problem in found]
    if len(set(ids)) < len(ids):
        twice = next(each for each in ids if ids.count(each) > 1)
        raise ConfigError(f"env.maths.data: {path} has two questions with the id {twice!r}")
    return tuple(found)


def _problem(line: Line) -> Problem:
    question, answer = (_text(line, key) for key in ("question", "answer"))
    return Problem(id=str(line.raw.get("id", line.number)), question=question, answer=answer)


def _text(line: Line, key: str) -> str:
    value = line.raw.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{line.where}: {key!r} is {value!r}, want text")
    return value


def _fraction(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _sum_of_fractions(rng: random.Random) -> tuple[str, str]:
    a, b = (Fraction(rng.randint(1, 9), rng.randint(2, 12)) for _ in range(2))
    return f"What is ${_fraction(a)} + {_fraction(b)}$ in lowest terms?", _fraction(a + b)


def _linear(rng: random.Random) -> tuple[str, str]:
    a, x, b = rng.randint(2, 9), Fraction(rng.randint(-12, 12), rng.randint(1, 4)), rng.randint(-20, 20)
    c = a * x + b
    return f"Solve for $x$: ${a}x {b:+d} = {_fraction(c)}$.", f"x = {_fraction(x)}"


def _roots(rng: random.Random) -> tuple[str, str]:
    p, q = rng.randint(-9, -1), rng.randint(1, 9)
    b, c = -(p + q), p * q
    middle = f"{b:+d}x " if b else ""
    return f"Find all roots of $x^2 {middle}{c:+d} = 0$.", f"\\{{{p}, {q}\\}}"


def _percentage(rng: random.Random) -> tuple[str, str]:
    whole = rng.choice((20, 25, 40, 50, 80, 200))
    part = rng.randint(1, whole - 1)
    percent = Fraction(100 * part, whole)
    shown = str(int(percent)) if percent.denominator == 1 else str(float(percent))
    return f"{part} is what percentage of {whole}?", f"{shown}\\%"


def _hypotenuse(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(1, 12), rng.randint(1, 12)
    square = a * a + b * b
    out = next(k for k in range(math.isqrt(square), 0, -1) if square % (k * k) == 0)
    inner = square // (out * out)
    answer = str(out) if inner == 1 else ("" if out == 1 else str(out)) + f"\\sqrt{{{inner}}}"
    return f"A right triangle has legs of {a} cm and {b} cm. How long is its hypotenuse?", f"{answer}\\text{{ cm}}"


def _choose(rng: random.Random) -> tuple[str, str]:
    n = rng.randint(5, 14)
    k = rng.randint(2, n - 2)
    return f"In how many ways can {k} people be chosen from {n}?", str(math.comb(n, k))


def _interval(rng: random.Random) -> tuple[str, str]:
    low = rng.randint(-9, 5)
    width, a = rng.randint(1, 9), rng.randint(2, 5)
    question = f"For which $x$ is ${a * low} \\le {a}x < {a * (low + width)}$? Answer with an interval."
    return question, f"[{low}, {low + width})"


def _expand(rng: random.Random) -> tuple[str, str]:
    a, b, c = rng.randint(2, 5), rng.choice((-3, -2, -1, 1, 2, 3)), rng.choice((-4, -1, 1, 4, 5))
    x, rest = a * c + b, b * c
    middle = {0: "", 1: " + x", -1: " - x"}.get(x, f" {x:+d}x")
    return f"Expand $({a}x {b:+d})(x {c:+d})$.", f"{a}x^2{middle} {rest:+d}"


def _circle(rng: random.Random) -> tuple[str, str]:
    r = rng.randint(2, 30)
    return f"What is the area of a circle of radius {r}?", f"{r * r}\\pi"


def _mean(rng: random.Random) -> tuple[str, str]:
    values = [rng.randint(1, 40) for _ in range(4)]
    return f"What is the mean of {', '.join(map(str, values))}?", _fraction(Fraction(sum(values), 4))


_MAKERS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    _sum_of_fractions,
    _linear,
    _roots,
    _percentage,
    _hypotenuse,
    _choose,
    _interval,
    _expand,
    _circle,
    _mean,
)
