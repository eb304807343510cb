"""Deleting a sandbox when its provider does not want to: bounded tries, growing pauses, counted and told.

Must not know what is deleted. Depends on ``errors`` and ``sandboxes.config``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from tollway.errors import SandboxGone
from tollway.sandboxes.config import SandboxConfig

__all__ = ["Counts", "delete", "tried"]

logger = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0


@dataclass(slots=True)
class Counts:
    """What a provider object did so far."""

    created: int = 0
    create_failures: int = 0
    """Single tries of a create that failed."""
    released: int = 0
    """Sandboxes that are known to be gone."""
    stuck: int = 0
    """Sandboxes whose deletion failed or hangs and is tried again in the background, now."""
    abandoned: int = 0
    """Sandboxes whose deletion was given up: only the provider's own TTL ends them."""
    swept: int = 0
    """Sandboxes of failed creates that were found at the provider and deleted."""


async def delete(
    name: str, kill: Callable[[], Coroutine[object, object, None]], config: SandboxConfig, counts: Counts
) -> bool:
    """Call ``kill`` until it succeeds, at most ``kill_attempts`` times; whether it did. Cancelling gives up."""
    pause_s, stuck, deleted = _FIRST_PAUSE_S, 0, False
    try:
        for attempt in range(1, config.kill_attempts + 1):
            problem = await tried(kill(), config.kill_timeout_s)
            if problem is None:
                counts.released += 1
                deleted = True
                break
            if not stuck:
                stuck = 1
                counts.stuck += 1
            logger.warning("sandbox %s is not deleted yet, try %d: %s", name, attempt, problem)
            if attempt < config.kill_attempts:
                await asyncio.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
    finally:
        counts.stuck -= stuck
        if not deleted:
            counts.abandoned += 1
            logger.error("sandbox %s is left behind; its ttl at the provider ends it, or delete it by hand", name)
    return deleted


async def tried(work: Coroutine[object, object, None], limit_s: float) -> object:
    """Run ``work`` for at most ``limit_s``; what went wrong, or ``None``. One that ignores its end is left behind."""
    task = asyncio.create_task(work)
    # Whatever one that is left behind still says, nobody waits for it.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        await asyncio.wait([task], timeout=limit_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        task.cancel()
        return f"no answer within {limit_s} s"
    if task.cancelled():
        return "it was cancelled"
    problem = task.exception()
    return None if isinstance(problem, SandboxGone) else problem
