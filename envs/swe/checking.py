"""Proof that a set of tasks is sound: what the reference fix, nothing, and every attack earn.

Depends on ``environment``, ``attacks`` and ``grading``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from tollway.envs.base import Task, Verdict, Work
from tollway.envs.swe.attacks import ATTACKS, fixed, submission
from tollway.envs.swe.cache import tree_files
from tollway.envs.swe.grading import SweGrader
from tollway.sandboxes.base import SandboxProvider

__all__ = ["Trial", "trials"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One submission and its grade."""

    name: str
    """"reference fix", "nothing changed", or an attack's."""
    verdict: Verdict
    wanted: float
    must_flag: bool = False

    @property
    def good(self) -> bool:
        """Whether grading did what it must."""
        return self.verdict.reward == self.wanted and (not self.must_flag or bool(self.verdict.flags))


async def trials(
    grader: SweGrader, task: Task, provider: SandboxProvider, *, attacks: bool = False
) -> AsyncIterator[Trial]:
    """Grade the reference fix, the untouched tree and, with ``attacks``, every known attack."""
    tree: Mapping[str, bytes] = tree_files(grader.tree)

    async def grade(handed: Mapping[str, bytes]) -> Verdict:
        return await grader.grade(task, Work(submission=handed, provider=provider))

    yield Trial(name="reference fix", verdict=await grade(fixed(grader.task, tree)), wanted=1.0)
    for attack in ATTACKS if attacks else ATTACKS[:1]:
        verdict = await grade(submission(attack, grader.task, tree))
        yield Trial(name=attack.name, verdict=verdict, wanted=0.0, must_flag=attack.flagged)
