"""What a run remembers between processes, besides the trainer's checkpoints: evaluations, phase times, wall time.

One small JSON file in the run directory, replaced atomically; and the lock that keeps a second process out of
that directory, or out of the one where its weights go. Depends on ``errors`` and ``trainer.atomic``.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import tollway
from tollway.errors import ConfigError
from tollway.trainer.atomic import write_file

__all__ = ["Notes", "locked"]


@contextmanager
def locked(directory: Path, *, key: Literal["run.dir", "trainer.weights_dir"] = "run.dir") -> Iterator[None]:
    """Hold the ``directory`` that ``key`` names for this process.

    Raises ``ConfigError`` when another one has it, and when it cannot be written.
    """
    lock = directory / (".lock" if key == "run.dir" else ".weights.lock")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = lock.open("w", encoding="ascii")
    except OSError as error:
        raise ConfigError(f"{key}: cannot use {directory}: {error.strerror}; name another directory") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(file.fileno()).st_nlink:
                raise BlockingIOError  # its owner, who just ended, took it away between our two calls
        except BlockingIOError:
            raise ConfigError(
                f"another process is running in {directory}; wait for it, or choose another directory "
                f"with --set {key}=..."
            ) from None
        try:
            yield
        finally:
            if key == "trainer.weights_dir":  # for weights alone, and not ours
                lock.unlink(missing_ok=True)


class Notes:
    """The notes of one run directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started_at = tollway.STARTED_AT
        self._wall_before_s = 0.0
        self.evaluations: dict[str, dict[str, object]] = {}
        """By name: before, after, blank_tools."""
        self.phases: dict[str, float] = {}
        """Wall seconds by phase, all processes of the run together."""
        self.tokens_generated = 0
        """Sampled tokens of every episode, evaluations and probes included."""
        self.identity: dict[str, object] = {}
        """The settings that make it this run; empty until it is claimed."""
        if path.is_file():
            self._load()

    def claim(self, identity: dict[str, object]) -> None:
        """Make this the run with these settings. Raises ``ConfigError`` when it was started with others.

        With another seed, say, the prompts that its ledger counts would be other tasks.
        """
        for key, value in identity.items():
            if key in self.identity and self.identity[key] != value:
                raise ConfigError(
                    f"{self._path.parent} was started with {key} = {self.identity[key]!r}, now it is {value!r}; "
                    "choose another run.dir, or start over with --fresh"
                )
        self.identity = identity
        self.save()

    @property
    def wall_s(self) -> float:
        """Wall seconds of all processes of this run so far, each from its start."""
        return self._wall_before_s + time.time() - self._started_at

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the wall time of a block towards a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - started

    def save(self) -> None:
        """Write everything; a kill leaves the old file or the new one."""
        body = {
            "evaluations": self.evaluations,
            "phases": self.phases,
            "tokens_generated": self.tokens_generated,
            "wall_s": self.wall_s,
            "identity": self.identity,
        }
        write_file(self._path, json.dumps(body, indent=1).encode())

    def _load(self) -> None:
        try:
            body = json.loads(self._path.read_text(encoding="utf-8"))
            self.evaluations = {str(name): dict(figures) for name, figures in body["evaluations"].items()}
            self.phases = {str(name): float(seconds) for name, seconds in body["phases"].items()}
            self.tokens_generated = int(body["tokens_generated"])
            self._wall_before_s = float(body["wall_s"])
            self.identity = dict(body["identity"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self._path} is not readable ({error}); move it away, or start over with --fresh"
            ) from error
