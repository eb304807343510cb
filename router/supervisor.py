"""Child processes that serve a URL: start, wait until ready, watch, stop.

A child says on its first line of stdout that it accepts requests: ``{"event": "ready", "url": ...}``; all
else it has to say goes to its log file. It gets a process group of its own, so a Ctrl-C in the terminal
reaches only the process that owns it, and it must end with its owner (``die_with_parent``). Owns no
policy: what a death means is for the caller. Depends on ``serving``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from tollway.errors import ComponentLost
from tollway.serving import read_ready

__all__ = ["PARENT_VARIABLE", "ServerProcess", "die_with_parent"]

PARENT_VARIABLE = "TOLLWAY_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to end this process when the process that started it dies, however it dies.

    Does nothing unless the parent asked for it through the environment. Closes the race in which the
    parent is gone before the request is made.
    """
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if not parent.isdigit():
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGTERM)


class ServerProcess:
    """One running child with a URL."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name, self.log = name, log
        self.url = ""
        self._process = process
        self._drain: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        name: str,
        log: Path,
        ready_timeout_s: float = 120.0,
        env: dict[str, str] | None = None,
    ) -> ServerProcess:
        """Start ``argv`` and return when it is ready.

        Raises ``ComponentLost`` with the child's last log lines when it ends or stays silent instead.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                env={**os.environ, **(env or {}), PARENT_VARIABLE: str(os.getpid())},
            )
        child = cls(name, process, log)
        try:
            await asyncio.wait_for(child._read_ready(), ready_timeout_s)
        except BaseException as error:
            await child.stop(grace_s=0.5)
            if isinstance(error, TimeoutError):
                raise ComponentLost(
                    f"{name} was not ready after {ready_timeout_s:.0f} s; its last words:\n{child.last_words()}"
                ) from None
            raise
        child._drain = asyncio.create_task(child._drain_stdout(), name=f"{name} stdout")
        return child

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; ``None`` while it runs, negative for a signal."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for the child to end, however long it takes."""
        return await self._process.wait()

    def lost(self) -> ComponentLost:
        """The error to raise when this child ended although it was needed."""
        return ComponentLost(f"{self.name} ended with status {self.returncode}; its last words:\n{self.last_words()}")

    def last_words(self, lines: int = 12) -> str:
        """The end of the child's log, indented, for error texts."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 16_384))
                tail = file.read().decode("utf-8", "replace").splitlines()[-lines:]
        except OSError:
            tail = []
        return "\n".join(f"    {line}" for line in tail) or "    (it wrote nothing)"

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """End the child and everything in its process group; returns when it is gone."""
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        if self._process.returncode is None or self._survivors():
            self._signal(signal.SIGKILL)
        await self._process.wait()
        if self._drain is not None:
            await asyncio.gather(self._drain, return_exceptions=True)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _survivors(self) -> bool:
        """Whether members of the child's group outlived it, once it is reaped.

        The kernel gives its number to nobody while the group has members: a process that has it as its pid
        is a stranger, and so is that process's group.
        """
        ours = False
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                _, _, group, session = entry.read_text("utf-8", "replace").rpartition(")")[2].split()[:4]
                if entry.parent.name == str(self.pid):
                    return False
                ours = ours or int(group) == int(session) == self.pid
        return ours

    async def _read_ready(self) -> None:
        stdout = self._stdout()
        line = await stdout.readline()
        if not line:
            await self._process.wait()
            raise self.lost()
        try:
            self.url = read_ready(line)
        except ValueError as error:
            raise ComponentLost(
                f"{self.name} said {line[:200]!r} on stdout instead of its ready line; see {self.log}"
            ) from error

    async def _drain_stdout(self) -> None:
        """Keep the pipe empty, so that a child that prints never blocks."""
        while await self._stdout().read(65_536):
            pass

    def _stdout(self) -> asyncio.StreamReader:
        if self._process.stdout is None:
            raise ComponentLost(f"{self.name} has no stdout to read")
        return self._process.stdout
