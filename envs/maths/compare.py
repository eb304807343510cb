"""Decides whether two answers are the same mathematics. Runs in the checking process only.

Builds sympy objects from our own tree, node by node; no text of a model ever reaches sympy's parsers, which
evaluate Python. Sizes are bounded before anything is computed; what is left is bounded by the process's own
limits. Depends on ``expressions`` and sympy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from collections.abc import Sequence as Many

import sympy

from tollway.envs.maths.expressions import Expression, Number, Operation, Sequence, Symbol, Unreadable, read

__all__ = ["same_answer"]

MAX_BITS = 40_000
"""Largest number that a power, factorial or binomial may become."""
MAX_PARTS = 64
"""Most elements of a set that are compared."""
_UNIT = re.compile(
    r"\s*(?:\\(?:text|mathrm|textrm|mbox)\s*\{\s*([A-Za-z .]+?)\s*\}"
    r"|(?<=[\d\s}])([A-Za-z]{2,}(?: [A-Za-z]+)*)|(\^?\s*\{?\\circ\}?|°))"
    r"\s*(?:\^\s*\{?\s*([23])\s*\}?)?\s*\.?\s*$"
)
_CURRENCY = re.compile(r"^\s*(?:\\\$|\$|€|£)\s*(?=[\d.])")
_WORDS = frozenset({"and", "or", "pi", "sqrt", "sin", "cos", "tan", "infinity", "oo", "ln", "log", "exp", "inf"})


def same_answer(answer: str, reference: str, *, tolerance: float) -> tuple[bool, str]:
    """Whether the two are equal, and why.

    >>> same_answer(r"\\frac{2}{4}", "0.5", tolerance=0.0)
    (True, 'equal')
    """
    if _plain(answer) == _plain(reference) and _plain(answer):
        return True, "the same text"
    answer, unit = _without_unit(answer)
    reference, wanted_unit = _without_unit(reference)
    if unit and wanted_unit and unit != wanted_unit:
        return False, f"unit {unit!r}, want {wanted_unit!r}"
    try:
        wanted = read(reference)
    except Unreadable as error:
        return False, f"the reference is compared as text: {error}"
    try:
        found = read(answer)
    except Unreadable as error:
        return False, f"unreadable: {error}"
    try:
        equal = _Comparison(tolerance).same(found, wanted)
    except Unreadable as error:
        return False, str(error)
    except MemoryError:
        raise
    except Exception as error:
        # sympy says in many ways that something has no value; it is then not the reference.
        return False, f"no comparison: {type(error).__name__}"
    return equal, "equal" if equal else "different"


def _plain(text: str) -> str:
    """Text answers (names, choices) compare without case, spaces, marks and wrappers."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf|textrm)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", text.strip())  # a choice such as (B)
    return re.sub(r"[\s$]|\\[,;! ]|\\left|\\right|\.$", "", text).casefold()


def _without_unit(text: str) -> tuple[str, str]:
    """The text without a currency before or a unit after it, and that unit's name."""
    if _CURRENCY.match(text) and text.count("$") - text.count("\\$") != 2:
        return _CURRENCY.sub("", text), "$"
    text = text.strip().strip("$").strip() if text.strip().startswith("$") else text
    found = _UNIT.search(text)
    if found is None or not text[: found.start()].strip():
        return text, ""
    name = (found[1] or found[2] or "degree").casefold().strip(" .")
    if name in _WORDS or found.start() == 0:
        return text, ""
    name = name if len(name) <= 2 else name.removesuffix("s")
    return text[: found.start()], name + (f"^{found[4]}" if found[4] else "")


class _Comparison:
    """Equality of trees, within ``tolerance`` for what was written as a decimal."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance

    def same(self, found: Expression, wanted: Expression) -> bool:
        found, wanted = _spread(found), _spread(wanted)
        if not _is_relation(wanted):
            found = _right_side(found)
        elif not _is_relation(found):
            wanted = _right_side(wanted)
        if isinstance(found, Sequence) or isinstance(wanted, Sequence):
            return self._sequences(found, wanted)
        if _is_relation(found) or _is_relation(wanted):
            return self._relations(found, wanted)
        percents = [isinstance(each, Operation) and each.name == "%" for each in (found, wanted)]
        if self._values(found, wanted):
            return True
        if percents[0] != percents[1]:  # 50 for 50 %
            return self._values(_bare(found), _bare(wanted))
        return False

    def _sequences(self, found: Expression, wanted: Expression) -> bool:
        if not isinstance(found, Sequence):
            found = Sequence("list", (found,))
        if not isinstance(wanted, Sequence):
            wanted = Sequence("list", (wanted,))
        loose = {"list", "set"}
        if found.kind != wanted.kind and not {found.kind, wanted.kind} <= loose:
            return False
        if len(found.parts) != len(wanted.parts) or len(wanted.parts) > MAX_PARTS:
            return False
        if wanted.kind not in loose | {"union"}:
            return all(map(self.same, found.parts, wanted.parts))
        left = list(found.parts)
        for part in wanted.parts:
            at = next((at for at, each in enumerate(left) if self.same(each, part)), None)
            if at is None:
                return False
            del left[at]
        return True

    def _relations(self, found: Expression, wanted: Expression) -> bool:
        if not (isinstance(found, Operation) and isinstance(wanted, Operation)):
            return False
        turned = {">": "<", ">=": "<="}
        names, sides = [], []
        for each in (found, wanted):
            parts = each.parts[::-1] if each.name in turned else each.parts
            names.append(turned.get(each.name, each.name))
            sides.append(_value(parts[0]) - _value(parts[1]))
        if names[0] != names[1] or sides[1] == 0:
            return False
        ratio = sympy.simplify(sides[0] / sides[1])
        if not ratio.is_number or ratio == 0 or not ratio.is_finite:
            return False
        return bool(ratio.is_positive) if names[0].startswith("<") else True

    def _values(self, found: Expression, wanted: Expression) -> bool:
        if isinstance(found, Number) and isinstance(wanted, Number):
            return found.value == wanted.value or self._near(found, wanted, float(found.value), float(wanted.value))
        left, right = _value(found), _value(wanted)
        if left == right:
            return True
        difference = left - right
        if difference.free_symbols:
            return bool(sympy.expand(difference) == 0 or sympy.simplify(difference) == 0)
        if not (left.is_finite is not False and right.is_finite is not False):
            return False
        size = abs(complex(sympy.N(difference, 30)))
        scale = max(1e-30, abs(complex(sympy.N(right, 30))))
        # So near that only an exact look can tell.
        if size <= 1e-9 * scale and (sympy.simplify(difference) == 0 or difference.equals(0)):
            return True
        return self._near(found, wanted, complex(sympy.N(left, 17)), complex(sympy.N(right, 17)))

    def _near(self, found: Expression, wanted: Expression, left: complex, right: complex) -> bool:
        if not (_decimal(found) or _decimal(wanted)):
            return False
        return abs(left - right) <= self._tolerance * max(abs(right), 1e-12)


def _is_relation(tree: Expression) -> bool:
    return isinstance(tree, Operation) and tree.name in ("=", "<", ">", "<=", ">=", "!=")


def _right_side(tree: Expression) -> Expression:
    """``x = 5`` said for 5; ``f(x) = ...`` likewise."""
    if isinstance(tree, Operation) and tree.name == "=":
        return _spread(tree.parts[1])
    return tree


def _spread(tree: Expression) -> Expression:
    """A plus-minus at the top is two values."""
    if isinstance(tree, Operation) and tree.name == "pm":
        return Sequence("list", (Operation("+", tree.parts), Operation("-", tree.parts)))
    return tree


def _bare(tree: Expression) -> Expression:
    return tree.parts[0] if isinstance(tree, Operation) and tree.name == "%" else tree


def _decimal(tree: Expression) -> bool:
    if isinstance(tree, Number):
        return tree.decimal
    return isinstance(tree, (Operation, Sequence)) and any(map(_decimal, tree.parts))


def _value(tree: Expression) -> sympy.Expr:
    """The sympy object of one value. Raises ``Unreadable`` for what is none or is too large."""
    if isinstance(tree, Number):
        return sympy.Rational(tree.value.numerator, tree.value.denominator)
    if isinstance(tree, Symbol):
        constants = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "oo": sympy.oo}
        return constants.get(tree.name) or sympy.Symbol(tree.name)
    if isinstance(tree, Operation):
        make = _MAKERS.get(tree.name)
        if make is not None:
            return make([_value(part) for part in tree.parts])
    raise Unreadable("a set or relation inside of a value")


def _power(parts: Many[sympy.Expr]) -> sympy.Expr:
    base, exponent = parts
    if base.is_number and exponent.is_number:
        size = abs(complex(sympy.N(exponent, 15)))
        if not size < MAX_BITS or size * max(1.0, _bits(base)) > MAX_BITS:
            raise Unreadable("a power too large to compare")
    elif exponent.is_number and abs(complex(sympy.N(exponent, 15))) > 64:
        raise Unreadable("an exponent too large to compare")
    return base**exponent


def _bits(value: sympy.Expr) -> float:
    if value.is_Rational:
        return float(max(int(value.p).bit_length(), int(value.q).bit_length()))
    return math.log2(abs(complex(sympy.N(value, 15))) + 2)


def _small_integer(value: sympy.Expr, most: int) -> sympy.Expr:
    if not (value.is_Integer and 0 <= int(value) <= most):
        raise Unreadable(f"an argument that is no integer from 0 to {most}")
    return value


_MAKERS: dict[str, Callable[[list[sympy.Expr]], sympy.Expr]] = {
    "+": lambda parts: parts[0] + parts[1],
    "-": lambda parts: parts[0] - parts[1],
    "*": lambda parts: parts[0] * parts[1],
    "/": lambda parts: parts[0] / parts[1],
    "frac": lambda parts: parts[0] / parts[1],
    "neg": lambda parts: -parts[0],
    "^": _power,
    "root": lambda parts: _power([parts[0], 1 / parts[1]]),
    "!": lambda parts: sympy.factorial(_small_integer(parts[0], 1000)),
    "%": lambda parts: parts[0] / 100,
    "abs": lambda parts: sympy.Abs(parts[0]),
    "binom": lambda parts: sympy.binomial(_small_integer(parts[0], 2000), _small_integer(parts[1], 2000)),
    "exp": lambda parts: _power([sympy.E, parts[0]]),
    "ln": lambda parts: sympy.log(parts[0]),
    "log": lambda parts: sympy.log(parts[0], parts[1] if len(parts) > 1 else 10),
    "arcsin": lambda parts: sympy.asin(parts[0]),
    "arccos": lambda parts: sympy.acos(parts[0]),
    "arctan": lambda parts: sympy.atan(parts[0]),
    "floor": lambda parts: sympy.floor(parts[0]),
    "ceil": lambda parts: sympy.ceiling(parts[0]),
    "max": lambda parts: sympy.Max(*parts),
    "min": lambda parts: sympy.Min(*parts),
    "gcd": lambda parts: sympy.gcd(*parts[:2]),
    "lcm": lambda parts: sympy.lcm(*parts[:2]),
    "sin": lambda parts: sympy.sin(parts[0]),
    "cos": lambda parts: sympy.cos(parts[0]),
    "tan": lambda parts: sympy.tan(parts[0]),
    "cot": lambda parts: sympy.cot(parts[0]),
    "sec": lambda parts: sympy.sec(parts[0]),
    "csc": lambda parts: sympy.csc(parts[0]),
    "sinh": lambda parts: sympy.sinh(parts[0]),
    "cosh": lambda parts: sympy.cosh(parts[0]),
    "tanh": lambda parts: sympy.tanh(parts[0]),
}
