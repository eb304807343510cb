"""Maths as an environment: a question, one reply, an answer that is compared by symbol.

Depends on ``envs.base``, ``envs.plain`` and siblings.
"""

from __future__ import annotations

from dataclasses import dataclass

from tollway.envs.base import Environment, Grader, Task, Toolset, Verdict, Work
from tollway.envs.config import EnvConfig
from tollway.envs.maths.checker import Checker
from tollway.envs.maths.extract import final_answer
from tollway.envs.maths.problems import Problem, read_problems, shipped
from tollway.envs.order import place
from tollway.envs.plain import NoTools
from tollway.errors import NotFound
from tollway.messages import Message
from tollway.sandboxes.base import Sandbox

__all__ = ["Maths", "SameAnswer"]


class Maths(Environment):
    """Single-turn questions; the last boxed answer of the reply is compared with the known one."""

    name = "maths"
    needs_submission = False

    def __init__(self, config: EnvConfig) -> None:
        self._config, self._maths = config, config.maths
        path = (self._maths.heldout_data if config.split == "heldout" else None) or self._maths.data
        problems = read_problems(path) if path is not None else shipped(config.split)
        self._problems = {f"{self.name}/{problem.id}": problem for problem in problems}
        self._ids = tuple(self._problems)
        self._checker = Checker(self._maths)
        self.size = len(self._ids)

    async def open(self) -> None:
        """See that answers can be compared at all. Raises ``ConfigError``."""
        await self._checker.same("1", "1.0")

    async def aclose(self) -> None:
        """End the checking processes."""
        await self._checker.aclose()

    def task(self, index: int) -> Task:
        """The question at ``index`` of the seeded order."""
        return self._task(self._ids[place(self._config.seed, len(self._ids), index)])

    def find(self, task_id: str) -> Task:
        """The question of that id."""
        if task_id not in self._problems:
            raise NotFound(f"no question {task_id!r}; there are {self.size}, such as {self._ids[0]!r}")
        return self._task(task_id)

    def reference(self, task: Task) -> str:
        """The known answer, for graders that are given one."""
        return self._problem(task).answer

    def toolset(self, task: Task, sandbox: Sandbox | None) -> Toolset:
        """None: one reply is the whole episode."""
        return NoTools()

    def grader(self, task: Task) -> Grader:
        """Comparison with the known answer."""
        return SameAnswer(
            checker=self._checker, reference=self._problem(task).answer, boxed_only=self._maths.boxed_only
        )

    def _problem(self, task: Task) -> Problem:
        return self._problems[task.task_id]

    def _task(self, task_id: str) -> Task:
        text = "\n\n".join(filter(None, (self._problems[task_id].question, self._maths.instruction)))
        return Task(task_id=task_id, messages=(Message(role="user", content=text),), machine=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SameAnswer(Grader):
    """1 when the final answer of the last reply equals ``reference``, else 0."""

    checker: Checker
    reference: str
    boxed_only: bool = False

    async def grade(self, task: Task, work: Work) -> Verdict:
        """Extract, compare in a killable process."""
        answer = final_answer(work.run.answer, boxed_only=self.boxed_only)
        if answer is None:
            return Verdict(reward=0.0, reason="no final answer", facts={"answered": 0.0})
        found = await self.checker.same(answer, self.reference)
        return Verdict(reward=float(found.equal), reason=found.reason, facts={"answered": 1.0})
