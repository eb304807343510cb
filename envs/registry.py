"""Environments by name: the shipped ones and those of installed packages (entry-point group ``tollway.envs``).

A third party registers an ``Environment`` subclass whose constructor takes an ``EnvConfig``.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from tollway.envs.base import Environment
from tollway.envs.config import EnvConfig
from tollway.errors import ConfigError

__all__ = ["GROUP", "open_environment"]

GROUP = "tollway.envs"
_SHIPPED = {"micro-swe": "tollway.envs.micro_swe.environment:MicroSwe"}


def open_environment(config: EnvConfig) -> Environment:
    """The environment that ``config.name`` names; ``ConfigError`` names the known ones."""
    installed = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    target = _SHIPPED.get(config.name) or installed.get(config.name)
    if target is None:
        raise ConfigError(f"env.name={config.name!r} is unknown; known: {', '.join(sorted({**_SHIPPED, **installed}))}")
    module, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"env.name={config.name!r}: cannot load {target}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(f"env.name={config.name!r}: {target} is not an Environment class")
    # A third party's constructor is not ours to know statically.
    environment: Environment = found(config)  # type: ignore[call-arg]
    return environment
