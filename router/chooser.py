"""Who chooses the engines of sessions when this router does not: an outer gateway, or a service for several servers.

One surface for both, so that the router tells either the same things, and one place that picks by configuration.
Depends on ``gateway``, ``placement_client`` and ``seats``.
"""

from __future__ import annotations

from typing import Protocol

import aiohttp

from tollway.records import PolicyVersion
from tollway.router.admission import Admission
from tollway.router.config import RouterConfig
from tollway.router.engines import EngineClient, Timeouts
from tollway.router.fleet import Engine, Fleet, RefitPhase
from tollway.router.gateway import OuterGateway
from tollway.router.placement_client import RemotePlacement
from tollway.router.placement_lease import Lease
from tollway.router.seats import Placement
from tollway.router.table import RoutingTable

__all__ = ["Chooser", "open_chooser"]


class Chooser(Placement, Protocol):
    """A ``Placement`` with a life, told of everything that happens to engines and sessions."""

    fleet: Fleet | None
    """Set before ``start``."""

    @property
    def ready(self) -> bool:
        """Whether a new session could get a place."""

    async def start(self) -> None:
        """Take up work. Raises ``ConfigError`` when it never can."""

    async def restored(self) -> None:
        """The sessions from before a restart are in the table."""

    async def aclose(self) -> None:
        """End. Idempotent."""

    def client(self, url: str, http: aiohttp.ClientSession, *, timeouts: Timeouts) -> EngineClient:
        """The client by which calls reach an engine."""

    def changed(self, engine: Engine) -> None:
        """An engine of the fleet is another than it was, or gone."""

    def added(self, engine: Engine) -> None:
        """An operator added an engine here."""

    def removed(self, url: str) -> None:
        """An operator took an engine away here."""

    def refitted(
        self, url: str, version: PolicyVersion | None, *, flushed: bool, phase: RefitPhase | None, reason: str
    ) -> None:
        """A trainer told what it did to an engine."""

    def rest(self, key: str) -> None:
        """Nobody has used the session for a while."""


def open_chooser(
    config: RouterConfig, table: RoutingTable, admission: Admission, lease: Lease | None
) -> Chooser | None:
    """Whoever the configuration names, else the service of the ``lease``; ``None``: this router places sessions."""
    if config.gateway or config.gateway_url:
        return OuterGateway(config, table, admission)
    return RemotePlacement(config, table, lease) if lease is not None else None
