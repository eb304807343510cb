"""Places sessions by asking a placement service, in place of this router's own admission.

Asks once per session. While the service is away, sessions that have a place go on, also to another engine when
theirs is lost, and new ones wait for it within their deadline. Depends on ``placement_lease``, ``table``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import aiohttp

from tollway.errors import NoEngine, TollwayError
from tollway.router.config import RouterConfig
from tollway.router.engines import EngineClient, Timeouts
from tollway.router.fleet import Engine, Fleet, RefitPhase
from tollway.router.health import EngineState
from tollway.router.placement_lease import TELL_S, Lease
from tollway.router.placement_wire import Move, Place, Placed, RefitNotice
from tollway.router.table import Pin, RoutingTable
from tollway.router.targets import ANY, Wanted

__all__ = ["RemotePlacement"]

logger = logging.getLogger(__name__)


class RemotePlacement:
    """The placement of one session server, decided by a service for several."""

    def __init__(self, config: RouterConfig, table: RoutingTable, lease: Lease) -> None:
        self.lease = lease
        self._config, self._table = config, table
        self._joined = asyncio.Event()
        """An engine changed here."""

    @property
    def fleet(self) -> Fleet | None:
        """The engines here. Set before ``start``."""
        return self.lease.copy.fleet

    @fleet.setter
    def fleet(self, fleet: Fleet | None) -> None:
        self.lease.copy.fleet = fleet

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Nothing: whoever has the lease takes it."""

    async def restored(self) -> None:
        """Nothing: the lease tells."""

    async def aclose(self) -> None:
        """Nothing: whoever has the lease ends it."""

    @property
    def ready(self) -> bool:
        """Whether the service was reached and has not gone since."""
        return self.lease.held

    def client(self, url: str, http: aiohttp.ClientSession, *, timeouts: Timeouts) -> EngineClient:
        """An ordinary client: calls go to engines directly."""
        return EngineClient(url, http, timeouts=timeouts)

    # -- places ------------------------------------------------------------------------------------

    async def place(
        self, key: str, *, model: str, tokens: int, group: str, parent: str, want: Wanted, priority: int
    ) -> Pin:
        """As ``Admission.place``, asked of the service. Raises ``PlacementDown`` when it stays away, too."""
        deadline = time.monotonic() + self._config.admission_timeout_s
        had = self.lease.homes.get(key, {}).pop(model, None)
        if had is not None:  # it had a place, of which its engine had nothing yet
            await self._move(key, model, "busy", want, (had[0],))
        body = Place(
            server=self.lease.name,
            boot=self.lease.boot,
            key=key,
            tokens=tokens,
            model=model,
            group=group,
            parent=parent,
            minimum=want.minimum,
            exact=want.exact,
            priority=priority,
        )
        placed = await self.lease.persist("/place", body, Placed, deadline)
        engine = await self._engine_here(placed.url, deadline)
        self._table.restore(
            key, engine.id, dp_rank=placed.dp_rank, group=group, resident_tokens=placed.tokens, model=model
        )
        pin = self._table.pin(key, model)
        if pin is None:
            raise NoEngine("the session ended while its place was asked for")
        self.lease.homes.setdefault(key, {})[model] = (pin.engine_id, pin.dp_rank)
        return pin

    async def confirm(self, key: str, pin: Pin, want: Wanted = ANY) -> Pin:
        """The pin that the service agrees to, for one that was moved here; what was moved while it is away stays."""
        name, place = (key, pin.model), (pin.engine_id, pin.dp_rank)
        homes = self.lease.homes.setdefault(key, {})
        home = homes.get(pin.model)
        if home == place:
            return pin
        homes[pin.model] = place
        if home is None or pin.moved is None:  # from before a restart: the service hears where it is
            self._tell_later(name)
            return pin
        placed = await self._move(key, pin.model, pin.moved, want, (home[0],))
        engine = self.lease.copy.by_url(placed.url) if placed is not None else None
        targets = self._table.targets(engine.id) if engine is not None else []
        target = next((each for each in targets if placed is not None and each.dp_rank == placed.dp_rank), None)
        current = self._table.pin(key, pin.model)
        if target is None or not target.serves or current is not pin:
            self._tell_later(name)
            return pin if current is None else current
        homes[pin.model] = found = (target.engine_id, target.dp_rank)
        return pin if found == place else self._table.move_to(key, target, pin.moved)

    def served(self, key: str, rid: str) -> Pin | None:
        """Nobody stands between server and engine."""
        return None

    def grow(self, key: str, tokens: int, model: str = "") -> None:
        """A call left ``tokens`` tokens of prompt plus reply at the session's place."""
        self.lease.news.grown[key, model] = max(tokens, self.lease.news.grown.get((key, model), 0))
        self.lease.news.rested.discard(key)
        self.lease.wake()

    def rest(self, key: str) -> None:
        """Nobody has used the session for a while."""
        self.lease.news.rested.add(key)
        self.lease.wake()

    def release(self, key: str) -> None:
        """The session ended."""
        for model in self.lease.homes.pop(key, {}):
            self.lease.news.forget(key, model)
        self.lease.news.released.add(key)
        self.lease.wake()

    # -- engines -----------------------------------------------------------------------------------

    def changed(self, engine: Engine) -> None:
        """An engine changed here: whoever waits for it looks again, and the service hears when it was lost."""
        self._joined.set()
        if engine.health.state is EngineState.LOST and engine.id in self.lease.copy.engines:
            self.lease.news.lost[engine.url] = engine.health.last_error[:4000]
            self.lease.wake()
        if self.lease.copy.drain_changed(engine):
            self.lease.news.drained[engine.url] = engine.drained
            self.lease.wake()

    def added(self, engine: Engine) -> None:
        """An engine was added here: it is for every server."""
        self.lease.news.removed.discard(engine.url)
        self.lease.news.added[engine.url] = self.lease.copy.added(engine)
        self.lease.wake()

    def removed(self, url: str) -> None:
        """An engine was taken away here: it is gone for every server."""
        self.lease.news.added.pop(url, None)
        self.lease.news.removed.add(url)
        self.lease.wake()

    def refitted(self, url: str, version: int | None, *, flushed: bool, phase: RefitPhase | None, reason: str) -> None:
        """A trainer told this server of an engine: every other one hears it, too."""
        self.lease.news.refits.append(
            RefitNotice(url=url, version=version, flushed=flushed, phase=phase, reason=reason[:4000])
        )
        self.lease.wake()

    # -- inside ------------------------------------------------------------------------------------

    async def _move(self, key: str, model: str, reason: str, want: Wanted, exclude: tuple[str, ...]) -> Placed | None:
        """Another place from the service; ``None`` when it cannot be asked or has none."""
        urls = [engine.url for each in exclude if (engine := self.lease.copy.engines.get(each)) is not None]
        body = Move(
            server=self.lease.name,
            boot=self.lease.boot,
            key=key,
            reason=reason,
            model=model,
            minimum=want.minimum,
            exact=want.exact,
            exclude=urls,
        )
        try:
            return await self.lease.link.ask("POST", "/move", body, Placed, timeout_s=TELL_S)
        except TollwayError as error:
            logger.info("the placement service did not move a session: %s", error)
            self.lease.wake()
            return None

    async def _engine_here(self, url: str, deadline: float) -> Engine:
        """The engine that the service named, once it takes calls here. Raises ``NoEngine``."""
        until = min(deadline, time.monotonic() + 2 * self._config.probe_timeout_s)
        while True:
            engine = self.lease.copy.by_url(url)
            if engine is not None and engine.health.takes_calls and self._table.targets(engine.id):
                return engine
            if time.monotonic() > until:
                raise NoEngine(f"the placement service chose {url}, which this server cannot reach")
            self._joined.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(0.5, max(0.01, until - time.monotonic()))):
                    await self._joined.wait()

    def _tell_later(self, name: tuple[str, str]) -> None:
        """The service hears where the session is with the next report."""
        self.lease.news.moved.add(name)
        self.lease.wake()
