"""Sandboxes for environment tests: real ones where this machine can run them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.local import LocalProvider
from tollway.sandboxes.probe import probe

_PROBE = probe()


@pytest.fixture
async def local() -> AsyncIterator[LocalProvider]:
    """The real local provider; the test skips with the reason where it cannot run."""
    if not _PROBE.available or _PROBE.python is None:
        pytest.skip(_PROBE.reason)
    async with LocalProvider(SandboxConfig(max_running=4)) as provider:
        yield provider
