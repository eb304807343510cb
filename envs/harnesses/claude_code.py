"""Claude Code, as ``claude --print``: its native program, and settings that name the session and allow its tools."""

from __future__ import annotations

import json
from typing import ClassVar

from tollway.envs.harnesses.command import CommandHarness
from tollway.envs.harnesses.programs import OPT, npm_package
from tollway.envs.harnesses.recipes import Kit, Place, Recipe

__all__ = ["ClaudeCode"]

_SETTINGS = {
    # Asked for the key instead of finding it in a variable, which commands of the agent would inherit.
    "apiKeyHelper": "cat {home}/key",
    "env": {
        "ANTHROPIC_BASE_URL": "{anthropic_base_url}",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "{context_tokens}",
        # Every tool from the first request on, none by reference later.
        "ENABLE_TOOL_SEARCH": "false",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
    },
}


class ClaudeCode(CommandHarness):
    """``env.command.argv`` are further options of ``claude``."""

    title: ClassVar[str] = "Claude Code"
    works_beside: ClassVar[bool] = False

    def kit(self) -> Kit:
        """One program."""
        program = npm_package(self.config, "@anthropic-ai/claude-code-linux-{arch}", "claude")
        return Kit(mounts={f"{OPT}/claude-code/claude": program}, path=(f"{OPT}/claude-code",), mem_mb=4096, pids=256)

    def recipe(self, place: Place) -> Recipe:
        """The instruction comes by standard input, which has no limit."""
        return Recipe(
            argv=("claude", "--print", "--model", "{model}", "--permission-mode=bypassPermissions", *self.config.argv),
            env={"IS_SANDBOX": "1"},
            files={".claude/settings.json": json.dumps(_SETTINGS), "key": "{token}"},
            stdin="{instruction}",
        )
