"""Aborts of requests that nobody waits for any more, on their way to one engine.

Whoever abandons a request may be cancelled itself, so an abort travels in a task of its own; this owns those
tasks. An abort whose connection breaks is sent once more: its request must not go on decoding for nobody.
Depends on asyncio and ``errors``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tollway.errors import EngineLost, TollwayError

__all__ = ["Aborts"]

logger = logging.getLogger(__name__)
_TRIES = 2


class Aborts:
    """Aborts of one engine. ``needless`` says that its connections are closed, which ends their requests, too."""

    def __init__(self, send: Callable[[str], Awaitable[None]], *, needless: Callable[[], bool]) -> None:
        self._send, self._needless = send, needless
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By request id."""

    def __len__(self) -> int:
        return len(self._tasks)

    def later(self, rid: str) -> None:
        """Tell the engine without holding up the caller."""
        task = asyncio.get_running_loop().create_task(self._deliver(rid))
        self._tasks[rid] = task
        task.add_done_callback(lambda _: self._tasks.pop(rid, None))

    async def settled(self, rid: str, *, within_s: float) -> bool:
        """Wait until no abort of ``rid`` is on its way any more; False when it still is after ``within_s``."""
        task = self._tasks.get(rid)
        if task is not None:
            await asyncio.wait([task], timeout=within_s)
        return task is None or task.done()

    async def aclose(self) -> None:
        """Wait for all that are on their way."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _deliver(self, rid: str) -> None:
        for left in reversed(range(_TRIES)):
            if self._needless():
                return
            try:
                await self._send(rid)
                return
            except TollwayError as error:
                if not left or not isinstance(error, EngineLost) or error.refused:
                    logger.info("abort of %s not delivered: %s", rid, error)
                    return
