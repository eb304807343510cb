"""Checkpoints: the last complete one is always found, whatever was killed while writing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tollway.errors import ComponentLost
from tollway.trainer.checkpoint import CheckpointStore, RunState


async def write(directory: Path) -> None:
    (directory / "weights").write_bytes(b"w")


async def test_the_latest_checkpoint_comes_back_with_its_state(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert store.latest() is None
    for step in (0, 5, 10):
        await store.save(RunState(step=step, version=step, updates=2 * step, totals={"episodes": 3.0}), write)
    found = CheckpointStore(tmp_path, keep=2).latest()
    assert found is not None
    assert found[1] == RunState(step=10, version=10, updates=20, totals={"episodes": 3.0})
    assert (found[0] / "weights").read_bytes() == b"w"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step_000005", "step_000010"]


async def test_a_draft_counts_from_its_commit_on(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    await store.save(RunState(step=1), write)
    await store.draft(2, write)
    found = store.latest()
    assert found is not None
    assert found[1].step == 1
    await store.commit(RunState(step=2, version=2))
    found = store.latest()
    assert found is not None
    assert (found[1].version, (found[0] / "weights").read_bytes()) == (2, b"w")
    await store.draft(3, write)
    assert CheckpointStore(tmp_path, keep=2).latest() == found
    assert [path.name for path in tmp_path.glob(".*")] == []


async def test_a_backend_that_fails_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    await store.save(RunState(step=1), write)

    async def fail(directory: Path) -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        await store.save(RunState(step=2), fail)
    found = CheckpointStore(tmp_path, keep=2).latest()
    assert found is not None
    assert found[1].step == 1
    assert [path.name for path in tmp_path.glob(".*")] == []


async def test_a_damaged_latest_falls_back_and_nothing_readable_stops_the_run(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2):
        await store.save(RunState(step=step), write)
    (tmp_path / "LATEST").write_bytes(b"\xff\x00")
    found = store.latest()
    assert found is not None
    assert found[1].step == 2
    (tmp_path / "step_000002" / "controller.json").write_text("{")
    found = store.latest()
    assert found is not None
    assert found[1].step == 1
    (tmp_path / "step_000001" / "controller.json").write_text("[]")
    with pytest.raises(ComponentLost, match="move it away"):
        store.latest()


_SAVER = """
import asyncio, os, signal, sys
from pathlib import Path
from tollway.trainer import atomic, checkpoint
from tollway.trainer.checkpoint import CheckpointStore, RunState

folder, stop_at = Path(sys.argv[1]), int(sys.argv[2])
calls = 0

def counted(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == stop_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

async def write(directory):
    (directory / "weights").write_bytes(b"w")

async def main():
    await CheckpointStore(folder, keep=2).save(RunState(step=1), write)
    for module in (os, Path):
        for name in ("fsync", "rename", "replace", "mkdir", "write_text"):
            if hasattr(module, name):
                setattr(module, name, counted(getattr(module, name)))
    for step in (2, 2, 3):
        await CheckpointStore(folder, keep=2).save(RunState(step=step), write)

asyncio.run(main())
"""


def test_a_kill_between_any_two_writes_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    outcomes = []
    for stop_at in (1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 17, 20, 22, 23, 24, 25, 30, 999):
        folder = tmp_path / str(stop_at)
        code = subprocess.run([sys.executable, "-c", _SAVER, str(folder), str(stop_at)], timeout=60, check=False)
        found = CheckpointStore(folder, keep=2).latest()
        assert found is not None
        assert (found[0] / "weights").read_bytes() == b"w"
        outcomes.append((code.returncode, found[1].step))
    assert outcomes[0] == (-9, 1)
    assert outcomes[-1] == (0, 3)
    assert (-9, 2) in outcomes
    steps = [step for _, step in outcomes]
    assert steps == sorted(steps)
