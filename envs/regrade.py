"""Any environment with another grader: the user's own function, or a model. Depends on ``envs.base``."""

from __future__ import annotations

from collections.abc import Mapping

from tollway.envs.base import Environment, Grader, Task, Toolset
from tollway.envs.config import EnvConfig
from tollway.envs.custom.grader import CustomGrader, load_grader
from tollway.envs.judge.grader import JudgeGrader
from tollway.errors import ConfigError
from tollway.sandboxes.base import Sandbox

__all__ = ["JUDGE", "Regraded"]

JUDGE = "judge"


class Regraded(Environment):
    """``inner`` as it is, except for who judges."""

    def __init__(self, inner: Environment, config: EnvConfig) -> None:
        name = config.grader or JUDGE
        self.inner = inner
        self.name, self.size, self.needs_submission = inner.name, inner.size, inner.needs_submission
        self._config = config
        self._grader: Grader = JudgeGrader(config.judge) if name == JUDGE else load_grader(name, config.custom)
        if isinstance(self._grader, (CustomGrader, JudgeGrader)):
            self._grader.reference = self.reference

    async def open(self) -> None:
        """Open the environment, then try the grader on a task. Raises ``ConfigError`` when it cannot grade."""
        await self.inner.open()
        self.size = self.inner.size
        if isinstance(self._grader, CustomGrader):
            await self._grader.check(self.inner.task(0))
        if self._config.grader == JUDGE and self._config.judge.verdict == "prefer":
            task = self.inner.task(0)
            if self.reference(task) is None:
                raise ConfigError(
                    f'env.judge.verdict = "prefer" compares with a reference, and {self.name} has none for '
                    f'{task.task_id}; use "yes_no" or "score"'
                )

    async def aclose(self) -> None:
        """Close the environment."""
        await self.inner.aclose()

    def reference(self, task: Task) -> str | None:
        """The environment's."""
        return self.inner.reference(task)

    def task(self, index: int) -> Task:
        """The environment's."""
        return self.inner.task(index)

    def find(self, task_id: str) -> Task:
        """The environment's."""
        return self.inner.find(task_id)

    def toolset(self, task: Task, sandbox: Sandbox | None) -> Toolset:
        """The environment's."""
        return self.inner.toolset(task, sandbox)

    def grader(self, task: Task) -> Grader:
        """The other one."""
        return self._grader

    async def solve(self, task: Task, sandbox: Sandbox) -> None:
        """The environment's."""
        await self.inner.solve(task, sandbox)

    async def collect(self, task: Task, sandbox: Sandbox) -> Mapping[str, bytes]:
        """The environment's."""
        return await self.inner.collect(task, sandbox)
