"""The lease of a session server at its placement service: taken, kept by telling news, taken again when lost.

A service that was started again gets everything that this server knows; what could not be told is told later. Also
follows the service's fleet. Asks for no place. Depends on ``placement_link``, ``placement_news`` and
``placement_fleet``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from tollway.errors import ConfigError, PlacementDown, TollwayError, Unauthorized
from tollway.router.config import RouterConfig
from tollway.router.fleet import Engine
from tollway.router.placement_fleet import FleetCopy
from tollway.router.placement_link import KEY_VARIABLE, AttachFirst, ServiceLink
from tollway.router.placement_news import News
from tollway.router.placement_wire import Attach, Attached, EngineSaid, FleetRow, SessionRow
from tollway.router.table import Pin, RoutingTable

__all__ = ["TELL_S", "Lease", "Service"]

logger = logging.getLogger(__name__)
_BATCH_S = 0.1
"""How long what happened is collected before it is told."""
_RETRY_S = 0.25
_COMPLAINT_S = 60.0
_POLL_S = 20.0
_ALIVE_S = 1.0
"""Pause between reports whose only news is that tokens flow."""
_GRACE_S = 2.0
TELL_S = 5.0
"""Longest wait for an answer to anything but a place."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The placement service of a server, and what the server is to it."""

    url: str
    key: str | None = field(default=None, repr=False)
    """``None``: from the environment."""
    same_ids: bool = False
    """Engines have the service's ids here."""
    part: tuple[int, int] | None = None
    """(number, of how many): this server's share of an engine's limit, where no others share it."""


class Lease:
    """One start of the server called ``name``."""

    def __init__(self, config: RouterConfig, table: RoutingTable, *, name: str, service: Service) -> None:
        self.name, self.boot = name, secrets.token_hex(8)
        self.link = ServiceLink(config, url=service.url, key=service.key)
        self.copy = FleetCopy(name, same_ids=service.same_ids, part=service.part)
        self.news = News()
        self.homes: dict[str, dict[str, tuple[str, int | None]]] = {}
        """(engine id, rank) that the service knows of a session, by key, then by model."""
        self._table = table
        self._tasks: list[asyncio.Task[None]] = []
        self._epoch = ""
        """The start of the service that knows this server; empty while none does."""
        self._lease_s = 30.0
        self._told = 0.0
        """Monotonic seconds of the last report."""
        self._restored = False
        """The table has the sessions from before a restart."""
        self._seen: tuple[str, int] = ("", -1)
        """(start of the service, revision) of the fleet that was taken over last."""
        self._applying = asyncio.Lock()
        self._attaching = asyncio.Lock()
        self._wake = asyncio.Event()
        """There is something to tell."""
        self._complaint = ("", 0.0)
        """What is wrong since the last answer, and when (monotonic seconds) the log said so."""

    async def start(self) -> None:
        """Take the lease and begin to follow the fleet. Raises ``ConfigError`` for a wrong key.

        A service that does not answer yet is waited for in the background.
        """
        await self.link.start()
        try:
            await self.attach()
            await self.follow()
        except (PlacementDown, AttachFirst) as error:
            self._complain(error)
        except BaseException:
            await self.link.aclose()
            raise
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._keep_telling(), name="placement reports"),
            loop.create_task(self._keep_following(), name="placement fleet"),
        ]

    async def restored(self) -> None:
        """The sessions from before a restart are in the table: those that are not there are over."""
        self._restored = True
        with contextlib.suppress(PlacementDown):
            await self.attach()

    async def aclose(self) -> None:
        """Tell what is left to tell and end. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        with contextlib.suppress(TollwayError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self.tell()
        await self.link.aclose()

    @property
    def held(self) -> bool:
        """Whether the service was reached and has not gone since."""
        return bool(self._epoch)

    def wake(self) -> None:
        """There is news."""
        self._wake.set()

    async def persist(self, path: str, body: msgspec.Struct, kind: type[T], deadline: float) -> T:
        """Ask until there is an answer that a repetition would not change, or the deadline is over."""
        while True:
            try:
                await self.tell()  # what was released makes room
                # A moment longer than the service itself waits: its refusal says more than our giving up.
                patience_s = max(0.0, deadline - time.monotonic()) + _GRACE_S
                return await self.link.ask("POST", path, body, kind, timeout_s=patience_s)
            except AttachFirst:
                with contextlib.suppress(PlacementDown):
                    await self.attach()
            except (Unauthorized, ConfigError) as error:
                raise self.link.down(str(error)) from error
            except PlacementDown:
                if time.monotonic() + _RETRY_S > deadline:
                    raise
            if time.monotonic() > deadline:
                raise self.link.down("it does not take this server back")
            await asyncio.sleep(_RETRY_S)

    async def attach(self) -> None:
        """Take the lease with everything that is known here. Raises ``PlacementDown``, ``ConfigError``."""
        async with self._attaching:
            rows = []
            for name, pin in self._table.places():
                if (engine := self.copy.engines.get(pin.engine_id)) is not None:
                    rows.append(_row(name, pin, engine))
                    self.homes.setdefault(name, {})[pin.model] = (pin.engine_id, pin.dp_rank)
            message = Attach(
                server=self.name,
                boot=self.boot,
                sessions=rows if self._restored else None,
                engines=[self.copy.said(engine) for engine in self.copy.engines.values()],
                policy_version=self.copy.policy_version,
            )
            try:
                lease = await self.link.ask("POST", "/attach", message, Attached, timeout_s=TELL_S)
            except Unauthorized as error:
                raise ConfigError(f"{error}; set {KEY_VARIABLE} to the same secret on both sides") from None
            if self._epoch and self._epoch != lease.epoch:
                logger.warning("the placement service was started again; it got %d sessions", len(rows))
            self._epoch, self._lease_s = lease.epoch, lease.lease_s
            self._told = time.monotonic()

    async def tell(self) -> None:
        """Send what was collected; it is kept when it does not arrive. Raises ``PlacementDown``, ``AttachFirst``."""
        if not self._epoch:
            raise AttachFirst("this server has no lease yet")
        alive = [each.url for each in self.copy.engines.values() if each.health.last_progress > self._told]
        if not self.news and time.monotonic() - self._told < (_ALIVE_S if alive else self._lease_s / 4):
            return
        news, self.news = self.news, News()
        report = news.report(self.name, self.boot, self._rows(news.moved), alive)
        try:
            await self.link.ask("POST", "/report", report, dict, timeout_s=TELL_S)
        except (PlacementDown, AttachFirst):
            self.news.put_before(news)
            raise
        self._told = time.monotonic()

    def _rows(self, moved: set[tuple[str, str]]) -> list[SessionRow]:
        rows = []
        for key, model in moved:
            pin = self._table.pin(key, model)
            if pin is not None and (engine := self.copy.engines.get(pin.engine_id)) is not None:
                rows.append(_row(key, pin, engine))
        return rows

    async def _keep_telling(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 8):
                    await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(_BATCH_S)
            try:
                await self.tell()
            except AttachFirst:
                await self._attach_again()
            except TollwayError as error:
                self._complain(error)
                self._wake.set()
                await asyncio.sleep(_RETRY_S)

    async def _attach_again(self) -> None:
        try:
            await self.attach()
        except TollwayError as error:
            self._complain(error)
            await asyncio.sleep(_RETRY_S)
        self._wake.set()

    def _complain(self, error: TollwayError) -> None:
        """Log what is wrong, once a minute: it is tried again several times a second."""
        text, now = str(error), time.monotonic()
        if text != self._complaint[0] or now - self._complaint[1] > _COMPLAINT_S:
            self._complaint = (text, now)
            logger.warning("%s; it is tried again, and new sessions wait for it", text)

    # -- following ---------------------------------------------------------------------------------

    async def change(self, method: str, path: str, body: msgspec.Struct | None = None) -> dict[str, object]:
        """Change the fleet there, and take it over here before the answer is returned.

        Raises what the service says, and ``PlacementDown``.
        """
        answer: dict[str, object] = await self.link.ask(method, path, body, dict, timeout_s=TELL_S)
        await self.follow()
        return answer

    def announce(self, url: str) -> None:
        """The service shall have the engine at ``url``, as soon as it can be told; it comes from there."""
        self.news.added[url] = EngineSaid(url=url)
        self.wake()

    async def follow(self) -> None:
        """Take the fleet over as it is there now. Raises ``PlacementDown``."""
        await self._apply(await self.link.ask("GET", "/fleet", None, FleetRow, timeout_s=TELL_S))

    async def _apply(self, row: FleetRow) -> None:
        async with self._applying:
            epoch, revision = self._seen
            if self.name not in row.servers or (row.epoch == epoch and row.revision < revision):
                return
            self._seen = (row.epoch, row.revision)
            await self.copy.apply(row, self.news, same_service=row.epoch == epoch)

    async def _keep_following(self) -> None:
        while True:
            epoch, revision = self._seen
            try:
                path = f"/fleet?revision={revision}&epoch={epoch}&wait_s={_POLL_S:g}"
                row = await self.link.ask("GET", path, None, FleetRow, timeout_s=_POLL_S + TELL_S)
                self._answered()
                if row.epoch != self._epoch or self.name not in row.servers:
                    self._epoch = ""
                    self._wake.set()
                    await asyncio.sleep(_RETRY_S)
                await self._apply(row)
            except TollwayError as error:
                self._epoch = ""  # whether it is the same one when it is back is to be found out
                self._complain(error)
                await asyncio.sleep(_RETRY_S)
                self._wake.set()

    def _answered(self) -> None:
        if self._complaint[0]:
            self._complaint = ("", 0.0)
            logger.info("the placement service answers again")


def _row(key: str, pin: Pin, engine: Engine) -> SessionRow:
    return SessionRow(
        key=key,
        url=engine.url,
        dp_rank=pin.dp_rank,
        model=pin.model,
        group=pin.group,
        tokens=pin.resident_tokens,
        resting=pin.resting,
    )
