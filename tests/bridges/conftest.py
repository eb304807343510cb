"""Environments of real packages, each in a virtual environment of its own that ``scripts/setup_bridges`` makes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.local import LocalProvider
from tollway.sandboxes.probe import probe

ROOT = Path(__file__).resolve().parents[2]
SETUP_S = 900.0
UNSUPPORTED = 3
"""Exit status of the set-up on a machine that cannot have a bridge."""

# The scripted sessions of the episode tests serve here too.
sys.path.append(str(ROOT / "tests" / "unit" / "envs"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that installs its package may wait for that: the usual limit is for the test alone."""
    for item in items:
        if "bridge" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(SETUP_S + 180.0))


@pytest.fixture(scope="session")
def bridge() -> Callable[[str], Path]:
    """The interpreter that has a package; the test skips with the reason where there can be none."""
    found: dict[str, Path] = {}

    def python(name: str) -> Path:
        if name not in found:
            done = subprocess.run(
                [ROOT / "scripts" / "setup_bridges", name], capture_output=True, text=True, timeout=SETUP_S, check=False
            )
            if done.returncode == UNSUPPORTED:
                pytest.skip(done.stderr.strip().splitlines()[-1])
            assert done.returncode == 0, done.stderr[-3000:]
            found[name] = ROOT / f".venv-{name}" / "bin" / "python"
        return found[name]

    return python


@pytest.fixture
async def local() -> AsyncIterator[LocalProvider]:
    """The real local provider; the test skips with the reason where it cannot run."""
    found = probe()
    if not found.available or found.python is None:
        pytest.skip(found.reason)
    async with LocalProvider(SandboxConfig(max_running=4)) as provider:
        yield provider
