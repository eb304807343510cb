"""The ``[env.swe]`` section. Must not import anything but pydantic and the kernel's configuration."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from tollway.config import Section

__all__ = ["SweConfig"]


class SweConfig(Section):
    """Which tasks, and how they are judged."""

    tasks: str = "tiny"
    """"tiny" (part of this package, needs nothing), "shipped" (after ``tollway tasks fetch``), or a directory."""
    heldout_tasks: str | None = None
    """The same for env.split = "heldout"; ``None`` for ``tasks``."""
    only: tuple[str, ...] = ()
    """Patterns of task ids to use, such as "tabulate-*"; "!" before one leaves out what it fits. Empty for all."""
    cache: Path | None = None
    """Where downloads and prepared directories are kept; default: tollway/swe in the user's cache directory."""
    p2p_sample: int = Field(default=100, ge=0)
    """Tests of PASS_TO_PASS that training runs, the same ones each time; 0 for all. Evaluation runs all."""
    tool_timeout_s: float = Field(default=120.0, gt=0)
    """Longest command of the agent's tools."""
    memory_mb: int = Field(default=1024, ge=64)
    """Of the agent's sandbox and of the grader's."""
    pids: int = Field(default=128, ge=8)
