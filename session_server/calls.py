"""Model calls as their clients see them: replies to replay, retries to coalesce, clients that leave.

A ``Call`` is one generation, whoever waits for it. A retry (same idempotency key, or an SDK's retry header
with an identical body) joins it and gets the same bytes. When the last client leaves, the generation is
cancelled, after a grace period if a retry can be expected. Depends on asyncio only.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TypeVar

from tollway.errors import BadRequest, RequestAborted, TollwayError

__all__ = ["Call", "CallBook", "other_body"]

_K = TypeVar("_K", str, bytes)

_REMEMBERED = 4
"""Finished calls per session whose bytes wait for a retry."""


@dataclass(slots=True, eq=False)
class Call:
    """One generation and what was written for it so far."""

    digest: bytes
    """Of the request body."""
    key: str | None
    streaming: bool
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()
    chunks: list[bytes] = field(default_factory=list)
    """Body parts in order; a reply that is not streamed has one."""
    started: bool = False
    """Status and headers are final."""
    finished: bool = False
    task: asyncio.Task[None] | None = None
    clients: int = 0
    on_delivery: Callable[[bool], None] | None = None
    """Told of each client whether it got the whole reply, and once more when the reply ended without any."""
    failed: bool = False
    """The generation ended in an error; a retry runs anew."""
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)
    _abort: TollwayError | None = None

    def begin(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        """Fix status and headers."""
        self.status, self.headers, self.started = status, headers, True

    def write(self, chunk: bytes) -> None:
        """Add a body part."""
        self.chunks.append(chunk)
        self.wake()

    def finish(self) -> None:
        """Nothing more will come."""
        self.finished = True
        self.wake()

    def change(self) -> asyncio.Future[None]:
        """A future that ends at the next part, at the end, or at ``wake``; ask only while not ``finished``."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future

    def wake(self) -> None:
        """End every wait for a change; who waits looks what it was."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def cancel(self, reason: TollwayError) -> None:
        """End the generation; clients that still wait are told ``reason``."""
        if not self.finished and self._abort is None:
            self._abort = reason
            if self.task is not None:
                self.task.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether its generation is being ended: it has nothing for a request that comes now."""
        return self._abort is not None

    @property
    def abort_reason(self) -> TollwayError:
        """Why the generation was cancelled."""
        return self._abort or RequestAborted("the request was cancelled")


class CallBook:
    """Running and recent calls of one session."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[str, Call] = OrderedDict()
        self._by_body: OrderedDict[bytes, Call] = OrderedDict()
        self._running: set[Call] = set()

    @property
    def running(self) -> int:
        """Calls that are not finished."""
        return len(self._running)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Generations that run."""
        return [call.task for call in self._running if call.task is not None]

    def find(self, digest: bytes, *, key: str | None, retry: bool) -> Call | None:
        """The call that a request repeats. Raises ``BadRequest`` when a key comes back with another body."""
        call = self._by_key.get(key) if key is not None else self._by_body.get(digest) if retry else None
        if call is not None and call.digest != digest:
            raise other_body()
        return None if call is None or call.cancelled else call

    def start(self, call: Call, work: Coroutine[object, object, None]) -> None:
        """Run ``work`` as the generation of ``call``; failed calls are forgotten, so that a retry runs anew."""
        self._running.add(call)
        self._by_body[call.digest] = call
        if call.key is not None:
            self._by_key[call.key] = call
        call.task = asyncio.get_running_loop().create_task(work)
        call.task.add_done_callback(lambda _: self._ended(call))

    def leave(self, call: Call, *, grace_s: float) -> None:
        """A client went away before the end of its reply."""
        call.clients -= 1
        if call.clients > 0 or call.finished:
            return
        gone = RequestAborted("the client went away")
        if call.key is None or grace_s <= 0:
            call.cancel(gone)
            return

        def unless_joined() -> None:
            if call.clients <= 0:
                call.cancel(gone)

        asyncio.get_running_loop().call_later(grace_s, unless_joined)

    def forget(self) -> None:
        """Drop the replies that wait for a retry; the journal has those with a key."""
        self._by_key.clear()
        self._by_body.clear()

    async def cancel_all(self, reason: TollwayError) -> None:
        """End every running call and wait until each has let go."""
        running = list(self._running)
        for call in running:
            call.cancel(reason)
        await asyncio.gather(*(call.task for call in running if call.task is not None), return_exceptions=True)

    def _ended(self, call: Call) -> None:
        self._running.discard(call)
        if not call.finished:
            call.finish()
        if call.clients <= 0 and call.on_delivery is not None:
            call.on_delivery(False)
        if call.failed:
            if self._by_body.get(call.digest) is call:
                del self._by_body[call.digest]
            if call.key is not None and self._by_key.get(call.key) is call:
                del self._by_key[call.key]
            return
        _trim(self._by_body)
        _trim(self._by_key)


def _trim(book: OrderedDict[_K, Call]) -> None:
    """Forget all but the latest finished calls; a long one that still runs must not keep those behind it."""
    if len(book) > _REMEMBERED:
        finished = [name for name, call in book.items() if call.finished]
        for name in finished[:-_REMEMBERED]:
            del book[name]


def other_body() -> BadRequest:
    """The error for a key that comes back with another body."""
    return BadRequest("this idempotency key was used with a different body", param="idempotency-key")
