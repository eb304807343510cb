"""Toolsets for environments whose agents only talk. Depends on ``envs.base``."""

from __future__ import annotations

from collections.abc import Mapping

from tollway.envs.base import ToolAnswer, Toolset
from tollway.messages import ToolCall, ToolSpec

__all__ = ["NoTools"]


class NoTools(Toolset):
    """Nothing to call: the reply is the work."""

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """None."""
        return ()

    @property
    def facts(self) -> Mapping[str, float]:
        """None."""
        return {}

    async def call(self, call: ToolCall) -> ToolAnswer:
        """A model may call what it was never offered."""
        return ToolAnswer(f"there is no tool {call.name!r}; answer in text")
