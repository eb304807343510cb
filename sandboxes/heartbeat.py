"""Keeping a sandbox alive while somebody works with it.

A short TTL ends a sandbox soon after its owner died; a heartbeat keeps it alive while the owner is only slow. A
provider's own idle clock does not know that a long command is work, so the beat goes on during commands too.
Depends on ``base``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tollway.errors import SandboxError, SandboxGone
from tollway.sandboxes.base import Sandbox

__all__ = ["heartbeat", "kept_alive"]

logger = logging.getLogger(__name__)
_BEATS_PER_TTL = 3


@asynccontextmanager
async def kept_alive(sandbox: Sandbox, ttl_s: float | None = None) -> AsyncIterator[Sandbox]:
    """Extend ``sandbox`` by ``ttl_s`` (default: its spec's) again and again until the block ends; it is not killed."""
    beating = asyncio.create_task(heartbeat(sandbox, ttl_s or sandbox.spec.ttl_s))
    try:
        yield sandbox
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def heartbeat(sandbox: Sandbox, ttl_s: float) -> None:
    """Extend it three times per ``ttl_s`` until it is gone; a beat that fails or hangs is told, the next one tries."""
    while True:
        await asyncio.sleep(ttl_s / _BEATS_PER_TTL)
        try:
            async with asyncio.timeout(ttl_s / _BEATS_PER_TTL):
                await sandbox.extend(ttl_s)
        except SandboxGone:
            return  # the next command says so
        except (SandboxError, TimeoutError) as error:
            logger.warning("heartbeat of sandbox %s: %s", sandbox.id, error or "no answer in time")
