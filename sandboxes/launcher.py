"""The owner's end of the launcher process: starts it, sends commands, matches answers, kills on cancellation.

One launcher serves all sandboxes of a provider. It dies with this process (its socket closes), and takes
every sandboxed process with it. Depends on ``launcher_process`` only by its folder and frame format.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tollway.errors import BadRequest, SandboxError, SandboxGone, SandboxUnavailable
from tollway.sandboxes.base import ExecResult

__all__ = ["CommandCall", "Launcher", "LauncherSetup", "boot"]

_HEADER = struct.Struct("<II")
_BOOT = """
import importlib, sys, types
for name, places in (("tollway", []), ("tollway.sandboxes", [{folder!r}])):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = places
module = importlib.import_module("tollway.sandboxes.{module}")
{then}
"""
_START_S = 30.0
"""How long the launcher may take to look at this machine and say what it found."""
_STOP_S = 15.0
"""How long the launcher may take to kill everything when its socket closes."""
_NOT_STARTED = (b"bwrap: execvp ", b"bwrap: Can't chdir to ")
"""What bwrap says when the command itself, not the sandbox, is the reason that nothing ran."""
_UNUSABLE = (
    "namespace",
    "not permitted",
    "No permissions",
    "Unknown option",
    "cannot start bwrap: [Errno 2]",
    "uid map",
)
"""Signs in a failure that this machine cannot run bwrap at all."""


def boot(module: str, then: str) -> str:
    """Program text that imports one module of this folder without the package around it, and runs ``then``.

    So a process that only starts others stays small, and forks quickly.
    """
    return _BOOT.format(folder=str(Path(__file__).parent), module=module, then=then)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandCall:
    """One command for the launcher."""

    options: bytes
    """Encoded bwrap options."""
    argv: Sequence[str]
    stdin: bytes
    timeout_s: float
    max_output: int
    rlimits: Sequence[tuple[int, int]]
    uid: int | None
    """Host uid to drop to; ``None`` keeps ours."""
    box: str | None = None
    """The sandbox it runs in, by the name it was made with; ``None`` for plain bwrap without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSetup:
    """What a launcher starts with."""

    mounts: bool = False
    """Whether it may make mount namespaces."""
    cgroups: bool = False
    """Whether it may make control groups."""
    unsafe: bool = False
    """Whether the program that stands in for bwrap isolates nothing."""
    seccomp: int | None = None
    """Descriptor of the system call filter."""
    user_namespace: int | None = None
    """That of the launcher before, which owns the namespaces in ``boxes``."""
    boxes: Mapping[str, tuple[int, Sequence[float | None] | None]] = field(default_factory=dict)
    """Sandboxes that an earlier launcher made: descriptor of the mount namespace (-1 for none) and limits."""

    def descriptors(self) -> list[int]:
        """Those that the launcher inherits."""
        found = [fd for fd in (self.seccomp, self.user_namespace) if fd is not None]
        return found + [namespace for namespace, _ in self.boxes.values() if namespace >= 0]


class Launcher:
    """A running launcher process. Make with ``start``; ``close`` ends it and waits for it."""

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._process, self._reader, self._writer = process, reader, writer
        self._ids = itertools.count(1)
        self._greeting: asyncio.Future[tuple[dict[str, object], bytes]] = asyncio.get_running_loop().create_future()
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, object], bytes]]] = {0: self._greeting}
        self._answers = asyncio.create_task(self._dispatch())

    @classmethod
    async def start(cls, bwrap: Path, setup: LauncherSetup | None = None) -> Launcher:
        """Start the process with an empty environment and nothing of ours but its socket and what ``setup`` names."""
        setup = setup or LauncherSetup()
        ours, theirs = socket.socketpair()
        settings = json.dumps(
            {
                "mounts": setup.mounts,
                "cgroups": setup.cgroups,
                "seccomp": setup.seccomp,
                "unsafe": setup.unsafe,
                "user_namespace": setup.user_namespace,
                "boxes": setup.boxes,
                "descriptors": setup.descriptors(),
            }
        )
        arguments = [str(theirs.fileno()), str(bwrap), settings]
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - returns at once; the launcher outlives no one
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-B",
                    "-c",
                    boot("launcher_process", "module.main(sys.argv[1:])"),
                    *arguments,
                ],
                env={},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *setup.descriptors()),
                start_new_session=True,
            )
        finally:
            theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, reader, writer)

    @property
    def alive(self) -> bool:
        """Whether commands can still be sent."""
        return not self._answers.done()

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        return self._process.pid

    async def greeting(self) -> dict[str, object]:
        """What it found out about this machine when it started. ``SandboxError`` when it died or hangs."""
        try:
            async with asyncio.timeout(_START_S):
                return (await asyncio.shield(self._greeting))[0]
        except TimeoutError:
            raise SandboxError(f"the sandbox launcher process did not start within {_START_S} s") from None

    async def run(self, call: CommandCall, *, inside: bool = False) -> ExecResult:
        """Run one command, ``inside`` a session or in namespaces of its own.

        Cancelling kills it and returns only when nothing of it is left.
        """
        head: dict[str, object] = {
            "op": "call" if inside else "exec",
            "options": len(call.options),
            "timeout_s": call.timeout_s,
            "max_output": call.max_output,
            "box": call.box,
        }
        if not inside:
            head |= {"argv": list(call.argv), "rlimits": call.rlimits, "uid": call.uid}
        number, answer = self._expect()
        try:
            await self._send({"id": number, **head}, call.options, call.stdin)
            return _result(*await asyncio.shield(answer))
        except asyncio.CancelledError:
            if not answer.done() and self.alive:
                with contextlib.suppress(SandboxError):  # it has just died: the cancellation is still one
                    await self._send({"op": "kill", "id": number, "box": call.box})
                    await asyncio.wait([answer], timeout=_STOP_S)
            raise
        finally:
            self._waiting.pop(number, None)

    async def ask(self, head: dict[str, object], *body: bytes) -> dict[str, object]:
        """Any other operation; the answer's head. ``SandboxError`` when it failed."""
        number, answer = self._expect()
        try:
            await self._send({"id": number, **head}, *body)
            found = (await asyncio.shield(answer))[0]
        finally:
            self._waiting.pop(number, None)
        if found.get("gone"):
            raise SandboxGone("the sandbox is gone; create another one")
        if error := found.get("error"):
            raise _setup_failure(str(error))
        return found

    def _expect(self) -> tuple[int, asyncio.Future[tuple[dict[str, object], bytes]]]:
        if not self.alive:
            raise SandboxError("the sandbox launcher process is gone; the next create starts another one")
        number = next(self._ids)
        answer: asyncio.Future[tuple[dict[str, object], bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        return number, answer

    async def close(self) -> None:
        """End the launcher and everything it runs; kills it if it does not obey."""
        self._writer.close()
        self._answers.cancel()
        await asyncio.gather(self._answers, return_exceptions=True)
        try:
            await asyncio.to_thread(self._process.wait, _STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def _send(self, head: dict[str, object], *body: bytes) -> None:
        encoded = json.dumps(head).encode()
        self._writer.write(b"".join((_HEADER.pack(len(encoded), sum(map(len, body))), encoded, *body)))
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise SandboxError(f"the sandbox launcher process is gone: {error}") from error

    async def _dispatch(self) -> None:
        try:
            while True:
                head_size, body_size = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                head: dict[str, object] = json.loads(await self._reader.readexactly(head_size))
                body = await self._reader.readexactly(body_size)
                answer = self._waiting.pop(int(str(head["id"])), None)
                if answer is not None and not answer.done():
                    answer.set_result((head, body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(SandboxError("the sandbox launcher process died with commands running"))
                    answer.exception()  # a cancelled caller no longer looks


def _result(head: dict[str, object], body: bytes) -> ExecResult:
    if head.get("gone"):
        raise SandboxGone("the agent in the sandbox is gone; create another one")
    if "out" not in head:
        raise _setup_failure(str(head.get("error")))
    cut = int(str(head["out"]))
    stdout, stderr = body[:cut], body[cut:]
    code, error = head.get("exit_code"), head.get("error")
    timed_out = bool(head["timed_out"])
    if error:
        if "[Errno 7]" in str(error):
            raise BadRequest("the command line is too long for the system; pass data by stdin or by a file")
        raise _setup_failure(str(error))
    if code is None and not timed_out:
        if head.get("killed"):
            raise SandboxGone("the sandbox was killed while the command ran")
        if head.get("oom"):
            code = 137  # bwrap itself was the kernel's victim
        elif not stderr.startswith(_NOT_STARTED):
            raise _setup_failure(f"bwrap failed with status {head.get('bwrap_code')}: {_text(stderr)}")
        else:
            code = 126 if b"Permission denied" in stderr else 127
    return ExecResult(
        exit_code=None if timed_out else int(str(code)),
        stdout=stdout,
        stderr=stderr,
        timed_out=timed_out,
        oom=bool(head.get("oom")),
        truncated=bool(head["truncated"]),
        duration_s=float(str(head["duration_s"])),
        cpu_s=float(str(head["cpu_s"])),
    )


def _setup_failure(message: str) -> SandboxError:
    """Nothing ran. Where the machine forbids it, it will not run next time either."""
    unusable = any(sign in message for sign in _UNUSABLE)
    return (SandboxUnavailable if unusable else SandboxError)(message)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace").strip()[:500] or "no message"
