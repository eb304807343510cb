"""Things that are held for a while and surely let go of: within a bound, whoever is cancelled, whatever hangs.

Everything runs in tasks that ``Leases`` owns: a cancelled or late caller leaves them to end in the background, and
``aclose`` waits for them. What does not end in time is named, counted and left behind, so that a wedged part of a
user's cannot hold a run. Knows nothing of episodes. Depends on the kernel.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Generic, TypeVar

from tollway.errors import EpisodeFailed, TollwayError

__all__ = ["Held", "Leases", "OutOfTime", "Overrun", "leaf_of", "within"]

logger = logging.getLogger(__name__)
T = TypeVar("T")
V_co = TypeVar("V_co", covariant=True)


class OutOfTime(EpisodeFailed):
    """Something took longer than it may."""

    def __init__(self, what: str, limit_s: float) -> None:
        super().__init__(f"{what} took longer than {limit_s:g} s")


class Overrun(OutOfTime):
    """``Leases.run`` cancelled what it ran."""

    def __init__(self, what: str, limit_s: float, *, late: object, stuck: bool) -> None:
        super().__init__(what, limit_s)
        self.late = late
        """What it still returned when it was cancelled; ``None`` for nothing."""
        self.stuck = stuck
        """It did not end, and goes on for all we know."""


class Held(Generic[V_co]):
    """Something that is held, in a task of its own."""

    def __init__(self, what: str, keeper: asyncio.Task[None], value: V_co) -> None:
        self.what, self.keeper, self._value = what, keeper, value

    @property
    def value(self) -> V_co:
        """What entering gave."""
        return self._value

    def lost(self) -> EpisodeFailed:
        """The error to raise when it ended before it was let go of."""
        error = None if self.keeper.cancelled() or not self.keeper.done() else self.keeper.exception()
        return EpisodeFailed(f"{self.what} ended in the middle: {_words(error) if error else 'without a word'}")


class Leases:
    """Owner of the tasks. ``release_s`` bounds each release, and how long a cancelled task may take to end."""

    def __init__(self, release_s: float) -> None:
        self._release_s = release_s
        self._owned: set[asyncio.Task[object]] = set()
        self.left_behind = 0
        """Releases and cancelled tasks that did not end in time."""

    def own(self, work: Coroutine[object, object, T], name: str) -> asyncio.Task[T]:
        """Run ``work`` in a task that outlives a cancelled caller."""
        task = asyncio.create_task(work, name=name)
        self._owned.add(task)
        task.add_done_callback(self._forget)
        return task

    @asynccontextmanager
    async def hold(self, manager: AbstractAsyncContextManager[T], what: str) -> AsyncIterator[Held[T]]:
        """Enter ``manager``, and leave it at the end: both in one task, so that it may hold task groups.

        How long entering takes is for the caller to bound. Leaving is bounded here; when it fails or takes too
        long, that is told and the block's own outcome stands.
        """
        ready: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        done = asyncio.Event()

        async def keep() -> None:
            async with manager as value:
                if not ready.cancelled():
                    ready.set_result(value)
                await done.wait()

        keeper = self.own(keep(), what)
        try:
            await asyncio.wait((ready, keeper), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                await keeper  # it failed, and says how
                raise EpisodeFailed(f"{what} ended before it was ready")
            yield Held(what, keeper, ready.result())
        finally:
            done.set()
            entered = ready.done()
            if not entered:
                ready.cancel()
                keeper.cancel()
            await self._ended(keeper, what, quietly=not entered)

    async def run(
        self, work: Coroutine[object, object, T], limit_s: float, what: str, needs: Iterable[Held[object]] = ()
    ) -> T:
        """Await ``work`` for at most ``limit_s``, then cancel it. Raises ``Overrun``; also when it will not end.

        Ends with an error as soon as one of ``needs`` is lost.
        """
        held = {each.keeper: each for each in needs}
        task = self.own(work, what)
        try:
            await asyncio.wait((task, *held), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                lost = next((each for keeper, each in held.items() if keeper.done()), None)
                task.cancel()
                ended = await self._ended(task, what, quietly=True)
                if lost is not None:
                    raise lost.lost()
                late = task.result() if ended and not task.cancelled() and task.exception() is None else None
                raise Overrun(what, limit_s, late=late, stuck=not ended)
        except asyncio.CancelledError:
            if not task.done():
                task.cancel()
                await self._ended(task, what, quietly=True)
            raise
        if task.cancelled():
            raise EpisodeFailed(f"{what} cancelled itself")
        return task.result()

    async def release(self, work: Coroutine[object, object, object], what: str) -> None:
        """Await a release for as long as it may take; a failure is told, not raised."""
        await self._ended(self.own(work, what), what)

    async def aclose(self) -> None:
        """Wait for what goes on in the background, at most twice the bound of one release."""
        for _ in range(2):
            if waiting := [task for task in self._owned if not task.done()]:
                await asyncio.wait(waiting, timeout=self._release_s)
            for task in self._owned:
                task.cancel()
        if stuck := sorted(task.get_name() for task in self._owned if not task.done()):
            logger.error("%d tasks were left behind: %s", len(stuck), "; ".join(stuck))

    async def _ended(self, task: asyncio.Task[T], what: str, *, quietly: bool = False) -> bool:
        """Wait for a task that ends by itself; what does not is cancelled and left. Whether it ended."""
        if not task.done():
            await asyncio.wait((task,), timeout=self._release_s)
        if not task.done():
            self.left_behind += 1
            logger.error("%s did not end within %g s and is left behind", what, self._release_s)
            task.cancel()
            return False
        if not quietly and not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("%s ended badly: %s", what, _words(error))
        return True

    def _forget(self, task: asyncio.Task[object]) -> None:
        self._owned.discard(task)
        if not task.cancelled():
            task.exception()  # was told where it mattered; here nobody is left to ask


async def within(limit_s: float, what: str, work: Coroutine[object, object, T] | asyncio.Future[T]) -> T:
    """Await ``work`` for at most ``limit_s``; a stall of our own parts is an infrastructure failure."""
    try:
        async with asyncio.timeout(limit_s) as deadline:
            return await work
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise OutOfTime(what, limit_s) from error


def leaf_of(error: BaseException) -> BaseException:
    """What a group of errors is about: the first of ours in it, else the first of all.

    >>> leaf_of(ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("x"), EpisodeFailed("gone")]))
    EpisodeFailed('gone')
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    ours = error.subgroup(TollwayError)
    return leaf_of((ours or error).exceptions[0])


def _words(error: BaseException) -> str:
    leaf = leaf_of(error)
    return str(leaf) if isinstance(leaf, TollwayError) else f"{type(leaf).__name__}: {leaf}"
