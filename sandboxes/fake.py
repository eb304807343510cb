"""An in-memory provider for tests and dry runs: no processes, no files on disk, faults on request.

It knows a handful of commands (true, false, exit, echo, printf, cat, pwd, printenv, sleep, ln -s, ``yes``),
simple shell lines made of them, and any program that the caller hands in. It obeys the whole protocol, so
what runs on it runs on real providers; nothing is isolated. Depends on ``base`` and ``workspace.parts_of``.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import shlex
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from tollway.errors import BadRequest
from tollway.sandboxes.base import Command, ExecResult, Sandbox, SandboxProvider, SandboxSpec
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.workspace import parts_of

__all__ = ["FakeProvider", "FakeSandbox", "Faults", "Process", "Program"]


@dataclass(slots=True)
class Process:
    """One running fake command: what it got, and what it wrote."""

    sandbox: FakeSandbox
    argv: Sequence[str]
    cwd: tuple[str, ...]
    env: Mapping[str, str]
    stdin: bytes
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)

    def path(self, name: str) -> tuple[str, ...]:
        """``name`` as a workspace path, relative to the command's directory."""
        return parts_of(name) if name.startswith("/") else (*self.cwd, *parts_of(name))


Program = Callable[[Process], Awaitable[int]]
"""Writes to the process's streams and returns the exit code; its name is ``argv[0]``."""


@dataclass(slots=True)
class Faults:
    """Errors to raise, oldest first, and delays; tests fill them."""

    create: deque[Exception] = field(default_factory=deque)
    exec: deque[Exception] = field(default_factory=deque)
    read: deque[Exception] = field(default_factory=deque)
    write: deque[Exception] = field(default_factory=deque)
    create_delay_s: float = 0.0
    kill_delay_s: float = 0.0

    def strike(self, where: Literal["create", "exec", "read", "write"]) -> None:
        """Raise the next planned error of this operation, if there is one."""
        planned: deque[Exception] = getattr(self, where)
        if planned:
            raise planned.popleft()


class FakeProvider(SandboxProvider):
    """Sandboxes that are dictionaries. ``made`` and ``killed`` count what a leak test needs."""

    name: ClassVar[str] = "fake"

    def __init__(self, config: SandboxConfig | None = None, programs: Mapping[str, Program] | None = None) -> None:
        super().__init__(config or SandboxConfig())
        self.programs: dict[str, Program] = {**_PROGRAMS, **(programs or {})}
        self.faults = Faults()
        self.made = self.killed = 0
        self.specs: list[SandboxSpec] = []
        self._numbers = itertools.count(1)

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        await asyncio.sleep(self.faults.create_delay_s)
        self.faults.strike("create")
        self.made += 1
        self.specs.append(spec)
        return FakeSandbox(self, f"fake-{next(self._numbers)}", spec)


class FakeSandbox(Sandbox):
    """Files by path, and commands that are coroutines."""

    def __init__(self, provider: FakeProvider, sandbox_id: str, spec: SandboxSpec) -> None:
        super().__init__(provider, sandbox_id, spec)
        self._fake = provider
        self.files: dict[tuple[str, ...], bytes] = {}
        self.links: set[tuple[str, ...]] = set()
        self._running: set[asyncio.Task[int]] = set()

    async def _exec(self, command: Command) -> ExecResult:
        self._fake.faults.strike("exec")
        inside = () if command.cwd in (".", "/workspace") else parts_of(command.cwd)
        process = Process(self, command.argv, inside, {**self.spec.env, **command.env}, command.stdin)
        work = asyncio.create_task(run_program(process))
        self._running.add(work)
        try:
            done, _ = await asyncio.wait([work], timeout=command.timeout_s)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            self._running.discard(work)
        self._check_alive()
        return ExecResult(
            exit_code=work.result() if done else None,
            stdout=bytes(process.stdout[: command.max_output]),
            stderr=bytes(process.stderr[: command.max_output]),
            timed_out=not done,
            truncated=max(len(process.stdout), len(process.stderr)) > command.max_output,
        )

    async def _read(self, path: str, max_bytes: int) -> bytes:
        self._fake.faults.strike("read")
        parts = parts_of(path)
        if any(parts[:depth] in self.links for depth in range(1, len(parts) + 1)):
            raise BadRequest(f"{path!r} goes through a link", param="path")
        if parts not in self.files:
            raise BadRequest(f"{path!r} does not exist", param="path")
        data = self.files[parts]
        if len(data) > max_bytes:
            raise BadRequest(f"{path!r} holds more than {max_bytes} bytes", param="path")
        return data

    async def _write(self, path: str, data: bytes, mode: int) -> None:
        self._fake.faults.strike("write")
        self.files[parts_of(path)] = bytes(data)

    async def _kill(self) -> None:
        for work in list(self._running):
            work.cancel()
        await asyncio.sleep(self._fake.faults.kill_delay_s)
        self._fake.killed += 1


async def run_program(process: Process) -> int:
    """Run ``process.argv`` with the provider's programs; 127 for an unknown one."""
    name = process.argv[0].rpartition("/")[2]
    program = process.sandbox._fake.programs.get(name)
    if program is None:
        process.stderr += f"{name}: not found\n".encode()
        return 127
    return await program(process)


async def _shell(process: Process) -> int:
    """``sh -c`` for lines of simple commands: ``;``, ``>&2`` and ``> file`` are understood, nothing else."""
    code = 0
    for line in process.argv[2].split(";"):
        words = shlex.split(line)
        if not words:
            continue
        if words[0] == "exit":
            return int(words[1]) if len(words) > 1 else code
        target = None
        if len(words) > 2 and words[-2] == ">":
            target = () if words[-1] == "/dev/null" else process.path(words[-1])
            words = words[:-2]
        to_stderr = words[-1] == ">&2"
        words = words[:-1] if to_stderr else words
        captured = target is not None or to_stderr
        inner = Process(process.sandbox, words, process.cwd, process.env, process.stdin)
        if not captured:
            inner.stdout, inner.stderr = process.stdout, process.stderr
        code = await run_program(inner)
        if to_stderr:
            process.stderr += inner.stdout
        if target:
            process.sandbox.files[target] = bytes(inner.stdout)
    return code


async def _true(process: Process) -> int:
    return 0


async def _false(process: Process) -> int:
    return 1


async def _echo(process: Process) -> int:
    process.stdout += " ".join(process.argv[1:]).encode() + b"\n"
    return 0


async def _printf(process: Process) -> int:
    text = process.argv[1].encode().replace(rb"\n", b"\n")
    process.stdout += re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), text)
    return 0


async def _cat(process: Process) -> int:
    if len(process.argv) == 1:
        process.stdout += process.stdin
    for name in process.argv[1:]:
        data = process.sandbox.files.get(process.path(name))
        if data is None:
            process.stderr += f"cat: {name}: No such file or directory\n".encode()
            return 1
        process.stdout += data
    return 0


async def _pwd(process: Process) -> int:
    process.stdout += "/".join(("/workspace", *process.cwd)).encode() + b"\n"
    return 0


async def _printenv(process: Process) -> int:
    value = process.env.get(process.argv[1])
    if value is None:
        return 1
    process.stdout += value.encode() + b"\n"
    return 0


async def _sleep(process: Process) -> int:
    await asyncio.sleep(float(process.argv[1]))
    return 0


async def _link(process: Process) -> int:
    process.sandbox.links.add(process.path(process.argv[-1]))
    return 0


async def _yes(process: Process) -> int:
    while True:
        process.stdout += b"y\n" * 512
        await asyncio.sleep(0.001)


_PROGRAMS: dict[str, Program] = {
    "sh": _shell,
    "true": _true,
    "false": _false,
    "echo": _echo,
    "printf": _printf,
    "cat": _cat,
    "pwd": _pwd,
    "printenv": _printenv,
    "sleep": _sleep,
    "ln": _link,
    "yes": _yes,
}
