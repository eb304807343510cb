"""Environments and harnesses open by name or by path, and a wrong name is told with the known ones."""

from __future__ import annotations

import pytest
from eval_harnesses import Some

from tollway.envs.base import Harness
from tollway.envs.config import EnvConfig
from tollway.envs.harnesses.empty import Empty
from tollway.envs.harnesses.gold import Gold
from tollway.envs.harnesses.registry import names, open_harness
from tollway.envs.harnesses.tool_loop import ToolLoop
from tollway.envs.micro_swe.environment import MicroSwe
from tollway.envs.registry import open_environment
from tollway.errors import ConfigError


@pytest.mark.parametrize("name", ["micro-swe", "tollway.envs.micro_swe.environment:MicroSwe"])
def test_an_environment_opens_by_name_or_by_path(name: str) -> None:
    assert isinstance(open_environment(EnvConfig(name=name)), MicroSwe)


def test_an_unknown_environment_or_another_class_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.name='nothing' is unknown; known: .*micro-swe"):
        open_environment(EnvConfig(name="nothing"))
    with pytest.raises(ConfigError, match="is not an Environment class"):
        open_environment(EnvConfig(name="tollway.envs.config:EnvConfig"))


@pytest.mark.parametrize(
    ("name", "kind"), [("tool-loop", ToolLoop), ("gold", Gold), ("empty", Empty), ("eval_harnesses:Some", Some)]
)
def test_a_harness_opens_by_name_or_by_path(name: str, kind: type[Harness]) -> None:
    config = EnvConfig(harness=name)
    assert isinstance(open_harness(config, open_environment(config)), kind)


def test_an_unknown_harness_or_another_class_is_refused() -> None:
    environment = open_environment(EnvConfig())
    with pytest.raises(ConfigError, match=r"env\.harness='nothing' is unknown; known: .*tool-loop"):
        open_harness(EnvConfig(harness="nothing"), environment)
    with pytest.raises(ConfigError, match="is not a Harness class"):
        open_harness(EnvConfig(harness="tollway.envs.micro_swe.environment:MicroSwe"), environment)
    assert {"tool-loop", "gold", "empty", "command", "codex", "claude-code"} <= set(names())
