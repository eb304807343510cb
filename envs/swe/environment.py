"""SWE tasks as an environment: repositories with a bug, general coding tools, grading in fresh sandboxes.

Depends on ``envs.base``, ``envs.tools`` and siblings: ``catalogue`` reads tasks, ``cache`` prepares their
directories, ``grading`` judges.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tollway.envs.base import MAX_SOURCE_BYTES, Environment, Grader, Limits, Machine, Task, Toolset, collect
from tollway.envs.config import EnvConfig
from tollway.envs.order import place
from tollway.envs.swe import patches
from tollway.envs.swe.cache import Cache
from tollway.envs.swe.catalogue import Entry, read_set
from tollway.envs.swe.grading import SweGrader
from tollway.envs.swe.prepared import Prepared, prepare
from tollway.envs.swe.running import SITE
from tollway.envs.swe.task import Checkout
from tollway.envs.tools import CodingTools
from tollway.errors import EpisodeFailed, NotFound
from tollway.messages import Message
from tollway.sandboxes.base import Sandbox

__all__ = ["Swe"]

MAX_NEW_FILES, MAX_LISTING_BYTES, LIST_S = 500, 1 << 18, 60.0
GRADING_S = 300.0
"""Beyond twice the tests' own limit: making sandboxes, waiting for places."""


class Swe(Environment):
    """The tasks of one set."""

    name = "swe"
    needs_submission = False

    def __init__(self, config: EnvConfig) -> None:
        self._config, self._swe = config, config.swe
        heldout = config.split == "heldout"
        name = (self._swe.heldout_tasks if heldout else None) or self._swe.tasks
        self._entries = {f"{self.name}/{one.task.instance_id}": one for one in read_set(name, self._swe.only)}
        self._ids = tuple(self._entries)
        self._cache = Cache(self._swe.cache)
        self._prepared: dict[str, Prepared] = {}
        self._p2p_sample = 0 if heldout else self._swe.p2p_sample
        self.size = len(self._ids)

    async def open(self) -> None:
        """Prepare every task's directory from what was fetched; nothing is downloaded."""
        for task_id, entry in self._entries.items():
            self._prepared[task_id] = await asyncio.to_thread(prepare, self._cache, entry.task)

    def task(self, index: int) -> Task:
        """Task ``index`` of the seeded order."""
        return self._task(self._ids[place(self._config.seed, len(self._ids), index)])

    def find(self, task_id: str) -> Task:
        """The task of that id, with or without "swe/"."""
        wanted = task_id if task_id in self._entries else f"{self.name}/{task_id}"
        if wanted not in self._entries:
            raise NotFound(f"no SWE task {task_id!r} in this set; there are {self.size}, such as {self._ids[0]!r}")
        return self._task(wanted)

    @property
    def ids(self) -> tuple[str, ...]:
        """All task ids, sorted."""
        return self._ids

    def toolset(self, task: Task, sandbox: Sandbox | None) -> Toolset:
        """bash, read, edit, submit."""
        if sandbox is None:
            raise EpisodeFailed(f"{task.task_id} is worked on in a sandbox")
        return CodingTools(sandbox, timeout_s=self._swe.tool_timeout_s)

    def grader(self, task: Task) -> Grader:
        """The hardened grader over the task's own tests."""
        prepared = self._ready(task.task_id)
        return SweGrader(
            task=self._entry(task).task,
            tree=prepared.tree,
            site=prepared.site,
            p2p_sample=self._p2p_sample,
            mem_mb=self._swe.memory_mb,
        )

    async def solve(self, task: Task, sandbox: Sandbox) -> None:
        """Apply the reference fix."""
        fix = self._entry(task).task.fix
        before: dict[str, str] = {}
        for one in fix:
            if not one.creates:
                before[one.path] = (await sandbox.read(one.path, max_bytes=MAX_SOURCE_BYTES)).decode()
        for path, text in patches.apply(fix, before).items():
            if text is None:
                await sandbox.exec(["rm", "--", path], timeout_s=LIST_S)
            else:
                await sandbox.write(path, text.encode())

    async def collect(self, task: Task, sandbox: Sandbox) -> Mapping[str, bytes]:
        """The library's Python files, those that were there and new ones, as the agent left them."""
        swe = self._entry(task).task
        found = await collect(sandbox, task.sources)
        listed = await sandbox.exec(
            ["find", *swe.packages, "-type", "f", "-name", "*.py", "-print0"],
            timeout_s=LIST_S,
            max_output=MAX_LISTING_BYTES,
        )
        names = [one.decode("utf-8", "replace") for one in listed.stdout.split(b"\0")] if swe.packages else []
        new = sorted({one for one in names if swe.may_submit(one)} - set(task.sources))
        return {**found, **await collect(sandbox, new[:MAX_NEW_FILES])}

    def _entry(self, task: Task) -> Entry:
        return self._entries[task.task_id]

    def _ready(self, task_id: str) -> Prepared:
        if task_id not in self._prepared:
            self._prepared[task_id] = prepare(self._cache, self._entries[task_id].task)
        return self._prepared[task_id]

    def _task(self, task_id: str) -> Task:
        entry, prepared = self._entries[task_id], self._ready(task_id)
        swe = entry.task
        roots = ["/workspace" if root == "." else f"/workspace/{root}" for root in swe.roots]
        site = {SITE: prepared.site} if prepared.site is not None else {}
        return Task(
            task_id=task_id,
            messages=(Message(role="user", content=entry.instruction.strip()),),
            sources=prepared.sources,
            machine=Machine(
                image=swe.source.image if isinstance(swe.source, Checkout) else None,
                tree=prepared.tree,
                mounts=site,
                env={"PYTHONPATH": ":".join([*roots, *site]), "PYTHONDONTWRITEBYTECODE": "1"},
                mem_mb=self._swe.memory_mb,
                pids=self._swe.pids,
            ),
            limits=Limits(grade_s=2 * swe.timeouts.total_s + GRADING_S),
        )
