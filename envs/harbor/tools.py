"""The coding tools in a task's working directory. Depends on ``envs.tools`` and ``stage``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tollway.envs.harbor.stage import Stage
from tollway.envs.harbor.task import HarborTask
from tollway.envs.tools import CodingTools
from tollway.errors import BadRequest
from tollway.messages import Message
from tollway.sandboxes.base import ExecResult, Sandbox

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


class _InPlace:
    """``tools.Bench``: a machine from an image, seen from the task's working directory as the task's user."""

    def __init__(self, inner: Sandbox, workdir: str, user: str | int | None) -> None:
        self._inner, self._workdir, self._user = inner, workdir, None if user is None else str(user)

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        max_output: int | None = None,
    ) -> ExecResult:
        return await self._inner.exec(
            cmd,
            timeout_s=timeout_s,
            cwd=self._workdir,
            env=env,
            stdin=stdin,
            max_output=max_output,
            user=self._user,
        )

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        program = '[ -f "$1" ] && [ ! -L "$1" ] && exec cat "$1"'
        done = await self.exec(["/bin/sh", "-c", program, "read", path], timeout_s=60.0, max_output=max_bytes)
        if done.exit_code != 0 or done.truncated:
            raise BadRequest(f"{path} is {'too large' if done.truncated else 'no regular file'}", param="path")
        return done.stdout

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        program = 'mkdir -p "$(dirname "$1")" && cat > "$1" && chmod "$2" "$1"'
        done = await self.exec(["/bin/sh", "-c", program, "write", path, f"{mode:o}"], timeout_s=60.0, stdin=data)
        if done.exit_code != 0:
            raise BadRequest(f"cannot write {path}: {done.stderr.decode('utf-8', 'replace')[-200:]}", param="path")
