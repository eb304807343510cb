"""The shipped tasks for real: their sources are downloaded once for the session."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tollway.sandboxes.probe import probe

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit" / "envs"))


@pytest.fixture(scope="session")
def swe_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory of this session; the test skips with the reason where sandboxes cannot run."""
    found = probe()
    if not found.available or found.python is None:
        pytest.skip(found.reason)
    return tmp_path_factory.mktemp("swe-cache")
