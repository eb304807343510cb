"""The ``[env.harbor]`` section. Must not import anything but pydantic and the kernel's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from tollway.config import Section

__all__ = ["HarborConfig"]


class HarborConfig(Section):
    """A directory of tasks and how freely they may run."""

    tasks: Path | None = None
    """One task directory, or a directory of task directories. Required."""
    heldout_tasks: Path | None = None
    """The same for env.split = "heldout"; ``None`` for ``tasks``."""
    skip_unsupported: bool = False
    """Leave out tasks that cannot be run here, each with a line in the log, instead of refusing all."""
    network: Literal["declared", "default", "none"] = "declared"
    """"declared": a task has the network that its file names, and none when it names none. "default": the open network
    when it names none, as the format has it. "none": no network for any task."""
    images: dict[str, str] = Field(default_factory=dict)
    """Ready images for tasks that would have to be built, by task directory name; "*" for every other such task."""
    base_images: bool = False
    """Run tasks that need no build in the image that their Dockerfile starts from; by default they run on the
    provider's own system, with their files."""
    pass_env: tuple[str, ...] = ()
    """Names of our own environment variables that a task's ``${NAME}`` may read."""
    tool_timeout_s: float = Field(default=120.0, gt=0)
    """Longest command of the agent's tools."""
    memory_mb: int = Field(default=2048, ge=64)
    """For tasks that name none; likewise the next two."""
    storage_mb: int = Field(default=2048, ge=16)
    pids: int = Field(default=256, ge=8)
    artifact_mb: int = Field(default=64, ge=1)
    """Most that one artifact for a separate verifier may hold."""
