"""What the escape attempts share: sandboxes in both modes, code to run inside, looks from outside."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Literal

import pytest

from tollway.sandboxes.base import ExecResult, SandboxSpec
from tollway.sandboxes.config import LocalConfig, SandboxConfig
from tollway.sandboxes.local import LocalProvider, LocalSandbox
from tollway.sandboxes.probe import probe

PYTHON = ("/usr/bin/python3", "-I", "-S", "-B", "-c")
PROBE = probe()
Mode = Literal["exec", "session"]
both_modes = pytest.mark.parametrize("mode", ["exec", "session"])
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives each sandbox a uid of its own")
SYSCALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    done = libc.syscall(number, *arguments)
    return done, ctypes.get_errno()
"""
"""Prelude: ``call`` makes a system call and returns its result and errno."""


@asynccontextmanager
async def boxed(mode: Mode, **settings: object) -> AsyncIterator[tuple[LocalProvider, LocalSandbox]]:
    """A provider in this mode, and one sandbox of it."""
    if not PROBE.available or PROBE.python is None:
        pytest.skip(PROBE.reason)
    async with LocalProvider(SandboxConfig(local=LocalConfig(mode=mode))) as provider:
        yield provider, await another(provider, **settings)


async def another(provider: LocalProvider, **settings: object) -> LocalSandbox:
    """One more sandbox of the same provider."""
    values = {"ttl_s": 120.0, "labels": {"test": "escape"}, **settings}
    sandbox = await provider.create(SandboxSpec(**values))  # type: ignore[arg-type]
    assert isinstance(sandbox, LocalSandbox)
    return sandbox


async def python(sandbox: LocalSandbox, code: str, *, timeout_s: float = 30) -> ExecResult:
    """Run code with the sandbox's own Python."""
    return await sandbox.exec([*PYTHON, code], timeout_s=timeout_s)


async def works(sandbox: LocalSandbox) -> bool:
    """Whether it still runs commands and keeps files."""
    done = await sandbox.exec("echo yes > alive && cat alive", timeout_s=30)
    return done.stdout == b"yes\n"


def processes_of(uid: int) -> dict[int, int]:
    """Resident memory in kB by pid, of every process of this machine that runs under ``uid``."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "status").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        if fields["Uid"].split()[0] == str(uid) and not fields["State"].strip().startswith("Z"):
            found[int(entry.name)] = int(fields.get("VmRSS", "0 kB").split()[0])
    return found


async def watched(
    running: asyncio.Task[ExecResult], look: Callable[[], int], *, every_s: float = 0.02
) -> tuple[ExecResult, int]:
    """The result of a command, and the most that ``look`` saw while it ran."""
    most = 0
    while not running.done():
        most = max(most, look())
        await asyncio.sleep(every_s)
    return await running, most


async def nobody_left(uid: int) -> None:
    """Wait until no process runs under ``uid``."""
    end = time.monotonic() + 20
    while left := processes_of(uid):
        assert time.monotonic() < end, f"still alive: {left}"
        await asyncio.sleep(0.02)


@contextmanager
def victim(uid: int | None) -> AsyncIterator[subprocess.Popen[bytes]]:  # type: ignore[misc]  # a plain generator
    """A process of the host under the sandbox's own uid, which the sandbox must not reach."""
    options = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
    process = subprocess.Popen(  # type: ignore[call-overload]
        ["/bin/sleep", "300"], cwd="/", env={"VICTIM_SECRET": "of-the-victim"}, **options
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def python_program(code: str, *arguments: str) -> list[str]:
    """A program of this test's own Python."""
    return [sys.executable, "-c", code, *arguments]
