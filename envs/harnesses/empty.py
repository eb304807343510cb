"""The harness that submits at once: what an environment's grader must give nothing for.

Calls no model. Depends on ``envs.base``.
"""

from __future__ import annotations

from typing import ClassVar

from tollway.envs.base import AgentRun, Desk, Environment, Harness, Task
from tollway.envs.config import EnvConfig

__all__ = ["Empty"]


class Empty(Harness):
    """Changes nothing."""

    needs_model: ClassVar[bool] = False

    def __init__(self, config: EnvConfig, environment: Environment) -> None:
        """Takes what every harness takes and needs none of it."""

    async def run(self, task: Task, desk: Desk) -> AgentRun:
        """Hand in the task as it was given."""
        return AgentRun(turns=0, submitted=True, finish="submitted", facts=desk.tools.facts)
