"""Logging, context and metric declarations, set up once per process by the command line.

Packages declare their instruments in a ``metrics.py`` of their own with ``declare``; each name exists
once, with unit and meaning. Session, turn and policy version travel in context variables, so log messages
do not repeat them. Depends on prometheus-client only.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from dataclasses import dataclass
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
"""Every declared metric by name; the reference page is generated from it."""


def declare(name: str, unit: str, meaning: str, kind: Literal["scalar", "counter", "gauge"] = "scalar") -> str:
    """Declare one metric and return its name. A second declaration of a name is a programming error."""
    if name in METRICS:
        raise ValueError(f"metric {name} is declared twice")
    METRICS[name] = MetricSpec(name, unit, meaning, kind)
    return name


class _Context(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        current = session_id.get()
        record.session = f" [{current[:8]}]" if current else ""
        return True


def configure(level: str = "INFO", *, component: str = "tollway") -> None:
    """Send log lines of this process to stderr as ``time level component logger message``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_Context())
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {component} %(name)s%(session)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
