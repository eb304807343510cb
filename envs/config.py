"""The ``[env]`` section: which environment, how episodes are bounded.

Must not import anything but pydantic, the kernel's configuration and the sections below it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tollway.config import Section
from tollway.envs.command_config import CommandConfig
from tollway.envs.custom.config import CustomConfig
from tollway.envs.harbor.config import HarborConfig
from tollway.envs.judge.config import JudgeConfig
from tollway.envs.maths.config import MathsConfig
from tollway.envs.nemo_gym.config import NemoGymConfig
from tollway.envs.openenv.config import OpenEnvConfig
from tollway.envs.swe.config import SweConfig
from tollway.envs.verifiers.config import VerifiersConfig

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
    harness: str = "tool-loop"
    """What lets the model work: "tool-loop", "gold" (the reference solution), "empty" (submits at once), an agent
    command, a name of the entry-point group ``tollway.harnesses``, or ``module:Class``."""
    harness_options: dict[str, str | tuple[str, ...]] = Field(default_factory=dict)
    """For a harness of yours, which is given this section; no shipped one reads them."""
    seed: int = Field(default=0, ge=0)
    """Seed of the endless task order; training and evaluation use run.seed."""
    split: Literal["train", "heldout"] = "train"
    """Which names and constants the tasks use; the two splits share none."""
    max_turns: int = Field(default=4, ge=1)
    """Model calls per episode of the harness "tool-loop"; an agent command goes on for as long as it has time."""
    max_episodes: int = Field(default=64, ge=1)
    """Episodes in flight at once."""
    attempts: int = Field(default=2, ge=1)
    """Tries of a whole episode when infrastructure fails, the first one included."""
    blank_tools: bool = False
    """Replace every tool output by spaces of the same length before the model sees it; for harness "tool-loop"."""
    open_timeout_s: float = Field(default=60.0, gt=0)
    """Opening the session, waiting for capacity included."""
    setup_timeout_s: float = Field(default=600.0, gt=0)
    """Making the harness, the sandbox and the tools ready, waiting for a free place included."""
    model_timeout_s: float = Field(default=600.0, gt=0)
    """One model call."""
    agent_timeout_s: float = Field(default=1800.0, gt=0)
    """The whole agent phase, unless a task has a limit of its own; what is there when it ends is graded and marked."""
    collect_timeout_s: float = Field(default=120.0, gt=0)
    """Taking the agent's files out of its sandbox."""
    grade_timeout_s: float = Field(default=1800.0, gt=0)
    """The whole grading, unless a task has a limit of its own. Beyond it the episode failed, it is no grade."""
    sandbox_ttl_s: float = Field(default=300.0, gt=0)
    """Life of the agent's sandbox without a heartbeat; the runner extends it while the agent works."""
    exec_timeout_s: float = Field(default=30.0, gt=0)
    """One tool command and one command of the grader in "micro-swe"; others have limits in their own sections."""
    record_timeout_s: float = Field(default=60.0, gt=0)
    """Writing the reward, fetching the trajectories, closing the session; each."""
    release_timeout_s: float = Field(default=60.0, gt=0)
    """Closing the tools, the sandbox and what the harness took; each. What takes longer goes on in the background."""
    artifacts: str | None = None
    """Directory that gets a folder for every episode: verdict, timings, trajectory, logs, diff; none by default."""
    artifact_mb: float = Field(default=64.0, gt=0)
    """Most that one episode's folder may hold; what is larger is cut or left out, and marked so."""
    command: CommandConfig = CommandConfig()
    demonstrations: DemonstrationConfig = DemonstrationConfig()
    grader: str | None = None
    """Who judges instead of the environment's own grader: "judge", or a function of yours as ``module:name``."""
    custom: CustomConfig = CustomConfig()
    judge: JudgeConfig = JudgeConfig()
    maths: MathsConfig = MathsConfig()
    harbor: HarborConfig = HarborConfig()
    openenv: OpenEnvConfig = OpenEnvConfig()
    verifiers: VerifiersConfig = VerifiersConfig()
    nemo_gym: NemoGymConfig = NemoGymConfig()
    swe: SweConfig = SweConfig()
