"""The table of a placement service: engines, places of the sessions of several servers, and the servers' leases.

Owns one fleet, one table and one admission for all. A session belongs to the server that opened it; a server that
says nothing for a lease loses its places, and one that starts again under its name takes them over. Nothing is
written down: after a restart the servers tell what they have. No HTTP. Depends on ``fleet``, ``table``,
``admission`` and ``placement_wire``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, cast, get_args

import msgspec

from tollway.errors import BadRequest, Conflict, EngineLost, NoEngine, NotFound, TollwayError
from tollway.router.addresses import check_url
from tollway.router.admission import Admission
from tollway.router.config import RouterConfig
from tollway.router.fleet import Engine, Fleet, Membership, RefitPhase
from tollway.router.placement_wire import (
    Attach,
    Attached,
    EngineRow,
    EngineSaid,
    FleetRow,
    Move,
    Place,
    Placed,
    RefitNotice,
    RefitRow,
    Report,
    SessionRow,
)
from tollway.router.table import EngineLoad, Pin, RoutingTable
from tollway.router.targets import Wanted
from tollway.router.versions import Changes

__all__ = ["SharedTable", "StaleLease"]

logger = logging.getLogger(__name__)
_REFITS_KEPT = 256
_LONGEST_WORDS = 4096
"""Characters of a reason: what is longer no server reads."""
T = TypeVar("T")
_PHASES = (None, *get_args(RefitPhase))


class StaleLease(Conflict):
    """The service does not know the server, or a later start of it: attach first."""

    code, retryable = "attach_first", True


@dataclass(slots=True)
class _Server:
    """One session server with a lease."""

    name: str
    boot: str
    heard: float
    """Monotonic seconds."""
    keys: set[str] = field(default_factory=set)
    """Its sessions that have a place."""
    asking: int = 0
    """Places that it waits for: as long as it listens, it lives."""


class SharedTable:
    """Places sessions of several servers on one fleet."""

    def __init__(self, config: RouterConfig, *, lease_s: float) -> None:
        self.lease_s = lease_s
        self.epoch = secrets.token_hex(8)
        self.table = RoutingTable()
        self.admission = Admission(self.table, config)
        self._hosts, self._connect_s = config.engine_hosts, config.connect_timeout_s
        self.fleet = Fleet(config, on_change=self._engine_changed)
        self._servers: dict[str, _Server] = {}
        self._owners: dict[str, str] = {}
        self._revision = 0
        self._changes = Changes()
        self._removed: set[str] = set()
        """Engines that were taken away: a server that was not there at the time does not bring them back."""
        self._refits: deque[RefitRow] = deque(maxlen=_REFITS_KEPT)
        self._serial = 0
        self._settled_at = time.monotonic() + 2 * config.connect_timeout_s
        """Monotonic seconds until which engines and servers may be on their way back to a service that restarted."""
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> asyncio.Task[None]:
        """Begin to watch leases, in a task that ends by ``aclose`` or by an error of ours."""
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="leases")
        return self._sweeper

    async def aclose(self) -> None:
        """Stop watching engines and leases."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await self.fleet.aclose()

    # -- servers -----------------------------------------------------------------------------------

    def attach(self, message: Attach) -> Attached:
        """Give a server its lease and take over what it reports. Raises ``BadRequest`` for a bad engine URL."""
        for said in message.engines:
            if said.url not in self._removed:
                check_url(said.url, self._hosts)
                self._try(self._heard, said)
        known = [each for each in (message.policy_version, self.fleet.policy.version) if each is not None]
        self.fleet.policy.version = max(known, default=None)
        server = self._servers.get(message.server)
        if server is None:
            logger.info("session server %s is here", message.server)
            server = self._servers[message.server] = _Server(message.server, message.boot, time.monotonic())
        server.boot, server.heard = message.boot, time.monotonic()
        if message.sessions is not None:
            for key in server.keys - {row.key for row in message.sessions}:
                self._release(server, key)
            for row in message.sessions:
                self._settle(server, row)
        self._changed()
        return Attached(epoch=self.epoch, lease_s=self.lease_s)

    def report(self, message: Report) -> None:
        """Enter what happened on a server. Raises ``StaleLease``."""
        server = self._of(message.server, message.boot)
        self._hear_of_engines(message, server)
        for row in message.moved:
            self._settle(server, row)
        for grown in message.grown:
            if grown.key in server.keys:
                self.table.wake(grown.key)
                self.table.grow(grown.key, grown.tokens, grown.model)
        for key in message.rested:
            if key in server.keys:
                self.table.rest(key)
        for key in message.released:
            if key in server.keys:
                self._release(server, key)

    def _hear_of_engines(self, message: Report, server: _Server) -> None:
        for engine in [each for each in self.fleet.engines.values() if each.url in message.alive]:
            engine.health.progress(time.monotonic())
        for url, words in message.lost.items():
            if (lost := self._engine(url)) is not None:
                self.fleet.failed(lost, EngineLost(f"session server {server.name} says: {words}"))
        for said in message.added:
            self._removed.discard(said.url)
            self._try(self._heard, said)
        for url, drained in message.drained.items():
            if (known := self._engine(url)) is not None and known.drained != drained:
                (self.fleet.drain if drained else self.fleet.undrain)(known)
        for notice in message.refits:
            self._try(partial(self.refit, server=server.name), notice)

    async def remove(self, url: str) -> None:
        """Forget an engine; its sessions move. Unknown ones are fine."""
        self._removed.add(url)
        if (engine := self._engine(url)) is not None:
            await self.fleet.remove(engine.id)

    def add(self, said: EngineSaid) -> Engine:
        """An operator adds an engine. Raises ``BadRequest``, ``Conflict``."""
        self._removed.discard(said.url)
        return self._add(said, _membership(said))

    def refit(self, notice: RefitNotice, *, server: str = "") -> None:
        """Enter what a trainer did to an engine, and tell every other server. Raises ``NotFound``, ``BadRequest``."""
        if notice.phase not in _PHASES:
            raise BadRequest(f"phase {notice.phase!r}: want one of {', '.join(map(str, _PHASES[1:]))}", param="phase")
        engine = self._engine(notice.url)
        if engine is None:
            raise NotFound(f"no engine {notice.url}")
        self._serial += 1
        self._refits.append(RefitRow(serial=self._serial, server=server, **msgspec.structs.asdict(notice)))
        self.fleet.note_refit(
            engine.id,
            notice.version,
            flushed=notice.flushed,
            phase=cast("RefitPhase | None", notice.phase),
            reason=notice.reason,
        )

    # -- places ------------------------------------------------------------------------------------

    async def place(self, message: Place) -> Placed:
        """A place for a new session, waited for. Raises as ``Admission.place`` and ``StaleLease``."""
        server = self._of(message.server, message.boot)
        self._require_own(server, message.key)
        server.asking += 1
        try:
            pin = await self._admitted(message)
        finally:
            server.asking -= 1
            server.heard = time.monotonic()
        if self._servers.get(server.name) is not server or server.boot != message.boot:
            self.table.release(message.key)  # it was started again meanwhile and knows nothing of this session
            raise StaleLease(f"session server {server.name} was started again while the session waited")
        self._own(server, message.key)
        return self._placed(pin)

    async def _admitted(self, message: Place) -> Pin:
        """As ``Admission.place``; engines that are on their way here are waited for before it says no."""
        patience = time.monotonic() + (self._connect_s if self.fleet.report(message.model) else 0.0)
        while True:
            try:
                return await self.admission.place(
                    message.key,
                    model=message.model,
                    tokens=message.tokens,
                    group=message.group,
                    parent=message.parent,
                    want=Wanted(message.minimum, message.exact),
                    priority=message.priority,
                )
            except NoEngine:
                if not await self._changes.wait(max(patience, self._settled_at) - time.monotonic()):
                    raise

    def move(self, message: Move) -> Placed:
        """Another place for a session. Raises ``NoEngine`` when there is none, ``StaleLease``."""
        server = self._of(message.server, message.boot)
        self._require_own(server, message.key)
        pin = self.table.pin(message.key, message.model)
        if pin is None:
            raise StaleLease(f"the service does not know session {message.key}; attach again")
        ids = {engine.id for url in message.exclude if (engine := self._engine(url)) is not None}
        if pin.engine_id not in ids and pin.target is not None and pin.target.serves:
            return self._placed(pin)  # another call of the session was first
        want = Wanted(message.minimum, message.exact)
        moved = self.table.move(message.key, message.reason, model=message.model, want=want, exclude=ids)
        if moved is None:
            raise self.fleet.none_left(message.model)
        return self._placed(moved)

    # -- what servers see --------------------------------------------------------------------------

    async def seen(self, *, after: int, epoch: str, wait_s: float) -> FleetRow:
        """The fleet, at once when it is not what a server saw last, else when it changes or ``wait_s`` is over."""
        deadline = time.monotonic() + wait_s
        while epoch == self.epoch and after >= self._revision:
            if not await self._changes.wait(deadline - time.monotonic()):
                break
        return self.snapshot()

    def snapshot(self) -> FleetRow:
        """The fleet now."""
        return FleetRow(
            epoch=self.epoch,
            revision=self._revision,
            servers=sorted(self._servers),
            engines=[self.describe(engine) for engine in self.fleet.engines.values()],
            refits=list(self._refits),
            policy_version=self.fleet.policy.version,
        )

    def describe(self, engine: Engine) -> EngineRow:
        """One engine with its load."""
        return _engine_row(engine, self.table.load(engine.id) if self.table.targets(engine.id) else None)

    # -- inside ------------------------------------------------------------------------------------

    def _of(self, name: str, boot: str) -> _Server:
        server = self._servers.get(name)
        if server is None:
            raise StaleLease(f"session server {name} has no lease here; attach first")
        if server.boot != boot:
            raise StaleLease(f"session server {name} was started again since; this start of it is over")
        server.heard = time.monotonic()
        return server

    def _require_own(self, server: _Server, key: str) -> None:
        if self._owners.get(key, server.name) != server.name:
            raise Conflict(f"session {key} belongs to another session server")

    def _own(self, server: _Server, key: str) -> None:
        self._owners[key] = server.name
        server.keys.add(key)

    def _settle(self, server: _Server, row: SessionRow) -> None:
        """A server says where a session of its is: that is so, whatever was known."""
        engine = self._engine(row.url)
        if engine is None or self._owners.get(row.key, server.name) != server.name:
            return
        pin = self.table.pin(row.key, row.model)
        if pin is not None and (pin.engine_id, pin.dp_rank) != (engine.id, row.dp_rank):
            self.table.unpin(row.key, pin)  # it goes on elsewhere: no end to learn from, and its other models stay
            pin = None
        if pin is None:
            self.table.restore(
                row.key, engine.id, dp_rank=row.dp_rank, group=row.group, resident_tokens=row.tokens, model=row.model
            )
        if row.resting:
            self.table.rest(row.key)
        self._own(server, row.key)

    def _release(self, server: _Server, key: str) -> None:
        server.keys.discard(key)
        self._owners.pop(key, None)
        self.table.release(key)

    def _try(self, act: Callable[[T], object], what: T) -> None:
        """One thing that a server tells must not keep the others from being heard."""
        try:
            act(what)
        except TollwayError as error:
            logger.error("%s", error)

    def _heard(self, said: EngineSaid) -> Engine:
        return self._add(said, _beside(said, self._engine(said.url)))

    def _add(self, said: EngineSaid, membership: Membership) -> Engine:
        free_id = said.id if said.id not in self.fleet.engines else ""
        engine = self.fleet.add(said.url, engine_id=free_id, membership=membership)
        if said.drained and not engine.drained:
            self.fleet.drain(engine)
        self._changed()
        return engine

    def _engine(self, url: str) -> Engine | None:
        return next((each for each in self.fleet.engines.values() if each.url == url), None)

    def _placed(self, pin: Pin) -> Placed:
        engine = self.fleet.engines.get(pin.engine_id)
        if engine is None:
            raise NoEngine(f"engine {pin.engine_id} went away while the session was placed")
        return Placed(url=engine.url, dp_rank=pin.dp_rank, tokens=pin.resident_tokens)

    def _engine_changed(self, engine: Engine) -> None:
        if engine.id not in self.fleet.engines:
            self.table.remove_engine(engine.id)
        else:
            engine.enter(self.table, max_in_flight=None)  # calls are counted where they run
        self.admission.changed()
        self._changed()

    def _changed(self) -> None:
        self._revision += 1
        self._changes.notify()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.lease_s / 10)
            now = time.monotonic()
            for server in [each for each in self._servers.values() if not each.asking]:
                if now - server.heard > self.lease_s:
                    logger.error(
                        "session server %s said nothing for %.0f s; its %d sessions are released",
                        server.name,
                        self.lease_s,
                        len(server.keys),
                    )
                    for key in list(server.keys):
                        self._release(server, key)
                    del self._servers[server.name]
                    self._changed()


def _membership(said: EngineSaid) -> Membership:
    return Membership(model=said.model, max_in_flight=said.max_in_flight, frozen=said.frozen, stale=said.stale)


def _beside(said: EngineSaid, known: Engine | None) -> Membership:
    """What a server that may have been away says of an engine, beside what is known of it."""
    was = known.membership if known is not None else _membership(said)
    limit, frozen = said.max_in_flight or was.max_in_flight, said.frozen or was.frozen
    return replace(was, model=said.model, max_in_flight=limit, frozen=frozen)


def _engine_row(engine: Engine, load: EngineLoad | None) -> EngineRow:
    return EngineRow(
        id=engine.id,
        url=engine.url,
        model=engine.model,
        max_in_flight=engine.max_in_flight,
        frozen=engine.membership.frozen,
        stale=engine.membership.stale,
        drained=engine.drained,
        quarantined=engine.health.quarantine_reason[:_LONGEST_WORDS],
        state=str(engine.health.state),
        reason=engine.health.reason[:_LONGEST_WORDS],
        version=engine.version,
        sessions=load.sessions if load is not None else 0,
        resident_tokens=load.resident_tokens if load is not None else 0,
        budget_tokens=engine.max_total_tokens,
    )
