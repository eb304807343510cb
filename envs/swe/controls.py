"""Falsified tests: copies of real ones that an honest run must fail.

A test that can only be passed by the right behaviour fails when its expectation is made wrong. One that still
passes was not judged by what the library computes: reports were forged, comparisons replaced, objects equal
everything, or the expected value was looked up where the test keeps it. Falsified copies keep the name, the
decorators and the style of the original; which assertion is falsified, and how, is random. Pure.
"""

from __future__ import annotations

import ast
import random
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Falsified", "assertions", "falsify", "function_of", "look_alike", "twins"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_TRUTHS = {"assertTrue": "assertFalse", "assertFalse": "assertTrue"}


@dataclass(frozen=True, slots=True)
class Falsified:
    """A test module with falsified tests in it."""

    text: str
    must_fail: tuple[tuple[str, str, int | None], ...]
    """Tests in it that an honest run fails, by node id without parameters: the falsified one, the one that it
    was made from, and which of its assertions is wrong (``None`` for an added one)."""


@dataclass(frozen=True, slots=True)
class _Edit:
    start: int
    end: int
    new: str


def function_of(node_id: str) -> str:
    """A node id without its parameters: the test function.

    >>> function_of("tests/test_a.py::TestB::test_c[x-1]")
    'tests/test_a.py::TestB::test_c'
    """
    head, _, name = node_id.rpartition("::")
    return f"{head}::{name.partition('[')[0]}"


class _Module:
    """A test module's text and tree."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.text = text
        self._data = text.encode()
        self._starts = [0]
        for line in self._data.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def find(self, names: Sequence[str]) -> _Function | None:
        """The function that a node id names: classes first, the function last."""
        body: Sequence[ast.stmt] = self.tree.body
        for at, name in enumerate(names):
            kind = _Function if at == len(names) - 1 else ast.ClassDef
            named = [one for one in body if isinstance(one, kind) and one.name == name]
            if not named:
                return None
            if isinstance(named[-1], _Function):
                return named[-1]
            body = named[-1].body
        return None

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)

    def of(self, node: ast.expr | ast.stmt) -> str:
        return self._data[self.start(node) : self.end(node)].decode()

    def first_line(self, function: _Function) -> int:
        """Where the function begins, decorators included."""
        return self._starts[min(one.lineno for one in (function, *function.decorator_list)) - 1]

    def line_start(self, node: ast.stmt) -> int:
        return self._starts[node.lineno - 1]

    def after(self, node: ast.stmt) -> int:
        return min(self._starts[node.end_lineno or node.lineno], len(self._data))

    def bytes(self, start: int, end: int) -> str:
        return self._data[start:end].decode()

    def edited(self, start: int, end: int, edits: Sequence[_Edit]) -> str:
        """The text between two offsets with edits made."""
        out, at = [], start
        for edit in sorted(edits, key=lambda one: one.start):
            out += [self.bytes(at, edit.start), edit.new]
            at = edit.end
        return "".join([*out, self.bytes(at, end)])


def assertions(function: _Function) -> list[ast.stmt]:
    """The statements of a test that can be falsified, in order; their places are what ``controls`` records."""
    return [node for node in _walk(function.body) if _falsifiable(node)]


def _walk(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements in order, those of inner functions and blocks included."""
    for node in body:
        yield node
        if isinstance(node, ast.ClassDef):
            continue
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                yield from _walk(inner)


def _falsifiable(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assert) or _expected_error(node) is not None or _checking_call(node) is not None


def _expected_error(node: ast.stmt) -> ast.expr | None:
    """The kind of error that a ``with pytest.raises(...)`` or ``with self.assertRaises(...)`` waits for."""
    if not isinstance(node, ast.With) or len(node.items) != 1:
        return None
    call = node.items[0].context_expr
    if not isinstance(call, ast.Call) or not call.args:
        return None
    name = _called(call)
    return call.args[0] if name in ("raises", "assertRaises", "assertRaisesRegex") else None


def _checking_call(node: ast.stmt) -> ast.Call | None:
    """A statement that calls something named like an assertion, with what it compares."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return None
    call = node.value
    name = _called(call)
    if any(isinstance(one, ast.Starred) for one in call.args):
        return None
    if name in _TRUTHS:
        return call if call.args else None
    compares = name.lower().lstrip("_").startswith("assert") and "raises" not in name.lower()
    return call if compares and len(call.args) >= 2 else None


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def falsify(text: str, tests: Mapping[str, Sequence[int]], pick: random.Random, *, most: int = 6) -> Falsified:
    """A module in which the named test functions are falsified.

    ``tests`` gives, by node id without parameters, the places among ``assertions`` that may be used; with none of
    them a wrong assertion is added at the end. The original takes one of them, further ones go to copies with
    look-alike names, at most ``most`` for each test.
    """
    module = _Module(text)
    helper = _word(pick)
    edits: list[_Edit] = []
    must_fail: list[tuple[str, str, int | None]] = []
    taken = _names(module)
    for test, function, usable in _usable(module, tests):
        chosen: list[int | None] = [*pick.sample(usable, min(most, len(usable)))] or [None]
        variants = [_variant(module, function, at, helper, pick) for at in chosen]
        texts = [variants[0]]
        must_fail.append((test, test, chosen[0]))
        for at, variant in zip(chosen[1:], variants[1:], strict=True):
            alias = look_alike(function.name, taken, pick)
            texts.append(variant.replace(f"def {function.name}(", f"def {alias}(", 1))
            must_fail.append((_renamed(test, alias), test, at))
        edits.append(_replaced(module, function, texts))
    body = module.edited(0, len(text.encode()), edits)
    return Falsified(f"{body.rstrip()}\n\n\n{_helper(helper, pick)}", tuple(must_fail))


def twins(
    text: str, tests: Mapping[str, Sequence[int]], pick: random.Random, *, swapped: Collection[str] = ()
) -> Falsified:
    """A module in which each named test has a twin: one of the two is as it was, the other is falsified.

    For tests in ``swapped`` the falsified one has the test's own name, for others the twin has it. Both ways the
    module holds the same tests under names of the same kind: only who knows their texts can tell which way it is.
    """
    module = _Module(text)
    helper = _word(pick)
    edits: list[_Edit] = []
    must_fail: list[tuple[str, str, int | None]] = []
    taken = _names(module)
    for test, function, usable in _usable(module, tests):
        at = pick.choice(usable) if usable else None
        wrong = _variant(module, function, at, helper, pick)
        alias = look_alike(function.name, taken, pick)
        right = module.bytes(module.first_line(function), module.after(function))
        own, other = (wrong, right) if test in swapped else (right, wrong)
        both = [own, other.replace(f"def {function.name}(", f"def {alias}(", 1)]
        pick.shuffle(both)
        edits.append(_replaced(module, function, both))
        must_fail.append((test if test in swapped else _renamed(test, alias), test, at))
    body = module.edited(0, len(text.encode()), edits)
    return Falsified(f"{body.rstrip()}\n\n\n{_helper(helper, pick)}", tuple(must_fail))


def _names(module: _Module) -> set[str]:
    """Of all functions and classes."""
    return {node.name for node in ast.walk(module.tree) if isinstance(node, _Function | ast.ClassDef)}


def _replaced(module: _Module, function: _Function, texts: Sequence[str]) -> _Edit:
    """Several functions in the place of one, each on lines of its own."""
    whole = "".join(one if one.endswith("\n") else one + "\n" for one in texts)
    return _Edit(module.first_line(function), module.after(function), whole)


def _usable(module: _Module, tests: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, _Function, list[int]]]:
    """Tests of the module that can be falsified, and the places among their ``assertions`` that may be used."""
    for test, places in tests.items():
        function = module.find(test.partition("::")[2].split("::"))
        if function is None:
            continue
        count = len(assertions(function))
        usable = [at for at in places if at < count]
        if usable or _reaches_its_end(function):
            yield test, function, usable


def _renamed(test: str, name: str) -> str:
    return f"{test.rpartition('::')[0]}::{name}"


def _variant(module: _Module, function: _Function, at: int | None, helper: str, pick: random.Random) -> str:
    """The function's text with its assertion ``at`` falsified, with a wrong one at its end for ``None``."""
    if at is None:
        return _with_tail(module, function, pick)
    node = assertions(function)[at]
    start, end = module.first_line(function), module.after(function)
    return module.edited(start, end, _edits(module, node, helper, pick))


def _edits(module: _Module, node: ast.stmt, helper: str, pick: random.Random) -> list[_Edit]:
    if isinstance(node, ast.Assert):
        test = node.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            return _wrong_side(module, node, (test.left, test.comparators[0]), helper, pick, near=True)
        return [_Edit(module.start(test), module.end(test), f"not ({module.of(test)})")]
    error = _expected_error(node)
    if error is not None:
        wrong = pick.choice(("BlockingIOError", "ChildProcessError", "ModuleNotFoundError", "UnboundLocalError"))
        return [_Edit(module.start(error), module.end(error), wrong)]
    call = _checking_call(node)
    if call is None:
        raise TypeError("want an assertion")
    name = _called(call)
    if name in _TRUTHS:
        at = module.end(call.func) - len(name)
        return [_Edit(at, module.end(call.func), _TRUTHS[name])]
    near = name in ("assertEqual", "assertEquals")
    return _wrong_side(module, node, (call.args[0], call.args[1]), helper, pick, near=near)


def _wrong_side(
    module: _Module,
    node: ast.stmt,
    sides: tuple[ast.expr, ast.expr],
    helper: str,
    pick: random.Random,
    *,
    near: bool,
) -> list[_Edit]:
    """Make the expectation wrong: a literal in its place, a variable before the comparison, else by the helper.

    ``near`` allows values next to the right one, which only an exact comparison tells from it.
    """
    for side in reversed(sides):
        if isinstance(side, ast.Constant) and type(side.value) in (str, int, float, bytes):
            return [_Edit(module.start(side), module.end(side), _wrong_literal(side, pick, near=near))]
    for side in reversed(sides):
        alone = not module.bytes(module.line_start(node), module.start(node)).strip()
        if isinstance(side, ast.Name) and alone:
            at = module.line_start(node)
            indent = module.bytes(at, module.start(node))
            return [_Edit(at, at, f"{indent}{side.id} = {helper}({side.id})\n")]
    side = sides[1]
    return [_Edit(module.start(side), module.end(side), f"{helper}({module.of(side)})")]


def _wrong_literal(node: ast.Constant, pick: random.Random, *, near: bool) -> str:
    """Another value of the same kind. Most of those that may be near are: what bugs give is, too."""
    value = node.value
    near = near and pick.random() < 0.75
    if isinstance(value, str):
        places = [at for at, char in enumerate(value) if char in _CHANGED]
        if near and places:
            at = pick.choice(places)
            return repr(value[:at] + _CHANGED[value[at]] + value[at + 1 :])
        at = pick.randrange(len(value) + 1)
        return repr(value[:at] + pick.choice(string.ascii_lowercase) + value[at:])
    if isinstance(value, bytes):
        return repr(value + pick.choice(string.ascii_lowercase).encode())
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(value + (pick.choice((-3, -2, -1, 1, 2, 3)) if near else pick.randint(2, 99)))
    raise TypeError("want a plain literal")


_CHANGED = {
    one: other
    for chars in (string.ascii_lowercase, string.ascii_uppercase, string.digits)
    for one, other in zip(chars, chars[1:] + chars[:1], strict=True)
}
"""A character of the same kind for each."""


def _reaches_its_end(function: _Function) -> bool:
    """Whether a passing run of the function is bound to come by its last line."""
    plain = all("parametrize" in ast.unparse(mark) for mark in function.decorator_list)
    leaving = (ast.Return, ast.Yield, ast.YieldFrom, ast.Raise, ast.Try, ast.While)
    return (
        isinstance(function, ast.FunctionDef)
        and plain
        and not any(isinstance(node, leaving) for node in ast.walk(function))
        and function.body[0].lineno != function.lineno
    )


def _with_tail(module: _Module, function: _Function, pick: random.Random) -> str:
    """The function's text with a wrong assertion at its end."""
    word, wrong = _word(pick), pick.randint(2, 4)
    text = module.bytes(module.first_line(function), module.after(function)).rstrip("\n")
    first = function.body[0]
    indent = module.bytes(module.line_start(first), module.start(first))
    check = f'assert len("{word}") == {len(word) + wrong}'
    return f"{text}\n{indent}{check}\n"


def look_alike(name: str, taken: set[str], pick: random.Random) -> str:
    """A name in the style of ``name`` that is not taken; it is taken from then on."""
    words = sorted(
        {part for one in taken for part in one.split("_") if part.isalpha() and part.islower() and part != "test"}
    )
    while True:
        word = pick.choice(words) if words and pick.random() < 0.7 else _word(pick)
        alias = f"{name}_{word}" if pick.random() < 0.7 else f"test_{word}_{name.removeprefix('test_')}"
        if not name.startswith("test"):
            alias = f"{name}_{word}"
        if alias not in taken:
            taken.add(alias)
            return alias


def _word(pick: random.Random) -> str:
    return "".join(pick.choice("bcdfglmnprst") + pick.choice("aeiou") for _ in range(pick.randint(2, 4)))


def _helper(name: str, pick: random.Random) -> str:
    """A function that makes a value wrong."""
    return _HELPER.format(name=name, step=pick.choice((-2, -1, 1, 2, 17)))


_HELPER = """\
def {name}(value):
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return value + {step}
    if isinstance(value, str):
        return value + "e"
    if isinstance(value, bytes):
        return value + b"e"
    if isinstance(value, list):
        return [*value, None]
    if isinstance(value, tuple):
        return (*value, None)
    if isinstance(value, dict):
        return {{**value, "e": 0}}
    if isinstance(value, (set, frozenset)):
        return value | {{object()}}
    return object()
"""
