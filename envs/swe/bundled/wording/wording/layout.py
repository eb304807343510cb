"""Text in lines and columns."""

from __future__ import annotations

from collections.abc import Sequence


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most ``width`` characters; a longer word stands alone and is cut."""
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    lines: list[str] = []
    line = ""
    for word in text.split():
        rest = word
        if line and len(line) + 1 + len(rest) <= width:
            line += " " + rest
            continue
        if line:
            lines.append(line)
        while len(rest) > width:
            lines.append(rest[:width])
            rest = rest[width:]
        line = rest
    if line:
        lines.append(line)
    return lines


def indent(text: str, prefix: str, *, first: str | None = None) -> str:
    """Put ``prefix`` before every line that holds something, ``first`` before the first one."""
    found = []
    for at, line in enumerate(text.split("\n")):
        lead = first if at == 0 and first is not None else prefix
        found.append(lead + line if line.strip() else "")
    return "\n".join(found)


def columns(rows: Sequence[Sequence[str]], *, gap: int = 2) -> str:
    """Rows with their cells below each other; short rows are fine, no line ends in blanks."""
    if not rows:
        return ""
    count = max(len(row) for row in rows)
    widths = [max((len(row[at]) for row in rows if at < len(row)), default=0) for at in range(count)]
    lines = []
    for row in rows:
        cells = [cell.ljust(widths[at]) for at, cell in enumerate(row)]
        lines.append((" " * gap).join(cells).rstrip())
    return "\n".join(lines)
