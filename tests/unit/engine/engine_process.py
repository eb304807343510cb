"""Starting and stopping a real engine process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Process:
    """A running engine."""

    process: subprocess.Popen[str]
    url: str


def start_engine(model: Path, *arguments: str, env: dict[str, str] | None = None) -> Process:
    command = [sys.executable, "-m", "tollway.engine", "--model-path", str(model), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    line = process.stdout.readline()
    if not line:
        process.wait(10)
        raise RuntimeError(f"the engine ended with {process.returncode} before it was ready")
    return Process(process, json.loads(line)["url"])


def stop_engine(engine: Process) -> int:
    engine.process.terminate()
    code = engine.process.wait(20)
    engine.process.stdout.close()
    return code
