"""Training runs on one device: how they are started, killed and read.

``TOLLWAY_SGLANG`` names the program of the engines (default ``sglang``), ``TOLLWAY_GPU_OUT`` a folder for figures.
``TOLLWAY_GPU_CPU=1`` proves the same tests on a machine without a GPU: small models, weights over HTTP, and embedded
engines, unless ``TOLLWAY_SGLANG`` names an SGLang for the CPU. Owns no assertion.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tollway.records import Rollout
from tollway.sandboxes.config import LocalConfig
from tollway.sandboxes.probe import probe
from tollway.trainer.spool import decode_group

__all__ = [
    "EXAMPLE",
    "ON_CPU",
    "Run",
    "device_sets",
    "metrics_of",
    "needs_device",
    "note",
    "rollouts_by_step",
    "run_folder",
    "sandbox_sets",
    "versions_by_step",
]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpu" / "tollway.toml"
ON_CPU = os.environ.get("TOLLWAY_GPU_CPU") == "1"
_NAMED = "TOLLWAY_SGLANG" in os.environ
_PROGRAM = os.environ.get("TOLLWAY_SGLANG", "sglang")
_MARK = "TOLLWAY_TEST_RUN"


def _missing() -> str:
    """Why these tests cannot run here; empty when they can."""
    if ON_CPU:
        return ""
    if not torch.cuda.is_available():
        return "needs a CUDA device; TOLLWAY_GPU_CPU=1 runs it with embedded engines"
    if shutil.which(_PROGRAM) is None:
        return f"needs SGLang: there is no program {_PROGRAM!r}; name it in TOLLWAY_SGLANG"
    return ""


needs_device = pytest.mark.skipif(bool(_missing()), reason=_missing() or "can run")


def device_sets() -> list[str]:
    """What the example's configuration wants to be changed to for this machine, as ``--set`` values."""
    program = [f"engine.executable={json.dumps(_PROGRAM)}"]
    if not ON_CPU:
        return program
    return [*(program if _NAMED else ["engine.kind=embedded"]), "trainer.refit_transport=tensor"]


def run_folder(tmp_path: Path, gigabytes: float) -> Path:
    """A folder for a run that writes so much: in memory where it fits, as disks are slow beside a GPU."""
    memory = Path("/dev/shm")
    if not ON_CPU and shutil.disk_usage(memory).free > gigabytes * 1e9:
        return Path(tempfile.mkdtemp(prefix="tollway-gpu-", dir=memory))
    return tmp_path


def sandbox_sets() -> list[str]:
    """Isolated sandboxes where namespaces are allowed; else, by name, plain processes: these tests' code is ours."""
    if probe(LocalConfig()).available:
        return []
    return ["sandbox.local.unsafe=true"]


class Run:
    """One ``tollway`` process, in a group of processes that can be found again, and what it said."""

    def __init__(self, run_dir: Path, log: Path, arguments: Sequence[str]) -> None:
        self.run_dir, self.log, self.started = run_dir, log, time.monotonic()
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tollway", *arguments],
                stdout=file,
                stderr=file,
                env=os.environ | {_MARK: str(run_dir)},
            )

    @property
    def output(self) -> str:
        """All of it, so far."""
        return self.log.read_text(encoding="utf-8")

    def finish(self, limit_s: float) -> str:
        """Wait for its good end and return the output; fail with it, and with what the parts said, otherwise."""
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not done after {limit_s:g} s:\n{self._everything()}")
        if status:
            pytest.fail(f"ended with status {status}:\n{self._everything()}")
        return self.output

    def wait_for_step(self, step: int, limit_s: float) -> None:
        """Return once it has said that a step is over."""
        self.wait_until(lambda: f"\n    {step:>5} " in self.output, f"step {step} to end", limit_s)

    def wait_until(self, look: Callable[[], object], what: str, limit_s: float) -> None:
        """Return once ``look`` finds something; fail when the run ends before, with what its parts said."""
        deadline = time.monotonic() + limit_s
        while not look():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"waited in vain for {what}:\n{self._everything()}")
            time.sleep(0.02)

    def kill_after(self, step: int, limit_s: float) -> None:
        """Kill it, and nothing else, once it has said that a step is over."""
        self.wait_for_step(step, limit_s)
        self.process.kill()
        self.process.wait()

    def engines(self) -> list[int]:
        """Process ids of its engines: of the first process of each, which leads a group."""
        return sorted(pid for pid, line in self._alive().items() if " --model-path " in line and os.getpgid(pid) == pid)

    def wait_until_gone(self, limit_s: float = 30.0) -> list[str]:
        """Command lines of what is left of the run after at most ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while (left := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return list(left.values())

    def end(self) -> None:
        """Leave nothing behind, whatever happened."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.wait_until_gone(10.0)
        for pid in self._alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _alive(self) -> dict[int, str]:
        """Command line by process id: the mark travels in the environment."""
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and f"{_MARK}={self.run_dir}".encode() in (
                    entry / "environ"
                ).read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def _everything(self) -> str:
        parts = [self.output]
        for path in sorted((self.run_dir / "logs").glob("*.log")):
            parts.append(f"--- {path.name}\n{path.read_text(encoding='utf-8', errors='replace')[-3000:]}")
        return "\n".join(parts)


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def rollouts_by_step(run_dir: Path) -> dict[int, list[Rollout]]:
    """What each step was trained on."""
    found: dict[int, list[Rollout]] = {}
    for path in sorted((run_dir / "trajectories").rglob("*.safetensors")):
        found.setdefault(int(path.parent.name.rpartition("_")[2]), []).extend(decode_group(path).rollouts)
    return found


def versions_by_step(run_dir: Path) -> dict[int, set[int]]:
    """Weight versions of the sampled tokens of each step's trained groups, as the engine's spans gave them."""
    return {
        step: {int(v) for one in rollouts for row in one.rows for v in row.weight_version[row.loss_mask == 1]}
        for step, rollouts in rollouts_by_step(run_dir).items()
    }


def note(name: str, figures: Mapping[str, object]) -> None:
    """Print the figures as one line of JSON, and keep them in ``$TOLLWAY_GPU_OUT/<name>.json``."""
    line = json.dumps({"name": name, "cpu": ON_CPU, **figures})
    sys.stdout.write(line + "\n")
    if folder := os.environ.get("TOLLWAY_GPU_OUT"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.json").write_text(line + "\n", encoding="utf-8")
