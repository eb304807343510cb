"""What a refit does to one engine: load weights while it serves, or let it sleep, load, and wake it.

Serving: pause -> flush -> tell the session server (paused, flushed) -> begin -> parts -> end -> version -> tell it
(version, resumed) -> continue. Asleep: the same pause, then its memory back by tag; later the memory of the weights
again, the load, and at the end the rest of the memory, the news and ``continue``. The session server hears of a
flush whatever follows, and of a version only once the engine has it. Whatever fails, the engine goes on with whole
weights or is quarantined, and the session server hears which; nothing stays half-paused.
Depends on ``payload``; owns no fleet and no retries.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from tollway.errors import EngineLost, EngineRefused, TollwayError
from tollway.trainer.weights.payload import PauseMode, Payload, RefitTarget

__all__ = ["Notify", "RefitNotice", "Sessions"]

logger = logging.getLogger(__name__)
_WEIGHTS = "weights"
_CANCELLED_S = 3.0
"""For each call that leaves an engine in order when the run is stopped: it may hang, and somebody waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitNotice:
    """What happened to one engine; told while it is paused, so that no call is misattributed."""

    url: str
    version: int | None = None
    """All its weights are of this version now; ``None``: they are what they were."""
    flushed: bool = False
    phase: Literal["paused", "resumed", "failed"] | None = None
    """It generates nothing, goes on at once, or holds half-loaded weights that may not serve."""
    reason: str = ""
    """Why it failed."""


Notify = Callable[[RefitNotice], Awaitable[None]]


@dataclass(slots=True)
class _Stage:
    """How far one engine is."""

    told: bool = False
    """The session server may believe that it is paused."""
    broken: bool = False
    """Its weights are a mixture, or their memory was given back: they may not serve."""

    @property
    def serves(self) -> bool:
        """Whether it may generate at once."""
        return not self.broken


@dataclass(slots=True)
class _Sleeper(_Stage):
    """A paused engine that gave memory back, or is about to get it again."""

    released: tuple[str, ...] = ()
    """Tags whose memory it does not have."""
    version: int | None = None
    """Of the weights that it got since; ``None``: it has those that it slept with."""

    @property
    def serves(self) -> bool:
        """See ``_Stage``: without its memory it cannot, whatever its weights are."""
        return not self.broken and not self.released


class Sessions:
    """Per-engine sequences, and what must be remembered of each engine between them."""

    def __init__(self, *, mode: PauseMode, notify: Notify | None, timeout_s: float) -> None:
        self._mode: PauseMode = mode
        self._notify, self._timeout_s = notify, timeout_s
        self._half_open: set[str] = set()
        """Engines whose weight session may still be open from a failure."""
        self._asleep: dict[str, _Sleeper] = {}

    def asleep(self, engine: RefitTarget) -> bool:
        """Whether it sleeps, or failed while it did and was not woken."""
        return engine.url in self._asleep

    def forget(self, url: str) -> None:
        """The process at ``url`` is gone: the next one there has all its memory and no open session."""
        self._asleep.pop(url, None)
        self._half_open.discard(url)

    async def load(self, engine: RefitTarget, payload: Payload, version: int) -> float:
        """Bring weights to an engine: one that serves goes on with them, one that sleeps waits for ``wake``.

        Returns the seconds that it was paused by this call.
        """
        started = time.perf_counter()
        if (sleeper := self._asleep.get(engine.url)) is not None:
            await self._load_asleep(engine, sleeper, payload, version)
            return time.perf_counter() - started
        stage = _Stage()
        async with self._settled(engine, stage):
            await self._pause(engine, stage)
            await self._exchange(engine, payload, version, stage)
            await self._tell(engine, RefitNotice(url=engine.url, version=version, phase="resumed"))
            await self._repeatable(engine, "continue", engine.resume)
        return time.perf_counter() - started

    async def sleep(self, engine: RefitTarget, tags: Sequence[str]) -> bool:
        """Pause it and take its memory of ``tags``; False when it had given all of it back before.

        An engine that refuses goes on as it was. One of which nobody knows what it gave back may not serve, and is
        asked for all of it the next time.
        """
        sleeper = self._asleep.get(engine.url) or _Sleeper()
        wanted = [tag for tag in tags if tag not in sleeper.released]
        if not wanted:
            return False
        slept_before = engine.url in self._asleep
        async with self._settled(engine, sleeper):
            if not slept_before:
                await self._pause(engine, sleeper)
            # Known before the call: when the process dies in it, ``forget`` has the last word.
            self._asleep[engine.url] = sleeper
            broken, sleeper.broken = sleeper.broken, True
            try:
                await self._bounded(engine, "release memory", engine.release_memory(wanted))
            except EngineRefused:
                sleeper.broken = broken  # it said no, so nothing is gone
                if not slept_before:
                    self._asleep.pop(engine.url, None)
                raise
            sleeper.released, sleeper.broken = (*sleeper.released, *wanted), broken or _WEIGHTS in wanted
            sleeper.version = None
        return True

    async def wake(self, engine: RefitTarget) -> bool:
        """Give it the rest of its memory and let it go on; False for one whose weights may not serve, or that ended.

        The first stays paused and quarantined, with what it gave back, until weights reach it.
        """
        sleeper = self._asleep.get(engine.url)
        if sleeper is None or sleeper.broken:
            return False
        async with self._settled(engine, sleeper):
            if sleeper.released:
                sleeper.broken = True
                await self._take_back(engine, sleeper, sleeper.released)
                sleeper.broken = False
            self._asleep.pop(engine.url, None)
            await self._tell(engine, RefitNotice(url=engine.url, version=sleeper.version, phase="resumed"))
            await self._repeatable(engine, "continue", engine.resume)
        return True

    async def _load_asleep(self, engine: RefitTarget, sleeper: _Sleeper, payload: Payload, version: int) -> None:
        try:
            if _WEIGHTS in sleeper.released:
                await self._take_back(engine, sleeper, [_WEIGHTS])
            if engine.url in self._half_open:
                await self._end_stale_session(engine)
            await self._exchange(engine, payload, version, sleeper)
            sleeper.version = version
        except BaseException as error:
            if sleeper.broken:  # otherwise it has what it slept with, and waits for ``wake``
                await self._release(engine, sleeper, error)
            raise

    async def _take_back(self, engine: RefitTarget, sleeper: _Sleeper, tags: Sequence[str]) -> None:
        """Memory of ``tags`` again. Without an answer it counts as taken: the next sleep releases it once more.

        Neither call can be sent twice. A stock server ends when it is to resume what it has (its scheduler removes the
        tag from a set) or to release what it has not (torch_memory_saver exits), and no answer of its says what it
        has. An answer is lost most likely after the call was carried out: then that release is right. Otherwise the
        server ends of it, which frees the memory as well and costs one start.
        """
        before = sleeper.released
        sleeper.released = tuple(tag for tag in before if tag not in tags)
        try:
            await self._bounded(engine, "resume memory", engine.resume_memory(tags))
        except EngineRefused:
            sleeper.released = before  # it said no
            raise

    async def _pause(self, engine: RefitTarget, stage: _Stage) -> None:
        flushes = self._mode != "in_place"
        await self._repeatable(engine, "pause", partial(engine.pause, self._mode))
        if engine.url in self._half_open:
            await self._end_stale_session(engine)
        if flushes:
            await self._repeatable(engine, "flush", engine.flush_cache)
        stage.told = True
        await self._tell(engine, RefitNotice(url=engine.url, flushed=flushes, phase="paused"))

    async def _exchange(self, engine: RefitTarget, payload: Payload, version: int, stage: _Stage) -> None:
        """The load itself: nothing of the old weights may serve from its start to the new version."""
        if payload.session:
            self._half_open.add(engine.url)
            await self._bounded(engine, "begin", engine.begin_weight_update())
        stage.broken = True
        for part in payload.parts(engine):
            await self._bounded(engine, "load", part)
        if payload.session:
            await self._bounded(engine, "end", engine.end_weight_update())
            self._half_open.discard(engine.url)
        await self._bounded(engine, "version", engine.set_weight_version(version))
        stage.broken = False

    @asynccontextmanager
    async def _settled(self, engine: RefitTarget, stage: _Stage) -> AsyncIterator[None]:
        """Whatever ends the block early: the engine goes on or is quarantined."""
        try:
            yield
        except BaseException as error:
            await self._release(engine, stage, error)
            raise

    async def _tell(self, engine: RefitTarget, notice: RefitNotice, limit_s: float | None = None) -> None:
        if self._notify is not None:
            await self._bounded(engine, "session server", self._notify(notice), limit_s)

    async def _release(self, engine: RefitTarget, stage: _Stage, cause: BaseException) -> None:
        """Let the engine go on, or end its requests so that nobody waits for a paused engine.

        The session server hears of it first: what is ended here must not come back here.
        """
        serve, reason = stage.serves, str(cause) or "it was cancelled"
        limit_s = self._timeout_s if isinstance(cause, TollwayError) else min(self._timeout_s, _CANCELLED_S)
        if isinstance(cause, EngineLost) and cause.refused:
            self.forget(engine.url)
        notice = RefitNotice(url=engine.url, phase="resumed" if serve else "failed", reason="" if serve else reason)
        try:
            if stage.told:
                await self._tell(engine, notice, limit_s)
        except TollwayError as error:
            logger.warning("engine %s after a failed refit: the session server was not told: %s", engine.url, error)
        try:
            if serve:
                await self._bounded(engine, "continue", engine.resume(), limit_s)
            else:
                await self._bounded(engine, "abort", engine.abort_all(), limit_s)
        except TollwayError as error:
            logger.warning("engine %s after a failed refit: %s", engine.url, error)

    async def _end_stale_session(self, engine: RefitTarget) -> None:
        """A session left open would refuse the next begin; one that is gone refuses this."""
        try:
            await self._bounded(engine, "end", engine.end_weight_update())
        except TollwayError as error:
            logger.info("engine %s had no open weight session: %s", engine.url, error)
        self._half_open.discard(engine.url)

    async def _repeatable(self, engine: RefitTarget, stage: str, call: Callable[[], Awaitable[None]]) -> None:
        """A call that changes nothing the second time: sent again when its connection broke before the answer."""
        try:
            await self._bounded(engine, stage, call())
        except EngineLost as error:
            if error.refused or error.timed_out:
                raise
            await self._bounded(engine, stage, call())

    async def _bounded(
        self, engine: RefitTarget, stage: str, call: Awaitable[None], limit_s: float | None = None
    ) -> None:
        limit_s = self._timeout_s if limit_s is None else limit_s
        try:
            async with asyncio.timeout(limit_s):
                await call
        except TimeoutError as error:
            raise EngineLost(
                f"engine {engine.url}: {stage} took longer than {limit_s:.0f} s", timed_out=True
            ) from error
