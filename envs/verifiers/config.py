"""The ``[env.verifiers]`` section. Must not import anything but pydantic and the kernel's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue

from tollway.config import Section

__all__ = ["VerifiersConfig"]


class VerifiersConfig(Section):
    """One taskset, and the interpreter that has the verifiers package."""

    python: Path | None = None
    """Interpreter in whose environment verifiers and the taskset are installed. Required."""
    taskset: str = ""
    """Id of an installed taskset or environment package, or ``module:name`` of a Taskset class or of a function that
    makes a v0 Environment. Required."""
    config: dict[str, JsonValue] = Field(default_factory=dict)
    """Fields of the taskset's config, or arguments of the function."""
    heldout_config: dict[str, JsonValue] = Field(default_factory=dict)
    """The same on top of ``config`` for env.split = "heldout"."""
    tools: Literal["auto", "none", "coding"] = "auto"
    """What the agent has: nothing but its reply, or bash, read, edit and submit in a sandbox. "auto": a sandbox for
    tasks that set one up, need an image, or are scored in one."""
    network: Literal["none", "public"] = "none"
    """Of sandboxes."""
    pids: int = Field(default=256, ge=8)
    """Processes in a sandbox."""
    tool_timeout_s: float = Field(default=120.0, gt=0)
    """Longest command of the agent's tools, and of the task's own in the sandbox."""
    max_tasks: int = Field(default=100_000, ge=1)
    """How many tasks of an endless or large taskset are listed."""
    path: tuple[Path, ...] = ()
    """Directories from which the taskset may be imported, too."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the worker, besides PATH, HOME, LANG and TMPDIR; nothing else of ours is passed on."""
    workers: int = Field(default=1, ge=1)
    """Worker processes; each keeps its own copy of the taskset."""
    load_timeout_s: float = Field(default=300.0, gt=0)
    """Importing the package and loading its tasks."""
    score_timeout_s: float = Field(default=120.0, gt=0)
    """One score, finalizing included."""
