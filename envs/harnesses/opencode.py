"""OpenCode, as ``opencode run``: its native program, and a provider of its own in ``opencode.json``."""

from __future__ import annotations

import json
from typing import ClassVar

from tollway.envs.harnesses.command import CommandHarness
from tollway.envs.harnesses.programs import OPT, npm_package
from tollway.envs.harnesses.recipes import Kit, Place, Recipe

__all__ = ["OpenCode"]

_MAX_OUTPUT = 16_384


class OpenCode(CommandHarness):
    """``env.command.argv`` are further options of ``opencode run``."""

    title: ClassVar[str] = "OpenCode"
    works_beside: ClassVar[bool] = False

    def kit(self) -> Kit:
        """One program."""
        program = npm_package(self.config, "opencode-ai", "bin", "opencode.exe")
        return Kit(mounts={f"{OPT}/opencode/opencode": program}, path=(f"{OPT}/opencode",), mem_mb=4096, pids=256)

    def recipe(self, place: Place) -> Recipe:
        """With a title of ours, so that it asks the model for none."""
        output = min(_MAX_OUTPUT, place.context_tokens // 2)
        limit = {"context": place.context_tokens, "output": output}
        config = {
            "provider": {
                "tollway": {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "Tollway",
                    "options": {"baseURL": "{openai_base_url}", "apiKey": "{token}"},
                    "models": {"{model}": {"name": "{model}", "reasoning": True, "tool_call": True, "limit": limit}},
                }
            },
            "permission": {"edit": "allow", "bash": "allow", "webfetch": "deny"},
            "autoupdate": False,
            "share": "disabled",
        }
        return Recipe(
            argv=("opencode", "run", "--model", "tollway/{model}", "--title", "task", *self.config.argv),
            env={
                "OPENCODE_DISABLE_MODELS_FETCH": "1",
                "OPENCODE_DISABLE_AUTOUPDATE": "1",
                "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
                # Of address space it would otherwise reserve 12 GB more than it uses.
                "BUN_JSC_useWasmFastMemory": "false",
                "GIGACAGE_ENABLED": "no",
            },
            files={".config/opencode/opencode.json": json.dumps(config)},
            stdin="{instruction}",
        )
