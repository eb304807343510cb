"""Harbor task directories as an environment.

Depends on ``envs.base`` and siblings; what a task asks for is in ``task``, how it is laid out in ``stage``, how it
is judged in ``verify``.
"""

from __future__ import annotations

import logging
import os
import posixpath
from collections.abc import Mapping
from pathlib import Path

from tollway.envs.base import Environment, Grader, Limits, Task, Toolset
from tollway.envs.config import EnvConfig
from tollway.envs.harbor.stage import Stage, machine_of, pack
from tollway.envs.harbor.task import HarborTask, Unsupported, read_task, task_directories
from tollway.envs.harbor.tools import HarborTools
from tollway.envs.harbor.verify import SeparateVerifier, SharedVerifier
from tollway.envs.order import place
from tollway.errors import CapabilityMissing, ConfigError, EpisodeFailed, NotFound
from tollway.messages import Message
from tollway.sandboxes.base import Sandbox

__all__ = ["Harbor"]

logger = logging.getLogger(__name__)
_GRADING_S = 600.0
"""Beyond the verifier's own limit: making its machine, laying out files."""
_SOLVE_S = 1800.0


class Harbor(Environment):
    """The tasks of one directory, all read and checked before the first runs."""

    name = "harbor"
    needs_submission = False

    def __init__(self, config: EnvConfig) -> None:
        self._config, self._harbor = config, config.harbor
        path = (self._harbor.heldout_tasks if config.split == "heldout" else None) or self._harbor.tasks
        self._tasks = {f"{self.name}/{task.name}": task for task in self._read(task_directories(path))}
        self._ids = tuple(self._tasks)
        self.size = len(self._ids)

    def task(self, index: int) -> Task:
        """The task at ``index`` of the seeded order."""
        return self._task(self._ids[place(self._config.seed, len(self._ids), index)])

    def find(self, task_id: str) -> Task:
        """The task of that id: its directory's name, with or without "harbor/"."""
        wanted = task_id if task_id in self._tasks else f"{self.name}/{task_id}"
        if wanted not in self._tasks:
            raise NotFound(f"no Harbor task {task_id!r}; there are {self.size}, such as {self._ids[0]!r}")
        return self._task(wanted)

    def toolset(self, task: Task, sandbox: Sandbox | None) -> Toolset:
        """bash, read, edit, submit in the task's working directory."""
        if sandbox is None:
            raise EpisodeFailed(f"{task.task_id} is worked on in a sandbox")
        return HarborTools(self._tasks[task.task_id], sandbox, timeout_s=self._harbor.tool_timeout_s)

    def grader(self, task: Task) -> Grader:
        """tests/test.sh, in the agent's machine or in one of its own, as the task says."""
        found = self._tasks[task.task_id]
        if found.verifier is None:
            return SharedVerifier(task=found)
        return SeparateVerifier(task=found, pids=self._harbor.pids)

    async def collect(self, task: Task, sandbox: Sandbox) -> Mapping[str, bytes]:
        """For a separate verifier: a tar of each artifact, by its path."""
        found = self._tasks[task.task_id]
        if found.verifier is None:
            return {}
        stage = await Stage.on(sandbox, found.agent)
        for hook in found.file.verifier.collect:
            user = None if hook.user is None else str(hook.user)
            await stage.run(
                ["/bin/sh", "-c", hook.command], timeout_s=hook.timeout_sec, user=user, cwd=found.agent.workdir
            )
        taken = {}
        wanted: dict[str, tuple[str, ...]] = {"/logs/artifacts": ()}
        for each in found.file.artifacts:
            wanted[posixpath.normpath(posixpath.join(found.agent.workdir, each.source))] = each.exclude
        for number, (source, exclude) in enumerate(wanted.items()):
            archive = await stage.take(source, number, self._harbor.artifact_mb << 20, exclude)
            if archive is not None:
                taken[source] = archive
        return taken

    async def solve(self, task: Task, sandbox: Sandbox) -> None:
        """Run solution/solve.sh. Raises ``EpisodeFailed`` when it fails, ``CapabilityMissing`` without one."""
        found = self._tasks[task.task_id]
        if not (found.solution / "solve.sh").is_file():
            raise CapabilityMissing(f"{task.task_id} has no solution/solve.sh")
        stage = await Stage.on(sandbox, found.agent)
        await stage.lay("/", pack([(found.solution, stage.real("/solution"))]))
        await stage.must(["chmod", "a+rx", stage.real("/solution/solve.sh")], "make solution/solve.sh a program")
        program = 'cd "$1" && exec /solution/solve.sh'
        done = await stage.run(
            ["/bin/sh", "-c", program, "solve", found.agent.workdir],
            timeout_s=found.file.agent.timeout_sec or _SOLVE_S,
            env=found.solution_env,
            user=None if found.file.agent.user is None else str(found.file.agent.user),
        )
        if done.exit_code != 0:
            words = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-300:]
            raise EpisodeFailed(f"{task.task_id}: solution/solve.sh ended with {done.exit_code}: {words}")

    def _task(self, task_id: str) -> Task:
        found = self._tasks[task_id]
        return Task(
            task_id=task_id,
            messages=(Message(role="user", content=found.instruction.strip()),),
            machine=machine_of(found.agent, self._harbor.pids),
            limits=Limits(agent_s=found.file.agent.timeout_sec, grade_s=found.file.verifier.timeout_sec + _GRADING_S),
        )

    def _read(self, folders: tuple[Path, ...]) -> list[HarborTask]:
        tasks, refused = [], []
        for folder in folders:
            try:
                tasks.append(read_task(folder, self._harbor, os.environ))
            except Unsupported as error:
                refused.append(str(error))
        if refused and (not self._harbor.skip_unsupported or not tasks):
            head = f"{len(refused)} of {len(folders)} Harbor tasks cannot be run here"
            raise ConfigError("\n  ".join([f"{head}; env.harbor.skip_unsupported leaves such tasks out:", *refused]))
        for line in refused:
            logger.warning("left out: %s", line)
        return tasks
