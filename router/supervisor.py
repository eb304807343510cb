"""Child processes that serve a URL: start, wait until ready, watch, stop.

A child of ours says on its first line of stdout that it accepts requests: ``{"event": "ready", "url": ...}``; all
else it has to say goes to its log file. A foreign program (``spawn``) gets its address from us, says nothing of
the kind, and has all of its output in the log. A child has a process group of its own, so a Ctrl-C in the terminal
reaches only the process that owns it, and it ends with its owner. What a death means is for the caller; how often
one may follow another says ``RestartBudget``. Depends on ``serving``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from tollway.errors import ComponentLost
from tollway.serving import read_ready

__all__ = ["PARENT_VARIABLE", "RestartBudget", "ServerProcess", "die_with_parent", "mind_program"]

PARENT_VARIABLE = "TOLLWAY_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_MIND_S = 0.5
"""Longest time between two looks at whether the parent lives: a signal that came too early is not waited for."""
_GRACE_S = 3.0
"""How long a program may take to end after its owner died."""


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


def mind_program(argv: Sequence[str]) -> int:
    """Run the foreign program ``argv`` to its end and return its exit status; nothing of it outlives our parent.

    A server's own processes notice the death of their parent late or never, above all while they start. So this
    process stays beside them: when its parent dies, it ends the process group that it leads.
    """
    parent = os.getppid()
    die_with_parent()
    try:
        program = subprocess.Popen(argv, preexec_fn=_die_with_minder)  # noqa: PLW1509 - this process has one thread
    except OSError as error:
        sys.stderr.write(f"cannot start {argv[0]}: {error.strerror}\n")
        return 127
    # Whoever ends the group tells the program, too: here it only ends the waiting.
    heard = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    while (status := program.poll()) is None:
        signal.sigtimedwait(heard, _MIND_S)
        if os.getppid() != parent:
            os.killpg(0, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(_GRACE_S)
            os.killpg(0, signal.SIGKILL)
    return status


def _die_with_minder() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


class RestartBudget:
    """How often processes may die: ``limit`` times within ``window_s``, then never mind which one it was.

    >>> budget = RestartBudget(1, 60.0)
    >>> budget.spend(0.0), budget.spend(10.0)
    (True, False)
    """

    def __init__(self, limit: int = 8, window_s: float = 60.0) -> None:
        self.limit, self.window_s = limit, window_s
        self._deaths: deque[float] = deque()

    def spend(self, now: float) -> bool:
        """Count a death at ``now``; whether a restart is still allowed."""
        self._deaths.append(now)
        while self._deaths[0] <= now - self.window_s:
            self._deaths.popleft()
        return len(self._deaths) <= self.limit

    @property
    def pause_s(self) -> float:
        """How long to wait before the next restart: nothing at first, longer while deaths follow each other."""
        return min(5.0, 0.1 * (float(2 ** (len(self._deaths) - 1)) - 1.0))


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
        with _appended(log, name) as stderr:
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

    @classmethod
    async def spawn(
        cls, argv: Sequence[str], *, name: str, log: Path, url: str, env: dict[str, str] | None = None
    ) -> ServerProcess:
        """Start a foreign program that will serve at ``url``. When it does, the caller has to find out."""
        with _appended(log, name) as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", __name__, *argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **(env or {}), PARENT_VARIABLE: str(os.getpid())},
            )
        child = cls(name, process, log)
        child.url = url
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

    def kill(self) -> None:
        """End the child and its process group at once, without waiting."""
        self._signal(signal.SIGKILL)

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


def _appended(log: Path, name: str) -> BinaryIO:
    """``log``, open at its end. Raises ``ComponentLost``: nothing is started that could not say why it ends."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab")
    except OSError as error:
        raise ComponentLost(f"{name} was not started: its log {log} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    _status = mind_program(sys.argv[1:])
    if _status == -signal.SIGKILL:  # it ends as its program did
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(_status if _status >= 0 else 128 - _status)
