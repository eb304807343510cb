"""Looks at one engine: joins it, probes it, notices that it was started again.

One loop per engine, which never has more than one probe outstanding. Whether the engine is dead is decided by
``health``; what a change means for others is for the fleet, through callbacks. Depends on ``engines``,
``facts``, ``health``, ``member``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping

from tollway.errors import EngineLost, EngineRefused, InvalidRecord, TollwayError, UpstreamError
from tollway.records import PolicyVersion, parse_version
from tollway.router.config import RouterConfig
from tollway.router.engines import ModelInfo, ServerInfo
from tollway.router.facts import check_release, directory_config, read_facts, session_open, start_of
from tollway.router.health import EngineState
from tollway.router.member import Engine

__all__ = ["NOT_READY", "Watch"]

logger = logging.getLogger(__name__)
_JOIN_RETRY_S = 0.1
_JOIN_BACKOFF = 1.5
_EVICTED, _USAGE = "sglang:evicted_tokens_total", "sglang:token_usage"
_FACTS_EVERY = 5
"""Probes between two readings of the engine's eviction counter and of what tells its starts apart."""
_WAKE_PAUSE_S = 0.01
"""Many calls may fail at once; one extra probe answers for all of them."""
NOT_READY = "it says that it is not ready for requests: paused, or its memory is released"


class Watch:
    """Probes engines, each in a loop of its own."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        lost: Callable[[Engine], None],
        changed: Callable[[Engine], None],
        joining: Callable[[Engine, str], None],
        joined: Callable[[Engine], None],
    ) -> None:
        """``joining`` gets an engine that is about to join with its start, and raises why it may not."""
        self._config, self._lost, self._changed = config, lost, changed
        self._joining, self._joined = joining, joined

    async def follow(self, engine: Engine) -> None:
        """Probe ``engine`` until cancelled."""
        retry_s = _JOIN_RETRY_S
        while True:
            engine.wake.clear()
            await self._probe(engine)
            joining = engine.health.state is EngineState.JOINING
            pause_s = min(retry_s, self._config.probe_interval_s) if joining else self._config.probe_interval_s
            retry_s = retry_s * _JOIN_BACKOFF if joining else _JOIN_RETRY_S
            try:
                async with asyncio.timeout(pause_s):
                    await engine.wake.wait()
                await asyncio.sleep(_WAKE_PAUSE_S)
            except TimeoutError:
                pass

    async def read_evictions(self, engine: Engine) -> None:
        """Note the engine's eviction counter and how full it is; engines without metrics have neither.

        Raises what its metrics page raises: who can do without it, ignores that.
        """
        try:
            said = await engine.client.metrics(_EVICTED, _USAGE)
        except EngineRefused:
            return
        evicted, usage = ([each for each in said[name] if math.isfinite(each)] for name in (_EVICTED, _USAGE))
        engine.usage = max(usage, default=None)
        if evicted or not (said[_EVICTED] or engine.evicted):
            # SGLang shows a counter from its first count on: not there yet means 0.
            engine.evicted.append((time.monotonic(), sum(evicted)))

    async def _glance(self, engine: Engine) -> None:
        """The same for the sake of later: no harm comes from metrics that are missing, late or garbage."""
        try:
            await self.read_evictions(engine)
        except TollwayError as error:
            logger.debug("engine %s: no counters: %s", engine.url, error)

    # -- one probe ---------------------------------------------------------------------------------

    async def _probe(self, engine: Engine) -> None:
        health = engine.health
        said = health.last_error
        try:
            if health.state in (EngineState.JOINING, EngineState.LOST):
                await self._join(engine)
            else:
                await self._check(engine)
        except Exception as raised:  # boundary: whatever an engine says, its watch goes on
            if isinstance(raised, TollwayError):
                error = raised
            else:
                error = UpstreamError(f"engine {engine.url} said what cannot be understood: {raised!r}")
                if said != str(error):
                    logger.exception("looking at engine %s failed", engine.url)
            if health.failed(error, time.monotonic()):
                self._lost(engine)
            elif health.state in (EngineState.JOINING, EngineState.LOST):
                health.last_error = str(error)
                if said != str(error):  # said once, not at every try
                    logger.warning("engine %s cannot join yet: %s", engine.url, error)

    async def _check(self, engine: Engine) -> None:
        """One look at an engine that joined. Raises what ``EngineHealth.failed`` judges."""
        health = engine.health
        if not await self._same_weights(engine) or not await self._same_process(engine):
            return
        resumes = health.resumes
        ready = await engine.client.ready()
        if ready is False and not health.pause_reason and health.resumes == resumes:
            health.pause(NOT_READY, time.monotonic(), told=False)
            self._changed(engine)
        await self._check_generation(engine, ready=ready)
        health.probe_passed()
        engine.probes += 1
        if engine.probes % _FACTS_EVERY == 0:
            await self._glance(engine)

    async def _check_generation(self, engine: Engine, *, ready: bool | None) -> None:
        """Let it generate one token, unless tokens flow or it is known that none can."""
        health, now = engine.health, time.monotonic()
        told_lately = health.pause_told and now - health.paused_since <= self._config.busy_window_s
        if health.quarantine_reason or told_lately:
            return
        if not health.pause_reason and now - health.last_progress <= self._config.probe_interval_s:
            return
        try:
            generates = await engine.client.health_generate()
        except EngineLost as error:
            if error.refused or not health.pause_reason:
                raise
            generates = False
        if generates:
            if health.pause_reason and (ready is not False or await engine.client.ready() is not False):
                health.resume()
                self._changed(engine)
        elif not health.pause_reason:
            raise UpstreamError(f"engine {engine.url} answers, and generates nothing (/health_generate)")
        elif not health.pause_told:
            # A paused scheduler still answers, a dead one does not.
            await self._server_info(engine)

    async def _same_weights(self, engine: Engine) -> bool:
        """Whether it has the version that we know, or a newer one, which is then known; else it starts anew."""
        health, before = engine.health, engine.version
        info = await engine.client.model_info()
        if engine.version != before or health.pause_told or health.quarantine_reason:
            return True  # a refit is under way, and who makes it tells us
        try:
            version = parse_version(info.weight_version)
        except InvalidRecord as error:
            return self._restarted(engine, str(error))
        if before is not None and version < before:
            return self._restarted(engine, f"it has weights {version} and had {before}")
        if version != before:
            logger.info("engine %s has weights %d now", engine.name, version)
            engine.refitted(version, flushed=False)
            self._joined(engine)
        return True

    async def _same_process(self, engine: Engine) -> bool:
        """Whether it is still the process that joined; looked at now and then, and after a broken call."""
        if not engine.start_id or not (engine.doubted or engine.probes % _FACTS_EVERY == _FACTS_EVERY - 1):
            return True
        engine.doubted = False
        server = await self._server_info(engine)
        if server is None or start_of(server.raw) == engine.start_id:
            return True
        return self._restarted(engine, "its process is another one")

    def _restarted(self, engine: Engine, why: str) -> bool:
        engine.health.exited(f"it was started again: {why}")
        self._lost(engine)
        engine.wake.set()
        return False

    # -- joining -----------------------------------------------------------------------------------

    async def _join(self, engine: Engine) -> None:
        """Learn what it is, let it generate a token, confirm its version. Raises why it cannot join."""
        client, health = engine.client, engine.health
        info = await self._model_info(engine)
        server = await self._server_info(engine)
        said: Mapping[str, object] = server.raw if server is not None else {}
        check_release(engine.url, said)  # before its version: whoever stamps an old release does it in vain
        _parsed(engine, info)
        ready = await client.ready()
        if ready is not False and not await client.health_generate():
            raise UpstreamError(f"engine {engine.url} answers, and generates nothing yet (/health_generate)")
        await self._glance(engine)
        # Weights may have come while it was looked at, so the version is read last.
        version, model_path, raw = await self._version(engine)
        # From here on nothing is awaited: whoever sees it serve finds it in the table.
        start = start_of(said)
        self._joining(engine, start)
        self._learn(engine, server)
        engine.version, engine.model_path = version, model_path
        client.facts = read_facts(raw, said, directory_config(model_path))
        if health.quarantine_reason and start and start != engine.start_id:
            health.reloaded()
        engine.start_id = start
        health.confirmed()
        if session_open(said):
            health.quarantine("a weight-update session is open: its weights may be half-loaded")
        if ready is False:
            health.pause(NOT_READY, time.monotonic(), told=False)
        self._joined(engine)

    async def _version(self, engine: Engine) -> tuple[PolicyVersion, str, Mapping[str, object]]:
        """(version, model path, everything) of ``/model_info``."""
        info = await self._model_info(engine)
        return _parsed(engine, info), info.model_path, info.raw

    async def _model_info(self, engine: Engine) -> ModelInfo:
        """``/model_info`` of what is an engine by it."""
        try:
            info = await engine.client.model_info()
        except (EngineRefused, UpstreamError) as error:
            raise UpstreamError(_no_engine(engine.url, str(error).removeprefix(f"engine {engine.url} "))) from error
        if "weight_version" not in info.raw:
            raise UpstreamError(_no_engine(engine.url, "its /model_info names no weight_version"))
        return info

    async def _server_info(self, engine: Engine) -> ServerInfo | None:
        """``/server_info``; ``None`` when the server has none to tell."""
        try:
            return await engine.client.server_info()
        except EngineRefused:
            return None

    def _learn(self, engine: Engine, server: ServerInfo | None) -> None:
        """Limits of the engine; what it does not say is unknown."""
        budget = self._config.kv_budget_tokens
        if server is None:
            engine.max_total_tokens = budget
            return
        engine.context_length, engine.page_size = server.context_length, server.page_size
        engine.dp_ranks = server.dp_size
        reported = server.max_total_tokens
        engine.max_total_tokens = budget or (int(reported * self._config.kv_share) if reported is not None else None)


def _parsed(engine: Engine, info: ModelInfo) -> PolicyVersion:
    """Its weight version, which must be a number."""
    try:
        return parse_version(info.weight_version)
    except InvalidRecord as error:
        raise UpstreamError(f"engine {engine.url} cannot join: {error}") from error


def _no_engine(url: str, found: str) -> str:
    return f"{url} is no engine: {found}; want a server with SGLang's native HTTP surface (/model_info, /generate)"
