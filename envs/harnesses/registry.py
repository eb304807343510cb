"""Harnesses by name: the shipped ones, those of installed packages, and ``module:Class``.

A third party registers a ``Harness`` subclass whose constructor takes an ``EnvConfig`` and the ``Environment`` under
the entry-point group ``tollway.harnesses``. Imports a harness only when it is asked for.
"""

from __future__ import annotations

from tollway.envs.base import Environment, Harness
from tollway.envs.config import EnvConfig
from tollway.plugins import Plugins

__all__ = ["GROUP", "names", "open_harness"]

GROUP = "tollway.harnesses"
_HERE = "tollway.envs.harnesses"
_HARNESSES = Plugins(
    key="env.harness",
    port=Harness,  # type: ignore[type-abstract]  # compared with, never called
    group=GROUP,
    shipped={
        "tool-loop": f"{_HERE}.tool_loop:ToolLoop",
        "gold": f"{_HERE}.gold:Gold",
        "empty": f"{_HERE}.empty:Empty",
        "command": f"{_HERE}.command:CommandHarness",
        "mini-swe-agent": f"{_HERE}.mini_swe:MiniSweAgent",
        "codex": f"{_HERE}.codex:Codex",
        "claude-code": f"{_HERE}.claude_code:ClaudeCode",
        "opencode": f"{_HERE}.opencode:OpenCode",
        "qwen-code": f"{_HERE}.qwen_code:QwenCode",
        "openhands": f"{_HERE}.openhands:OpenHands",
    },
)


def names() -> tuple[str, ...]:
    """Every harness name that ``open_harness`` knows, sorted."""
    return _HARNESSES.names()


def open_harness(config: EnvConfig, environment: Environment) -> Harness:
    """The harness that ``config.harness`` names; ``ConfigError`` names the known ones."""
    return _HARNESSES.open(config.harness, config, environment)
