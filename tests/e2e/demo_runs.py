"""Runs of the demo as a user starts them, in processes of their own, and what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

__all__ = ["DEMO", "TINY", "Run", "processes_of", "wait_until_gone"]

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo" / "tollway.toml"
# The demo's configuration, small enough for a test: every part still runs for real.
TINY = (
    "trainer.steps=3",
    "trainer.groups_per_step=2",
    "trainer.samples_per_group=4",
    "trainer.checkpoint_every=1",
    "trainer.gap_every=1",
    "trainer.gap_turns=4",
    "trainer.warm_start.steps=12",
    "env.demonstrations.distinct_tasks=16",
    "eval.episodes=8",
)


class Run:
    """One ``tollway`` process and its output so far."""

    def __init__(self, run_dir: Path, arguments: list[str], log: Path, env: dict[str, str]) -> None:
        self.run_dir, self.log = run_dir, log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tollway", *arguments], stdout=file, stderr=file, env=os.environ | env
            )

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def wait(self, limit_s: float = 150.0) -> int:
        return self.process.wait(limit_s)

    def wait_for(self, text: str, limit_s: float = 120.0) -> None:
        """Wait until the run has said ``text``; fail with its output when it ends first."""
        deadline = time.monotonic() + limit_s
        while text not in self.output:
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the run never said {text!r}:\n{self.output}")
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        """Wait until the line of a training step is there."""
        self.wait_for(f"\n    {step:>5} ")

    def pid_of(self, part: str) -> int:
        """Process id of a part of this run, by a word of its command line."""
        (pid,) = [pid for pid, command in processes_of(self.run_dir) if part in command]
        return pid


def processes_of(run_dir: Path) -> list[tuple[int, str]]:
    """Every live process that was started for ``run_dir``: its variable travels in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"TOLLWAY_TEST_RUN={run_dir}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
        except OSError:
            continue
    return found


def wait_until_gone(run_dir: Path, limit_s: float = 15.0) -> list[tuple[int, str]]:
    """What is still alive of a run after at most ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while (left := processes_of(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
