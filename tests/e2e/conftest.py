"""Starts tiny runs of the demo, and ends whatever a test left of them."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_runs import DEMO, TINY, Run, wait_until_gone


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[type[Run]]:
    """``start(command, *extra --set values, backend=...)`` of a tiny demo run in its own directory."""
    # Not under pytest's private directory: sandboxes run under uids of their own, which must reach it.
    sandboxes = Path(tempfile.mkdtemp(prefix="tollway-e2e-", dir="/dev/shm"))
    sandboxes.chmod(0o711)
    (tmp_path / "sandboxes").symlink_to(sandboxes)
    runs: list[Run] = []

    def start(command: str, *sets: str, backend: str = "torch", flags: tuple[str, ...] = ()) -> Run:
        run_dir = tmp_path / "run"
        values = (f"run.dir={run_dir}", f"sandbox.local.root={sandboxes}", f"trainer.backend={backend}", *TINY, *sets)
        arguments = [command, "-c", str(DEMO), *flags, *(part for value in values for part in ("--set", value))]
        run = Run(run_dir, arguments, tmp_path / f"log{len(runs)}", {"TOLLWAY_TEST_RUN": str(run_dir)})
        runs.append(run)
        return run

    yield start  # type: ignore[misc]
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
            run.process.wait()
    for run in runs:
        for pid, _ in wait_until_gone(run.run_dir, 5.0):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(sandboxes)
