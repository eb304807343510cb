"""Size caps and small rules that no linter has: docs/adr/0003-checks.md. Prints every finding, exits 1."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src/tollway", "session_server", "router", "engine", "envs", "sandboxes", "trainer")
FILE_LINES, FUNCTION_LINES, CLASS_LINES, PARAMETERS = 600, 80, 300, 7
VAGUE = {"utils", "util", "misc", "helpers", "helper", "manager", "common", "v2"}
LATER = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


def findings(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if len(lines) > FILE_LINES:
        yield 1, f"{len(lines)} lines, cap {FILE_LINES}"
    if path.stem in VAGUE:
        yield 1, f"module name {path.stem!r} says nothing"
    for number, line in enumerate(lines, 1):
        if LATER.search(line):
            yield number, "unfinished-work marker"
    tree = ast.parse(text)
    if ast.get_docstring(tree) is None:
        yield 1, "module without a docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert in a source file: raise a typed error"
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        cap = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
        if length > cap:
            yield node.lineno, f"{node.name} has {length} lines, cap {cap}"
        if not isinstance(node, ast.ClassDef):
            arguments = node.args
            names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            count = len([name for name in names if name not in ("self", "cls")])
            if count > PARAMETERS:
                yield node.lineno, f"{node.name} takes {count} parameters, cap {PARAMETERS}"


def main() -> int:
    count = 0
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, text in findings(path):
                print(f"{path.relative_to(ROOT)}:{line}: {text}")
                count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
