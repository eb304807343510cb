"""What an admin call does on every worker: fleet changes, refits, and figures of all workers in one answer.

The placement service of the workers has the list of engines: a change is made there, once, and then every worker
is made to follow before the call is answered. So engines have the same id everywhere, and a worker that was away
misses nothing. With one worker all of it is local. Depends on ``siblings`` and the router.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TypedDict
from urllib.parse import quote

from msgspec import Struct

from tollway.errors import BadRequest, WorkerDown
from tollway.router.addresses import check_url
from tollway.router.fleet import Membership, RefitPhase
from tollway.router.placement_lease import Lease
from tollway.router.placement_wire import EngineSaid, RefitNotice
from tollway.router.service import Router
from tollway.session_server.merging import Json, merge_cache, merge_engines, merge_health, merge_ready
from tollway.session_server.siblings import Siblings

__all__ = ["FLEET_PATH", "Fanout", "Notice"]

FLEET_PATH = "/workers/fleet"
"""Between workers only: the fleet changed."""


class Notice(TypedDict):
    """What a trainer did to an engine, as ``Router.note_refit`` takes it."""

    version: int | None
    flushed: bool
    phase: RefitPhase | None
    reason: str


class Fanout:
    """Admin calls of one worker. ``alone`` is for calls of siblings, which concern this worker only."""

    def __init__(self, siblings: Siblings, router: Router) -> None:
        self._siblings = siblings
        self._router = router

    # -- changes -----------------------------------------------------------------------------------

    async def add(self, url: str, membership: Membership) -> Json:
        """``POST /engines``. Every change answers when all workers have it; a worker that could not be told is
        ``WorkerDown`` naming it, and the same call again is safe."""
        workers, limit = self._siblings.crew.size, membership.max_in_flight
        if limit is not None and limit < workers:
            raise BadRequest(
                f"max_in_flight {limit} is for {workers} workers, each of which needs a place: want {workers} or more, "
                "or fewer workers",
                param="max_in_flight",
            )
        if (lease := self._shared) is None:
            return self._router.describe_engine(self._router.add_engine(url, membership))
        engine = EngineSaid(url=check_url(url), **asdict(membership))
        answer = await self._everywhere(lease, "POST", "/engines", engine)
        return self._router.describe_engine(self._router.fleet.get(str(answer["id"])))

    async def remove(self, engine_id: str) -> None:
        """``DELETE /engines/{id}``"""
        if (lease := self._shared) is None:
            await self._router.remove_engine(engine_id)
        else:
            await self._everywhere(lease, "DELETE", f"/engines/{quote(engine_id, safe='')}")

    async def drain(self, engine_id: str, *, drained: bool) -> Json:
        """``POST /engines/{id}/drain`` and ``/undrain``"""
        fleet = self._router.fleet
        engine = fleet.get(engine_id)
        if (lease := self._shared) is None:
            (fleet.drain if drained else fleet.undrain)(engine)
        else:
            await self._everywhere(lease, "POST", f"/engines/{engine.id}/{'drain' if drained else 'undrain'}")
        return self._router.describe_engine(engine)

    async def refit(self, engine_id: str, notice: Notice) -> Json:
        """``POST /engines/{id}/refit``"""
        engine = self._router.fleet.get(engine_id)
        if (lease := self._shared) is None:
            self._router.note_refit(engine_id, **notice)
        else:
            await self._everywhere(lease, "POST", f"/engines/{engine.id}/refit", RefitNotice(url=engine.url, **notice))
        return self._router.describe_engine(engine)

    async def follow(self) -> None:
        """A sibling changed the fleet: it is true here when this returns."""
        if (lease := self._shared) is not None:
            await lease.follow()

    @property
    def _shared(self) -> Lease | None:
        """Where the workers' engines are listed; ``None``: this is the only one."""
        return None if self._siblings.crew.alone else self._router.lease

    async def _everywhere(self, lease: Lease, method: str, path: str, body: Struct | None = None) -> Json:
        answer = await lease.change(method, path, body)
        lost = (await self._siblings.all("GET", FLEET_PATH))[1]
        if lost:
            raise WorkerDown(f"done here, but not everywhere: {'; '.join(map(str, lost))}; send the call again")
        return answer

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
        words, chooser = list(fleet.words()), self._router.chooser
        if chooser is not None and not chooser.ready:
            words.append(f"{'placement service' if self._router.lease else 'outer gateway'} does not answer")
        mine: Json = {"ready": self._router.ready, "engines": words, "fleet": fleet.report()}
        return mine if self._single(alone) else merge_ready(*await self._everybody("/readyz", mine))

    def _single(self, alone: bool) -> bool:
        return alone or self._siblings.crew.alone

    async def _everybody(self, path: str, mine: Json) -> tuple[dict[int, Json], list[int]]:
        """(answers by worker, workers that gave none)."""
        answers, _ = await self._siblings.all("GET", path)
        answers[self._siblings.crew.index] = mine
        return dict(sorted(answers.items())), [index for index in self._siblings.crew.siblings if index not in answers]
