"""Refits: the trainer's weights into all engines, which keep serving or sleep meanwhile.

One set of weights is on its way at a time. An engine that does not take it is quarantined and tried again with
everything; the last weights can be brought to engines that join or come back. Where engines and trainer share a
device, engines ``sleep`` before the trainer needs it and ``wake`` with the weights of the push between.
What is done to one engine is in ``session``. Talks through the router's engine clients; imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, get_args

from tollway.errors import ComponentLost, ConfigError, EngineLost, TollwayError, TrainerLost
from tollway.trainer.weights.payload import PauseMode, Payload, RefitTarget, Weights
from tollway.trainer.weights.session import Notify, RefitNotice, Sessions

__all__ = [
    "Drained",
    "EngineSource",
    "Limits",
    "Notify",
    "Offloaded",
    "PauseMode",
    "Refit",
    "RefitNotice",
    "RefitReport",
    "RefitTarget",
    "Sharing",
]

logger = logging.getLogger(__name__)
T = TypeVar("T")

_AGAIN_S = 1.0
"""Between two looks for an engine that takes weights, while all of them are gone."""
_LONGEST_PAUSE_S = 60.0
"""Between two attempts to bring weights to an engine that keeps failing."""
_ANSWER_S = 10.0
"""How long an engine whose connection broke may take to show that it lives, or to be gone."""
_ASK_S = 0.1
"""Between two times that it is asked."""


@dataclass(frozen=True, slots=True)
class RefitReport:
    """One push to all engines."""

    version: int
    make_s: float
    """Time to make the payload in the training process."""
    seconds: float
    """Time to bring it to all engines."""
    paused_s: float
    """Longest time that one engine did not generate, while it sleeps: that it was loaded."""
    wire_bytes: int
    """Payload bytes sent to each engine, before base64."""
    weight_bytes: int
    """Bytes of the tensors that each engine has new."""
    quarantined: tuple[str, ...]
    """Engines that did not take the weights."""


Drained = Callable[[str], Awaitable[None]]
"""Waits, within a bound of its own, until nobody needs exactly the weights that the engine at a URL has."""
EngineSource = Callable[[], Awaitable[Sequence[RefitTarget]]]
"""The engines that are there now."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a refit waits."""

    call_s: float = 120.0
    """For each call to an engine or the session server."""
    patience_s: float = 0.0
    """For an engine that takes weights, when all of them are gone."""


class Offloaded(Protocol):
    """A trainer whose memory can leave the device."""

    async def offload(self) -> None: ...
    async def onload(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Sharing:
    """Engines and trainer take turns on a device."""

    trainer: Offloaded
    tags: Sequence[str]
    """What sleeping engines give back."""


class Refit:
    """Pushes whole sets of weights. A quarantined engine is tried again, with everything, at the next push.

    ``engines`` are those of every push, or a function that finds them. ``drained`` is waited for before an engine is
    paused. With ``sharing`` no payload is kept: its memory belongs to the engines between two pushes.
    """

    def __init__(
        self,
        engines: Sequence[RefitTarget] | EngineSource,
        weights: Weights,
        *,
        mode: PauseMode = "retract",
        notify: Notify | None = None,
        limits: Limits | None = None,
        drained: Drained | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        if mode not in get_args(PauseMode):
            raise ConfigError(f"pause mode {mode!r}: use one of {', '.join(get_args(PauseMode))}")
        if sharing is not None and mode == "in_place":
            raise ConfigError("pause mode in_place keeps keys and values, which engines that sleep give back")
        if not engines:
            raise ConfigError("a refit needs at least one engine")
        self._source: EngineSource = engines if callable(engines) else _always(engines)
        limits = limits or Limits()
        self._weights, self._patience_s, self._drained, self._sharing = weights, limits.patience_s, drained, sharing
        self._sessions = Sessions(mode=mode, notify=notify, timeout_s=limits.call_s)
        self._lock = asyncio.Lock()
        """Held while weights are on their way, and while engines go to sleep or wake."""
        self._asleep = False
        """Engines sleep, or are about to: what waits for weights gets them with the next push."""
        self._last: tuple[Payload | None, int] | None = None
        """The last push; its payload is ``None`` where none is kept."""
        self._ended: set[str] = set()
        """Where a process ended since engines were last asked to sleep."""
        self._not_before: dict[str, tuple[float, float]] = {}
        """Engines that failed to catch up: (monotonic second of the next attempt, pause after that)."""

    def forget(self, url: str) -> None:
        """The engine process at ``url`` ended; whatever is started there begins anew."""
        self._sessions.forget(url)
        self._not_before.pop(url, None)
        self._ended.add(url)

    async def push(self, version: int) -> RefitReport:
        """Load the trainer's weights into every engine and stamp it ``version``. Engines that sleep go on sleeping.

        Raises ``ComponentLost`` when no engine took them, with the first engine's reason.
        """
        async with self._lock:
            started = time.perf_counter()
            payload = await self._weights.payload(version)
            make_s = time.perf_counter() - started
            self._last = (payload if self._sharing is None else None), version
            waiting = time.monotonic()
            while True:
                report = await self._push(await self._source(), payload, version, make_s)
                if isinstance(report, RefitReport):
                    return report
                if time.monotonic() - waiting >= self._patience_s or not isinstance(report.__cause__, EngineLost):
                    raise report
                logger.warning("%s; waiting for an engine", report)
                await asyncio.sleep(_AGAIN_S)

    async def catch_up(self, waiting: Sequence[RefitTarget]) -> None:
        """Bring the weights of the last push to engines that joined, came back or were quarantined since.

        An engine that does not take them is tried again later, with growing pauses. Does nothing before a push, nothing
        while engines sleep, and nothing while weights are on their way: they may reach who waits.
        """
        for engine in waiting:
            at, pause_s = self._not_before.get(engine.url, (0.0, _AGAIN_S))
            if time.monotonic() < at:
                continue
            if self._lock.locked():
                return
            async with self._lock:
                if self._last is None or self._asleep:
                    return
                payload, version = self._last
                outcome = (
                    await self._load(engine, payload, version)
                    if payload is not None
                    else await self._attempt(engine, self._turn(engine, version), f"take weights {version}")
                )
            if isinstance(outcome, TollwayError):
                self._not_before[engine.url] = time.monotonic() + pause_s, min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                self._not_before.pop(engine.url, None)
                logger.info("engine %s caught up with weights %d", engine.url, version)

    async def hold(self) -> None:
        """Until ``wake`` nobody catches up any more, and whoever did when this was called is done."""
        async with self._lock:
            self._asleep = True

    async def sleep(self) -> tuple[str, ...]:
        """Every engine pauses and gives its memory back; returns those that did now. One whose process ended has none.

        Raises ``ComponentLost`` for an engine that lives and may have kept its memory: the trainer cannot have the
        device.
        """
        async with self._lock:
            self._asleep = True
            self._ended.clear()
            engines = await self._source()
            outcomes = await self._each(engines, partial(self._sleep, self._shared), "go to sleep")
            for engine, outcome in zip(engines, outcomes, strict=True):
                if not isinstance(outcome, TollwayError):
                    continue
                if not (isinstance(outcome, EngineLost) and await self._has_ended(engine)):
                    lives = "; its process has not ended" if isinstance(outcome, EngineLost) else ""
                    raise ComponentLost(
                        f"engine {engine.url} did not give its memory back, which the trainer needs: {outcome}{lives}"
                    ) from outcome
                self.forget(engine.url)
        return tuple(engine.url for engine, outcome in zip(engines, outcomes, strict=True) if outcome is True)

    async def wake(self) -> tuple[str, ...]:
        """Every engine that sleeps with whole weights gets the rest of its memory and goes on; returns those.

        Raises ``ComponentLost`` when none of them does although one is alive.
        """
        async with self._lock:
            sleeping = [engine for engine in await self._source() if self._sessions.asleep(engine)]
            outcomes = await self._each(sleeping, self._sessions.wake, "wake")
            self._asleep = False
        woken = tuple(engine.url for engine, outcome in zip(sleeping, outcomes, strict=True) if outcome is True)
        refusals = [each for each in outcomes if isinstance(each, TollwayError) and not isinstance(each, EngineLost)]
        if refusals and not woken:
            raise ComponentLost(f"no engine woke: {refusals[0]}") from refusals[0]
        return woken

    # -- one attempt -------------------------------------------------------------------------------

    async def _push(
        self, engines: Sequence[RefitTarget], payload: Payload, version: int, make_s: float
    ) -> RefitReport | ComponentLost:
        """One attempt on all engines; the error when none took them."""
        if not engines:
            lost = ComponentLost(f"no engine took weights {version}: there is none")
            lost.__cause__ = EngineLost("no engine is registered")
            return lost
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._load(engine, payload, version)) for engine in engines]
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
            make_s=make_s,
            seconds=time.perf_counter() - started,
            paused_s=max(outcome for outcome in outcomes if isinstance(outcome, float)),
            wire_bytes=payload.wire_bytes,
            weight_bytes=payload.weight_bytes,
            quarantined=tuple(failures),
        )

    async def _load(self, engine: RefitTarget, payload: Payload, version: int) -> float | TollwayError:
        """Seconds that the engine was paused, or why it did not take the weights."""

        async def drained_load() -> float:
            if not self._sessions.asleep(engine):
                await self._wait_drained(engine)
            return await self._sessions.load(engine, payload, version)

        return await self._attempt(engine, drained_load(), f"take weights {version}")

    async def _sleep(self, sharing: Sharing, engine: RefitTarget) -> bool:
        if not self._sessions.asleep(engine):
            await self._wait_drained(engine)
        return await self._sessions.sleep(engine, sharing.tags)

    async def _turn(self, engine: RefitTarget, version: int) -> None:
        """Weights for one engine while the others serve: the trainer gets that one's memory to pack them in."""
        sharing = self._shared
        await self._sleep(sharing, engine)
        await sharing.trainer.onload()
        try:
            await self._sessions.load(engine, await self._weights.payload(version), version)
        finally:
            await sharing.trainer.offload()
        await self._sessions.wake(engine)

    async def _has_ended(self, engine: RefitTarget) -> bool:
        """Whether nobody is there any more, which a connection that broke does not say; whoever is silent lives."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                while engine.url not in self._ended:
                    try:
                        await engine.ready()
                    except EngineLost as error:
                        if error.refused:
                            return True
                    except TollwayError:
                        return False  # whoever answers wrongly lives, too
                    else:
                        return False
                    await asyncio.sleep(_ASK_S)
        return engine.url in self._ended

    @property
    def _shared(self) -> Sharing:
        if self._sharing is None:
            raise ConfigError("engines of this refit share no device with the trainer and do not sleep")
        return self._sharing

    async def _wait_drained(self, engine: RefitTarget) -> None:
        if self._drained is not None:
            await self._drained(engine.url)

    async def _each(
        self, engines: Sequence[RefitTarget], call: Callable[[RefitTarget], Awaitable[T]], what: str
    ) -> list[T | TollwayError]:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._attempt(engine, call(engine), what)) for engine in engines]
        return [task.result() for task in running]

    async def _attempt(self, engine: RefitTarget, call: Awaitable[T], what: str) -> T | TollwayError:
        """What the call came to, or why it failed. Without the trainer there is nothing to bring to anybody."""
        try:
            return await call
        except TrainerLost:
            raise
        except TollwayError as error:
            logger.error("engine %s did not %s: %s", engine.url, what, error)
            return error


def _always(engines: Sequence[RefitTarget]) -> EngineSource:
    async def source() -> Sequence[RefitTarget]:
        return engines

    return source
