"""Refit sessions: new weights into engines that keep serving.

pause -> flush and tell the session server (not in_place) -> begin -> buckets -> end -> version -> tell the
session server -> continue, per engine. It hears of a flush whatever follows, and of a version only once the
engine has it. Whatever fails, the engine goes on with whole weights or is quarantined; nothing stays half-paused.
Owns no generation. Talks through the router's engine clients; imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from tollway.errors import ComponentLost, ConfigError, EngineLost, TollwayError

__all__ = ["Notify", "PauseMode", "Refit", "RefitReport", "RefitTarget"]

logger = logging.getLogger(__name__)

PauseMode = Literal["retract", "in_place", "abort"]
Notify = Callable[[str, int | None, bool], Awaitable[None]]
"""(engine url, version that it now has, flushed): told while the engine is paused, so that no call is
misattributed. (url, None, True) after a flush, (url, version, False) once the weights are stamped."""


class RefitTarget(Protocol):
    """The part of ``router.engines.EngineClient`` that a refit uses."""

    url: str

    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def flush_cache(self) -> None: ...
    async def begin_weight_update(self) -> None: ...
    async def update_weights_from_tensor(self, payload: bytes) -> None: ...
    async def end_weight_update(self) -> None: ...
    async def set_weight_version(self, version: int) -> None: ...
    async def abort_all(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RefitReport:
    """One push to all engines."""

    version: int
    seconds: float
    paused_s: float
    """Longest time that one engine did not generate."""
    wire_bytes: int
    """Payload bytes sent to each engine, before base64."""
    quarantined: tuple[str, ...]
    """Engines that did not take the weights."""


class Refit:
    """Pushes whole sets of weights. A quarantined engine is tried again, with everything, at the next push."""

    def __init__(
        self,
        engines: Sequence[RefitTarget],
        *,
        mode: PauseMode = "retract",
        notify: Notify | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        if mode not in get_args(PauseMode):
            raise ConfigError(f"pause mode {mode!r}: use one of {', '.join(get_args(PauseMode))}")
        if not engines:
            raise ConfigError("a refit needs at least one engine")
        self._engines, self._mode, self._notify, self._timeout_s = tuple(engines), mode, notify, timeout_s
        self._half_open: set[str] = set()
        """Engines whose weight session may still be open from a failure."""

    async def push(self, buckets: Sequence[bytes], version: int) -> RefitReport:
        """Load ``buckets`` into every engine and stamp it ``version``.

        Raises ``ComponentLost`` when no engine took them, with the first engine's reason.
        """
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._try(engine, buckets, version)) for engine in self._engines]
        outcomes = [task.result() for task in running]
        failures = {
            engine.url: outcome
            for engine, outcome in zip(self._engines, outcomes, strict=True)
            if isinstance(outcome, TollwayError)
        }
        if len(failures) == len(self._engines):
            url, reason = next(iter(failures.items()))
            raise ComponentLost(f"no engine took weights {version}; {url}: {reason}") from reason
        return RefitReport(
            version=version,
            seconds=time.perf_counter() - started,
            paused_s=max(outcome for outcome in outcomes if isinstance(outcome, float)),
            wire_bytes=sum(map(len, buckets)),
            quarantined=tuple(failures),
        )

    async def _try(self, engine: RefitTarget, buckets: Sequence[bytes], version: int) -> float | TollwayError:
        """Seconds that the engine was paused, or why it is quarantined."""
        try:
            return await self._session(engine, buckets, version)
        except TollwayError as error:
            logger.error("engine %s quarantined at weights %d: %s", engine.url, version, error)
            return error

    async def _session(self, engine: RefitTarget, buckets: Sequence[bytes], version: int) -> float:
        flushes = self._mode != "in_place"
        started = time.perf_counter()
        touched = whole = False
        try:
            await self._bounded(engine, "pause", engine.pause(self._mode))
            if engine.url in self._half_open:
                await self._end_stale_session(engine)
            if flushes:
                await self._bounded(engine, "flush", engine.flush_cache())
                await self._tell(engine, None, flushed=True)
            await self._bounded(engine, "begin", engine.begin_weight_update())
            self._half_open.add(engine.url)
            touched = True
            for bucket in buckets:
                await self._bounded(engine, "bucket", engine.update_weights_from_tensor(bucket))
            await self._bounded(engine, "end", engine.end_weight_update())
            self._half_open.discard(engine.url)
            await self._bounded(engine, "version", engine.set_weight_version(version))
            whole = True
            await self._tell(engine, version, flushed=False)
            await self._bounded(engine, "continue", engine.resume())
        except BaseException:
            # Old weights, or new ones under their version, may serve; a mixture may not.
            await self._release(engine, serve=whole or not touched)
            raise
        return time.perf_counter() - started

    async def _tell(self, engine: RefitTarget, version: int | None, *, flushed: bool) -> None:
        if self._notify is not None:
            await self._bounded(engine, "session server", self._notify(engine.url, version, flushed))

    async def _release(self, engine: RefitTarget, *, serve: bool) -> None:
        """Let the engine go on, or end its requests so that nobody waits for a paused engine."""
        try:
            if serve:
                await self._bounded(engine, "continue", engine.resume())
            else:
                await self._bounded(engine, "abort", engine.abort_all())
        except TollwayError as error:
            logger.warning("engine %s after a failed refit: %s", engine.url, error)

    async def _end_stale_session(self, engine: RefitTarget) -> None:
        """A session left open would refuse the next begin; one that is gone refuses this."""
        try:
            await self._bounded(engine, "end", engine.end_weight_update())
        except TollwayError as error:
            logger.info("engine %s had no open weight session: %s", engine.url, error)
        self._half_open.discard(engine.url)

    async def _bounded(self, engine: RefitTarget, stage: str, call: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await call
        except TimeoutError as error:
            raise EngineLost(f"engine {engine.url}: {stage} took longer than {self._timeout_s:.0f} s") from error
