"""mini-swe-agent, through its Python API: the system's Python with the harness's packages, and a short program.

The program is ``mini_swe_inside``. What it is told is in a file, so that the agent's commands inherit no key.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from tollway.envs.harnesses.command import CommandHarness
from tollway.envs.harnesses.programs import OPT, python_packages, system_python
from tollway.envs.harnesses.recipes import Kit, Place, Recipe
from tollway.errors import ConfigError

__all__ = ["MiniSweAgent"]

_PROGRAM = Path(__file__).with_name("mini_swe_inside.py")
_CONFIGS = ("mini.yaml", "mini_textbased.yaml")


class MiniSweAgent(CommandHarness):
    """``env.command.argv`` may name the agent's configuration: "mini.yaml" (a bash tool), "mini_textbased.yaml"."""

    title: ClassVar[str] = "mini-swe-agent"
    _python = "python3"
    """Of an image that brings the harness; ``kit`` knows better."""

    def kit(self) -> Kit:
        """The packages, for the Python that sandboxes have."""
        packages = python_packages(self.config)
        self._python = system_python(packages)
        return Kit(mounts={f"{OPT}/python": packages}, mem_mb=2048, pids=128)

    def recipe(self, place: Place) -> Recipe:
        """One program with one file of settings."""
        names = self.config.argv or _CONFIGS[:1]
        if len(names) != 1 or names[0] not in _CONFIGS:
            raise ConfigError(f"env.command.argv={list(names)}: mini-swe-agent takes one of {', '.join(_CONFIGS)}")
        settings = {
            "config": names[0],
            "packages": f"{OPT}/python",
            "api_base": "{openai_base_url}",
            "api_key": "{token}",
            "model": "openai/{model}",
            "cwd": "{workspace}",
            "beside": self.config.where == "beside",
        }
        return Recipe(
            argv=(self._python, "-I", "{home}/run.py", "{home}/agent.json", "{instruction_file}"),
            env={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"},
            files={"agent.json": json.dumps(settings), "run.py": _PROGRAM.read_text(encoding="utf-8")},
        )
