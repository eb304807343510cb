"""The launcher process when the system refuses it something, and when half of it is killed."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from pathlib import Path

import pytest
from sandbox_helpers import ended, gone, make, marker, processes_with

from tollway.errors import SandboxError
from tollway.sandboxes.launcher import CommandCall, Launcher
from tollway.sandboxes.local import LocalProvider


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_a_command_that_cannot_start_leaves_no_descriptor_open() -> None:
    call = CommandCall(options=b"", argv=["true"], stdin=b"", timeout_s=5.0, max_output=100, rlimits=[], uid=None)
    launcher = await Launcher.start(Path("/nonexistent/bwrap"))
    try:
        with pytest.raises(SandboxError):
            await launcher.run(call)  # it runs, and everything that it needs is loaded
        (worker,) = children(launcher.pid)
        folder = f"/proc/{worker}/fd"
        before = sorted(os.listdir(folder), key=int)
        # Room for the options and one pipe: the second pipe is refused.
        free = [number for number in range(64) if str(number) not in before]
        old = resource.prlimit(worker, resource.RLIMIT_NOFILE)
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (free[3], old[1]))
        for _ in range(3):
            with pytest.raises(SandboxError, match="Errno 24"):
                await launcher.run(call)
            assert sorted(os.listdir(folder), key=int) == before
    finally:
        await launcher.close()


@pytest.mark.parametrize("victim", ["guardian", "launcher"])
async def test_whichever_half_of_the_launcher_is_killed_no_starting_sandbox_lives_on(
    local: LocalProvider, victim: str
) -> None:
    """Killed the moment a command shows: bwrap's own link to its parent is not in place yet."""
    sandbox = await make(local)
    mark = marker()
    running = [asyncio.create_task(sandbox.exec(["sleep", mark], timeout_s=60)) for _ in range(3)]
    while not processes_with(mark):
        await asyncio.sleep(0)
    guardian = local.launcher_pid
    assert guardian is not None
    os.kill(guardian if victim == "guardian" else children(guardian)[0], signal.SIGKILL)
    for each in running:
        with pytest.raises(SandboxError, match="launcher"):
            await each
    await gone(mark)
    assert (await sandbox.exec(["echo", "again"], timeout_s=20)).stdout == b"again\n"


async def test_a_cancelled_command_is_cancelled_also_when_the_launcher_has_just_died() -> None:
    call = CommandCall(options=b"", argv=["true"], stdin=b"", timeout_s=60.0, max_output=100, rlimits=[], uid=None)
    launcher = await Launcher.start(Path("/nonexistent/bwrap"))
    try:
        with pytest.raises(SandboxError):
            await launcher.run(call)  # both halves are there
        (worker,) = children(launcher.pid)
        os.kill(worker, signal.SIGSTOP)  # it answers nothing
        running = asyncio.create_task(launcher.run(call))
        await asyncio.sleep(0)
        os.kill(worker, signal.SIGKILL)
        while not ended(launcher.pid):  # and we, blocked here, do not learn that it is gone
            time.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    finally:
        await launcher.close()
