"""Keeps groups generating: admits prompts by pace, runs them through the episode source, files the results.

Owns the ledger's issued and finished states and the two drops at arrival (aborted, no variance). Generation
never waits for training; only admission does. Depends on ports, ledger, spool and buffer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass

from tollway.errors import ComponentLost, TollwayError
from tollway.ports import EpisodeSource, GroupRequest
from tollway.records import Group, PolicyVersion, Sampling
from tollway.trainer.buffer import GroupBuffer, Ready, may_admit, newest_version, staleness
from tollway.trainer.config import TrainerConfig
from tollway.trainer.ledger import DropReason, Ledger
from tollway.trainer.planner import is_scored, judge
from tollway.trainer.spool import Spool

__all__ = ["Drops", "Restored", "Rollouts", "sampling_of"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Drops:
    """Groups dropped, by reason, since the last step."""

    aborted: int = 0
    zero_variance: int = 0


@dataclass(frozen=True, slots=True)
class Restored:
    """What a resume found."""

    reissued: int
    """Prompts that go out again."""
    reloaded: int
    """Finished groups taken from the spool."""
    stale: int
    """Finished groups that were too old."""


def sampling_of(config: TrainerConfig) -> Sampling:
    """How episodes are drawn, in training, in probes and in evaluation alike."""
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_new_tokens=config.max_new_tokens,
    )


class Rollouts:
    """The producer side of one run. ``run`` is a task of the caller's; everything is on one event loop."""

    def __init__(
        self, source: EpisodeSource, config: TrainerConfig, ledger: Ledger, spool: Spool, *, step: int, version: int
    ) -> None:
        self._source, self._config, self._ledger, self._spool = source, config, ledger, spool
        self._step, self._version, self._base = step, version, version
        self._total = (config.steps - step) * config.groups_per_step
        self._cap = config.max_groups_in_flight or config.groups_per_step
        self._sampling = sampling_of(config)
        self._again: deque[int] = deque()
        self._next = ledger.next_index()
        self._consumed = self._in_flight = self._failures = self._replaced = 0
        self._changed = asyncio.Event()
        self.drops = Drops()
        self.buffer = GroupBuffer(max_staleness=config.max_staleness, on_stale=self._drop_stale)

    def restore(self) -> Restored:
        """Put the open prompts of an earlier process back: reload finished groups, reissue the others.

        A group with a token of a version that the loaded checkpoint has not reached belongs to weights that
        are gone, so its prompt goes out again.
        """
        issued, finished = self._ledger.open()
        reloaded = stale = 0
        for index in finished:
            group = self._spool.get(index)
            if group is None or newest_version(group) > self._version:
                self._ledger.reissue(index)
                issued.append(index)
            elif staleness(group, self._version) > self._config.max_staleness:
                self._drop(index, "stale")
                stale += 1
            else:
                self.buffer.put(Ready(index, group))
                reloaded += 1
        self._again = deque(sorted(issued))
        return Restored(len(issued), reloaded, stale)

    async def run(self) -> None:
        """Start groups as admission allows, until cancelled. A lost component ends it with the error."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                while self._has_room():
                    index = self._again.popleft() if self._again else self._new_index()
                    self._in_flight += 1
                    tasks.create_task(self._run_group(index), name=f"group-{index}")
                self._changed.clear()
                await self._changed.wait()

    async def take(self, version: PolicyVersion) -> list[Ready]:
        """Wait for the next batch of groups. They count as admitted from here on, not only once trained."""
        taken = await self.buffer.take(self._config.groups_per_step, version)
        self._consumed += len(taken)
        return taken

    def advance(self, *, step: int, version: PolicyVersion) -> None:
        """A step is trained and its weights serve: more groups may go out."""
        self._step, self._version, self._replaced = step, version, 0
        self._changed.set()

    def close_window(self) -> Drops:
        """Drops at arrival since the last call."""
        drops, self.drops = self.drops, Drops()
        return drops

    def _has_room(self) -> bool:
        admitted = self._consumed + len(self.buffer) + self._in_flight
        return (
            self._in_flight < self._cap
            and admitted < self._total
            and may_admit(
                admitted=admitted,
                batch=self._config.groups_per_step,
                lead=self._config.lead,
                versions=self._version - self._base,
            )
        )

    def _new_index(self) -> int:
        self._next += 1
        return self._next - 1

    async def _run_group(self, index: int) -> None:
        try:
            attempt = self._ledger.issue(index)
            request = GroupRequest(
                group_id=f"g{index:06d}" if attempt == 1 else f"g{index:06d}-{attempt}",
                prompt_index=index,
                samples=self._config.samples_per_group,
                sampling=self._sampling,
            )
            try:
                group: Group | None = await self._source.run_group(request)
            except ComponentLost:
                raise
            except TollwayError as error:
                self._failed(index, f"{type(error).__name__}: {error}")
                group = None
            if group is not None:
                await self._file(index, group)
        finally:
            self._in_flight -= 1
            self._changed.set()

    async def _file(self, index: int, group: Group) -> None:
        verdict = judge(group, self._config.group_scoring)
        if verdict == "aborted":
            if any(is_scored(rollout) for rollout in group.rollouts):
                self._failures = 0
                self._count_aborted(index)
            else:
                errors = [rollout.error for rollout in group.rollouts if rollout.error]
                self._failed(index, errors[0] if errors else "no attempt got a reward")
            return
        self._failures = 0
        limit = self._config.oversample_limit * self._config.groups_per_step
        if verdict == "zero_variance" and self._config.dynamic_sampling and self._replaced < limit:
            self._replaced += 1
            self.drops.zero_variance += 1
            self._drop(index, "zero_variance")
            return
        await asyncio.to_thread(self._spool.put, index, group)
        self._ledger.finish(index)
        self.buffer.put(Ready(index, group))

    def _failed(self, index: int, reason: str) -> None:
        """No attempt of the group came through. Too many in a row mean that none will."""
        self._count_aborted(index)
        self._failures += 1
        logger.warning("group %d failed entirely: %s", index, reason)
        if self._failures >= self._config.max_failed_groups:
            raise ComponentLost(f"{self._failures} groups in a row failed entirely; the last one: {reason}")

    def _count_aborted(self, index: int) -> None:
        self.drops.aborted += 1
        self._drop(index, "aborted")

    def _drop_stale(self, ready: Ready) -> None:
        self._drop(ready.index, "stale")
        self._changed.set()

    def _drop(self, index: int, reason: DropReason) -> None:
        self._ledger.drop(index, reason, step=self._step)
        self._spool.discard(index)
