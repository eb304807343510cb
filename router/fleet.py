"""The engines of a router: joining, probing, losing and taking them back.

Owns one HTTP session per engine, so that losing an engine ends every call on it at once, and one probe
task per engine, which never has more than one probe outstanding. Chooses nothing and generates nothing.
Depends on ``engines`` and ``health``.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from ipaddress import ip_address
from urllib.parse import urlsplit

import aiohttp

from tollway.errors import BadRequest, EngineRefused, InvalidRecord, NoEngine, NotFound, TollwayError, UpstreamError
from tollway.records import PolicyVersion, parse_version
from tollway.router import metrics
from tollway.router.config import RouterConfig
from tollway.router.engines import KEEP_ALIVE_S, EngineClient, Timeouts
from tollway.router.facts import directory_config, read_facts
from tollway.router.health import EngineHealth, EngineState

__all__ = ["Engine", "Fleet", "check_url"]

logger = logging.getLogger(__name__)
_JOIN_RETRY_S = 0.1
_EVICTION_EVERY = 5
"""Probes between two readings of the engine's eviction counter."""


@dataclass(slots=True)
class Engine:
    """One engine and what is known of it."""

    id: str
    url: str
    client: EngineClient
    http: aiohttp.ClientSession
    health: EngineHealth
    version: PolicyVersion | None = None
    model_path: str = ""
    context_length: int | None = None
    page_size: int = 1
    max_total_tokens: int | None = None
    flush_epoch: int = 0
    flushed: bool = False
    """It was flushed and has no new version since."""
    flushed_versions: deque[PolicyVersion] = field(default_factory=lambda: deque(maxlen=4096))
    """Versions whose refit dropped the prefix cache, oldest first."""
    evicted: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=512))
    """(monotonic seconds, evicted tokens so far), oldest first."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to probe now."""
    probes: int = 0
    drained: bool = False
    """It takes no new sessions, also when it comes back."""

    @property
    def name(self) -> str:
        """URL and incarnation: what records call this engine."""
        return f"{self.url}#{self.health.incarnation}"

    def flushed_since(self, version: PolicyVersion, upto: PolicyVersion) -> bool:
        """Whether a refit to a version in (``version``, ``upto``] dropped the cache."""
        return any(version < flushed <= upto for flushed in self.flushed_versions)

    def refitted(self, version: PolicyVersion | None, *, flushed: bool) -> None:
        """Note a flush, a new version, or both; a flush belongs to the version that comes with or after it."""
        if flushed:
            self.flush_epoch += 1
            self.flushed = True
        if version is not None:
            self.version = version
            if self.flushed:
                self.flushed_versions.append(version)
            self.flushed = False

    def describe(self) -> dict[str, object]:
        """JSON form for ``GET /engines``."""
        return {
            "id": self.id,
            "url": self.url,
            "incarnation": self.health.incarnation,
            "state": str(self.health.state),
            "version": self.version,
            "flush_epoch": self.flush_epoch,
            "model_path": self.model_path,
            "kind": self.client.facts.kind,
            "release": self.client.facts.release,
            "precision": self.client.facts.precision,
            "context_length": self.context_length,
            "page_size": self.page_size,
            "kv_budget_tokens": self.max_total_tokens,
            "failures": self.health.failures,
            "last_error": self.health.last_error,
        }


class Fleet:
    """All engines by id."""

    def __init__(self, config: RouterConfig, *, on_change: Callable[[Engine], None]) -> None:
        self.engines: dict[str, Engine] = {}
        self._config = config
        self._on_change = on_change
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.next_number = 0
        """Of the id that the next new engine gets."""

    async def aclose(self) -> None:
        """Stop probing, wait for aborts on their way, close every connection."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(engine.client.aclose() for engine in self.engines.values()))
        await asyncio.gather(*(engine.http.close() for engine in self.engines.values()))
        await asyncio.gather(*self._closing, return_exceptions=True)

    def add(self, url: str, *, engine_id: str = "") -> Engine:
        """Start watching the engine at ``url``; a known URL returns the known engine. ``BadRequest`` on a bad URL.

        ``engine_id`` is the id that it has elsewhere; by default it gets the next one.
        """
        url = check_url(url, self._config.engine_hosts)
        for engine in self.engines.values():
            if engine.url == url:
                engine.wake.set()
                return engine
        http, client = self._connect(url)
        health = EngineHealth(self._config.probe_failures, self._config.busy_window_s)
        engine = Engine(engine_id or f"e{self.next_number}", url, client, http, health)
        self.next_number += 0 if engine_id else 1
        self.engines[engine.id] = engine
        self._tasks[engine.id] = asyncio.get_running_loop().create_task(self._watch(engine), name=f"probe {engine.id}")
        return engine

    async def remove(self, engine_id: str) -> None:
        """Forget an engine; its running calls end with ``EngineLost``."""
        engine = self.get(engine_id)
        task = self._tasks.pop(engine_id)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.health.exited("removed")
        del self.engines[engine_id]
        self.changed(engine)
        await engine.client.aclose()
        await engine.http.close()

    def drain(self, engine: Engine) -> None:
        """No new session goes to the engine; its own go on."""
        engine.drained = True
        engine.health.drain()
        self.changed(engine)

    def get(self, engine_id: str) -> Engine:
        """Engine by id. Raises ``NotFound``."""
        try:
            return self.engines[engine_id]
        except KeyError:
            known = ", ".join(sorted(self.engines)) or "none"
            raise NotFound(f"no engine {engine_id!r}; known engines: {known}") from None

    def serving(self) -> list[str]:
        """Ids of engines that take new sessions."""
        return [each.id for each in self.engines.values() if each.health.state is EngineState.SERVING]

    async def wait_serving(self, timeout_s: float, count: int = 1) -> None:
        """Wait until ``count`` engines take traffic. Raises ``NoEngine`` with every engine's last words."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.serving()) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise self.none_left() from None

    def none_left(self) -> NoEngine:
        """The error for a call that no engine can take."""
        states = [(each.url, each.health.state, each.health.last_error) for each in self.engines.values()]
        words = [f"{url} is {state}" + (f": {error}" if error else "") for url, state, error in states]
        return NoEngine(f"no engine can take the call ({'; '.join(words) or 'none is registered'})")

    def failed(self, engine: Engine, error: TollwayError) -> None:
        """A call or probe failed: count it, and probe at once so that death is known soon."""
        if engine.health.failed(error, time.monotonic()):
            self._lose(engine)
        else:
            engine.wake.set()

    def changed(self, engine: Engine) -> None:
        """Publish a change of state."""
        metrics.ENGINES_SERVING.set(len(self.serving()))
        self._on_change(engine)
        self._changed.set()

    # -- watching ----------------------------------------------------------------------------------

    async def _watch(self, engine: Engine) -> None:
        while True:
            engine.wake.clear()
            await self._probe(engine)
            joining = engine.health.state is EngineState.JOINING
            try:
                async with asyncio.timeout(_JOIN_RETRY_S if joining else self._config.probe_interval_s):
                    await engine.wake.wait()
                # Many calls may fail at once; one extra probe answers for all of them.
                await asyncio.sleep(0.01)
            except TimeoutError:
                pass

    async def _probe(self, engine: Engine) -> None:
        try:
            if engine.health.state in (EngineState.JOINING, EngineState.LOST):
                await self._join(engine)
            elif await engine.client.health():
                engine.health.probe_passed()
                engine.probes += 1
                if engine.probes % _EVICTION_EVERY == 0:
                    await self.read_evictions(engine)
            else:
                raise UpstreamError(f"engine {engine.url} answers its health check with an error")
        except TollwayError as error:
            if engine.health.failed(error, time.monotonic()):
                self._lose(engine)
            elif engine.health.state is EngineState.JOINING:
                if engine.health.last_error != str(error):  # said once, not at every try
                    logger.warning("engine %s cannot join yet: %s", engine.url, error)
                engine.health.last_error = str(error)

    async def _join(self, engine: Engine) -> None:
        info = await engine.client.model_info()
        try:
            version = parse_version(info.weight_version)
        except InvalidRecord as error:
            raise UpstreamError(f"engine {engine.url} cannot join: {error}") from error
        said: Mapping[str, object] = {}
        try:
            server = await engine.client.server_info()
            said = server.raw
            engine.context_length, engine.page_size = server.context_length, server.page_size
            reported = server.max_total_tokens
            share = int(reported * self._config.kv_share) if reported is not None else None
            engine.max_total_tokens = self._config.kv_budget_tokens or share
        except EngineRefused:
            engine.max_total_tokens = self._config.kv_budget_tokens
        engine.version, engine.model_path = version, info.model_path
        engine.client.facts = read_facts(info.raw, said, directory_config(info.model_path))
        await self.read_evictions(engine)
        # From here on nothing is awaited: whoever sees it serve finds it in the table.
        engine.health.confirmed()
        engine.health.serve()
        if engine.drained:
            engine.health.drain()
        logger.info("engine %s serves version %d", engine.name, version)
        if engine.client.facts.cumulative_streams:
            logger.warning(
                "engine %s repeats the whole reply in every event of a stream; start it with "
                "--incremental-streaming-output when long replies are streamed",
                engine.url,
            )
        self.changed(engine)

    async def read_evictions(self, engine: Engine) -> None:
        """Note the engine's eviction counter; engines without metrics have none."""
        try:
            value = await engine.client.metric("sglang:evicted_tokens_total")
        except EngineRefused:
            return
        if value is not None:
            engine.evicted.append((time.monotonic(), value))

    def _lose(self, engine: Engine) -> None:
        logger.error("engine %s is lost: %s", engine.name, engine.health.last_error)
        metrics.LOST.inc()
        old = engine.http
        engine.http, client = self._connect(engine.url)
        engine.client = client
        # Closing its connections ends every call on it with EngineLost.
        task = asyncio.get_running_loop().create_task(old.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        self.changed(engine)

    def _connect(self, url: str) -> tuple[aiohttp.ClientSession, EngineClient]:
        c = self._config
        http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
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
        return http, EngineClient(url, http, timeouts=timeouts)


def check_url(url: str, allowed: Sequence[str] = ("*",)) -> str:
    """An engine's URL: http or https, an allowed host, no credentials, no query. Raises ``BadRequest``.

    Link-local addresses are refused whatever is allowed: metadata services of clouds answer there.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadRequest(f"engine url {url!r}: {error}", param="url") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
        raise BadRequest(f"engine url {url!r}: want http://host:port without credentials", param="url")
    if parts.query or parts.fragment or port == 0:
        raise BadRequest(f"engine url {url!r}: want http://host:port without query or fragment", param="url")
    host = parts.hostname.lower()
    if not url.isascii() or not url.isprintable() or " " in url:
        raise BadRequest(f"engine url {url!r}: want printable ASCII without spaces", param="url")
    if not any(fnmatchcase(host, pattern.lower()) for pattern in allowed):
        raise BadRequest(f"engine host {host} is not in router.engine_hosts: {', '.join(allowed)}", param="url")
    if _is_link_local(host):
        raise BadRequest(f"engine url {url!r} is a link-local address; no engine is served there", param="url")
    return url.rstrip("/")


def _is_link_local(host: str) -> bool:
    try:
        address = ip_address(socket.inet_ntoa(socket.inet_aton(host)))  # 0xa9fe0001 and 169.254.1 are addresses, too
    except OSError:
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_link_local)
