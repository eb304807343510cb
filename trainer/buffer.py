"""Finished groups between the engines and the trainer: first in, first out, stale ones dropped when taken.

Also the admission rule that makes such drops rare. One event loop; depends on the records only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tollway.records import Group, PolicyVersion

__all__ = ["GroupBuffer", "Ready", "Window", "may_admit", "newest_version", "staleness"]


@dataclass(frozen=True, slots=True)
class Ready:
    """A finished group and the prompt that it answers."""

    index: int
    group: Group


@dataclass(slots=True)
class Window:
    """Counts since the last step took them."""

    ages: list[int]
    """Ages of taken and stale-dropped groups, in versions."""
    stale: int = 0


def may_admit(*, admitted: int, batch: int, lead: int, versions: int) -> bool:
    """Whether one more group may go out.

    ``admitted`` groups are trained, buffered or in flight since the start or resume (drops refunded), and
    ``versions`` refits happened since. At most ``lead`` batches are ahead of the one being trained.

    >>> may_admit(admitted=31, batch=16, lead=1, versions=0), may_admit(admitted=32, batch=16, lead=1, versions=0)
    (True, False)
    """
    return admitted < (lead + 1 + versions) * batch


def staleness(group: Group, version: PolicyVersion) -> int:
    """Versions between the trainer and the oldest token of the group; 0 for a group without sampled tokens."""
    oldest = group.oldest_version
    return 0 if oldest is None else version - oldest


def newest_version(group: Group) -> PolicyVersion:
    """Newest version of any sampled token; -1 without one."""
    rows = (row for rollout in group.rollouts for row in rollout.rows)
    return max((int(row.weight_version.max(initial=-1)) for row in rows), default=-1)


class GroupBuffer:
    """Holds finished groups. ``on_stale`` hears of each group that is dropped as too old."""

    def __init__(self, *, max_staleness: int, on_stale: Callable[[Ready], None]) -> None:
        self._max_staleness, self._on_stale = max_staleness, on_stale
        self._ready: deque[Ready] = deque()
        self._changed = asyncio.Event()
        self._window = Window([])

    def __len__(self) -> int:
        return len(self._ready)

    def put(self, ready: Ready) -> None:
        """Add a finished group."""
        self._ready.append(ready)
        self._changed.set()

    async def take(self, count: int, version: PolicyVersion) -> list[Ready]:
        """Wait for ``count`` groups that are at most ``max_staleness`` old at ``version``, oldest first."""
        while True:
            self._drop_stale(version)
            if len(self._ready) >= count:
                taken = [self._ready.popleft() for _ in range(count)]
                self._window.ages += [staleness(ready.group, version) for ready in taken]
                return taken
            self._changed.clear()
            await self._changed.wait()

    def ages(self, version: PolicyVersion) -> list[int]:
        """Ages of the groups that wait."""
        return [staleness(ready.group, version) for ready in self._ready]

    def close_window(self) -> Window:
        """Counts since the last call."""
        window, self._window = self._window, Window([])
        return window

    def _drop_stale(self, version: PolicyVersion) -> None:
        kept: deque[Ready] = deque()
        for ready in self._ready:
            age = staleness(ready.group, version)
            if age <= self._max_staleness:
                kept.append(ready)
                continue
            self._window.ages.append(age)
            self._window.stale += 1
            self._on_stale(ready)
        self._ready = kept
