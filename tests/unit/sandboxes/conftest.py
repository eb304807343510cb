"""A real local provider; tests skip with the reason where this machine cannot run one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sandbox_helpers import make

from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.local import LocalProvider, LocalSandbox
from tollway.sandboxes.probe import probe

_PROBE = probe()


@pytest.fixture
async def local() -> AsyncIterator[LocalProvider]:
    if not _PROBE.available or _PROBE.python is None:
        pytest.skip(_PROBE.reason)
    async with LocalProvider(SandboxConfig()) as provider:
        yield provider


@pytest.fixture
async def sandbox(local: LocalProvider) -> LocalSandbox:
    made = await make(local)
    assert isinstance(made, LocalSandbox)
    return made
