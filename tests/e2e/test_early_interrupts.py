"""Ctrl-C while a command is still being read in: status 130 and not a word, wherever among the imports it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from demo_runs import DEMO, wait_until_gone

COMMANDS = {
    "train": ("train", "-c", str(DEMO)),
    "serve": ("serve", "-c", str(DEMO), "--port", "0"),
    "serve with engines": ("serve", "-c", str(DEMO), "--port", "0", "--start-engines", "1"),
}


class Started:
    """A ``tollway`` process that tells of each module that it has imported."""

    def __init__(self, command: str, folder: Path) -> None:
        self.mark = folder / "run"
        values = (f"run.dir={self.mark}", f"server.journal={folder / 'journal.sqlite'}", "trainer.backend=torch")
        sets = [part for value in values for part in ("--set", value)]
        env = {"PYTHONPROFILEIMPORTTIME": "1", "TOLLWAY_ADMIN_KEY": "k" * 20, "TOLLWAY_TEST_RUN": str(self.mark)}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tollway", *COMMANDS[command], *sets],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | env,
            start_new_session=True,
        )
        assert self.process.stderr is not None
        self._lines = self.process.stderr

    def imported(self, module: str) -> None:
        """Wait until it has imported ``module``."""
        for line in self._lines:
            if line.startswith("import time:") and line.rpartition("|")[2].strip() == module:
                return
        pytest.fail(f"it ended with {self.process.wait()} and never imported {module}")

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        """Its status, and what it said of its own."""
        with self.process as process:
            process.send_signal(number)
            said = [line for line in self._lines if not line.startswith("import time:")]
        assert wait_until_gone(self.mark) == []
        return process.returncode, "".join(said)


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("train", "argparse"),
        pytest.param("train", "pydantic_core._pydantic_core", marks=pytest.mark.all),
        pytest.param("train", "tollway.settings", marks=pytest.mark.all),
        ("train", "numpy"),
        pytest.param("train", "aiohttp.client", marks=pytest.mark.all),
        ("train", "tollway.app"),
        pytest.param("serve", "tollway.errors", marks=pytest.mark.all),
        pytest.param("serve", "uvicorn.config", marks=pytest.mark.all),
        ("serve", "fastapi"),
        pytest.param("serve with engines", "tollway.session_server.app", marks=pytest.mark.all),
        ("serve with engines", "tollway.trainer.weights.refit"),
    ],
)
def test_an_import_that_is_interrupted_says_nothing(tmp_path: Path, command: str, module: str) -> None:
    started = Started(command, tmp_path)
    started.imported(module)
    assert started.interrupt() == (130, "")


def test_a_service_manager_is_heard_as_early(tmp_path: Path) -> None:
    started = Started("train", tmp_path)
    started.imported("numpy")
    assert started.interrupt(signal.SIGTERM) == (130, "")


@pytest.mark.all
@pytest.mark.parametrize(
    ("command", "delay_s"),
    [("train", 0.05), ("train", 0.4), ("train", 1.0), ("train", 2.0), ("serve with engines", 1.5)],
)
def test_whenever_it_comes_no_traceback_is_shown(tmp_path: Path, command: str, delay_s: float) -> None:
    started = Started(command, tmp_path)
    started.imported("argparse")
    time.sleep(delay_s)
    status, said = started.interrupt()
    assert "Traceback" not in said
    assert "KeyboardInterrupt" not in said
    # A program that a signal ended, by the words of its parent; a shell calls both 130. What serves ends with 0.
    assert status in (130, -signal.SIGINT) or (command.startswith("serve") and status == 0)


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As of a command in the background of a script."""
    argv = [sys.executable, "-P", "-m", "tollway", "config", "check"]
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", ignoring, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"},
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rpartition("|")[2].strip() == "pydantic":
                process.send_signal(signal.SIGINT)
                break
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, "are known" in out) == (0, True)
