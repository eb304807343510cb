"""The installed harnesses, and the Qwen3 family that all of them talk to."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tollway.session_server.families.base import Family

ROOT = Path(__file__).resolve().parents[2]
SETUP_S = 900.0
UNSUPPORTED = 3
"""Exit status of the set-up on a machine that cannot have the harnesses."""


def _import_scripted() -> None:
    """Make ``scripted`` importable without its folder, whose subfolders are named like packages."""
    spec = importlib.util.spec_from_file_location("scripted", ROOT / "examples" / "harnesses" / "scripted.py")
    if spec is None or spec.loader is None:
        raise RuntimeError("examples/harnesses/scripted.py is gone")
    module = importlib.util.module_from_spec(spec)
    sys.modules["scripted"] = module
    spec.loader.exec_module(module)


_import_scripted()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that installs the harnesses may wait for that: the usual limit is for the test alone."""
    for item in items:
        if "harnesses" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(SETUP_S + 180.0))


@pytest.fixture(scope="session")
def harnesses() -> None:
    """Installs the harnesses, or skips the test on a machine that cannot have them."""
    done = subprocess.run(
        [ROOT / "scripts" / "setup_harnesses"], stderr=subprocess.PIPE, text=True, timeout=SETUP_S, check=False
    )
    if done.returncode == UNSUPPORTED:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise RuntimeError(f"scripts/setup_harnesses exited with {done.returncode}:\n{done.stderr}")


@pytest.fixture(scope="session")
def qwen() -> Family:
    """The Qwen3 template over its real vocabulary."""
    from scripted import qwen3

    return qwen3()
