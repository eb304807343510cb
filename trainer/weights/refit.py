"""Refit sessions: new weights into engines that keep serving.

pause -> flush -> tell the session server (paused, flushed) -> begin -> buckets -> end -> version -> tell it (version,
resumed) -> continue, per engine. It hears of a flush whatever follows, and of a version only once the engine has it.
Whatever fails, the engine goes on with whole weights or is quarantined, and the session server hears which; nothing
stays half-paused. The last weights are kept, so that an engine that joins or comes back gets them, too.
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

__all__ = ["Drained", "EngineSource", "Notify", "PauseMode", "Refit", "RefitNotice", "RefitReport", "RefitTarget"]

logger = logging.getLogger(__name__)

PauseMode = Literal["retract", "in_place", "abort"]
_AGAIN_S = 1.0
"""Between two looks for an engine that takes weights, while all of them are gone."""
_LONGEST_PAUSE_S = 60.0
"""Between two attempts to bring weights to an engine that keeps failing."""


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


Drained = Callable[[str], Awaitable[None]]
"""Waits, within a bound of its own, until nobody needs exactly the weights that the engine at a URL has."""
EngineSource = Callable[[], Awaitable[Sequence[RefitTarget]]]
"""The engines that are there now."""


class Refit:
    """Pushes whole sets of weights. A quarantined engine is tried again, with everything, at the next push.

    ``engines`` are those of every push, or a function that finds them. ``patience_s`` is how long a push waits for
    an engine when all of them are gone. ``drained`` is waited for before an engine is paused.
    """

    def __init__(
        self,
        engines: Sequence[RefitTarget] | EngineSource,
        *,
        mode: PauseMode = "retract",
        notify: Notify | None = None,
        timeout_s: float = 120.0,
        patience_s: float = 0.0,
        drained: Drained | None = None,
    ) -> None:
        if mode not in get_args(PauseMode):
            raise ConfigError(f"pause mode {mode!r}: use one of {', '.join(get_args(PauseMode))}")
        if not engines:
            raise ConfigError("a refit needs at least one engine")
        self._source: EngineSource = engines if callable(engines) else _always(engines)
        self._mode, self._notify, self._timeout_s, self._patience_s = mode, notify, timeout_s, patience_s
        self._drained = drained
        self._half_open: set[str] = set()
        """Engines whose weight session may still be open from a failure."""
        self._lock = asyncio.Lock()
        """Held while weights are on their way: one set at a time."""
        self._last: tuple[Sequence[bytes], int] | None = None
        """Buckets and version of the last push."""
        self._not_before: dict[str, tuple[float, float]] = {}
        """Engines that failed to catch up: (monotonic second of the next attempt, pause after that)."""

    async def push(self, buckets: Sequence[bytes], version: int) -> RefitReport:
        """Load ``buckets`` into every engine and stamp it ``version``.

        Raises ``ComponentLost`` when no engine took them, with the first engine's reason.
        """
        async with self._lock:
            self._last = buckets, version
            started = time.monotonic()
            while True:
                report = await self._push(await self._source(), buckets, version)
                if isinstance(report, RefitReport):
                    return report
                if time.monotonic() - started >= self._patience_s or not isinstance(report.__cause__, EngineLost):
                    raise report
                logger.warning("%s; waiting for an engine", report)
                await asyncio.sleep(_AGAIN_S)

    async def catch_up(self, waiting: Sequence[RefitTarget]) -> None:
        """Bring the weights of the last push to engines that joined, came back or were quarantined since.

        An engine that does not take them is tried again later, with growing pauses. Does nothing before a push.
        """
        for engine in waiting:
            at, pause_s = self._not_before.get(engine.url, (0.0, _AGAIN_S))
            if self._last is None or time.monotonic() < at:
                continue
            async with self._lock:
                buckets, version = self._last
                outcome = await self._try(engine, buckets, version)
            if isinstance(outcome, TollwayError):
                self._not_before[engine.url] = time.monotonic() + pause_s, min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                self._not_before.pop(engine.url, None)
                logger.info("engine %s caught up with weights %d", engine.url, version)

    async def _push(
        self, engines: Sequence[RefitTarget], buckets: Sequence[bytes], version: int
    ) -> RefitReport | ComponentLost:
        """One attempt on all engines; the error when none took them."""
        if not engines:
            lost = ComponentLost(f"no engine took weights {version}: there is none")
            lost.__cause__ = EngineLost("no engine is registered")
            return lost
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._try(engine, buckets, version)) for engine in engines]
        outcomes = [task.result() for task in running]
        failures = {
            engine.url: outcome
            for engine, outcome in zip(engines, outcomes, strict=True)
            if isinstance(outcome, TollwayError)
        }
        if len(failures) == len(engines):
            url, reason = next(iter(failures.items()))
            lost = ComponentLost(f"no engine took weights {version}; {url}: {reason}")
            # What an engine refused it will refuse again; a lost one may come back.
            lost.__cause__ = next((each for each in failures.values() if not isinstance(each, EngineLost)), reason)
            return lost
        return RefitReport(
            version=version,
            seconds=time.perf_counter() - started,
            paused_s=max(outcome for outcome in outcomes if isinstance(outcome, float)),
            wire_bytes=sum(map(len, buckets)),
            quarantined=tuple(failures),
        )

    async def _try(self, engine: RefitTarget, buckets: Sequence[bytes], version: int) -> float | TollwayError:
        """Seconds that the engine was paused, or why it did not take the weights."""
        try:
            if self._drained is not None:
                await self._drained(engine.url)
            return await self._session(engine, buckets, version)
        except TollwayError as error:
            logger.error("engine %s did not take weights %d: %s", engine.url, version, error)
            return error

    async def _session(self, engine: RefitTarget, buckets: Sequence[bytes], version: int) -> float:
        flushes = self._mode != "in_place"
        started = time.perf_counter()
        told = touched = whole = False
        try:
            await self._bounded(engine, "pause", engine.pause(self._mode))
            if engine.url in self._half_open:
                await self._end_stale_session(engine)
            if flushes:
                await self._bounded(engine, "flush", engine.flush_cache())
            told = True
            await self._tell(engine, RefitNotice(url=engine.url, flushed=flushes, phase="paused"))
            self._half_open.add(engine.url)
            await self._bounded(engine, "begin", engine.begin_weight_update())
            touched = True
            for bucket in buckets:
                await self._bounded(engine, "bucket", engine.update_weights_from_tensor(bucket))
            await self._bounded(engine, "end", engine.end_weight_update())
            self._half_open.discard(engine.url)
            await self._bounded(engine, "version", engine.set_weight_version(version))
            whole = True
            await self._tell(engine, RefitNotice(url=engine.url, version=version, phase="resumed"))
            await self._bounded(engine, "continue", engine.resume())
        except BaseException as error:
            # Old weights, or new ones under their version, may serve; a mixture may not.
            await self._release(engine, serve=whole or not touched, told=told, reason=str(error) or "it was cancelled")
            raise
        return time.perf_counter() - started

    async def _tell(self, engine: RefitTarget, notice: RefitNotice) -> None:
        if self._notify is not None:
            await self._bounded(engine, "session server", self._notify(notice))

    async def _release(self, engine: RefitTarget, *, serve: bool, told: bool, reason: str) -> None:
        """Let the engine go on, or end its requests so that nobody waits for a paused engine.

        The session server hears of it first: what is ended here must not come back here.
        """
        notice = RefitNotice(url=engine.url, phase="resumed" if serve else "failed", reason="" if serve else reason)
        try:
            if told:
                await self._tell(engine, notice)
        except TollwayError as error:
            logger.warning("engine %s after a failed refit: the session server was not told: %s", engine.url, error)
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


def _always(engines: Sequence[RefitTarget]) -> EngineSource:
    async def source() -> Sequence[RefitTarget]:
        return engines

    return source
