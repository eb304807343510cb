"""Data files of one JSON object per line, with errors that name key and line. Depends on the kernel's errors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tollway.errors import ConfigError

__all__ = ["Line", "read_json_lines"]


@dataclass(frozen=True, slots=True)
class Line:
    """One line that is not empty."""

    number: int
    """From 1."""
    where: str
    """What errors call it: the key, the file and the number."""
    raw: dict[str, object]


def read_json_lines(path: Path, key: str, what: str) -> tuple[Line, ...]:
    """The objects of a file that ``key`` of the configuration names. Raises ``ConfigError``, without ``what``, too.

    Lines end at a line feed and nowhere else: texts may hold other separators of Unicode.
    """
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: cannot read {path}: {error}") from error
    lines = enumerate(text.split("\n"), 1)
    found = tuple(_line(number, f"{key}: {path}, line {number}", line) for number, line in lines if line.strip())
    if not found:
        raise ConfigError(f"{key}: no {what} in {path}")
    return found


def _line(number: int, where: str, text: str) -> Line:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} is a {type(raw).__name__}, want an object")
    return Line(number, where, raw)
