"""Environments by name: the shipped ones, those of installed packages, and ``module:Class``.

A third party registers an ``Environment`` subclass whose constructor takes an ``EnvConfig`` under the
entry-point group ``tollway.envs``.
"""

from __future__ import annotations

from tollway.envs.base import Environment
from tollway.envs.config import EnvConfig
from tollway.plugins import Plugins

__all__ = ["GROUP", "open_environment"]

GROUP = "tollway.envs"
_ENVIRONMENTS = Plugins(
    key="env.name",
    port=Environment,  # type: ignore[type-abstract]  # compared with, never called
    group=GROUP,
    shipped={"micro-swe": "tollway.envs.micro_swe.environment:MicroSwe"},
)


def open_environment(config: EnvConfig) -> Environment:
    """The environment that ``config.name`` names; ``ConfigError`` names the known ones."""
    return _ENVIRONMENTS.open(config.name, config)
