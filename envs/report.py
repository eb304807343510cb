"""What an evaluation found so far: rewards with their interval, pass@k, errors by code, costs, a row per task.

Grows episode by episode, so that an evaluation that is stopped still tells what it knows. Episodes that
infrastructure ended are counted apart and are part of no mean; a figure that nobody measured is ``None``, not 0.
Pure; depends on ``envs.episode`` and ``envs.evaluate``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tollway.envs.episode import Episode
from tollway.envs.evaluate import Evaluation, interval_of, summarise
from tollway.envs.usage import Usage, usage_of
from tollway.records import Rollout

__all__ = ["Report", "TaskRow", "pass_at"]

PASSED = 1.0
"""Smallest reward that counts as solved."""


@dataclass(slots=True)
class TaskRow:
    """One task and what came of its samples."""

    task_id: str
    rewards: list[float] = field(default_factory=list)
    """Of the graded samples."""
    errors: list[str] = field(default_factory=list)
    turns: int = 0
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    folders: list[str] = field(default_factory=list)

    @property
    def reward(self) -> float | None:
        """Mean over the graded samples."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        graded = len(self.rewards)
        return {
            "task": self.task_id,
            "reward": self.reward,
            "rewards": self.rewards,
            "solved": sum(reward >= PASSED for reward in self.rewards),
            "errors": self.errors,
            "turns": self.turns / graded if graded else None,
            "seconds": round(self.seconds / graded, 3) if graded else None,
            "reasons": self.reasons,
            "flags": sorted(self.flags),
            "artifacts": self.folders,
        }


class Report:
    """Collects the episodes of one evaluation of ``tasks`` tasks with ``samples`` samples each."""

    def __init__(self, *, environment: str, harness: str, tasks: int, samples: int) -> None:
        self.environment, self.harness = environment, harness
        self.tasks, self.samples = tasks, samples
        self.rows: dict[str, TaskRow] = {}
        self.codes: Counter[str] = Counter()
        """Episodes that infrastructure ended, by error code."""
        self.artifacts_lost = 0
        self._rollouts: list[Rollout] = []
        self._usages: list[Usage] = []
        self._reward_sum, self._graded = 0.0, 0

    @property
    def planned(self) -> int:
        """Episodes of the whole evaluation."""
        return self.tasks * self.samples

    @property
    def done(self) -> int:
        """Episodes that are over, with or without a grade."""
        return len(self._rollouts)

    @property
    def mean_reward(self) -> float | None:
        """Over the graded episodes so far; cheap enough to look at all the time."""
        return self._reward_sum / self._graded if self._graded else None

    def add(self, episode: Episode) -> None:
        """Take in a finished episode."""
        usage = usage_of(episode.rows)
        # Its tokens are not needed any more, and an evaluation may be long.
        rollout = replace(episode.rollout(), rows=())
        self._usages.append(usage)
        self._rollouts.append(rollout)
        row = self.rows.setdefault(episode.task_id, TaskRow(episode.task_id))
        if episode.folder is not None:
            row.folders.append(str(episode.folder))
        if rollout.reward is None or episode.verdict is None:
            self.codes[episode.error.code if episode.error else "internal"] += 1
            row.errors.append(rollout.error or "")
            return
        self._reward_sum += rollout.reward
        self._graded += 1
        row.rewards.append(rollout.reward)
        row.turns += rollout.turns
        row.seconds += rollout.duration_s
        row.reasons.append(episode.verdict.reason)
        row.flags |= set(episode.verdict.flags)

    def evaluation(self) -> Evaluation:
        """The means. With several samples of a task the interval is that of the tasks' means, which do not depend
        on each other; those of its samples do."""
        found = summarise(self._rollouts)
        if self.samples == 1:
            return found
        return replace(
            found, interval=interval_of([row.reward for row in self.rows.values() if row.reward is not None])
        )

    def in_order(self) -> list[TaskRow]:
        """The rows by task id, numbers in it by value."""
        return sorted(self.rows.values(), key=lambda row: _natural(row.task_id))

    def pass_at(self) -> dict[int, float]:
        """Chance that one of k samples solves a task, for k = 1, 2, 4, ... and all; empty with one sample."""
        if self.samples < 2:
            return {}
        counts = [(len(row.rewards), sum(r >= PASSED for r in row.rewards)) for row in self.rows.values()]
        ks = sorted({2**power for power in range(self.samples.bit_length())} | {self.samples})
        found = {k: pass_at(counts, k) for k in ks if k <= self.samples}
        return {k: value for k, value in found.items() if value is not None}

    @property
    def cache_hit_rate(self) -> float | None:
        """Cached share of all prompt tokens; ``None`` where a call did not say."""
        prompt, cached = self.tokens("prompt_tokens"), self.tokens("cached_tokens")
        return cached / prompt if prompt and cached is not None else None

    def tokens(self, name: str) -> int | None:
        """Sum of one figure of ``Usage`` over all episodes with model calls; ``None`` where one does not know it."""
        values: Sequence[int | None] = [getattr(usage, name) for usage in self._usages if usage.calls]
        known = [value for value in values if value is not None]
        return sum(known) if values and len(known) == len(values) else None

    def as_json(self) -> dict[str, object]:
        """Everything as plain values."""
        evaluation = self.evaluation()
        return {
            "environment": self.environment,
            "harness": self.harness,
            "planned": self.planned,
            "complete": self.done == self.planned,
            "episodes": evaluation.episodes,
            "errors": evaluation.errors,
            "errors_by_code": dict(sorted(self.codes.items())),
            "reward": evaluation.reward,
            "interval": list(evaluation.interval) if evaluation.episodes else None,
            "samples": self.samples,
            "pass_at": {str(k): value for k, value in self.pass_at().items()},
            "turns": evaluation.turns if evaluation.episodes else None,
            "facts": evaluation.facts,
            "sampled_tokens": self.tokens("sampled_tokens"),
            "prompt_tokens": self.tokens("prompt_tokens"),
            "cached_tokens": self.tokens("cached_tokens"),
            "cache_hit_rate": self.cache_hit_rate,
            "artifacts_lost": self.artifacts_lost,
            "tasks": [row.as_json() for row in self.in_order()],
        }


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isascii() and part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def pass_at(counts: Sequence[tuple[int, int]], k: int) -> float | None:
    """Unbiased pass@k over tasks given as (graded samples, solved ones); tasks with fewer than k are left out.

    >>> pass_at([(4, 1), (4, 0), (1, 1)], 2)
    0.25
    """
    chances = [1.0 - math.comb(graded - solved, k) / math.comb(graded, k) for graded, solved in counts if graded >= k]
    return sum(chances) / len(chances) if chances else None
