"""Keeps a session server's fleet what the placement service says it is.

Adds and removes engines, gives each this server's share of its limits, and passes on what trainers told other
servers, once each. How an engine is, the fleet finds out by itself. Depends on ``fleet`` and ``placement_wire``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import cast

from tollway.errors import TollwayError
from tollway.router.fleet import Engine, Fleet, Membership, RefitPhase
from tollway.router.placement_news import News
from tollway.router.placement_wire import EngineSaid, FleetRow

__all__ = ["FleetCopy"]

logger = logging.getLogger(__name__)


class FleetCopy:
    """The fleet of the server called ``name``, after the service's."""

    def __init__(self, name: str) -> None:
        self.fleet: Fleet | None = None
        """Set before use."""
        self._name = name
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
            model=engine.model,
            max_in_flight=self._limits.get(engine.url),
            frozen=engine.membership.frozen,
            drained=engine.drained,
        )

    def by_url(self, url: str) -> Engine | None:
        """The engine at ``url``."""
        return next((each for each in self.engines.values() if each.url == url), None)

    async def apply(self, row: FleetRow, news: News, *, same_service: bool) -> None:
        """Make the fleet here what it is there."""
        if self.fleet is None:
            return
        others = max(1, len(row.servers))
        for said in row.engines:
            if said.url in news.removed:
                continue
            self._limits[said.url] = said.max_in_flight
            limit = None if said.max_in_flight is None else max(1, said.max_in_flight // others)
            known = self.by_url(said.url)
            stale = known.membership.stale if known is not None else False
            membership = Membership(model=said.model, max_in_flight=limit, frozen=said.frozen, stale=stale)
            try:
                if known is None or known.membership != membership:
                    known = self.fleet.add(said.url, membership=membership)
            except TollwayError as error:
                logger.error("the placement service has engine %s: %s", said.url, error)
                continue
            if said.url in news.drained:
                continue  # changed here, and not told yet
            self._drained[said.url] = said.drained
            if said.drained != known.drained:
                (self.fleet.drain if said.drained else self.fleet.undrain)(known)
        there = {said.url for said in row.engines} | set(news.added)
        for engine in [each for each in self.engines.values() if each.url not in there]:
            await self.fleet.remove(engine.id)
        self._apply_refits(row, same_service=same_service)

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
