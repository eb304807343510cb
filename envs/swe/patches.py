"""Unified diffs as data: read, made, applied exactly, reversed.

No fuzz, no external program, no path that leaves its directory: a patch applies as it stands or is refused with
the place that does not fit. Works on mappings of text by path. Depends on ``errors``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from tollway.errors import BadRequest

__all__ = ["FilePatch", "Hunk", "apply", "changes", "make", "read", "render", "reverse", "safe_path", "split_lines"]

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NOTHING = "/dev/null"
_NO_NEWLINE = "\\ No newline at end of file"


@dataclass(frozen=True, slots=True)
class Hunk:
    """One place of a file. Lines keep their ends; ``tag`` is " ", "-" or "+"."""

    old_start: int
    new_start: int
    lines: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class FilePatch:
    """What a patch does to one file."""

    path: str
    hunks: tuple[Hunk, ...]
    creates: bool = False
    deletes: bool = False


def safe_path(path: str) -> bool:
    """Whether ``path`` names something below a directory, in the one usual spelling.

    >>> safe_path("a/b.py"), safe_path("../b"), safe_path("/b"), safe_path("a//b")
    (True, False, False, False)
    """
    parts = PurePosixPath(path).parts
    return (
        bool(parts)
        and "/".join(parts) == path
        and ".." not in parts
        and not path.startswith("/")
        and not any(ord(char) < 32 or char == "\\" for char in path)
    )


def read(text: str) -> tuple[FilePatch, ...]:
    """The files of a unified diff. Raises ``BadRequest`` for what is none, and for renames and binary files."""
    found: list[FilePatch] = []
    lines = split_lines(text)
    at = 0
    while at < len(lines):
        line = lines[at].rstrip("\n")
        if line.startswith(("rename ", "copy ", "GIT binary", "Binary files", "similarity index")):
            raise BadRequest(f"the patch has {line!r}; only changes of text files are supported")
        if not line.startswith("--- "):
            at += 1
            continue
        if at + 1 >= len(lines) or not lines[at + 1].startswith("+++ "):
            raise BadRequest(f"line {at + 1} of the patch: '---' without '+++'")
        old, new = _name(line[4:]), _name(lines[at + 1].rstrip("\n")[4:])
        path = old if new == _NOTHING else new
        if not safe_path(path) or (_NOTHING not in (old, new) and old != new):
            raise BadRequest(f"the patch names the file {path!r}; want one path below the repository")
        hunks, at = _hunks(lines, at + 2)
        found.append(FilePatch(path, hunks, creates=old == _NOTHING, deletes=new == _NOTHING))
    if not found:
        raise BadRequest("the patch changes no file")
    if len({one.path for one in found}) != len(found):
        raise BadRequest("the patch names a file twice")
    return tuple(found)


def split_lines(text: str) -> list[str]:
    """Lines with their ends, cut at newlines alone: sources hold form feeds and other separators."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def _name(text: str) -> str:
    name = text.partition("\t")[0].strip()
    return name[2:] if name[:2] in ("a/", "b/") else name


def _hunks(lines: Sequence[str], at: int) -> tuple[tuple[Hunk, ...], int]:
    hunks = []
    while at < len(lines) and (header := _HUNK.match(lines[at])):
        old_start, old_left, new_start, new_left = (int(one) if one is not None else 1 for one in header.groups())
        at += 1
        body: list[tuple[str, str]] = []
        while old_left > 0 or new_left > 0:
            if at >= len(lines):
                raise BadRequest("the patch ends inside a hunk")
            tag, rest = (lines[at][:1], lines[at][1:]) if lines[at].strip("\r\n") else (" ", lines[at])
            if tag not in (" ", "-", "+"):
                raise BadRequest(f"line {at + 1} of the patch: {lines[at][:40]!r} inside a hunk")
            old_left -= tag != "+"
            new_left -= tag != "-"
            at += 1
            if at < len(lines) and lines[at].startswith(_NO_NEWLINE):
                rest = rest.removesuffix("\n")
                at += 1
            body.append((tag, rest))
        if old_left or new_left:
            raise BadRequest("a hunk of the patch holds more lines than it says")
        hunks.append(Hunk(old_start, new_start, tuple(body)))
    if not hunks:
        raise BadRequest(f"line {at + 1} of the patch: a file without changes")
    return tuple(hunks), at


def apply(patch: Sequence[FilePatch], files: Mapping[str, str]) -> dict[str, str | None]:
    """New contents of the files that the patch names, ``None`` for deleted ones. Raises ``BadRequest``."""
    changed: dict[str, str | None] = {}
    for one in patch:
        if one.creates:
            if one.path in files:
                raise BadRequest(f"the patch creates {one.path}, which exists")
            before: list[str] = []
        elif one.path not in files:
            raise BadRequest(f"the patch changes {one.path}, which does not exist")
        else:
            before = split_lines(files[one.path])
        after = _apply_one(one, before)
        if one.deletes and after:
            raise BadRequest(f"the patch deletes {one.path}, which holds more than it knows")
        changed[one.path] = None if one.deletes else "".join(after)
    return changed


def _apply_one(patch: FilePatch, before: Sequence[str]) -> list[str]:
    after: list[str] = []
    done = 0
    for hunk in patch.hunks:
        old = [line for tag, line in hunk.lines if tag != "+"]
        # An empty old side is said as "after this line".
        start = hunk.old_start - 1 if old else hunk.old_start
        if start < done or list(before[start : start + len(old)]) != old:
            raise BadRequest(f"the patch does not fit {patch.path} at line {hunk.old_start}")
        after += before[done:start]
        after += [line for tag, line in hunk.lines if tag != "-"]
        done = start + len(old)
    return [*after, *before[done:]]


def reverse(patch: Sequence[FilePatch]) -> tuple[FilePatch, ...]:
    """The patch that undoes ``patch``."""
    turned = {" ": " ", "-": "+", "+": "-"}
    return tuple(
        FilePatch(
            one.path,
            tuple(
                Hunk(hunk.new_start, hunk.old_start, _ordered([(turned[tag], line) for tag, line in hunk.lines]))
                for hunk in one.hunks
            ),
            creates=one.deletes,
            deletes=one.creates,
        )
        for one in patch
    )


def _ordered(lines: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Within a run of changes the removed lines come first."""
    found: list[tuple[str, str]] = []
    added: list[tuple[str, str]] = []
    for tag, line in lines:
        if tag == "+":
            added.append((tag, line))
            continue
        if tag == " ":
            found += added
            added = []
        found.append((tag, line))
    return tuple(found + added)


def make(path: str, before: str, after: str) -> str:
    """The unified diff of one file that exists before and after."""
    lines = difflib.unified_diff(split_lines(before), split_lines(after), f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}\n" for line in lines)


def render(patch: Sequence[FilePatch]) -> str:
    """The text of a patch; ``read`` of it is the same patch."""
    out = []
    for one in patch:
        out.append(f"--- {_NOTHING if one.creates else 'a/' + one.path}\n")
        out.append(f"+++ {_NOTHING if one.deletes else 'b/' + one.path}\n")
        for hunk in one.hunks:
            old = sum(tag != "+" for tag, _ in hunk.lines)
            new = sum(tag != "-" for tag, _ in hunk.lines)
            out.append(f"@@ -{hunk.old_start},{old} +{hunk.new_start},{new} @@\n")
            for tag, line in hunk.lines:
                out.append(f"{tag}{line}" if line.endswith("\n") else f"{tag}{line}\n{_NO_NEWLINE}\n")
    return "".join(out)


def changes(path: str, before: str, after: str) -> list[FilePatch]:
    """Every hunk of a diff as a patch of its own."""
    diff = make(path, before, after)
    return [FilePatch(path, (hunk,)) for hunk in read(diff)[0].hunks] if diff else []
