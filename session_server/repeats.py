"""Calls that may be sent twice: the second gets the answer of the first. In memory, for a while.

A server that starts again has forgotten them, as it has forgotten every token. Depends on asyncio only.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine

from tollway.session_server.calls import other_body

__all__ = ["Repeats"]


class Repeats:
    """Answers by idempotency key; the oldest of more than ``limit`` go."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._answers: OrderedDict[str, tuple[bytes, asyncio.Task[bytes]]] = OrderedDict()
        """(digest of the body, answer) by key."""

    async def once(self, key: str | None, body: bytes, make: Callable[[], Coroutine[object, object, bytes]]) -> bytes:
        """The answer of ``make``, made once per key. A failure is not kept: the same call again is tried anew.

        Raises ``BadRequest`` when a key comes back with another ``body``.
        """
        if key is None:
            return await make()
        digest = hashlib.sha256(body).digest()
        known, task = self._answers.get(key, (digest, None))
        if known != digest:
            raise other_body()
        if task is None:
            task = asyncio.get_running_loop().create_task(make())
            task.add_done_callback(lambda done: self._ended(key, done))
            self._answers[key] = digest, task
            while len(self._answers) > self._limit:
                self._answers.popitem(last=False)
        # A client that leaves does not end it: the one that comes back wants its answer.
        return await asyncio.shield(task)

    def _ended(self, key: str, task: asyncio.Task[bytes]) -> None:
        """Forget a failure, also one that nobody waited for."""
        failed = task.cancelled() or task.exception() is not None
        if failed and key in self._answers and self._answers[key][1] is task:
            del self._answers[key]
