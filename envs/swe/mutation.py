"""One-statement mutations of Python source that leave everything else as it is formatted.

Sites are found in the syntax tree and changed in the text, by byte offsets. The same source gives the same
sites in the same order. Pure; knows nothing of tests or sandboxes.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["OPERATORS", "Mutant", "means_something_else", "mutants", "shuffled"]

OPERATORS = (
    "compare",
    "boolean",
    "arithmetic",
    "off-by-one",
    "wrong variable",
    "removed guard",
    "swapped arguments",
    "deleted statement",
)
_COMPARE: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "+"),
}
_BOOLEAN: dict[type[ast.boolop], tuple[str, str]] = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed file."""

    path: str
    operator: str
    function: str
    line: int
    text: str


class _Text:
    """Source with positions of syntax nodes as byte offsets."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self._starts = [0]
        for line in self.data.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)

    def of(self, node: ast.expr | ast.stmt) -> bytes:
        return self.data[self.start(node) : self.end(node)]

    def splice(self, start: int, end: int, new: bytes) -> str:
        return (self.data[:start] + new + self.data[end:]).decode()

    def without_lines(self, node: ast.stmt) -> str | None:
        """The text without the lines of a statement that has them for itself."""
        first, last = self._starts[node.lineno - 1], self._starts[node.end_lineno or node.lineno]
        alone = (
            not self.data[first : self.start(node)].strip()
            and not self.data[self.end(node) : last].split(b"#")[0].strip()
        )
        return self.splice(first, last, b"") if alone else None


def mutants(path: str, text: str, seed: int) -> list[Mutant]:
    """Every mutation of a file; ``seed`` decides among variants at one place."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    if "\r" in text or "\f" in text:
        return []  # line numbers of the tree would not be those of the text
    source = _Text(text)
    found = []
    for function, name in _functions(tree, ""):
        for operator, line, new in _sites(function, source, random.Random(f"{seed}/{path}/{name}")):
            if new is not None and new != text:
                found.append(Mutant(path, operator, name, line, new))
    return found


def shuffled(found: list[Mutant], seed: int) -> Iterator[Mutant]:
    """All of them in a seeded order that takes the operators in turn."""
    pick = random.Random(seed)
    piles = [[one for one in found if one.operator == operator] for operator in OPERATORS]
    for pile in piles:
        pick.shuffle(pile)
    pick.shuffle(piles)
    while any(piles):
        for pile in piles:
            if pile:
                yield pile.pop()


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[_Function, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield child, prefix + child.name
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try):
            yield from _functions(child, prefix)


def _sites(function: _Function, source: _Text, pick: random.Random) -> Iterator[tuple[str, int, str | None]]:
    names = _local_names(function)
    for node in (inner for statement in function.body for inner in ast.walk(statement)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            pair = _COMPARE.get(type(node.ops[0]))
            if pair:
                yield "compare", node.lineno, _between(source, node.left, node.comparators[0], pair)
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            yield "boolean", node.lineno, _between(source, node.values[0], node.values[1], _BOOLEAN[type(node.op)])
        elif isinstance(node, ast.BinOp) and not _is_text(node.left) and not _is_text(node.right):
            pair = _ARITHMETIC.get(type(node.op))
            if pair:
                yield "arithmetic", node.lineno, _between(source, node.left, node.right, pair)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield "boolean", node.lineno, source.splice(source.start(node), source.start(node.operand), b"")
        elif isinstance(node, ast.Constant) and type(node.value) is int and source.of(node).isdigit():
            new = str(node.value + pick.choice((1, -1)) if node.value else 1).encode()
            yield "off-by-one", node.lineno, source.splice(source.start(node), source.end(node), new)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
            others = [name for name in names if name != node.id]
            if others:
                new = pick.choice(others).encode()
                yield "wrong variable", node.lineno, source.splice(source.start(node), source.end(node), new)
        elif isinstance(node, ast.Call) and len(node.args) >= 2:
            yield "swapped arguments", node.lineno, _swapped(source, node, pick)
    for block in _blocks(function):
        yield from _statements(block, source)


def _statements(block: list[ast.stmt], source: _Text) -> Iterator[tuple[str, int, str | None]]:
    if len(block) < 2:
        return
    for statement in block:
        if isinstance(statement, ast.If) and not statement.orelse and len(statement.body) == 1:
            if isinstance(statement.body[0], ast.Return | ast.Raise | ast.Continue | ast.Break):
                yield "removed guard", statement.lineno, source.without_lines(statement)
        elif isinstance(statement, ast.AugAssign | ast.Assign) or (
            isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        ):
            yield "deleted statement", statement.lineno, source.without_lines(statement)


def _blocks(function: _Function) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _local_names(function: _Function) -> list[str]:
    """Parameters and assigned names, sorted; names of the instance are left out."""
    arguments = function.args
    names = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    names |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return sorted(names - {"self", "cls", "_"})


def _between(source: _Text, left: ast.expr, right: ast.expr, pair: tuple[str, str]) -> str | None:
    """The text with the operator between two operands exchanged, where nothing else stands there."""
    start, end = source.end(left), source.start(right)
    gap = source.data[start:end]
    old = pair[0].encode()
    if gap.strip(b" \n\t()") != old or gap.count(old) != 1:
        return None
    return source.splice(start, end, gap.replace(old, pair[1].encode()))


def _swapped(source: _Text, call: ast.Call, pick: random.Random) -> str | None:
    at = pick.randrange(len(call.args) - 1)
    one, other = call.args[at], call.args[at + 1]
    if isinstance(one, ast.Starred) or isinstance(other, ast.Starred) or source.of(one) == source.of(other):
        return None
    middle = source.data[source.end(one) : source.start(other)]
    return source.splice(source.start(one), source.end(other), source.of(other) + middle + source.of(one))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def means_something_else(new: str, before: str) -> bool:
    """Whether the new text is Python still, and not the same program."""
    try:
        return ast.dump(ast.parse(new)) != ast.dump(ast.parse(before))
    except (SyntaxError, ValueError):
        return False
