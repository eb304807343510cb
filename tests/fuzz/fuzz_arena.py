"""A server that outlives hypothesis' examples, on a loop of its own."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fuzz_ground import FAMILIES, ground
from hypothesis import HealthCheck, Phase, settings

T = TypeVar("T")
FULL = [pytest.mark.all, pytest.mark.slow(1800), pytest.mark.timeout(1800)]
"""Marks of the sizes that are too long for every run."""
QUIET = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)


class Arena:
    """One server, and a session that all examples share."""

    def __init__(self, family: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._folder = tempfile.TemporaryDirectory()
        self.place = self.run(self._stack.enter_async_context(ground(Path(self._folder.name), family)))
        self.shared = self.run(self.place.camp())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to completion."""
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        """Stop the server."""
        self.run(self._stack.aclose())
        self._loop.close()
        self._folder.cleanup()


@pytest.fixture(params=FAMILIES)
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    """One server for all examples of a test."""
    made = Arena(request.param)
    yield made
    made.close()
