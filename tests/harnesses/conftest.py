"""The installed harnesses, and the Qwen3 family that all of them talk to."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tollway.sandboxes.probe import probe
from tollway.session_server.families.base import Family

ROOT = Path(__file__).resolve().parents[2]
SETUP_S = 900.0
UNSUPPORTED = 3
"""Exit status of the set-up on a machine that cannot have the harnesses."""


def _import_example(name: str) -> None:
    """Make an example importable without its folder, whose subfolders are named like packages."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "harnesses" / f"{name}.py")
    if spec is None or spec.loader is None:
        raise RuntimeError(f"examples/harnesses/{name}.py is gone")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


_import_example("scripted")
_import_example("episode")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that installs the harnesses may wait for that: the usual limit is for the test alone."""
    for item in items:
        if {"harnesses", "all_harnesses"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.timeout(SETUP_S + 180.0))


def _set_up(script: str) -> None:
    done = subprocess.run([ROOT / "scripts" / script], stderr=subprocess.PIPE, text=True, timeout=SETUP_S, check=False)
    if done.returncode == UNSUPPORTED:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise RuntimeError(f"scripts/{script} exited with {done.returncode}:\n{done.stderr}")


@pytest.fixture(scope="session")
def harnesses() -> None:
    """Installs the harnesses, or skips the test on a machine that cannot have them."""
    _set_up("setup_harnesses")


@pytest.fixture(scope="session")
def openhands() -> None:
    """The same for the OpenHands SDK, which wants a newer Python."""
    _set_up("setup_openhands")


@pytest.fixture
def all_harnesses(request: pytest.FixtureRequest, name: str) -> None:
    """What the harness of that ``name`` needs, and a machine with sandboxes."""
    found = probe()
    if not found.available or found.python is None:
        pytest.skip(found.reason)
    request.getfixturevalue("openhands" if name == "openhands" else "harnesses")


@pytest.fixture(scope="session")
def qwen() -> Family:
    """The Qwen3 template over its real vocabulary."""
    from scripted import qwen3

    return qwen3()
