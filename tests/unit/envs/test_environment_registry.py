"""Environments open by name or by path, and a wrong name is told with the known ones."""

from __future__ import annotations

import pytest

from tollway.envs.config import EnvConfig
from tollway.envs.micro_swe.environment import MicroSwe
from tollway.envs.registry import open_environment
from tollway.errors import ConfigError


@pytest.mark.parametrize("name", ["micro-swe", "tollway.envs.micro_swe.environment:MicroSwe"])
def test_an_environment_opens_by_name_or_by_path(name: str) -> None:
    assert isinstance(open_environment(EnvConfig(name=name)), MicroSwe)


def test_an_unknown_environment_or_another_class_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.name='nothing' is unknown; known: micro-swe"):
        open_environment(EnvConfig(name="nothing"))
    with pytest.raises(ConfigError, match="is not an Environment class"):
        open_environment(EnvConfig(name="tollway.envs.config:EnvConfig"))
