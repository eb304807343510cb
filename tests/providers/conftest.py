"""Stand-ins of remote services, each run with its real SDK in that SDK's own environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def sdk_python() -> object:
    """The interpreter of a provider's environment, made when it is missing."""

    def ready(name: str) -> Path:
        script = ROOT / "scripts" / "setup_providers"
        done = subprocess.run([script, name], capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            raise RuntimeError(f"scripts/setup_providers {name} exited with {done.returncode}:\n{done.stderr}")
        return ROOT / f".venv-{name}" / "bin" / "python"

    return ready
