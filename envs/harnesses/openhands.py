"""OpenHands, through its SDK: a Python of its own that has it, and a short program.

The program is ``openhands_inside``. What it is told is in a file, so that the agent's commands inherit no key.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from tollway.envs.harnesses.command import CommandHarness
from tollway.envs.harnesses.programs import OPT, openhands_home
from tollway.envs.harnesses.recipes import Kit, Place, Recipe

__all__ = ["OpenHands"]

_HOME = f"{OPT}/openhands"
_PROGRAM = Path(__file__).with_name("openhands_inside.py")


class OpenHands(CommandHarness):
    """The terminal, file editor and task tracker of the SDK's default agent; it takes no further arguments."""

    title: ClassVar[str] = "the OpenHands SDK"
    _python = "python3"
    """Of an image that brings the harness; ``kit`` knows better."""
    works_beside: ClassVar[bool] = False

    def kit(self) -> Kit:
        """A Python with the SDK in it: it needs a newer one than systems have."""
        # Not on PATH: the agent's own python3 shall be the system's.
        self._python = f"{_HOME}/bin/python3"
        return Kit(
            mounts={_HOME: openhands_home(self.config)},
            mem_mb=4096,
            pids=256,
        )

    def recipe(self, place: Place) -> Recipe:
        """One program with one file of settings."""
        settings = {
            "base_url": "{openai_base_url}",
            "api_key": "{token}",
            "model": "openai/{model}",
            "context_tokens": place.context_tokens,
            "workspace": "{workspace}",
            "home": "{home}",
        }
        return Recipe(
            argv=(self._python, "-I", "{home}/run.py", "{home}/agent.json", "{instruction_file}"),
            env={
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "OPENHANDS_SUPPRESS_BANNER": "1",
                "OTEL_SDK_DISABLED": "true",
                "DO_NOT_TRACK": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            files={"agent.json": json.dumps(settings), "run.py": _PROGRAM.read_text(encoding="utf-8")},
        )
