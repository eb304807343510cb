"""Who may have a sandbox next, in the order of asking.

An episode waits here before its session is opened, so that nothing idles meanwhile and the provider's own wait for a
place, which is an error in the end, is for foreign users of the provider only. It keeps its place from its agent to
its grading, which so always has one; and whoever needs several gets them at once: nobody waits for a place while
holding another. Pure asyncio; depends on nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["Places"]


class Places:
    """``count`` places."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = count
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, count: int = 1) -> AsyncIterator[None]:
        """Hold ``count`` places, at most all that there are; waits for them."""
        count = min(count, self.count)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((count, turn))
        self._serve()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._give_back(count)  # it was given and never used
            else:
                turn.cancel()
                self._serve()  # it may have stood before somebody who needs less
            raise
        try:
            yield
        finally:
            self._give_back(count)

    def _give_back(self, count: int) -> None:
        self._free += count
        self._serve()

    def _serve(self) -> None:
        while self._queue:
            count, turn = self._queue[0]
            if not turn.done():
                if count > self._free:
                    return  # in order: whoever needs many would else never get them
                self._free -= count
                turn.set_result(None)
            self._queue.popleft()
