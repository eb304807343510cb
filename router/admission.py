"""Waiting for room: sessions at their start for KV room, calls for a place on their target.

The asyncio side of ``queues``: deadlines, cancellation, wake-ups. Agents wait at their first call and never in the
middle, since half of a conversation holds the room that it waits for. Whatever is cancelled leaves no trace in any
counter. Knows no network. Depends on ``table``, ``queues`` and ``config``.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict

from tollway.errors import CapacityExceeded, NoEngine, TollwayError, VersionNotReady
from tollway.router import metrics
from tollway.router.config import RouterConfig
from tollway.router.queues import AdmissionQueue, CallTicket, SessionTicket, SlotQueue, possible, should_move
from tollway.router.table import Ask, Pin, RoutingTable
from tollway.router.targets import ANY, Target, Wanted

__all__ = ["Admission"]

_REMEMBERED = 4096
"""Sessions that were told to come again and keep the place in the queue that they had."""
_RETRY_S = 5.0
"""What a refused session is told to wait."""


class Admission:
    """Who may start, who may call now, and who should go elsewhere."""

    def __init__(self, table: RoutingTable, config: RouterConfig) -> None:
        self._table, self._config = table, config
        self._queue = AdmissionQueue(table)
        self._slots = SlotQueue(table)
        self._tickets: dict[tuple[str, str], SessionTicket] = {}
        self._waiters: dict[SessionTicket, set[asyncio.Future[None]]] = {}
        self._calls: dict[CallTicket, asyncio.Future[None]] = {}
        self._refused: OrderedDict[tuple[str, str], float] = OrderedDict()
        """Arrival of sessions that waited in vain, so that a retry does not go to the end."""
        self._wanted: Counter[tuple[str, Wanted]] = Counter()
        """(model, versions) of those that wait: looked through at every change, so without the waiting themselves."""
        self._due = False
        """Another look at the queue is on its way."""
        table.on_room = self.changed

    # -- sessions ----------------------------------------------------------------------------------

    async def place(
        self,
        key: str,
        *,
        model: str = "",
        tokens: int,
        group: str = "",
        parent: str = "",
        want: Wanted = ANY,
        priority: int = 0,
    ) -> Pin:
        """The place of a session, waited for in a fair queue; at once when it has one.

        Calls of one key that arrive together wait together. Raises ``NoEngine`` when no target takes sessions,
        ``VersionNotReady`` when none that does holds ``want``, ``CapacityExceeded`` after
        ``router.admission_timeout_s``.
        """
        name = (key, model)
        ticket = self._tickets.get(name)
        if (pin := self._table.pin(key, model)) is not None:
            if ticket is not None:
                ticket.taken = True  # whoever waited for it may yet be cancelled
            return pin
        if ticket is None:
            ask = Ask(key, tokens, model, group, parent, want)
            self._require_possible(ask)
            if parent and self._table.pin(parent, model) is not None:
                # The parent waits for this one and holds its room meanwhile: a queue would block both.
                if (pin := self._table.settle(ask)) is not None:
                    return pin
                raise self._no_engine(model)
            ticket = self._queue.offer(ask, now=self._refused.pop(name, time.monotonic()), priority=priority)
            self._pump()
            if ticket.pin is not None:
                return ticket.pin
            self._tickets[name] = ticket
            self._wanted[model, want] += 1
        return await self._wait(ticket)

    async def _wait(self, ticket: SessionTicket) -> Pin:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(ticket, set())
        waiters.add(waiter)
        metrics.WAITING.labels("session").inc()
        try:
            async with asyncio.timeout(self._config.admission_timeout_s):
                await waiter
        except TimeoutError:
            if ticket.pin is None:
                raise self._refusal(ticket) from None
        except asyncio.CancelledError:
            if ticket.pin is not None and not ticket.taken and len(waiters) == 1:
                self._table.unpin(ticket.ask.key, ticket.pin)
            raise
        finally:
            metrics.WAITING.labels("session").dec()
            waiters.discard(waiter)
            if not waiters:
                self._forget(ticket)
        if ticket.pin is None:
            raise self._refusal(ticket)
        ticket.taken = True
        return ticket.pin

    @property
    def waiting_sessions(self) -> int:
        """Sessions in the queue."""
        return len(self._queue)

    @property
    def waiting_calls(self) -> int:
        """Calls that wait for a place on their target."""
        return len(self._calls)

    def changed(self) -> None:
        """Engines or room changed: start whom there is room for, refuse who can no longer be served."""
        self._due = False
        if self._tickets:
            self._pump()
            lost = {name for name in self._wanted if self._cannot_be(*name)}
            for ticket in list(self._tickets.values()) if lost else ():
                if ticket.pin is None and (ticket.ask.model, ticket.ask.want) in lost:
                    self._wake(ticket)
        for target in self._slots.targets():
            self._start(self._slots.pump(target))

    def _pump(self) -> None:
        for ticket in self._queue.pump():
            self._wake(ticket)

    def _wake(self, ticket: SessionTicket) -> None:
        for waiter in self._waiters.get(ticket, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _forget(self, ticket: SessionTicket) -> None:
        ask = ticket.ask
        del self._waiters[ticket], self._tickets[ask.key, ask.model]
        self._wanted[ask.model, ask.want] -= 1
        if not self._wanted[ask.model, ask.want]:
            del self._wanted[ask.model, ask.want]
        self._queue.withdraw(ticket)
        # What it had claimed is free. Thousands may leave at once, and one look is enough for all of them.
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self.changed)

    # -- refusals ----------------------------------------------------------------------------------

    def _require_possible(self, ask: Ask) -> None:
        targets = self._table.of_model(ask.model)
        if not any(each.admits for each in targets):
            raise self._no_engine(ask.model)
        if not possible(targets, ask.want):
            raise self._not_ready(ask)

    def _cannot_be(self, model: str, want: Wanted) -> bool:
        """Some target of ``model`` takes sessions, and none of them has a version that is wanted."""
        targets = self._table.of_model(model)
        return any(each.admits for each in targets) and not possible(targets, want)

    def _refusal(self, ticket: SessionTicket) -> TollwayError:
        """Why the session did not get a place."""
        ask = ticket.ask
        try:
            self._require_possible(ask)
        except TollwayError as error:
            return error
        self._refused[ask.key, ask.model] = ticket.arrived
        while len(self._refused) > _REMEMBERED:
            self._refused.popitem(last=False)
        loads = ", ".join(
            f"{each.name} {each.reserved_tokens} of {each.budget_tokens}" for each in self._table.of_model(ask.model)
        )
        return CapacityExceeded(
            f"no engine had KV room for a new session of {ask.tokens} tokens within "
            f"{self._config.admission_timeout_s:g} s (reserved tokens: {loads}); {len(self._queue)} others wait. "
            "Try again, run fewer sessions at once, or add engines",
            retry_after_s=_RETRY_S,
        )

    def _no_engine(self, model: str) -> NoEngine:
        targets = self._table.of_model(model)
        known = ", ".join(each.name for each in targets) or "none"
        return NoEngine(
            f"no engine of {f'model {model!r}' if model else 'the policy'} takes new sessions (known: {known})"
        )

    def _not_ready(self, ask: Ask) -> VersionNotReady:
        versions = [
            each.version for each in self._table.of_model(ask.model) if each.admits and each.version is not None
        ]
        wanted = ask.want.exact if ask.want.exact is not None else ask.want.minimum
        return VersionNotReady(wanted or 0, max(versions, default=None))

    # -- calls -------------------------------------------------------------------------------------

    async def enter(self, target: Target, *, priority: int = 0) -> CallTicket:
        """Be one of the calls that may run on ``target`` until ``leave``, counted by the table's ``begin`` and ``end``.

        Waiting calls go by priority, then by arrival. Raises ``CapacityExceeded`` after
        ``router.admission_timeout_s``. A target that is lost or removed meanwhile still hands its places on: ask
        again whether it serves before the call leaves.
        """
        ticket = self._slots.ask(target, now=time.monotonic(), priority=priority)
        if not ticket.granted:
            try:
                await self._wait_slot(ticket)
            except BaseException:
                self.leave(ticket)
                raise
        return ticket

    def leave(self, ticket: CallTicket) -> None:
        """The call ended, however it ended: the next one may run."""
        self._start(self._slots.end(ticket))

    async def _wait_slot(self, ticket: CallTicket) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls[ticket] = waiter
        metrics.WAITING.labels("call").inc()
        try:
            async with asyncio.timeout(self._config.admission_timeout_s):
                await waiter
        except TimeoutError:
            if not ticket.granted:
                target = ticket.target
                raise CapacityExceeded(
                    f"engine {target.name} ran {target.in_flight} calls at once, its limit, for "
                    f"{self._config.admission_timeout_s:g} s, with {target.waiting} waiting. Try again, or add engines",
                    retry_after_s=_RETRY_S,
                ) from None
        finally:
            metrics.WAITING.labels("call").dec()
            del self._calls[ticket]

    def _start(self, tickets: list[CallTicket]) -> None:
        for ticket in tickets:
            waiter = self._calls.get(ticket)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    # -- migration ---------------------------------------------------------------------------------

    def should_move(self, pin: Pin, *, want: Wanted = ANY) -> bool:
        """Whether the session should leave by ``table.move(key, "migration")`` before its next call.

        Only when the wait exceeds ``router.migrate_factor`` times its own re-prefill, and another target has room.
        """
        return should_move(self._table, pin, want=want, factor=self._config.migrate_factor)
