"""Calls that may be sent twice: the second gets the answer of the first. In memory, for a while.

A server that starts again has forgotten them, as it has forgotten every token. Depends on asyncio only.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine

from tollway.session_server.calls import other_body

__all__ = ["Repeats"]


class Repeats:
    """Answers by idempotency key; the oldest of more than ``limit`` go."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._answers: OrderedDict[str, tuple[bytes, asyncio.Task[bytes]]] = OrderedDict()

    async def once(self, key: str | None, body: bytes, make: Callable[[], Coroutine[object, object, bytes]]) -> bytes:
        """The answer of ``make``, made once per key. A failure is not kept: the same call again is tried anew.

        Raises ``BadRequest`` when a key comes back with another ``body``.
        """
        if key is None:
            return await make()
        known, task = self._answers.get(key, (body, None))
        if known != body:
            raise other_body()
        if task is None:
            task = asyncio.get_running_loop().create_task(make())
            self._answers[key] = body, task
            while len(self._answers) > self._limit:
                self._answers.popitem(last=False)
        try:
            # A client that leaves does not end it: the one that comes back wants its answer.
            return await asyncio.shield(task)
        except Exception:
            if self._answers.get(key) == (body, task):
                del self._answers[key]
            raise
