"""Rules that hold for every test."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Searches find new cases only where a finding is wanted: `scripts/test --all` explores, the gate repeats.
# No example has a deadline: how long one takes is a matter of the machine.
settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("explore", print_blob=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))

# One thread per process: on a loaded machine a second one makes single steps many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _log_lines_end_with_the_test() -> Iterator[None]:
    """A command that ran in this process sent log lines to a stderr that is gone with its test."""
    from tollway import telemetry

    root = logging.getLogger()
    level = root.level
    yield
    telemetry.unconfigure()
    root.setLevel(level)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first: one begun last keeps the other processes waiting for it. Files stay in one piece."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def rank(item: pytest.Item) -> int:
        if "e2e" in item.path.parts:  # whole fleets
            return 0
        return 1 if item.path in slow or {"contract", "trainer"} & set(item.path.parts) else 2

    items.sort(key=rank)
