"""Codex, as ``codex exec``: its native program, a provider of its own in ``config.toml``, its sandbox off inside ours.

The key stands in that file and in no variable, so that commands of the agent do not inherit it.
"""

from __future__ import annotations

from typing import ClassVar

from tollway.envs.harnesses.command import CommandHarness
from tollway.envs.harnesses.programs import OPT, npm_package
from tollway.envs.harnesses.recipes import Kit, Place, Recipe

__all__ = ["Codex"]

_CONFIG = """\
model = "{model}"
model_provider = "tollway"
model_context_window = {context_tokens}
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[model_providers.tollway]
name = "Tollway"
base_url = "{openai_base_url}"
experimental_bearer_token = "{token}"
wire_api = "responses"

[analytics]
enabled = false

[features]
plugins = false
"""


class Codex(CommandHarness):
    """``env.command.argv`` are further options of ``codex exec``."""

    title: ClassVar[str] = "Codex"
    works_beside: ClassVar[bool] = False

    def kit(self) -> Kit:
        """One statically linked program and its ripgrep."""
        vendor = npm_package(self.config, "@openai/codex-linux-{arch}", "vendor")
        (triple,) = vendor.iterdir()
        return Kit(
            mounts={f"{OPT}/codex": triple}, path=(f"{OPT}/codex/bin", f"{OPT}/codex/codex-path"), mem_mb=2048, pids=256
        )

    def recipe(self, place: Place) -> Recipe:
        """The instruction comes by standard input, which has no limit."""
        return Recipe(
            argv=("codex", "exec", "--skip-git-repo-check", *self.config.argv, "-"),
            files={".codex/config.toml": _CONFIG},
            stdin="{instruction}",
        )
