"""A child process that serves a URL: ready or a reason, and gone when its owner is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tollway.errors import ComponentLost
from tollway.router.supervisor import ServerProcess


def child(body: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(body)]


READY = 'import time, sys; print(\'{"event": "ready", "url": "http://x"}\', flush=True)\n'


async def test_a_ready_child_has_a_url_and_stops(tmp_path: Path) -> None:
    process = await ServerProcess.start(child(READY + "time.sleep(60)"), name="c", log=tmp_path / "log")
    assert process.url == "http://x"
    assert process.returncode is None
    await process.stop()
    assert process.returncode == -signal.SIGTERM


async def test_a_child_that_dies_first_is_reported_with_its_last_words(tmp_path: Path) -> None:
    body = "import sys; print('port 80 is in use', file=sys.stderr); sys.exit(3)"
    with pytest.raises(ComponentLost, match=r"(?s)status 3.*port 80 is in use"):
        await ServerProcess.start(child(body), name="c", log=tmp_path / "log")


async def test_garbage_instead_of_the_ready_line_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ComponentLost, match="instead of its ready line"):
        await ServerProcess.start(child("print('hello', flush=True)"), name="c", log=tmp_path / "log")


async def test_a_silent_child_is_killed_after_the_deadline(tmp_path: Path) -> None:
    body = "import os, sys, time; print(os.getpid(), file=sys.stderr, flush=True); time.sleep(60)"
    with pytest.raises(ComponentLost, match="not ready after"):
        await ServerProcess.start(child(body), name="c", log=tmp_path / "log", ready_timeout_s=2.0)
    pid = int((tmp_path / "log").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_child_that_ignores_sigterm_and_forks_is_gone_after_stop(tmp_path: Path) -> None:
    body = (
        READY
        + "import os, signal\n"
        + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + "pid = os.fork()\n"
        + "print(os.getpid(), file=sys.stderr, flush=True)\n"
        + "time.sleep(60)\n"
    )
    process = await ServerProcess.start(child(body), name="c", log=tmp_path / "log")
    async with asyncio.timeout(20):
        while len((tmp_path / "log").read_text().split()) < 2:
            await asyncio.sleep(0.01)
    await process.stop(grace_s=0.2)
    assert process.returncode == -signal.SIGKILL
    async with asyncio.timeout(20):  # the kernel takes its time over a killed process
        while any(_alive(int(pid)) for pid in (tmp_path / "log").read_text().split()):
            await asyncio.sleep(0.01)


async def test_what_outlives_a_child_that_ended_is_killed_at_stop(tmp_path: Path) -> None:
    body = (
        READY
        + "import os\n"
        + "if os.fork() == 0:\n"
        + "    os.close(1)\n"
        + "    print(os.getpid(), file=sys.stderr, flush=True)\n"
        + "    time.sleep(60)\n"
    )
    process = await ServerProcess.start(child(body), name="c", log=tmp_path / "log")
    async with asyncio.timeout(20):
        await process.wait()
        while not (tmp_path / "log").read_text().split():
            await asyncio.sleep(0.01)
    (left,) = map(int, (tmp_path / "log").read_text().split())
    assert _alive(left)
    await process.stop()
    async with asyncio.timeout(10):
        while _alive(left):
            await asyncio.sleep(0.01)


async def test_the_group_of_a_child_that_is_gone_is_not_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By now its number may be somebody else's."""
    process = await ServerProcess.start(child(READY), name="c", log=tmp_path / "log")
    await process.wait()
    signalled: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: signalled.append(group))
    await process.stop()
    assert signalled == []


async def test_a_stranger_that_got_the_number_of_a_dead_child_is_not_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await ServerProcess.start(child(READY), name="c", log=tmp_path / "log")
    await process.wait()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as stranger:
        try:
            # What it looks like when the kernel hands out the number again.
            process._process.pid = stranger.pid
            signalled: list[int] = []
            monkeypatch.setattr(os, "killpg", lambda group, number: signalled.append(group))
            await process.stop()
            assert signalled == []
        finally:
            stranger.kill()


def test_children_end_when_their_owner_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    grandchild = (
        "from tollway.router.supervisor import die_with_parent; die_with_parent(); import os\n"
        + READY
        + "print(os.getpid(), file=sys.stderr, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen(
        child(
            f"""
            import asyncio, pathlib, sys
            from tollway.router.supervisor import ServerProcess
            async def main():
                argv = [sys.executable, "-c", {grandchild!r}]
                await ServerProcess.start(argv, name="c", log=pathlib.Path({str(log)!r}))
                await asyncio.sleep(60)
            asyncio.run(main())
            """
        )
    )
    try:
        deadline = time.monotonic() + 30
        while not (log.exists() and log.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.02)
        pid = int(log.read_text())
        assert _alive(pid)
    finally:
        owner.kill()
        owner.wait()
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
