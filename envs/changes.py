"""What an agent changed, as a unified diff of the collected files against those that its task began with.

Bytes that are no text are named, not shown. Its cost is bounded for any input. Reads the task's own files only;
depends on ``envs.base``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tollway.envs.base import Task

__all__ = ["changes", "file_diff"]

_MOST_PAIRS = 4_000_000
"""Lines before times lines after beyond which a changed region is shown as one piece: finer takes too long."""
_CONTEXT = 3


def changes(task: Task, submission: Mapping[str, bytes]) -> bytes:
    """The whole diff, files in order of their paths. A source that was there and was not collected was removed."""
    parts = []
    for path in sorted({*submission, *task.sources}):
        before, after = _before(task, path), submission.get(path)
        if before != after:
            parts.append(file_diff(path, before, after))
    return b"".join(parts)


def file_diff(path: str, before: bytes | None, after: bytes | None) -> bytes:
    """The diff of one file; ``None`` where it does not exist."""
    names = (_name("a", path, before), _name("b", path, after))
    if _is_binary(before) or _is_binary(after):
        sizes = f"{_size(before)} to {_size(after)}"
        return f"Binary files {names[0]} and {names[1]} differ ({sizes})\n".encode("utf-8", "backslashreplace")
    old, new = _lines(before), _lines(after)
    body = b"".join(_hunks(old, new))
    return f"--- {names[0]}\n+++ {names[1]}\n".encode("utf-8", "backslashreplace") + body


def _before(task: Task, path: str) -> bytes | None:
    if path in task.files:
        return task.files[path]
    tree = task.machine.tree if task.machine is not None else None
    if tree is None:
        return None
    found = (tree / path).resolve()
    # The tree is the environment's own, the path may be a submission's.
    if not found.is_relative_to(tree.resolve()) or not found.is_file():
        return None
    return found.read_bytes()


def _hunks(old: Sequence[bytes], new: Sequence[bytes]) -> list[bytes]:
    out = []
    for group in _groups(old, new):
        out.append(f"@@ -{_range(group[0].old, group[-1].old)} +{_range(group[0].new, group[-1].new)} @@\n".encode())
        for piece in group:
            if piece.same:
                out += [_line(b" ", line) for line in old[piece.old]]
                continue
            out += [_line(b"-", line) for line in old[piece.old]]
            out += [_line(b"+", line) for line in new[piece.new]]
    return out


class _Piece(NamedTuple):
    same: bool
    old: slice
    new: slice


def _groups(old: Sequence[bytes], new: Sequence[bytes]) -> list[list[_Piece]]:
    """Hunks as pieces that are the same or not."""
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    if (len(old) - head - tail) * (len(new) - head - tail) > _MOST_PAIRS:
        return [[_Piece(False, slice(head, len(old) - tail), slice(head, len(new) - tail))]]
    # Equal ends are most of a file and would cost the matcher as much as the rest; it needs only the context.
    start, end = max(0, head - _CONTEXT), max(0, tail - _CONTEXT)
    matcher = difflib.SequenceMatcher(None, old[start : len(old) - end], new[start : len(new) - end], autojunk=False)
    return [
        [
            _Piece(tag == "equal", slice(i1 + start, i2 + start), slice(j1 + start, j2 + start))
            for tag, i1, i2, j1, j2 in group
        ]
        for group in matcher.get_grouped_opcodes(_CONTEXT)
    ]


def _line(mark: bytes, line: bytes) -> bytes:
    return mark + line if line.endswith(b"\n") else mark + line + b"\n\\ No newline at end of file\n"


def _range(first: slice, last: slice) -> str:
    """Lines as a hunk's head names them."""
    start, length = first.start, last.stop - first.start
    return f"{start + 1 if length else start}" + ("" if length == 1 else f",{length}")


def _lines(data: bytes | None) -> list[bytes]:
    # By newline only: other separators belong to the text.
    *whole, rest = (data or b"").split(b"\n")
    return [line + b"\n" for line in whole] + ([rest] if rest else [])


def _is_binary(data: bytes | None) -> bool:
    return data is not None and b"\0" in data


def _size(data: bytes | None) -> str:
    return "nothing" if data is None else f"{len(data)} bytes"


def _name(side: str, path: str, data: bytes | None) -> str:
    shown = path.encode("unicode_escape").decode() if any(ord(sign) < 32 for sign in path) else path
    return "/dev/null" if data is None else f"{side}/{shown}"
