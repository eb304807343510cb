"""The coding tools in a task's working directory. Depends on ``envs.tools`` and ``stage``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tollway.envs.harbor.stage import Stage
from tollway.envs.harbor.task import HarborTask
from tollway.envs.tools import CodingTools
from tollway.errors import BadRequest, CapabilityMissing
from tollway.messages import Message
from tollway.sandboxes.base import Command, ExecResult, Sandbox

__all__ = ["HarborTools"]


class HarborTools(CodingTools):
    """bash, read, edit and submit; ``open`` lays out the task first, whoever then works on it."""

    def __init__(self, task: HarborTask, sandbox: Sandbox, *, timeout_s: float) -> None:
        user = task.file.agent.user
        super().__init__(
            sandbox if task.agent.image is None and user is None else _InPlace(sandbox, task.agent.workdir, user),
            timeout_s=timeout_s,
        )
        self._task, self._machine = task, sandbox

    async def open(self) -> tuple[Message, ...]:
        """Lay out the task's files."""
        await (await Stage.on(self._machine, self._task.agent)).prepare()
        return ()


class _InPlace(Sandbox):
    """A machine from an image, seen from the task's working directory as the task's user.

    Only what tools need: the machine itself is created, extended and killed by the runner.
    """

    def __init__(self, inner: Sandbox, workdir: str, user: str | int | None) -> None:
        self._inner, self._workdir, self._user = inner, workdir, None if user is None else str(user)

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_s: float,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        max_output: int | None = None,
        user: str | None = None,
    ) -> ExecResult:
        """As the task's user, relative paths from its working directory."""
        where = cwd if cwd.startswith("/") else f"{self._workdir}/{cwd}"
        return await self._inner.exec(
            cmd, timeout_s=timeout_s, cwd=where, env=env, stdin=stdin, max_output=max_output, user=user or self._user
        )

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """A regular file, by the task's own means."""
        program = '[ -f "$1" ] && [ ! -L "$1" ] && exec cat "$1"'
        done = await self.exec(["/bin/sh", "-c", program, "read", path], timeout_s=60.0, max_output=max_bytes)
        if done.exit_code != 0 or done.truncated:
            raise BadRequest(f"{path} is {'too large' if done.truncated else 'no regular file'}", param="path")
        return done.stdout

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Create or replace a file, with the directories above it."""
        program = 'mkdir -p "$(dirname "$1")" && cat > "$1" && chmod "$2" "$1"'
        done = await self.exec(["/bin/sh", "-c", program, "write", path, f"{mode:o}"], timeout_s=60.0, stdin=data)
        if done.exit_code != 0:
            raise BadRequest(f"cannot write {path}: {done.stderr.decode('utf-8', 'replace')[-200:]}", param="path")

    async def _exec(self, command: Command) -> ExecResult:
        raise CapabilityMissing("a view of a sandbox runs nothing by itself")

    async def _read(self, path: str, max_bytes: int) -> bytes:
        raise CapabilityMissing("a view of a sandbox reads nothing by itself")

    async def _write(self, path: str, data: bytes, mode: int) -> None:
        raise CapabilityMissing("a view of a sandbox writes nothing by itself")

    async def _kill(self) -> None:
        raise CapabilityMissing("a view of a sandbox cannot kill it")
