"""Whose turn it is on a device that engines and trainer share; everyone's, always, where they share none.

One turn: engines sleep -> the driver confirms that their memory is free -> the trainer's comes back -> it trains ->
its weights go out -> its memory leaves -> engines wake. Depends on ``refit`` and the trainer's handle.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from tollway.errors import ConfigError
from tollway.trainer.weights.refit import Offloaded, Refit, RefitReport

__all__ = ["Handover", "OnDevice", "Turns"]

logger = logging.getLogger(__name__)


class OnDevice(Offloaded, Protocol):
    """A trainer that can ask the driver of its device."""

    async def device_memory(self) -> tuple[int, int] | None:
        """Free and total bytes of the device as its driver counts them; ``None`` without one."""
        ...


@dataclass(frozen=True, slots=True)
class Handover:
    """One turn of the trainer, at its end."""

    pushed: RefitReport
    asleep_s: float | None = None
    """From the engines' sleep to their waking; ``None`` where they do not sleep."""
    freed_bytes: int | None = None
    """What the driver had free after they slept and not before; ``None``: nobody could ask it."""


class Turns:
    """Hands the device from the engines to the trainer and back. ``shared`` says whether there is one to hand over.

    At first it is the engines'; the trainer may be there as well, until its first turn ends.
    """

    def __init__(self, refit: Refit, trainer: OnDevice, *, shared: bool) -> None:
        self.shared = shared
        self._refit, self._trainer = refit, trainer
        self._trainers = False
        """It is the trainer's turn."""
        self._since = 0.0
        self._freed: int | None = None
        self._proven = False
        """The driver has seen memory become free when engines slept: they are set up for it."""

    async def clear(self) -> None:
        """Let the engines sleep, before a trainer that is not yet built needs the device. Safe to call twice.

        Raises ``ComponentLost`` when one does not, ``ConfigError`` when they say so and have freed nothing yet.
        """
        if not self.shared or self._trainers:
            return
        await self._refit.hold()  # the memory of one that catches up would be counted as freed, or as taken
        before = await self._trainer.device_memory()
        slept = await self._refit.sleep()
        self._since, self._trainers = time.perf_counter(), True
        after = await self._trainer.device_memory()
        self._freed = None if before is None or after is None else after[0] - before[0]
        if slept and self._freed is not None:
            self._judge(slept, self._freed)

    async def trainer(self) -> None:
        """From here on the device is the trainer's. Safe to call twice. Errors as ``clear``."""
        await self.clear()
        if self.shared:
            await self._trainer.onload()

    async def engines(self, version: int) -> Handover:
        """Bring the weights to the engines as ``version``; from here on the device is theirs.

        Raises ``ComponentLost`` when no engine took them or none woke.
        """
        pushed = await self._refit.push(version)
        if not self.shared:
            return Handover(pushed)
        await self._trainer.offload()
        await self._refit.wake()
        asleep_s, self._trainers = time.perf_counter() - self._since, False
        return Handover(pushed, asleep_s, self._freed)

    @asynccontextmanager
    async def aside(self, version: int) -> AsyncIterator[None]:
        """The trainer's turn for something that leaves its weights, which are ``version``, as they are."""
        await self.trainer()
        yield
        if self.shared:
            await self.engines(version)

    def _judge(self, slept: tuple[str, ...], freed: int) -> None:
        """Hold the driver's figure against engines that claim to sleep, until it has once borne them out.

        A bad one that comes later is somebody else's: an engine that starts again takes memory while the others give
        theirs back.
        """
        if freed > 0:
            self._proven = True
            return
        found = (
            f"engines {', '.join(slept)} said that they gave their memory back, and the driver has {-freed} bytes less "
            "free than before"
        )
        if self._proven:
            logger.warning("%s: somebody took more meanwhile, such as an engine that is started again", found)
            return
        raise ConfigError(
            f"{found} (want more free); set enable-memory-saver = true under [engine.sglang], run trainer and engines "
            "on the same device and nothing else there, or set trainer.colocated = false"
        )
