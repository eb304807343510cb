"""The one configuration tree: every process reads it whole and hands each part its own section.

Order: defaults, then the TOML file, then ``--set``. Secrets come from the environment only. Composes the
sections that the packages own; importing it must stay light (pydantic, nothing else).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from tollway.config import Section, Tree, load, merge_overrides, read_tree
from tollway.engine.config import EngineConfig
from tollway.envs.config import EnvConfig
from tollway.fresh_model import ModelShape
from tollway.router.config import RouterConfig
from tollway.sandboxes.config import SandboxConfig
from tollway.session_server.config import ServerConfig
from tollway.trainer.config import TrainerConfig

__all__ = ["ADMIN_KEY_VARIABLE", "EvalConfig", "ModelConfig", "RunConfig", "Settings", "admin_key", "load_settings"]

ADMIN_KEY_VARIABLE = "TOLLWAY_ADMIN_KEY"


class RunConfig(Section):
    """Where a run keeps its files and what it is seeded with."""

    dir: str = "runs/default"
    """Everything the run writes: checkpoints, journal, trajectories, logs, summary."""
    seed: int = Field(default=0, ge=0)
    """Seeds the fresh model, demonstrations, task order and sampling."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


class ModelConfig(Section):
    """The model that is trained and served: a directory, or a shape to start from random weights."""

    path: str | None = None
    """Hugging Face directory with config.json and safetensors."""
    fresh: ModelShape | None = None
    """Start from random weights of this shape instead; written to the run's directory."""

    @model_validator(mode="after")
    def _not_both(self) -> ModelConfig:
        if self.path is not None and self.fresh is not None:
            raise ValueError("set path or [model.fresh], not both")
        return self


class EvalConfig(Section):
    """Evaluation on held-out tasks."""

    episodes: int = Field(default=256, gt=0)
    at_start: bool = True
    """Evaluate before the first training step."""
    at_end: bool = True
    blank_tools: bool = False
    """After training, also evaluate with every tool result replaced by blanks: a policy that still scores
    does not read its tools."""


class Settings(Section):
    """The whole tree."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    router: RouterConfig = RouterConfig()
    server: ServerConfig = ServerConfig()
    sandbox: SandboxConfig = SandboxConfig()
    env: EnvConfig = EnvConfig()
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()

    @property
    def run_dir(self) -> Path:
        """Absolute directory of the run."""
        return Path(self.run.dir).absolute()


def load_settings(path: Path | None, overrides: Sequence[str] = ()) -> Settings:
    """Read and check the tree. Raises ``ConfigError`` that names every wrong key at once."""
    tree: Tree = read_tree(path) if path is not None else {}
    source = str(path) if path is not None else "the defaults"
    if overrides:
        source += " with --set"
    return load(Settings, merge_overrides(tree, overrides), source=source)


def admin_key() -> str:
    """The admin key from the environment, or a new random one for a server that only this process uses."""
    return os.environ.get(ADMIN_KEY_VARIABLE) or secrets.token_urlsafe(32)
