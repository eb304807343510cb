"""Reads what people and models write for mathematical answers: LaTeX and plain notation, into a small tree.

Nothing is evaluated here and nothing is imported by name: text becomes numbers, symbols and a fixed list of
operations, or is refused. Length, nesting and the size of numbers are bounded. Pure; depends on the standard
library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["Expression", "Number", "Operation", "Sequence", "Symbol", "Unreadable", "read"]

MAX_LENGTH = 2000
MAX_TOKENS = 400
MAX_DEPTH = 40
MAX_DIGITS = 400


class Unreadable(ValueError):
    """The text is no expression that this reader knows."""


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value; ``decimal`` when it was written with a decimal point."""

    value: Fraction
    decimal: bool = False


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable or one of the constants pi, e, i, oo."""

    name: str


@dataclass(frozen=True, slots=True)
class Operation:
    """``name`` is one of the reader's own operations, never text of a model."""

    name: str
    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Sequence:
    """Several values: ``kind`` is "list", "set", "union" or the two brackets of a tuple or interval."""

    kind: str
    parts: tuple[Expression, ...]


Expression = Number | Symbol | Operation | Sequence

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?![\d.]))?|\.\d+)|(?P<command>\\[a-zA-Z]+|\\[{}|])"
    r"|(?P<word>[A-Za-z]+)|(?P<mark><=|>=|!=|\*\*|[-+*/^_=<>(){}\[\],;|!%&]))"
)
_SPACES = re.compile(r"\\(?:left|right|displaystyle|limits|quad|qquad|[!,;: ])(?![a-zA-Z])|~")
_AND = re.compile(r"\\(?:text|mathrm)\{\s*(?:and|or)\s*\}|\s(?:and|or)\s")
_SAME = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\cdot": "*", "\\times": "*", "\\ast": "*",
    "\\div": "/",
    "**": "^", "\\le": "<=", "\\leq": "<=", "\\ge": ">=", "\\geq": ">=", "\\ne": "!=", "\\neq": "!=", "\\lt": "<",
    "\\gt": ">", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\lvert": "|", "\\rvert": "|", "\\vert": "|", "\\|": "|",
    "\\lbrack": "[", "\\rbrack": "]", ";": ",",
}  # fmt: skip
_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "×": "*", "·": "*", "÷": "/", "≤": "<=", "≥": ">=", "≠": "!=", "π": "\\pi ",
        "∞": "\\infty ",
        "√": "\\sqrt ", "∪": "\\cup ", "±": "\\pm ", "²": "^2", "³": "^3", "½": "\\frac{1}{2}", "θ": "\\theta ",
    }
)  # fmt: skip
_CONSTANTS = {"\\pi": "pi", "pi": "pi", "\\infty": "oo", "infinity": "oo", "inf": "oo", "oo": "oo", "e": "e", "i": "i"}
_FUNCTIONS = (
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "ln", "log", "exp",
    "sqrt", "abs", "min", "max", "gcd", "lcm", "floor", "ceil",
)  # fmt: skip
_GREEK = (
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu", "xi",
    "rho", "sigma", "tau", "phi", "varphi", "chi", "psi", "omega",
)  # fmt: skip
_RELATIONS = ("=", "<", ">", "<=", ">=", "!=")
_OPEN = {"(": (")", "]"), "[": ("]", ")"), "\\{": ("\\}",), "{": ("}",)}


def read(text: str) -> Expression:
    """The tree of ``text``. Raises ``Unreadable``.

    >>> read("0.5")
    Number(value=Fraction(1, 2), decimal=True)
    """
    return _Reader(_tokens(text)).whole()


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_LENGTH:
        raise Unreadable(f"{len(text)} characters, at most {MAX_LENGTH} are read")
    text = _SPACES.sub(" ", text.translate(_UNICODE)).replace("$", " ").replace("\\%", "%")
    text = _AND.sub(",", text)
    text = re.sub(r"(?<=\d)\{,\}(?=\d)|(?<=\d)\\,(?=\d{3})", "", text)
    text = re.sub(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])", lambda found: found[0].replace(",", ""), text)
    text = re.sub(r"^\s*(-?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)\s*$", r"\1(\2+\3/\4)", text)
    tokens, at = [], 0
    text = text.strip()
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise Unreadable(f"{text[at : at + 20]!r} is no mathematics")
        at = found.end()
        token = found[0].strip()
        tokens.append(_SAME.get(token, token))
        if len(tokens) > MAX_TOKENS:
            raise Unreadable(f"more than {MAX_TOKENS} signs")
    if not tokens:
        raise Unreadable("nothing is there")
    return tokens


class _Reader:
    """Recursive descent; every level costs one of ``MAX_DEPTH``."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at, self._depth, self._bars = tokens, 0, 0, 0

    def whole(self) -> Expression:
        parts = self._listed()
        if self._at < len(self._tokens):
            raise Unreadable(f"cannot read on at {self._tokens[self._at]!r}")
        return parts[0] if len(parts) == 1 else Sequence("list", tuple(parts))

    # -- pieces ------------------------------------------------------------------------------------

    @property
    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        sign = self._next
        self._at += 1
        return sign

    def _want(self, *tokens: str) -> str:
        if self._next not in tokens or not self._next:
            raise Unreadable(f"{self._next or 'the end'!r} where {' or '.join(tokens)} is wanted")
        return self._take()

    def _listed(self) -> list[Expression]:
        parts = [self._relation()]
        while self._next == ",":
            self._take()
            parts.append(self._relation())
        return parts

    def _relation(self) -> Expression:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable(f"nested deeper than {MAX_DEPTH}")
        left = self._union()
        if self._next == "\\in":  # x in a set: the set is the answer
            self._take()
            left = self._union()
        while self._next in _RELATIONS:
            name = self._take()
            left = Operation(name, (left, self._union()))
        self._depth -= 1
        return left

    def _union(self) -> Expression:
        parts = [self._sum()]
        while self._next == "\\cup":
            self._take()
            parts.append(self._sum())
        return parts[0] if len(parts) == 1 else Sequence("union", tuple(parts))

    def _sum(self) -> Expression:
        left: Expression | None = None
        if self._next in ("\\pm", "\\mp"):
            self._take()
            left = Operation("pm", (Number(Fraction(0)), self._product()))
        left = left if left is not None else self._product()
        while self._next in ("+", "-", "\\pm", "\\mp"):
            name = self._take()
            right = self._product()
            left = Operation({"+": "+", "-": "-"}.get(name, "pm"), (left, right))
        return left

    def _product(self) -> Expression:
        left = self._signed()
        while True:
            if self._next in ("*", "/"):
                name = self._take()
                left = Operation(name, (left, self._signed()))
            elif self._starts_factor():
                right = self._power()
                mixed = (
                    isinstance(left, Number) and left.value.denominator == 1 and not left.decimal
                    and isinstance(right, Operation) and right.name == "frac"
                    and all(isinstance(part, Number) for part in right.parts)
                )  # fmt: skip
                left = Operation("+" if mixed else "*", (left, right))
            else:
                return left

    def _starts_factor(self) -> bool:
        sign = self._next
        if sign == "|":
            return self._bars == 0
        if sign.startswith("\\"):
            return sign in ("\\frac", "\\sqrt", "\\binom", "\\{") or self._is_name(sign)
        return bool(sign) and (sign[0].isalnum() or sign[0] in ".([{")

    def _is_name(self, sign: str) -> bool:
        return sign in _CONSTANTS or sign[1:] in _FUNCTIONS or sign[1:] in _GREEK

    def _signed(self) -> Expression:
        if self._next in ("-", "+"):
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise Unreadable(f"nested deeper than {MAX_DEPTH}")
            negative = self._take() == "-"
            inner = self._signed()
            self._depth -= 1
            return Operation("neg", (inner,)) if negative else inner
        return self._power()

    def _power(self) -> Expression:
        base = self._atom()
        while self._next in ("^", "!", "%"):
            name = self._take()
            if name == "^":
                if self._next == "\\circ":
                    self._take()  # degrees
                    continue
                base = Operation("^", (base, self._script()))
            else:
                base = Operation(name, (base,))
        return base

    def _script(self) -> Expression:
        """An exponent or argument: a group, a signed number, one sign otherwise. ``2^3^2`` is ``2^(3^2)``."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable(f"nested deeper than {MAX_DEPTH}")
        inner = self._signed()
        self._depth -= 1
        return inner

    def _atom(self) -> Expression:
        sign = self._take()
        if not sign:
            raise Unreadable("the text ends too early")
        if sign[0].isdigit() or sign[0] == ".":
            return _number(sign)
        if sign in _OPEN:
            return self._group(sign)
        if sign == "|":
            self._bars += 1
            inner = self._relation()
            self._want("|")
            self._bars -= 1
            return Operation("abs", (inner,))
        if sign in ("\\frac", "\\binom"):
            top, bottom = self._argument(), self._argument()
            return Operation("frac" if sign == "\\frac" else "binom", (top, bottom))
        if sign == "\\sqrt":
            return self._root()
        return self._named(sign)

    def _group(self, opening: str) -> Expression:
        parts = self._listed()
        closing = self._want(*_OPEN[opening])
        if opening == "\\{" or (opening == "{" and len(parts) > 1):
            return Sequence("set", tuple(parts))
        if len(parts) == 1 and (opening, closing) in (("(", ")"), ("{", "}"), ("[", "]")):
            return parts[0]
        return Sequence(opening + closing, tuple(parts))

    def _root(self) -> Expression:
        index: Expression = Number(Fraction(2))
        if self._next == "[":
            self._take()
            index = self._relation()
            self._want("]")
        return Operation("root", (self._argument(), index))

    def _argument(self) -> Expression:
        """One braced group, or one sign as TeX takes it: ``\\frac12`` is a half."""
        sign = self._next
        if sign and sign[0].isdigit() and len(sign) > 1 and sign.isdigit():
            self._tokens[self._at] = sign[1:]
            return _number(sign[0])
        return self._atom()

    def _named(self, sign: str) -> Expression:
        name = sign.removeprefix("\\")
        if sign in _CONSTANTS:
            return Symbol(_CONSTANTS[sign])
        if name in _FUNCTIONS:
            return self._function(name)
        if sign.startswith("\\"):
            if name not in _GREEK:
                raise Unreadable(f"{sign} is unknown")
            return self._subscripted(name)
        if len(name) == 1:
            return self._subscripted(name)
        if len(name) > 3:
            raise Unreadable(f"{name!r} is a word")
        self._tokens[self._at - 1 : self._at] = list(name)  # xy is x times y
        self._at -= 1
        return self._product()

    def _function(self, name: str) -> Expression:
        base: Expression | None = None
        if self._next == "_" and name == "log":
            self._take()
            base = self._argument()
        power: Expression | None = None
        if self._next == "^":  # sin^2 x
            self._take()
            power = self._argument()
        if name == "sqrt":
            return Operation("root", (self._argument(), Number(Fraction(2))))
        inner = self._group(self._take()) if self._next in _OPEN else self._power()
        parts = inner.parts if isinstance(inner, Sequence) and name in ("min", "max", "gcd", "lcm") else (inner,)
        if base is not None:
            parts = (*parts, base)
        called = Operation(name, parts)
        return called if power is None else Operation("^", (called, power))

    def _subscripted(self, name: str) -> Expression:
        if self._next != "_":
            return Symbol(name)
        self._take()
        if self._next == "{":
            self._take()
            inner = self._take()
            self._want("}")
        else:
            inner = self._take()
        if not inner.isalnum():
            raise Unreadable(f"the subscript {inner!r} is no name")
        return Symbol(f"{name}_{inner}")


def _number(sign: str) -> Number:
    if len(sign) > MAX_DIGITS:
        raise Unreadable(f"a number of {len(sign)} digits, at most {MAX_DIGITS} are read")
    return Number(Fraction(sign), decimal="." in sign or "e" in sign.lower())
