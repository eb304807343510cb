"""The embedded engine as a process of its own, for tests of whatever talks to engines."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from tollway.router.engines import EngineClient

__all__ = ["serving"]


@asynccontextmanager
async def serving(model: Path, kind: type[EngineClient] = EngineClient) -> AsyncIterator[EngineClient]:
    """Serve ``model`` until the block ends, and yield a client of it."""
    command = [sys.executable, "-m", "tollway.engine", "--model-path", str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = await asyncio.to_thread(process.stdout.readline)  # type: ignore[union-attr]  # piped
            async with aiohttp.ClientSession() as http:
                client = kind(json.loads(line)["url"], http)
                yield client
                await client.aclose()
        finally:
            process.terminate()
