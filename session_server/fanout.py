"""What an admin call does on every worker: fleet changes, refits, and figures of all workers in one answer.

Worker 0 makes the changes of the fleet, one after the other, and gives every sibling the whole fleet as it
is then; a worker that starts takes it from a sibling. So engines have the same id everywhere, and a worker
that was away misses nothing. With one worker all of it is local. Depends on ``siblings`` and the router.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from tollway.errors import TollwayError, WorkerDown
from tollway.router.fleet import Membership
from tollway.router.service import Router
from tollway.session_server.merging import Json, merge_cache, merge_engines, merge_health, merge_ready
from tollway.session_server.siblings import Siblings

__all__ = ["FLEET_PATH", "Fanout", "FleetState"]

logger = logging.getLogger(__name__)
T = TypeVar("T")
FLEET_PATH = "/workers/fleet"
"""Between workers only: the fleet as a whole."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineState(_Body):
    """One engine of ``FleetState``."""

    id: str
    url: str
    drained: bool
    model: str = ""
    max_in_flight: int | None = None
    frozen: bool = False
    stale: bool = False
    quarantined: str = ""
    """Why its weights may not serve; only a trainer knows, so a worker that starts has to be told."""


class FleetState(_Body):
    """Which engines there are. How each of them is, every worker finds out by itself."""

    engines: list[EngineState]
    next_number: int
    policy_version: int | None = None
    """Newest weights that a trainer told of."""


class Fanout:
    """Admin calls of one worker. ``alone`` is for calls of siblings, which concern this worker only."""

    def __init__(self, siblings: Siblings, router: Router) -> None:
        self._siblings = siblings
        self._router = router
        self._lock = asyncio.Lock()
        """Held while the fleet changes here."""

    # -- changes -----------------------------------------------------------------------------------

    async def change(self, act: Callable[[], Awaitable[T]]) -> T:
        """Change the fleet on worker 0, then on all; answers when every worker has it.

        A worker that could not be told is ``WorkerDown`` naming it; the same call again is safe. A change that is
        refused here stays refused, whoever is down.
        """
        async with self._lock:
            try:
                result = await act()
            except TollwayError:
                # What an earlier call changed may not be everywhere yet: a repeated removal finds nothing here.
                for error in await self._push():
                    logger.warning("%s", error)
                raise
            self._all_told(await self._push())
            return result

    async def everywhere(self, path: str, body: Json, act: Callable[[], T], *, alone: bool) -> T:
        """The same admin ``POST`` on every worker, here first. Fails as ``change`` does."""
        async with self._lock:
            result = act()
            if not alone:
                self._all_told((await self._siblings.all("POST", path, body))[1])
            return result

    def state(self) -> FleetState:
        """The fleet as this worker has it."""
        fleet = self._router.fleet
        engines = [
            EngineState(
                id=each.id,
                url=each.url,
                drained=each.drained,
                quarantined=each.health.quarantine_reason,
                **asdict(each.membership),
            )
            for each in fleet.engines.values()
        ]
        return FleetState(engines=engines, next_number=fleet.next_number, policy_version=fleet.policy.version)

    async def take(self, state: FleetState) -> None:
        """Make the fleet here what worker 0 says that it is."""
        async with self._lock:
            await self._apply(state)

    async def sync(self) -> None:
        """Take the fleet from a sibling, once this worker can be told of changes and before it says ready.

        Nobody there means that all start together, with the engines of the command line.
        """
        crew = self._siblings.crew
        async with self._lock:
            for index in crew.siblings:
                try:
                    raw = await self._siblings.call(index, "GET", FLEET_PATH)
                except WorkerDown:
                    continue
                await self._apply(FleetState.model_validate(raw))
                break
            if crew.index == 0 and (away := await self._push()):
                logger.info("%d other workers are not there yet: each takes the fleet over as it starts", len(away))

    async def _push(self) -> list[WorkerDown]:
        if self._siblings.crew.alone:
            return []
        return (await self._siblings.all("POST", FLEET_PATH, self.state().model_dump()))[1]

    async def _apply(self, state: FleetState) -> None:
        fleet = self._router.fleet
        wanted = {each.id: each for each in state.engines}
        for engine in list(fleet.engines.values()):
            if engine.id not in wanted or wanted[engine.id].url != engine.url:
                await self._router.remove_engine(engine.id)
        if fleet.policy.version is None:  # later ones come with every refit
            fleet.policy.version = state.policy_version
        for each in state.engines:
            known = each.id in fleet.engines
            membership = Membership(
                model=each.model, max_in_flight=each.max_in_flight, frozen=each.frozen, stale=each.stale
            )
            engine = fleet.add(each.url, engine_id=each.id, membership=membership)
            if each.quarantined and not known:
                engine.health.quarantine(each.quarantined)
            if each.drained != engine.drained:
                (fleet.drain if each.drained else fleet.undrain)(engine)
        fleet.next_number = max(fleet.next_number, state.next_number)

    @staticmethod
    def _all_told(lost: list[WorkerDown]) -> None:
        if lost:
            raise WorkerDown(f"done here, but not everywhere: {'; '.join(map(str, lost))}; send the call again")

    # -- figures -----------------------------------------------------------------------------------

    async def engines(self, *, alone: bool) -> Json:
        """``GET /engines``"""
        fleet = self._router.fleet
        mine: Json = {
            "engines": self._router.engines(),
            "policy_version": fleet.policy.version,
            "down_s": round(fleet.down_s(), 3),
            "rollout_down": fleet.rollout_down(),
        }
        return mine if self._single(alone) else merge_engines(*await self._everybody("/engines", mine))

    async def cache(self, *, sessions: int, alone: bool) -> Json:
        """``GET /cache``, with the ``sessions`` most wasteful sessions."""
        mine: Json = self._router.ledger.summary(sessions=sessions)
        if self._single(alone):
            return mine
        return merge_cache(*await self._everybody(f"/cache?sessions={sessions}", mine), sessions=sessions)

    async def health(self, mine: Json, *, alone: bool) -> Json:
        """``GET /healthz``"""
        return mine if self._single(alone) else merge_health(*await self._everybody("/healthz", mine))

    async def ready(self, *, alone: bool) -> Json:
        """``GET /readyz``: whether every worker can serve a turn now."""
        fleet = self._router.fleet
        mine: Json = {"ready": self._router.ready, "engines": fleet.words(), "fleet": fleet.report()}
        return mine if self._single(alone) else merge_ready(*await self._everybody("/readyz", mine))

    def _single(self, alone: bool) -> bool:
        return alone or self._siblings.crew.alone

    async def _everybody(self, path: str, mine: Json) -> tuple[dict[int, Json], list[int]]:
        """(answers by worker, workers that gave none)."""
        answers, _ = await self._siblings.all("GET", path)
        answers[self._siblings.crew.index] = mine
        return dict(sorted(answers.items())), [index for index in self._siblings.crew.siblings if index not in answers]
