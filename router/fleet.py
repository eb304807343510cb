"""The engines of a router: adding, draining, losing and taking them back, and what all of them are up to.

Owns one HTTP session per engine, so that losing an engine ends every call on it at once, and the policy's version
as trainers told it: an engine that joins with older weights waits for them. Chooses nothing and generates
nothing. Depends on ``engines``, ``member``, ``watch``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import aiohttp

from tollway.errors import Conflict, EngineBusy, EngineLost, NoEngine, NotFound, TollwayError, UpstreamError
from tollway.records import PolicyVersion
from tollway.router import metrics
from tollway.router.addresses import Resolver, check_url
from tollway.router.config import RouterConfig
from tollway.router.engines import KEEP_ALIVE_S, EngineClient, Timeouts
from tollway.router.facts import is_unique
from tollway.router.health import EngineHealth, EngineState
from tollway.router.member import Engine, Membership
from tollway.router.policy import PolicyWeights
from tollway.router.watch import Watch

__all__ = ["Engine", "Fleet", "Membership", "RefitPhase"]

logger = logging.getLogger(__name__)

RefitPhase = Literal["paused", "resumed", "failed"]
"""What a trainer does to an engine: it stopped generation, lets it go on, or left its weights half-loaded."""
_LOOK_S = 0.5
"""Longest look at whether an engine is gone; one that does not answer in time may be busy."""


class Fleet:
    """All engines by id."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        on_change: Callable[[Engine], None],
        client: Callable[..., EngineClient] = EngineClient,
    ) -> None:
        self.engines: dict[str, Engine] = {}
        self.policy = PolicyWeights()
        self._numbers = itertools.count()
        """Of the ids that new engines get."""
        self.died: set[str] = set()
        """Ids of engines that were dead when they were taken away."""
        self._config = config
        self._on_change = on_change
        self._client = client
        self._watch = Watch(
            config,
            lost=self._lose,
            changed=self.changed,
            joining=partial(_check_twin, self.engines),
            joined=self._joined,
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """Ends of the pauses of engines that had no room."""
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._down_since: dict[str, float] = {"": time.monotonic()}
        """Monotonic seconds since when no engine of a model is ready."""

    async def aclose(self) -> None:
        """Stop probing, wait for aborts on their way, close every connection."""
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(engine.client.aclose() for engine in self.engines.values()))
        await asyncio.gather(*(engine.http.close() for engine in self.engines.values()))
        await asyncio.gather(*self._closing, return_exceptions=True)

    # -- members -----------------------------------------------------------------------------------

    def add(self, url: str, *, engine_id: str = "", membership: Membership | None = None) -> Engine:
        """Start watching the engine at ``url``; a known URL returns the known engine with what is new of it.

        ``engine_id`` is the id that it has elsewhere; by default it gets the next one. Raises ``BadRequest`` on a
        bad URL and ``Conflict`` when the engine is known with another model.
        """
        url = check_url(url, self._config.engine_hosts)
        for engine in self.engines.values():
            if engine.url == url:
                self._add_again(engine, membership)
                return engine
        http, client = _connect(url, self._config, self._client)
        health = EngineHealth(self._config.probe_failures, self._config.busy_window_s)
        name = engine_id or next(each for n in self._numbers if (each := f"e{n}") not in self.engines)
        engine = Engine(name, url, client, http, health, membership or Membership())
        self.engines[engine.id] = engine
        self._note_down(engine.model)
        self._tasks[name] = asyncio.get_running_loop().create_task(self._watch.follow(engine), name=f"probe {name}")
        return engine

    def _add_again(self, engine: Engine, membership: Membership | None) -> None:
        if membership is not None and membership != engine.membership:
            if membership.model != engine.model:
                raise Conflict(
                    f"engine {engine.id} at {engine.url} serves model {engine.model or 'policy'!r}, not "
                    f"{membership.model or 'policy'!r}; remove it first"
                )
            engine.membership = membership
            self.changed(engine)
        engine.wake.set()

    async def look(self, engine: Engine) -> None:
        """Find out now, not at the next probe, when nobody listens at the engine's address any more."""
        try:
            async with asyncio.timeout(_LOOK_S):
                await engine.client.model_info()
        except EngineLost as error:
            if error.refused:
                self.failed(engine, error)
        except Exception as error:  # boundary: whatever it answers, who looks wants to take it away
            logger.debug("engine %s was looked at and is not known to be gone: %r", engine.name, error)

    async def remove(self, engine_id: str) -> None:
        """Forget an engine; its running calls end with ``EngineLost``."""
        engine = self.get(engine_id)
        # It is gone before anything is awaited: a second removal, or a new engine under its id, meets none of it.
        del self.engines[engine_id]
        (self.died.add if engine.health.state is EngineState.LOST else self.died.discard)(engine_id)
        task = self._tasks.pop(engine_id)
        task.cancel()
        if (timer := self._timers.pop(engine_id, None)) is not None:
            timer.cancel()
        engine.health.exited("removed")
        self.changed(engine)
        logger.info("engine %s is removed", engine.name)
        engine.client.hang_up()
        await asyncio.gather(task, return_exceptions=True)
        await engine.client.aclose()
        await engine.http.close()

    def drain(self, engine: Engine) -> None:
        """No new session goes to the engine; its own go on."""
        engine.health.drain()
        logger.info("engine %s takes no new sessions", engine.name)
        self.changed(engine)

    def undrain(self, engine: Engine) -> None:
        """The engine takes new sessions again, as soon as it can."""
        engine.health.undrain()
        logger.info("engine %s takes new sessions again", engine.name)
        self.changed(engine)

    def get(self, engine_id: str) -> Engine:
        """Engine by id. Raises ``NotFound``."""
        try:
            return self.engines[engine_id]
        except KeyError:
            known = ", ".join(sorted(self.engines)) or "none"
            raise NotFound(f"no engine {engine_id!r}; known engines: {known}") from None

    # -- weights -----------------------------------------------------------------------------------

    def note_refit(
        self,
        engine_id: str,
        version: PolicyVersion | None,
        *,
        flushed: bool,
        phase: RefitPhase | None = None,
        reason: str = "",
    ) -> Engine:
        """A trainer paused, flushed or reloaded an engine, lets it go on, or failed half-way for ``reason``.

        ``version`` is what all its weights are now; ``None`` while they are what they were. Raises ``NotFound``.
        """
        engine = self.get(engine_id)
        health = engine.health
        if phase == "paused":
            health.pause("a trainer paused it for new weights", time.monotonic(), told=True)
        engine.refitted(version, flushed=flushed)
        if version is not None:
            self.policy.reloaded(engine, version)
            health.reloaded()
            if health.state is EngineState.SYNCED:
                health.serve()
        if phase == "resumed":
            health.resume()
        if phase == "failed":
            health.quarantine(f"a refit failed half-way: {reason or 'no reason was given'}")
            logger.error("engine %s is quarantined: %s", engine.name, health.quarantine_reason)
        self.changed(engine)
        return engine

    # -- states ------------------------------------------------------------------------------------

    def serving(self, model: str = "") -> list[str]:
        """Ids of engines of ``model`` that take new sessions."""
        return [
            each.id
            for each in self.engines.values()
            if each.model == model and each.health.state is EngineState.SERVING
        ]

    def soon(self, model: str = "") -> bool:
        """Whether an engine of ``model`` takes no session now and will by itself: paused, or without room."""
        now = time.monotonic()
        return any(each.model == model and each.pauses(now) for each in self.engines.values())

    async def wait_serving(self, timeout_s: float, count: int = 1, model: str = "") -> None:
        """Wait until ``count`` engines take traffic. Raises ``NoEngine`` with every engine's last words."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.serving(model)) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise self.none_left(model) from None

    def none_left(self, model: str = "") -> NoEngine:
        """The error for a call that no engine can take."""
        words = "; ".join(self.words(model)) or "none is registered"
        return NoEngine(f"no engine can take the call ({words})")

    def report(self, model: str | None = None) -> list[dict[str, object]]:
        """What every engine is and why, for whoever asks whether turns can be served; of one model or of all."""
        return [each.brief() for each in self.engines.values() if model is None or each.model == model]

    def words(self, model: str | None = None) -> list[str]:
        """``report`` in words, a line for each engine."""
        return [
            f"{row['url']} is {row['state']}" + (f": {row['reason']}" if row["reason"] else "")
            for row in self.report(model)
        ]

    def down_s(self, model: str = "") -> float:
        """How long no engine of ``model`` has been ready: serving, or paused by a trainer. 0 while one is."""
        since = self._down_since.get(model)
        return 0.0 if since is None else time.monotonic() - since

    def rollout_down(self, model: str = "") -> str:
        """Why a run that needs ``model`` has to end: no engine was ready for too long. Empty while it need not."""
        limit = self._config.rollout_down_timeout_s
        if (down_s := self.down_s(model)) < limit:
            return ""
        words = "; ".join(self.words(model)) or "none is registered"
        return f"no engine was ready for {down_s:.0f} s (router.rollout_down_timeout_s {limit:g}): {words}"

    def failed(self, engine: Engine, error: TollwayError) -> None:
        """A call failed. A lost connection counts and is looked into at once; "no room" stops admission for a while."""
        if self.engines.get(engine.id) is not engine:
            return  # removed meanwhile; another one may have its id
        if isinstance(error, EngineBusy):
            self._rest(engine)
            return
        waits = engine.health.pause_reason and isinstance(error, EngineLost) and error.timed_out
        if isinstance(error, EngineLost) and not waits and engine.health.failed(error, time.monotonic()):
            self._lose(engine)
            return
        engine.doubted = True
        engine.wake.set()

    def changed(self, engine: Engine) -> None:
        """Publish a change of state."""
        metrics.ENGINES_SERVING.set(sum(e.health.state is EngineState.SERVING for e in self.engines.values()))
        self._note_down(engine.model)
        self._on_change(engine)
        self._changed.set()

    async def read_evictions(self, engine: Engine) -> None:
        """Note the engine's eviction counter and usage; engines without metrics have neither. Raises when it fails."""
        await self._watch.read_evictions(engine)

    # -- pieces ------------------------------------------------------------------------------------

    def _joined(self, engine: Engine) -> None:
        """Its version is confirmed: open it, or say what it waits for."""
        if reason := self.policy.holds_back(engine):
            engine.health.wait(reason)
        else:
            engine.health.serve()
        state, reason = engine.health.state, engine.health.reason
        logger.info(
            "engine %s has weights %s and is %s%s", engine.name, engine.version, state, reason and f": {reason}"
        )
        if engine.client.facts.cumulative_streams:
            logger.warning(
                "engine %s repeats the whole reply in every event of a stream; start it with "
                "--incremental-streaming-output when long replies are streamed",
                engine.url,
            )
        self.changed(engine)

    def _lose(self, engine: Engine) -> None:
        others = len([each for each in self.engines.values() if each is not engine and each.health.takes_calls])
        on = f"{others} of {len(self.engines)} engines go on" if others else "no other engine is left"
        logger.error("engine %s is lost: %s; %s", engine.name, engine.health.last_error, on)
        metrics.LOST.inc()
        old = engine.http
        old_client = engine.client
        engine.http, engine.client = _connect(engine.url, self._config, self._client)
        # Every call on it ends with EngineLost.
        old_client.hang_up()
        task = asyncio.get_running_loop().create_task(old.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        self.changed(engine)

    def _rest(self, engine: Engine) -> None:
        """No new session for an engine that has no room, for a while."""
        pause_s = self._config.busy_pause_s
        if time.monotonic() >= engine.busy_until:
            logger.warning("engine %s has no room: no new session for %g s", engine.name, pause_s)
        engine.busy_until = time.monotonic() + pause_s
        if (timer := self._timers.pop(engine.id, None)) is not None:
            timer.cancel()
        self._timers[engine.id] = asyncio.get_running_loop().call_later(pause_s, self.relieved, engine)
        self.changed(engine)

    def relieved(self, engine: Engine) -> None:
        """The engine has room again: its pause is over, or it served a call."""
        if engine.busy_until == float("-inf") or self.engines.get(engine.id) is not engine:
            return
        engine.busy_until = float("-inf")
        if (timer := self._timers.pop(engine.id, None)) is not None:
            timer.cancel()
        self.changed(engine)

    def _note_down(self, model: str) -> None:
        if any(each.model == model and _ready(each) for each in self.engines.values()):
            self._down_since.pop(model, None)
        else:
            self._down_since.setdefault(model, time.monotonic())


def _check_twin(engines: Mapping[str, Engine], engine: Engine, start: str) -> None:
    """Raise ``UpstreamError`` when ``engine`` has joined as the same process under another address."""
    for each in engines.values():
        joined = each.health.state not in (EngineState.JOINING, EngineState.LOST)
        if each is not engine and joined and start and each.start_id == start and is_unique(start):
            raise UpstreamError(f"it is the same process as {each.id} at {each.url}; remove one of them")


def _ready(engine: Engine) -> bool:
    """Whether it serves new sessions, or would but for a trainer's pause."""
    health = engine.health
    return health.state is EngineState.SERVING or (
        health.state is EngineState.PAUSED and health.pause_told and not health.drained
    )


def _connect(
    url: str, c: RouterConfig, client: Callable[..., EngineClient]
) -> tuple[aiohttp.ClientSession, EngineClient]:
    http = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, resolver=Resolver()),
        cookie_jar=aiohttp.DummyCookieJar(),
        # A reply with expert choices is a megabyte: with less room its reading stops and starts again.
        read_bufsize=1 << 20,
        auto_decompress=True,
    )
    timeouts = Timeouts(
        connect_s=c.connect_timeout_s,
        control_s=c.control_timeout_s,
        probe_s=c.probe_timeout_s,
        call_s=c.call_timeout_s,
        progress_s=c.progress_timeout_s,
    )
    return http, client(url, http, timeouts=timeouts)
