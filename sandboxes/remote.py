"""What all providers share whose machines are reached by a shell and file transfer only.

A subclass says how to run a shell program on the machine and get its output (``_program``), how to put a file
there (``_upload``) and how to destroy it (``_destroy``). Exact bytes, caps, timeouts and the end of everything
that a command started come from ``remote_program``. Nothing here repeats a program after a lost connection: a
command may have run. Depends on ``base`` and ``remote_program``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shlex
import time
from abc import abstractmethod
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

from tollway.errors import BadImage, BadRequest, SandboxError, SandboxGone, TollwayError
from tollway.sandboxes import remote_program as programs
from tollway.sandboxes.base import Sandbox, SandboxProvider
from tollway.sandboxes.remote_program import Reply
from tollway.sandboxes.spec import Command, ExecResult, SandboxSpec
from tollway.sandboxes.workspace import parts_of

__all__ = ["MARK", "RemoteSandbox", "expires_in", "labels_of", "marks_of", "restored_spec", "wanted_marks"]

logger = logging.getLogger(__name__)

MARK = "tollway"
"""Every sandbox that a remote provider makes carries this key in the service's labels or metadata."""
_EXPIRES = "tollway-expires"
_FILE_S = 60.0
"""What reading or writing one file may take."""
_STOP_S = 15.0


def marks_of(spec: SandboxSpec) -> dict[str, str]:
    """What to write into the service's labels, so that any process finds the sandbox and knows when it is stale."""
    return {MARK: "sandbox", _EXPIRES: str(int(time.time() + spec.ttl_s) + 1), **spec.labels}


def wanted_marks(labels: Mapping[str, str] | None) -> dict[str, str]:
    """What a sandbox of ours with these labels carries at least."""
    return {MARK: "sandbox", **(labels or {})}


def labels_of(marks: Mapping[str, str]) -> dict[str, str]:
    """The owner's labels among a sandbox's marks."""
    return {name: value for name, value in marks.items() if name not in (MARK, _EXPIRES)}


def expires_in(marks: Mapping[str, str]) -> float:
    """Seconds until the planned end that the marks name, 0 when it has passed or nobody wrote one."""
    text = marks.get(_EXPIRES, "")
    return max(0.0, int(text) - time.time()) if text.isdecimal() else 0.0


def restored_spec(marks: Mapping[str, str], expires_in_s: float) -> SandboxSpec:
    """A spec for a sandbox that another process made: its labels and what is left of its life."""
    return SandboxSpec(ttl_s=max(1.0, expires_in_s), labels=labels_of(marks) or {MARK: "unlabelled"})


class RemoteSandbox(Sandbox):
    """A machine behind a service."""

    inline_bytes: ClassVar[int] = 48_000
    """What a program may hold of a file; the program itself is twice as long. A single argument may hold 128 KiB."""
    sweeps: ClassVar[bool] = False
    """Nothing but our commands runs on the machine, so that what is left after the last one may be killed."""

    def __init__(
        self, provider: SandboxProvider, sandbox_id: str, spec: SandboxSpec, *, workspace: str = "/workspace"
    ) -> None:
        super().__init__(provider, sandbox_id, spec)
        self.workspace = workspace
        self._calls: set[asyncio.Task[Reply]] = set()

    # -- what a provider says ----------------------------------------------------------------------

    @abstractmethod
    async def _program(self, program: str, *, timeout_s: float, user: str | None) -> Reply:
        """Run ``/bin/sh -c program``; its standard output and status. The output is text of bounded size."""

    @abstractmethod
    async def _upload(self, path: str, data: bytes) -> None:
        """Put a file that the sandbox's user may read and remove at an absolute path, whose directory exists."""

    @abstractmethod
    async def _destroy(self) -> None:
        """Destroy the machine; fine when it is gone. Called once, when no program runs any more."""

    async def prepare(self) -> None:
        """Make the workspace of a fresh machine. Raises ``BadImage`` where that cannot be; the machine is gone then."""
        try:
            reply = await self._bounded(programs.WORKSPACE_READY, _FILE_S, None)
            if reply.status != 0:
                raise BadImage(
                    "cannot make /workspace in this image: its user is neither root nor may use sudo; use another one"
                )
        except BaseException:
            await asyncio.shield(self._provider.own(self.discard()))
            raise

    async def discard(self) -> None:
        """Destroy a machine whose set-up failed."""
        with suppress(SandboxGone):
            await self._destroy()

    # -- the port ----------------------------------------------------------------------------------

    async def _exec(self, command: Command) -> ExecResult:
        call = secrets.token_hex(8)
        uploaded = None
        if command.stdin:
            uploaded = f"{self.workspace}/.tollway-{call}.in"
            await self._guarded(self._sent(uploaded, command.stdin))
        program = programs.command_program(
            call, self._with_env(command), self.workspace, uploaded=uploaded, sweep=self.sweeps
        )
        started = time.monotonic()
        try:
            reply = await self._run(program, command.timeout_s + self._provider.config.answer_grace_s, command.user)
        except asyncio.CancelledError:
            if self._dead is None:
                await asyncio.shield(self._provider.own(self._stop(call, command.user)))
            raise
        except TollwayError:
            if self._dead is None:
                # The connection is lost, the command perhaps not.
                await self._stop(call, command.user)
            raise
        if reply.status > 128:
            # The command killed the shell around it; what else it started may be left.
            await self._stop(call, command.user)
        return programs.parse_result(call, reply, command, time.monotonic() - started)

    async def _read(self, path: str, max_bytes: int) -> bytes:
        parts, data = parts_of(path), bytearray()
        while True:
            program = programs.read_program(self.workspace, parts, max_bytes, len(data))
            piece, size = programs.parse_read(await self._run(program, _FILE_S, None), path, max_bytes)
            data += piece
            if len(data) >= size or not piece:
                break
        if len(data) > max_bytes:  # it grew meanwhile
            raise BadRequest(f"{path!r} holds more than {max_bytes} bytes", param="path")
        return bytes(data)

    async def _write(self, path: str, data: bytes, mode: int) -> None:
        parts = parts_of(path)
        staged = f"{self.workspace}/.tollway-{secrets.token_hex(8)}"
        small = len(data) <= self.inline_bytes
        if not small:
            await self._guarded(self._sent(staged, data))
        program = programs.write_program(self.workspace, parts, mode, data=data if small else None, uploaded=staged)
        programs.parse_write(await self._run(program, _FILE_S, None), path)

    async def _kill(self) -> None:
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._destroy()

    # -- inside ------------------------------------------------------------------------------------

    def _with_env(self, command: Command) -> Command:
        """The command with the spec's environment below its own."""
        if not self.spec.env:
            return command
        return replace(command, env={**self.spec.env, **command.env})

    async def _sent(self, path: str, data: bytes) -> Reply:
        await self._upload(path, data)
        return Reply(b"")

    async def _run(self, program: str, timeout_s: float, user: str | None) -> Reply:
        """One program with a deadline; a kill meanwhile is ``SandboxGone``."""
        if len(shlex.quote(program)) > 2 * self.inline_bytes:  # a service may quote it for one more shell
            path = f"{self.workspace}/.tollway-{secrets.token_hex(8)}.sh"
            await self._guarded(self._sent(path, program.encode()))
            program = f"/bin/sh {path}; rm -f {path}"
        return await self._guarded(self._bounded(program, timeout_s, user))

    async def _bounded(self, program: str, timeout_s: float, user: str | None) -> Reply:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._program(program, timeout_s=timeout_s, user=user)
        except TimeoutError:
            raise SandboxError(f"sandbox {self.id} did not answer within {timeout_s:.0f} s") from None

    async def _guarded(self, work: Coroutine[object, object, Reply]) -> Reply:
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise
            self._check_alive()
            raise SandboxGone(f"sandbox {self.id} was killed while a command ran in it") from None
        except SandboxGone as error:
            self.mark_gone("is gone at the service")
            raise SandboxGone(str(error)) from error

    async def _stop(self, call: str, user: str | None) -> None:
        """End a command whose caller is gone. A machine that does not answer is ended by its TTL."""
        try:
            async with asyncio.timeout(_STOP_S):
                await self._program(programs.stop_program(call), timeout_s=_STOP_S, user=user)
        except (TollwayError, TimeoutError) as error:
            logger.warning("sandbox %s: cannot end a command: %s; it ends with the sandbox", self.id, error)
