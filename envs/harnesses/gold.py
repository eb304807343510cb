"""The harness that does what the reference solution does: what an environment's grader must give full marks for.

Calls no model. Depends on ``envs.base`` and the kernel.
"""

from __future__ import annotations

from typing import ClassVar

from tollway.envs.base import AgentRun, Desk, Environment, Harness, Task
from tollway.envs.config import EnvConfig
from tollway.errors import CapabilityMissing

__all__ = ["Gold"]


class Gold(Harness):
    """Applies ``Environment.solve`` in the agent's sandbox and submits."""

    needs_model: ClassVar[bool] = False

    def __init__(self, config: EnvConfig, environment: Environment) -> None:
        self._environment = environment

    async def run(self, task: Task, desk: Desk) -> AgentRun:
        """Solve ``task``. Raises ``CapabilityMissing`` where there is no reference solution."""
        if desk.sandbox is None:
            raise CapabilityMissing(
                f"{task.task_id} has no sandbox that a reference solution could work in; use another harness"
            )
        await self._environment.solve(task, desk.sandbox)
        return AgentRun(turns=0, submitted=True, finish="submitted", facts=desk.tools.facts)
