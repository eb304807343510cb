"""Servers over scripted engines for the session server's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import vocabularies

from tollway.session_server.fake import FakeServer
from tollway.session_server.families.catalogue import renderers_family
from tollway.session_server.families.renderers_family import RenderersFamily
from tollway.session_server.tokens import ControlTokenizer


@pytest.fixture(scope="session")
def qwen() -> RenderersFamily:
    """The Qwen3 template over a small vocabulary."""
    return renderers_family("qwen3", ControlTokenizer(vocabularies.small(), name="small-qwen3"))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[FakeServer]:
    """A server of the byte family."""
    async with FakeServer(tmp_path) as running:
        yield running


@pytest.fixture
async def qwen_server(tmp_path: Path, qwen: RenderersFamily) -> AsyncIterator[FakeServer]:
    """A server of the Qwen3 family over the small vocabulary."""
    async with FakeServer(tmp_path, family=qwen) as running:
        yield running
