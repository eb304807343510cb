"""An outer gateway (``smg``) chooses the engine of a session; what it chose is found out, and held to.

Generation calls go through the gateway, with the session's routing key; everything else goes to the engines
directly, and only this process judges which of them live. A session's engine is asked for once, before its first
call, by a call that every engine refuses: so pins, records and the ledger know the engine from the start. Each
reply names its engine again, and a surprise is a move with a reason. A session that leaves an engine gets another
routing key: gateways take their keys back to an engine that returns. Depends on ``smg``, ``canary``, ``table``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from weakref import WeakValueDictionary

import aiohttp
import orjson

from tollway.errors import EngineLost, NoEngine, TollwayError, UpstreamError
from tollway.router.addresses import check_url
from tollway.router.admission import Admission
from tollway.router.canary import ROUTED_BY
from tollway.router.config import RouterConfig
from tollway.router.engines import EngineClient, Timeouts
from tollway.router.fleet import Engine, Fleet, RefitPhase
from tollway.router.gateways import ForeignGateway, GatewayEnd, OwnGateway
from tollway.router.health import EngineState
from tollway.router.losses import lost_words
from tollway.router.table import Pin, RoutingTable
from tollway.router.targets import ANY, Target, Wanted
from tollway.router.wire import GenerateCall

__all__ = ["KEY_VARIABLE", "GatewayClient", "OuterGateway"]

logger = logging.getLogger(__name__)

KEY_VARIABLE = "TOLLWAY_GATEWAY_KEY"
"""Environment variable with the key of a gateway that wants one."""
_ASK = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": -1.0}}
"""A call that passes smg and that an engine refuses before it does anything."""
_ASK_S = 10.0
"""How long a gateway may go on naming engines that a session cannot have."""
_PREFERENCES = 8
"""How many routing keys are tried at once for a session to stay on the engine that has its prefix."""
_PREFER_S = 1.0
"""How long it is tried in all: a gateway that has just started may not send to every worker yet."""


class OuterGateway:
    """Places the policy's sessions through an outer gateway; other models are this router's own affair.

    Gives no KV admission, no groups and no children's places: those are decided by who chooses the engine.
    """

    def __init__(self, config: RouterConfig, table: RoutingTable, inner: Admission) -> None:
        self.fleet: Fleet | None = None
        """Set before ``start``."""
        self._config, self._table, self._inner = config, table, inner
        self._key = os.environ.get(KEY_VARIABLE, "")
        self._end: GatewayEnd | None = None
        self._behind: dict[str, str] = {}
        """Engine id by URL, of the engines behind the gateway."""
        self._marks: dict[str, int] = {}
        """How many engines a session has left."""
        self._homes: dict[str, str] = {}
        """Engine that the gateway named for a session."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held while a session's place is asked for."""
        self._strays: dict[str, str] = {}
        """URL of the engine that served a call, by request id, where another one was expected."""

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start or find the gateway and refuse one that changes calls.

        Raises ``ConfigError`` for such a one and for a missing program. A gateway of others that does not answer
        yet, or has no engine yet, is checked before the first session.
        """
        probe_s, url = self._config.probe_timeout_s, self._config.gateway_url
        if url:
            self._end = ForeignGateway(check_url(url), key=self._key, probe_s=probe_s)
        else:
            self._end = OwnGateway(probe_s=probe_s, on_start=self._homes.clear)
        try:
            await self._end.start()
        except BaseException:
            await self.aclose()
            raise

    async def restored(self) -> None:
        """Nothing: the gateway is asked at the next call of each session."""

    async def aclose(self) -> None:
        """End the gateway if it is ours. Idempotent."""
        if self._end is not None:
            await self._end.aclose()

    @property
    def end(self) -> GatewayEnd:
        """The gateway itself. Raises ``NoEngine`` before ``start``."""
        if self._end is None:
            raise NoEngine("the outer gateway is not started")
        return self._end

    @property
    def url(self) -> str:
        """Where calls go. Raises ``NoEngine`` while there is no gateway."""
        return self.end.url

    @property
    def ready(self) -> bool:
        """Whether the gateway passed its check and runs."""
        return self._end is not None and self._end.ready

    def client(self, url: str, http: aiohttp.ClientSession, *, timeouts: Timeouts) -> EngineClient:
        """The client of an engine, for the fleet."""
        return GatewayClient(url, http, timeouts=timeouts, gateway=self)

    def changed(self, engine: Engine) -> None:
        """An engine of the fleet changed: tell the gateway, if it is ours, who takes calls."""
        if engine.model:
            return
        gone = self.fleet is None or engine.id not in self.fleet.engines
        if gone:
            self._behind.pop(engine.url, None)
        else:
            self._behind[engine.url] = engine.id
        drains = engine.health.state is EngineState.DRAINING or engine.drained
        self.end.takes(engine.url, not gone and engine.health.takes_calls and not drains)

    # -- places ------------------------------------------------------------------------------------

    async def place(
        self, key: str, *, model: str, tokens: int, group: str, parent: str, want: Wanted, priority: int
    ) -> Pin:
        """The place that the gateway gives a new session. Raises ``NoEngine``."""
        if model:
            return await self._inner.place(
                key, model=model, tokens=tokens, group=group, parent=parent, want=want, priority=priority
            )
        async with self._alone(key):
            if (pin := self._table.pin(key)) is not None:
                return pin  # another first call of the session was first
            if key in self._homes:  # it was placed before, and that engine had no room
                self._marks[key] = self._marks.get(key, 0) + 1
            target = await self._ask(key, want=want)
            rank = target.dp_rank
            self._table.restore(key, target.engine_id, dp_rank=rank, group=group, resident_tokens=tokens)
            pin = self._table.pin(key)
        if pin is None:
            raise NoEngine("the session ended while its place was asked for")
        return pin

    async def confirm(self, key: str, pin: Pin, want: Wanted = ANY) -> Pin:
        """The pin that the gateway agrees to: after a restart of ours, and after every move. Raises ``NoEngine``."""
        if pin.model or self._homes.get(key) == pin.engine_id:
            return pin
        async with self._alone(key):
            home, current = self._homes.get(key), self._table.pin(key)
            if current is None or current is not pin or home == pin.engine_id:
                return pin if current is None else current  # another call of the session was first
            if home is not None or pin.moved is not None:
                self._marks[key] = self._marks.get(key, 0) + 1
            left = frozenset((home,)) if home is not None else frozenset()
            target = await self._ask(key, want=want, prefer=pin.engine_id, exclude=left)
            if target.engine_id == pin.engine_id or self._table.pin(key) is not pin:
                return pin
            return self._table.move_to(key, target, pin.moved or "gateway")

    def served(self, key: str, rid: str) -> Pin | None:
        """The new pin of a session whose call ``rid`` another engine served than the one expected."""
        worker = self._strays.pop(rid, None)
        if worker is None or self._table.pin(key) is None:
            return None
        target = self._target(worker)
        if target is None:
            return None
        logger.warning("the gateway sent a session to %s, which is not where it lives", worker)
        self._homes[key] = target.engine_id
        return self._table.move_to(key, target, "gateway")

    def grow(self, key: str, tokens: int, model: str = "") -> None:
        """Nothing: the gateway counts for itself."""

    def added(self, engine: Engine) -> None:
        """Nothing: ``changed`` tells when it takes calls."""

    def removed(self, url: str) -> None:
        """Nothing: ``changed`` tells."""

    def refitted(self, url: str, version: int | None, *, flushed: bool, phase: RefitPhase | None, reason: str) -> None:
        """Nothing: a gateway knows no weights."""

    def rest(self, key: str) -> None:
        """Nothing: the gateway counts for itself."""

    def release(self, key: str) -> None:
        """The session ended."""
        self._homes.pop(key, None)
        self._marks.pop(key, None)

    # -- what clients ask --------------------------------------------------------------------------

    def carries(self, url: str) -> bool:
        """Whether calls to the engine at ``url`` go through the gateway."""
        return url in self._behind

    def headers(self, routing_key: str) -> dict[str, str]:
        """Headers by which the gateway knows a session, and us."""
        mark = self._marks.get(routing_key, 0)
        said = {"X-SMG-Routing-Key": f"{routing_key}~{mark}" if mark else routing_key}
        return said | ({"authorization": f"Bearer {self._key}"} if self._key else {})

    def routed(self, rid: str, expected: str, worker: str | None) -> None:
        """A reply names its engine. Raises ``UpstreamError`` for one that nobody registered here."""
        if worker is None or worker.partition("@")[0] == expected:
            return
        if self._target(worker) is None:
            raise UpstreamError(
                f"gateway {self.url} sent the call to {worker}, which is not among the engines here; add it "
                "with POST /engines, or take it out of the gateway"
            )
        self._strays[rid] = worker

    def forget(self, rid: str) -> None:
        """The call came to nothing."""
        self._strays.pop(rid, None)

    # -- asking ------------------------------------------------------------------------------------

    async def _ask(self, key: str, *, want: Wanted, prefer: str = "", exclude: Collection[str] = frozenset()) -> Target:
        """Where the gateway sends the session, after as many other routing keys as it takes.

        Raises ``NoEngine`` when it goes on naming engines that the session cannot have.
        """
        started, tries, said = time.monotonic(), 0, ""
        while True:
            await self.end.checked()
            worker, words = await self._whereabouts(key)
            target = self._target(worker) if worker is not None else None
            tries += 1
            if target is not None and target.engine_id not in exclude and target.serves and want.holds(target.version):
                tried = tries > _PREFERENCES and time.monotonic() - started > _PREFER_S
                if not prefer or target.engine_id == prefer or tried:
                    self._homes[key] = target.engine_id
                    return target
                if tries > _PREFERENCES:
                    await asyncio.sleep(0.05)
            else:
                said = words if worker is None else f"it names {worker}"
                if time.monotonic() - started > _ASK_S:
                    raise NoEngine(f"gateway {self.url} has no engine for the session: {said}")
                await asyncio.sleep(min(0.25, 0.01 * tries))
            self._marks[key] = self._marks.get(key, 0) + 1

    @asynccontextmanager
    async def _alone(self, key: str) -> AsyncGenerator[None]:
        """Calls of one session ask one after the other: two questions would have two answers."""
        lock = self._turns.setdefault(key, asyncio.Lock())
        async with lock:
            yield

    async def _whereabouts(self, key: str) -> tuple[str | None, str]:
        """(engine, what was said when there is none) that the gateway has for the session."""
        body = orjson.dumps({"rid": f"tollway-where-{key}", **_ASK})
        timeout = aiohttp.ClientTimeout(total=self._config.probe_timeout_s)
        try:
            async with self.end.http.post(
                f"{self.url}/generate",
                data=body,
                headers={"content-type": "application/json"} | self.headers(key),
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                text = await response.read()
                return response.headers.get(ROUTED_BY), f"it answered {response.status}: {text[:300]!r}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return None, lost_words(error)

    def _target(self, worker: str) -> Target | None:
        """The target that a worker name (``url`` or ``url@rank``) stands for: without a rank the emptiest one."""
        url, _, rank = worker.partition("@")
        targets = self._table.targets(self._behind.get(url.rstrip("/").lower(), ""))
        if rank.isdigit():
            return next((each for each in targets if each.dp_rank in (int(rank), None)), None)
        return min(targets, key=lambda each: (each.resident_tokens, each.sessions, each.last_chosen), default=None)


class GatewayClient(EngineClient):
    """An engine behind the gateway: calls go through it, aborts and everything else go to the engine."""

    def __init__(
        self, url: str, http: aiohttp.ClientSession, *, timeouts: Timeouts | None = None, gateway: OuterGateway
    ) -> None:
        super().__init__(url, http, timeouts=timeouts)
        self._gateway = gateway

    def _call_base(self) -> str:
        return self._gateway.url if self._gateway.carries(self.url) else self.url

    def _call_headers(self, routing_key: str) -> dict[str, str]:
        plain = super()._call_headers(routing_key)
        return plain | self._gateway.headers(routing_key) if self._gateway.carries(self.url) else plain

    def _post_call(
        self, call: GenerateCall, timeout: aiohttp.ClientTimeout
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        through = self._gateway.carries(self.url)
        return self._through(call, timeout) if through else super()._post_call(call, timeout)

    @asynccontextmanager
    async def _through(
        self, call: GenerateCall, timeout: aiohttp.ClientTimeout
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        done = False
        try:
            async with super()._post_call(call, timeout) as response:
                self._gateway.routed(call.rid, self.url, response.headers.get(ROUTED_BY))
                yield response
            done = True
        except TimeoutError:
            raise  # silence is the engine's
        except (aiohttp.ClientError, OSError) as error:
            if self._http.closed:
                raise  # the engine was lost, and all calls on it are ended
            raise NoEngine(f"the outer gateway broke off: {lost_words(error)}") from error
        finally:
            if not done:
                self._gateway.forget(call.rid)

    def _refused(self, call: GenerateCall, status: int, body: bytes) -> TollwayError:
        code, words = _gateway_error(body)
        if code == "call_upstream_connection_failed":
            return EngineLost(f"engine {self.url}: the gateway cannot reach it: {words}", refused=True)
        if code.startswith("call_upstream_") or code == "stream_error":
            return EngineLost(f"engine {self.url}: the gateway lost it: {words}")
        if code in ("no_available_workers", "model_not_found"):
            return NoEngine(f"the gateway has no engine for the call: {words}")
        return super()._refused(call, status, body)


def _gateway_error(body: bytes) -> tuple[str, str]:
    """(code, message) of an error body that may be smg's own; engines' errors have no such code."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "", ""
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict):
        return "", ""
    code = error.get("code") or error.get("type")
    return (code if isinstance(code, str) else ""), str(error.get("message", ""))[:300]
