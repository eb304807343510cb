"""Keeps a session server's fleet what the placement service says it is.

Adds and removes engines, gives each this server's share of its limits, and passes on what trainers told other
servers, once each. How an engine is, the fleet finds out by itself: only here is it known whether tokens flow.
Depends on ``fleet`` and ``placement_wire``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import cast

from tollway.errors import TollwayError
from tollway.router.fleet import Engine, Fleet, Membership, RefitPhase
from tollway.router.placement_news import News
from tollway.router.placement_wire import EngineRow, EngineSaid, FleetRow

__all__ = ["FleetCopy"]

logger = logging.getLogger(__name__)


class FleetCopy:
    """The fleet of the server called ``name``, after the service's.

    ``same_ids``: engines are called as the service calls them, for servers that answer for each other. ``part`` is
    (number, of how many) where it is fixed how many servers divide an engine's limit.
    """

    def __init__(self, name: str, *, same_ids: bool = False, part: tuple[int, int] | None = None) -> None:
        self.fleet: Fleet | None = None
        """Set before use."""
        self._name, self._same_ids, self._part = name, same_ids, part
        self._limits: dict[str, int | None] = {}
        """Limits of whole engines by URL; the fleet here has this server's share."""
        self._drained: dict[str, bool] = {}
        """By URL, as the service knows it."""
        self._serial = -1
        """Number of the last notice of a refit that was heard; -1 before the first snapshot."""

    @property
    def engines(self) -> Mapping[str, Engine]:
        """Engines here, by id."""
        return self.fleet.engines if self.fleet is not None else {}

    @property
    def policy_version(self) -> int | None:
        """Newest weights that a trainer told of here."""
        return self.fleet.policy.version if self.fleet is not None else None

    def added(self, engine: Engine) -> EngineSaid:
        """An operator added an engine here: its limit is the whole engine's."""
        self._limits[engine.url] = engine.max_in_flight
        return self.said(engine)

    def drain_changed(self, engine: Engine) -> bool:
        """Whether an engine was drained, or opened again, and the service does not know it yet."""
        if engine.drained == self._drained.get(engine.url, False):
            return False
        self._drained[engine.url] = engine.drained
        return True

    def said(self, engine: Engine) -> EngineSaid:
        """An engine as the service shall know it."""
        return EngineSaid(
            url=engine.url,
            id=engine.id if self._same_ids else "",
            model=engine.model,
            max_in_flight=self.limit(engine),
            frozen=engine.membership.frozen,
            stale=engine.membership.stale,
            drained=engine.drained,
        )

    def limit(self, engine: Engine) -> int | None:
        """Calls that the whole engine may run at once."""
        return self._limits.get(engine.url)

    def by_url(self, url: str) -> Engine | None:
        """The engine at ``url``."""
        return next((each for each in self.engines.values() if each.url == url), None)

    async def apply(self, row: FleetRow, news: News, *, same_service: bool) -> None:
        """Make the fleet here what it is there."""
        if self.fleet is None:
            return
        if self.fleet.policy.version is None:  # later ones come with every refit
            self.fleet.policy.version = row.policy_version
        there = {said.url for said in row.engines} | set(news.added)
        ids = {said.id for said in row.engines}
        for engine in list(self.engines.values()):
            if engine.url not in there or (self._same_ids and engine.id not in ids):
                await self.fleet.look(engine)  # its sessions move because it died, or because it was taken away
                if self.engines.get(engine.id) is engine:
                    await self.fleet.remove(engine.id)
        for said in row.engines:
            if said.url not in news.removed:
                self._apply_engine(self.fleet, said, news, servers=len(row.servers))
        self._apply_refits(row, same_service=same_service)

    def _apply_engine(self, fleet: Fleet, said: EngineRow, news: News, *, servers: int) -> None:
        self._limits[said.url] = said.max_in_flight
        known = self.by_url(said.url)
        stale = said.stale if known is None or self._same_ids else known.membership.stale
        membership = Membership(
            model=said.model, max_in_flight=self._share(said.max_in_flight, servers), frozen=said.frozen, stale=stale
        )
        try:
            engine = known
            if engine is None or engine.membership != membership:
                engine = fleet.add(said.url, engine_id=said.id if self._same_ids else "", membership=membership)
        except TollwayError as error:
            logger.error("the placement service has engine %s: %s", said.url, error)
            return
        if known is None and said.quarantined:
            engine.health.quarantine(said.quarantined)
        if said.url in news.drained:
            return  # changed here, and not told yet
        self._drained[said.url] = said.drained
        if said.drained != engine.drained:
            (fleet.drain if said.drained else fleet.undrain)(engine)

    def _share(self, limit: int | None, servers: int) -> int | None:
        """What this server may run at once of an engine's ``limit``."""
        if limit is None:
            return None
        if self._part is None:
            return max(1, limit // max(1, servers))
        number, size = self._part
        return max(1, limit // size + (number < limit % size))

    def _apply_refits(self, row: FleetRow, *, same_service: bool) -> None:
        """Hear of refits that other servers were told of, each once."""
        newest = max((each.serial for each in row.refits), default=0)
        if self._serial < 0 or not same_service:
            self._serial = newest
        for notice in row.refits:
            engine = self.by_url(notice.url)
            if notice.serial <= self._serial or notice.server == self._name or engine is None or self.fleet is None:
                continue
            self.fleet.note_refit(
                engine.id,
                notice.version,
                flushed=notice.flushed,
                phase=cast("RefitPhase | None", notice.phase),
                reason=notice.reason,
            )
        self._serial = max(self._serial, newest)
