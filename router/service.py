"""The router that a session server uses: its engines, its sessions' places, its calls, and its cache ledger.

A facade: ``fleet`` knows the engines, ``seats`` finds a place for every call, ``calls`` runs it, ``accounts``
explains its cache misses. Owns what one of them has to tell another. Every wait has a deadline in
``RouterConfig``; no call is retried for ever.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import asdict, replace
from types import TracebackType
from typing import Unpack

from tollway.errors import UpstreamError
from tollway.records import PolicyVersion
from tollway.router.accounts import Accounts, Lineage
from tollway.router.admission import Admission
from tollway.router.cache_ledger import CacheLedger
from tollway.router.calls import Attempt, Calls, Routed
from tollway.router.chooser import open_chooser
from tollway.router.config import RouterConfig
from tollway.router.engines import EngineClient, GenerateCall, GenerateDelta
from tollway.router.fleet import Engine, Fleet, Membership, RefitPhase
from tollway.router.placement_lease import Lease, Service
from tollway.router.seats import Placement, Seats, TermFields, Terms
from tollway.router.table import RoutingTable
from tollway.router.versions import Holders

__all__ = ["Attempt", "Lineage", "Placement", "Routed", "Router"]


class Router:
    """Engines, pins and the cache ledger of one session server.

    ``service`` is a placement service that several servers share, by default the configured one: it owns the list of
    engines, and places sessions unless ``placement`` or an outer gateway does.

    >>> async with Router(RouterConfig()) as router:  # doctest: +SKIP
    ...     router.add_engine("http://127.0.0.1:30000")
    ...     await router.wait_ready(60)
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        placement: Placement | None = None,
        server_name: str = "server",
        service: Service | None = None,
    ) -> None:
        self.config = config
        self.table = RoutingTable()
        self.ledger = CacheLedger()
        self.admission = Admission(self.table, config)
        if service is None and config.placement_url:
            service = Service(url=config.placement_url)
        self.lease = Lease(config, self.table, name=server_name, service=service) if service is not None else None
        """At the placement service; ``None``: the list of engines is this router's own."""
        self.chooser = open_chooser(config, self.table, self.admission, self.lease)
        """Chooses the engines of sessions in place of this router; ``None``: nobody else does."""
        client = self.chooser.client if self.chooser is not None else EngineClient
        self.fleet = Fleet(config, on_change=self._engine_changed, client=client)
        if self.chooser is not None:
            self.chooser.fleet = self.fleet
        if self.lease is not None:
            self.lease.copy.fleet = self.fleet
        self.accounts = Accounts(self.ledger, self.fleet)
        self.seats = Seats(config, self.table, self.fleet, self.admission, placement or self.chooser)
        self._calls = Calls(config, self.seats, self.fleet, self.accounts)
        self._context: dict[str, int | None] = {}
        """Smallest context of the engines that take calls, by model."""

    async def __aenter__(self) -> Router:
        try:
            if self.chooser is not None:
                await self.chooser.start()
            if self.lease is not None:
                await self.lease.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop watching engines and close their connections."""
        await self.accounts.aclose()
        if self.chooser is not None:
            await self.chooser.aclose()
        if self.lease is not None:
            await self.lease.aclose()
        await self.fleet.aclose()

    # -- engines -----------------------------------------------------------------------------------

    def add_engine(self, url: str, membership: Membership | None = None) -> Engine:
        """Register an engine; it serves once its weight version is confirmed."""
        engine = self.fleet.add(url, membership=membership)
        if self.chooser is not None:
            self.chooser.added(engine)
        return engine

    async def remove_engine(self, engine_id: str) -> None:
        """Forget an engine; its sessions move at their next call."""
        engine = self.fleet.get(engine_id)
        # Whoever started it hears of its death first and takes it away: its sessions were not drained, they lost it.
        await self.fleet.look(engine)
        await self.fleet.remove(engine_id)
        if self.chooser is not None:
            self.chooser.removed(engine.url)

    def drain_engine(self, engine_id: str) -> Engine:
        """No new session goes to the engine; its own go on."""
        engine = self.fleet.get(engine_id)
        self.fleet.drain(engine)
        return engine

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until an engine serves. Raises ``NoEngine``."""
        await self.fleet.wait_serving(timeout_s)

    def engines(self) -> list[dict[str, object]]:
        """The fleet with states, loads, and who holds the version that an engine has."""
        return [self.describe_engine(engine) for engine in self.fleet.engines.values()]

    def describe_engine(self, engine: Engine) -> dict[str, object]:
        """One row of ``engines``."""
        row = engine.describe()
        if self.lease is not None:
            row["max_in_flight"] = self.lease.copy.limit(engine)  # the whole engine's, not this server's share
        if self.table.targets(engine.id):
            load = self.table.load(engine.id)
            row |= {name: value for name, value in asdict(load).items() if name != "engine_id"}
            holders = self.exact_holders(engine.id)
            row |= {"exact_sessions": holders.sessions, "exact_calls": holders.calls}
        return row

    def exact_holders(self, engine_id: str) -> Holders:
        """Who needs exactly the version that an engine has now; a refit waits for them. Raises ``NotFound``."""
        engine = self.fleet.get(engine_id)

        def home(key: str) -> str | None:
            pin = self.table.pin(key, engine.model)
            return pin.engine_id if pin is not None else None

        return self.seats.holders.on(engine_id, engine.version, model=engine.model, home=home)

    def note_refit(
        self,
        engine_id: str,
        version: PolicyVersion | None,
        *,
        flushed: bool,
        phase: RefitPhase | None = None,
        reason: str = "",
    ) -> Engine:
        """The trainer flushed an engine, gave it new weights, or both; called before the engine continues.

        ``version`` is ``None`` while the engine has the weights that it had: whether new ones come is not known yet.
        """
        engine = self.fleet.note_refit(engine_id, version, flushed=flushed, phase=phase, reason=reason)
        if self.chooser is not None:
            self.chooser.refitted(engine.url, version, flushed=flushed, phase=phase, reason=reason)
        return engine

    def context_length(self, model: str = "") -> int | None:
        """Smallest context of the engines that serve ``model``; ``None`` when none says."""
        return self._context.get(model)

    def require_engine(self, key: str, model: str = "") -> None:
        """Raise ``NoEngine``, with every engine's last words, when no call of the session could be served now."""
        pin = self.table.pin(key, model)
        if pin is not None and pin.target is not None and pin.target.serves:
            return
        if not any(engine.health.takes_calls for engine in self.fleet.engines.values() if engine.model == model):
            raise self.fleet.none_left(model)

    @property
    def ready(self) -> bool:
        """Whether a new session could be served now."""
        return bool(self.fleet.serving()) and (self.chooser is None or self.chooser.ready)

    # -- sessions ----------------------------------------------------------------------------------

    def restore_session(
        self,
        key: str,
        engine_name: str,
        *,
        dp_rank: int | None = None,
        group: str = "",
        resident_tokens: int = 0,
        model: str = "",
    ) -> None:
        """Take over the pin of a session from before a restart; an unknown engine leaves it unpinned."""
        url = engine_name.rpartition("#")[0]
        for engine in self.fleet.engines.values():
            if engine.url == url and engine.model == model:
                self.table.restore(
                    key, engine.id, dp_rank=dp_rank, group=group, resident_tokens=resident_tokens, model=model
                )

    async def restored(self) -> None:
        """All sessions from before a restart were given to ``restore_session``."""
        if self.chooser is not None:
            await self.chooser.restored()
        if self.lease is not None:
            await self.lease.restored()

    def hold_exact(self, key: str, version: PolicyVersion, model: str = "") -> None:
        """The session needs exactly this version until it is closed: a refit of engines that have it waits."""
        self.seats.holders.hold(key, version, model=model)

    def rest_session(self, key: str) -> None:
        """Nobody has used the session for a while: it counts against no engine's room until its next call."""
        self.table.rest(key)
        if self.chooser is not None:
            self.chooser.rest(key)
        self.ledger.rest(key)

    def close_session(self, key: str) -> None:
        """Forget a session's place; its cache figures can still be asked for."""
        self.seats.release(key)

    def release_session(self, key: str) -> None:
        """Forget a session's place and its cache view."""
        self.seats.release(key)
        self.ledger.forget(key)

    # -- calls -------------------------------------------------------------------------------------

    async def generate(self, key: str, call: GenerateCall, *, lineage: Lineage, **terms: Unpack[TermFields]) -> Routed:
        """Run one call of session ``key`` to its end; ``terms`` are the fields of ``seats.Terms``.

        Raises ``NoEngine``, ``CapacityExceeded``, ``VersionNotReady``, ``EngineLost``, ``EngineBusy``,
        ``EngineRefused``, ``ContextLengthExceeded``, ``UpstreamError``. Cancelling aborts the request on the engine.
        """
        routed: Routed | None = None
        async for item in self._calls.run(key, call, lineage, Terms(**terms)):
            if isinstance(item, Routed):
                routed = item
        if routed is None:
            raise UpstreamError("the engine ended without a reply")
        return routed

    def stream(
        self, key: str, call: GenerateCall, *, lineage: Lineage, **terms: Unpack[TermFields]
    ) -> AsyncGenerator[GenerateDelta | Routed]:
        """As ``generate``, with deltas; the last item is the ``Routed`` whole. Close it to abort.

        After the first delta a lost engine is not replaced: what a client saw cannot be taken back.
        """
        return self._calls.run(key, replace(call, stream=True), lineage, Terms(**terms))

    # -- inside ------------------------------------------------------------------------------------

    def _engine_changed(self, engine: Engine) -> None:
        """Tell the table what the fleet knows."""
        if engine.id not in self.fleet.engines:
            self.table.remove_engine(engine.id)
        else:
            engine.enter(self.table, max_in_flight=engine.max_in_flight)
        lengths = [
            each.context_length
            for each in self.fleet.engines.values()
            if each.model == engine.model and each.context_length and each.health.takes_calls
        ]
        self._context[engine.model] = min(lengths, default=None)
        if self.chooser is not None:
            self.chooser.changed(engine)
        self.seats.changed()
