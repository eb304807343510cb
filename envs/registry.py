"""Environments by name: the shipped ones, those of installed packages, and ``module:Class``.

A third party registers an ``Environment`` subclass whose constructor takes an ``EnvConfig`` under the
entry-point group ``tollway.envs``.
"""

from __future__ import annotations

from tollway.envs.base import Environment
from tollway.envs.config import EnvConfig
from tollway.envs.regrade import Regraded
from tollway.plugins import Plugins

__all__ = ["GROUP", "open_environment"]

GROUP = "tollway.envs"
_ENVIRONMENTS = Plugins(
    key="env.name",
    port=Environment,  # type: ignore[type-abstract]  # compared with, never called
    group=GROUP,
    shipped={
        "micro-swe": "tollway.envs.micro_swe.environment:MicroSwe",
        "swe": "tollway.envs.swe.environment:Swe",
        "maths": "tollway.envs.maths.environment:Maths",
        "harbor": "tollway.envs.harbor.environment:Harbor",
        "openenv": "tollway.envs.openenv.environment:OpenEnv",
        "verifiers": "tollway.envs.verifiers.environment:Verifiers",
        "nemo-gym": "tollway.envs.nemo_gym.environment:NemoGym",
    },
)


def open_environment(config: EnvConfig) -> Environment:
    """The environment that ``config.name`` names, judged by ``config.grader`` if that is set.

    ``ConfigError`` names the known ones.
    """
    environment = _ENVIRONMENTS.open(config.name, config)
    return environment if config.grader is None else Regraded(environment, config)
