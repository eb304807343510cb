"""The ``[env]`` section: which environment, how episodes are bounded.

Must not import anything but pydantic and the kernel's configuration.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tollway.config import Section

__all__ = ["DemonstrationConfig", "EnvConfig"]


class DemonstrationConfig(Section):
    """How scripted episodes for a warm start are made, ``[env.demonstrations]``: noisy on purpose."""

    distinct_tasks: int = Field(default=256, ge=1)
    """Tasks they are made of; each costs one sandbox run."""
    p_run: float = Field(default=0.7, ge=0, le=1)
    """The check is run before the edit."""
    p_right: float = Field(default=0.3, ge=0, le=1)
    """The edit is the right one for sure; otherwise it is any of them."""
    p_run_again: float = Field(default=0.3, ge=0, le=1)
    """The check is run after the edit."""
    p_quit: float = Field(default=0.0, ge=0, le=1)
    """The episode ends in plain text, which earns nothing, instead of a submission."""


class EnvConfig(Section):
    """Settings of the environment and of the episode runner."""

    name: str = "micro-swe"
    """The environment that makes tasks."""
    seed: int = Field(default=0, ge=0)
    """Seed of the endless task order; training and evaluation use run.seed."""
    split: Literal["train", "heldout"] = "train"
    """Which names and constants the tasks use; the two splits share none."""
    max_turns: int = Field(default=4, ge=1)
    """Model calls per episode."""
    max_episodes: int = Field(default=64, ge=1)
    """Episodes in flight at once."""
    attempts: int = Field(default=2, ge=1)
    """Tries of a whole episode when infrastructure fails, the first one included."""
    blank_tools: bool = False
    """Replace every tool output by spaces of the same length before the model sees it."""
    open_timeout_s: float = Field(default=60.0, gt=0)
    """Opening the session, waiting for capacity included."""
    model_timeout_s: float = Field(default=600.0, gt=0)
    """One model call."""
    agent_timeout_s: float = Field(default=1800.0, gt=0)
    """The whole agent phase; what is there when it ends is graded and marked."""
    sandbox_ttl_s: float = Field(default=300.0, gt=0)
    """Life of the agent's sandbox without a heartbeat; the runner extends it while the agent works."""
    exec_timeout_s: float = Field(default=30.0, gt=0)
    """One tool command, and one command of the grader."""
    record_timeout_s: float = Field(default=60.0, gt=0)
    """Writing the reward, fetching the trajectories, closing the session; each."""
    demonstrations: DemonstrationConfig = DemonstrationConfig()
