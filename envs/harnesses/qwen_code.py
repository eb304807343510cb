"""Qwen Code, as ``qwen --yolo``: Node.js and its package, and settings that name the session."""

from __future__ import annotations

import json
from typing import ClassVar

from tollway.envs.harnesses.command import CommandHarness
from tollway.envs.harnesses.programs import OPT, node_program, npm_package
from tollway.envs.harnesses.recipes import Kit, Place, Recipe

__all__ = ["QwenCode"]

_SETTINGS = {
    "security": {"auth": {"selectedType": "openai", "apiKey": "{token}", "baseUrl": "{openai_base_url}"}},
    "model": {"name": "{model}"},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
}


class QwenCode(CommandHarness):
    """``env.command.argv`` are further options of ``qwen``."""

    title: ClassVar[str] = "Qwen Code"
    _launch: tuple[str, ...] = ("qwen",)
    """Of an image that brings the harness; ``kit`` knows better."""
    works_beside: ClassVar[bool] = False

    def kit(self) -> Kit:
        """Node.js, and the package with all that it depends on."""
        package = npm_package(self.config, "@qwen-code", "qwen-code")
        self._launch = ("node", f"{OPT}/qwen-code/cli-entry.js")
        return Kit(
            mounts={f"{OPT}/node/node": node_program(self.config), f"{OPT}/qwen-code": package},
            path=(f"{OPT}/node",),
            mem_mb=4096,
            pids=256,
        )

    def recipe(self, place: Place) -> Recipe:
        """The instruction comes by standard input, which has no limit."""
        return Recipe(
            argv=(*self._launch, "--yolo", *self.config.argv),
            env={"QWEN_USAGE_STATISTICS_ENABLED": "false", "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"},
            files={".qwen/settings.json": json.dumps(_SETTINGS)},
            stdin="{instruction}",
        )
