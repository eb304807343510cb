"""Logging, context and metric declarations, set up once per process by the command line.

Packages declare their instruments in a ``metrics.py`` of their own with ``declare``; each name exists
once, with unit and meaning. The session travels in a context variable, so log messages do not repeat it.
Standard library only.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["METRICS", "MetricSpec", "configure", "declare", "session_id"]

session_id: ContextVar[str] = ContextVar("session_id", default="")
"""Session that the running task works for; empty outside a session."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A named number that a run reports."""

    name: str
    unit: str
    meaning: str
    kind: Literal["scalar", "counter", "gauge"] = "scalar"


METRICS: dict[str, MetricSpec] = {}
"""Every declared metric by name."""


def declare(name: str, unit: str, meaning: str, kind: Literal["scalar", "counter", "gauge"] = "scalar") -> str:
    """Declare one metric and return its name. A second declaration of a name is a programming error."""
    if name in METRICS:
        raise ValueError(f"metric {name} is declared twice")
    METRICS[name] = MetricSpec(name, unit, meaning, kind)
    return name


_handlers: list[logging.Handler] = []
"""Those that ``configure`` installed last."""


class _Context(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        current = session_id.get()
        record.session = f" [{current[:8]}]" if current else ""
        return True


_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {9: "\t", 10: "\n    "}
"""A line of a message that came from elsewhere cannot pass for a line of the log, nor move a terminal's cursor."""


class _Lines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_CONTROL)


def configure(level: str = "INFO", *, component: str = "tollway", file: Path | None = None) -> None:
    """Send log lines of this process to stderr as ``time level component logger message``.

    With ``file`` they go there instead, and only warnings and errors also reach stderr: a terminal that
    shows progress stays readable. Handlers of an earlier call are replaced.
    """
    console = logging.StreamHandler(sys.stderr)
    handlers: list[logging.Handler] = [console]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        console.setLevel(logging.WARNING)
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    form = _Lines(f"%(asctime)s %(levelname)s {component} %(name)s%(session)s %(message)s")
    for handler in handlers:
        handler.addFilter(_Context())
        handler.setFormatter(form)
    unconfigure()
    root = logging.getLogger()
    _handlers[:] = handlers
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level.upper())


def unconfigure() -> None:
    """Take back what ``configure`` added, for a program that goes on after a command ended."""
    for earlier in _handlers:
        logging.getLogger().removeHandler(earlier)
        earlier.close()
    _handlers.clear()
