"""When creates may start: the rate is one for all processes of a host, refusals slow everybody, nothing is hijacked."""

from __future__ import annotations

import asyncio
import fcntl
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tollway.errors import ConfigError, CreateFailed, RateLimited
from tollway.sandboxes import pace as pace_module
from tollway.sandboxes.pace import CreatePace, HostClock, default_file

_PROCESS = """
import asyncio, json, sys, time
from tollway.sandboxes.base import SandboxSpec
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider

class Timed(FakeProvider):
    async def _create(self, spec):
        began.append(time.monotonic())
        return await super()._create(spec)

async def main():
    async with Timed(SandboxConfig(creates_per_s=25, pace_file=sys.argv[1])) as provider:
        spec = SandboxSpec(ttl_s=60, labels={"a": "b"})
        await asyncio.gather(*(provider.create(spec) for _ in range(5)))

began = []
asyncio.run(main())
print(json.dumps(began))
"""


def _pace(path: Path, **settings: object) -> CreatePace:
    return CreatePace(**{"at_once": 4, "per_s": None, "file": lambda: path, **settings})  # type: ignore[arg-type]


def test_processes_of_one_host_share_the_rate(tmp_path: Path) -> None:
    started = time.monotonic()
    processes = [
        subprocess.Popen([sys.executable, "-c", _PROCESS, str(tmp_path / "pace")], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    began: list[float] = []
    for process in processes:
        out, _ = process.communicate(timeout=50)
        assert process.returncode == 0
        began += json.loads(out)
    assert len(began) == 15
    # A slow machine only makes them later.
    for at, instant in enumerate(sorted(began)):
        assert instant - started >= at / 25 - 0.001


async def test_a_refusal_is_seen_by_other_processes_of_the_host(tmp_path: Path) -> None:
    first, second = _pace(tmp_path / "p", per_s=1000), _pace(tmp_path / "p", per_s=1000)
    started = time.monotonic()
    with pytest.raises(RateLimited):
        async with first.turn(started + 60):
            raise RateLimited("slow down", retry_after_s=0.2)
    async with second.turn(started + 60):
        assert time.monotonic() - started >= 0.199


async def test_after_a_refusal_one_goes_first_and_successes_let_more_go(tmp_path: Path) -> None:
    pace = _pace(tmp_path / "p", at_once=8)
    in_flight, most = 0, []

    async def create() -> None:
        nonlocal in_flight
        async with pace.turn(time.monotonic() + 60):
            in_flight += 1
            most.append(in_flight)
            await asyncio.sleep(0.002)
            in_flight -= 1

    await asyncio.gather(*(create() for _ in range(20)))
    assert max(most) == 8
    with pytest.raises(RateLimited):
        async with pace.turn(time.monotonic() + 60):
            raise RateLimited("slow down", retry_after_s=0.01)
    most.clear()
    await asyncio.gather(*(create() for _ in range(3)))
    assert max(most) == 1
    assert pace.refusals == 1
    await asyncio.gather(*(create() for _ in range(60)))
    assert max(most) > 1


async def test_a_cancelled_wait_gives_its_place_back(tmp_path: Path) -> None:
    pace = _pace(tmp_path / "p", at_once=1, per_s=1000)

    async def hold(event: asyncio.Event) -> None:
        async with pace.turn(time.monotonic() + 60):
            await event.wait()

    gate = asyncio.Event()
    holding = asyncio.create_task(hold(gate))
    await asyncio.sleep(0.05)
    for _ in range(20):
        waiting = asyncio.create_task(hold(gate))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    gate.set()
    await holding
    async with asyncio.timeout(10):
        await hold(gate)


async def test_a_create_without_time_left_is_not_begun(tmp_path: Path) -> None:
    with pytest.raises(CreateFailed):
        async with _pace(tmp_path / "p").turn(time.monotonic() - 1):
            raise AssertionError
    slow = _pace(tmp_path / "q", per_s=0.01)
    async with slow.turn(time.monotonic() + 60):
        pass
    for _ in range(5):
        with pytest.raises(RateLimited, match="after this one's deadline"):
            async with slow.turn(time.monotonic() + 60):
                raise AssertionError
    # Those who gave up took nobody's turn.
    assert await HostClock(tmp_path / "q").move(lambda instant: instant) < time.monotonic() + 101


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"\xff\xfe", b"other-boot 999999999", b"BOOT 1e300", b"BOOT nan"]
)
async def test_a_damaged_or_old_file_does_not_stop_anybody(tmp_path: Path, content: bytes) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    (tmp_path / "p").write_bytes(content.replace(b"BOOT", boot))
    assert await HostClock(tmp_path / "p").move(lambda instant: instant + 1) == 1.0
    assert await HostClock(tmp_path / "p").move(lambda instant: instant + 1) == 2.0


async def test_a_lock_that_is_never_given_back_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_module, "_LOCK_TRIES", 3)
    with (tmp_path / "p").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CreateFailed, match=r"sandbox\.pace_file"):
            await HostClock(tmp_path / "p").move(lambda instant: instant)


async def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "p").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError):
        await HostClock(tmp_path / "p").move(lambda instant: instant)
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_a_place_that_others_can_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    hijacked = tmp_path / "run" / f"tollway-{os.getuid()}"
    hijacked.mkdir(parents=True)
    hijacked.chmod(0o777)
    found = default_file("e2b")
    assert found.parent == tmp_path / "home" / ".cache" / f"tollway-{os.getuid()}"
    assert found.parent.stat().st_mode & 0o077 == 0
    found.parent.rmdir()
    found.parent.symlink_to(hijacked)
    assert found.parent not in default_file("e2b").parents
    hijacked.chmod(0o700)
    assert default_file("e2b").parent == hijacked
    assert default_file("e2b") != default_file("modal")
