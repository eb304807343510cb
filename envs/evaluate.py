"""Measures a policy: many tasks, one attempt each, mean reward with its interval, and what agents did.

Episodes that infrastructure ended are counted apart and never averaged. Depends on ``ports`` and ``envs.episode``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tollway.envs.base import Task
from tollway.envs.episode import Episode
from tollway.ports import EpisodeSource, GroupRequest
from tollway.records import Rollout, Sampling

__all__ = ["Evaluation", "TaskSource", "evaluate", "evaluate_tasks", "interval_of", "summarise", "wilson"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Outcome of ``evaluate``."""

    episodes: int
    """Episodes with a reward."""
    errors: int
    """Episodes without one; not part of any mean."""
    reward: float | None
    """Mean reward; ``None`` without a single graded episode."""
    interval: tuple[float, float]
    """95 % interval of the mean: Wilson's for rewards in [0, 1], else the mean and 1.96 standard errors."""
    turns: float
    facts: dict[str, float] = field(default_factory=dict)
    """Means of the environment's numbers, each over the episodes that report it."""


async def evaluate(
    source: EpisodeSource,
    episodes: int,
    *,
    sampling: Sampling,
    first_index: int = 0,
    name: str = "eval",
    samples_per_task: int = 1,
) -> Evaluation:
    """Run ``episodes`` episodes over as many tasks from ``first_index`` on, all at once as the source allows."""
    requests = [
        GroupRequest(
            group_id=f"{name}-{index}",
            prompt_index=index,
            samples=min(samples_per_task, episodes - place * samples_per_task),
            sampling=sampling,
        )
        for place, index in enumerate(range(first_index, first_index + math.ceil(episodes / samples_per_task)))
    ]
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(source.run_group(request)) for request in requests]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return summarise([rollout for each in running for rollout in each.result().rollouts])


class TaskSource(Protocol):
    """What runs episodes of given tasks: ``EpisodeRunner`` and what stands before it."""

    async def run_task(self, task: Task, *, group_id: str, samples: int, sampling: Sampling) -> Sequence[Episode]:
        """``samples`` episodes of ``task``. Raises what would end every further one, too."""
        ...


async def evaluate_tasks(
    source: TaskSource, tasks: Sequence[Task], *, samples: int, sampling: Sampling, done: Callable[[Episode], None]
) -> None:
    """Run ``samples`` episodes of each task, all at once as the source allows; ``done`` hears of each.

    An episode that fails is one episode that failed. What ends them all is raised, when the others are cancelled.
    """

    async def one(place: int, task: Task) -> None:
        for episode in await source.run_task(task, group_id=f"eval-{place}", samples=1, sampling=sampling):
            done(episode)

    try:
        async with asyncio.TaskGroup() as group:
            for place, task in enumerate(tasks):
                for _ in range(samples):
                    group.create_task(one(place, task))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def summarise(rollouts: Sequence[Rollout]) -> Evaluation:
    """Means over the graded rollouts."""
    graded = [rollout for rollout in rollouts if rollout.reward is not None]
    rewards = [rollout.reward for rollout in graded if rollout.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    values: dict[str, list[float]] = {}
    for rollout in graded:
        for key, value in rollout.facts.items():
            values.setdefault(key, []).append(value)
    return Evaluation(
        episodes=len(graded),
        errors=len(rollouts) - len(graded),
        reward=mean,
        interval=interval_of(rewards),
        turns=sum(rollout.turns for rollout in graded) / len(graded) if graded else 0.0,
        facts={key: sum(each) / len(each) for key, each in sorted(values.items())},
    )


def interval_of(rewards: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of ``rewards``; (0, 1) without any."""
    if not rewards:
        return 0.0, 1.0
    mean = sum(rewards) / len(rewards)
    if all(0.0 <= reward <= 1.0 for reward in rewards):
        return wilson(mean, len(rewards))
    spread = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1))
    half = 1.96 * spread / math.sqrt(len(rewards))
    return mean - half, mean + half


def wilson(mean: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a proportion.

    >>> tuple(round(bound, 3) for bound in wilson(0.5, 100))
    (0.404, 0.596)
    """
    centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, centre - half), min(1.0, centre + half)
