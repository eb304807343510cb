"""Who answers the model calls of an evaluation or a single episode: a running server, or one that is started for it.

Joins parts that ``app`` opens. Whatever it is, it can be watched: when it is lost, the work on it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp

from tollway import app
from tollway.envs.base import Sessions
from tollway.envs.modelless import ModellessSessions
from tollway.errors import ComponentLost, ConfigError, EngineLost, RolloutDown, TollwayError
from tollway.fleet_watch import FleetKeeper, Members
from tollway.router.supervisor import ServerProcess
from tollway.sandboxes.base import SandboxProvider
from tollway.sandboxes.registry import open_provider
from tollway.session_server.client import SessionClient
from tollway.settings import ADMIN_KEY_VARIABLE, Settings, admin_key

__all__ = ["Stage", "Where", "open_stage"]

_LOOK_S = 2.0
"""Between two looks at a server."""
_LOOK_TIMEOUT_S = 15.0
_DOWN_S = 60.0
"""How long a server may give no answer before the work on it ends: dead is not slow. One whose address refuses is
found by the first episode that it fails."""
_RETRY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What answers: a server by address, engines by address, or so many engines to start; nothing for neither."""

    url: str | None = None
    engines: tuple[str, ...] = ()
    start: int = 0

    def __post_init__(self) -> None:
        if self.start < 0:
            raise ConfigError(f"--start-engines {self.start}: want a number of engines")
        if (self.url is not None) + bool(self.engines) + bool(self.start) > 1:
            raise ConfigError("--url, --engine and --start-engines exclude each other: name who answers once")

    def __bool__(self) -> bool:
        return self.url is not None or bool(self.engines) or bool(self.start)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where episodes run."""

    sessions: Sessions
    provider: SandboxProvider
    _watch: Coroutine[object, object, None] | None = None
    _server: SessionClient | None = None

    async def check(self, error: TollwayError | None) -> None:
        """After an episode that nobody answered: raise ``ComponentLost`` when it is the server itself that is gone."""
        if self._server is None or not isinstance(error, EngineLost):
            return
        try:
            await self._server.fleet()
        except EngineLost as gone:
            raise ComponentLost(str(gone)) from gone

    async def watch(self) -> None:
        """Never returns. Raises ``ComponentLost`` when nobody answers any more."""
        if self._watch is None:
            await asyncio.Event().wait()
        else:
            await self._watch


@asynccontextmanager
async def open_stage(settings: Settings, where: Where) -> AsyncIterator[Stage]:
    """Start or reach what ``where`` says; without anything there is a stage without a model."""
    async with AsyncExitStack() as stack:
        sessions, watch = await _sessions(settings, where, stack)
        provider = open_provider(settings.sandbox)
        stack.push_async_callback(provider.aclose)
        try:
            yield Stage(sessions, provider, watch, sessions if isinstance(sessions, SessionClient) else None)
        finally:
            if watch is not None:
                watch.close()  # of one that was never awaited


async def _sessions(
    settings: Settings, where: Where, stack: AsyncExitStack
) -> tuple[Sessions, Coroutine[object, object, None] | None]:
    if not where:
        return ModellessSessions(), None
    http = await stack.enter_async_context(app.open_http())
    if where.url is not None:
        sessions = SessionClient(where.url, _key_of(where.url), http=http, retry_s=_RETRY_S)
        await sessions.fleet()  # says what is wrong with the address or the key before anything is started
        return sessions, _watch_server(sessions.base_url, _key_of(where.url), http, None)
    key = admin_key()
    folder = settings.run_dir / "eval"  # the caller holds the run directory
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    overrides = [
        *(f"server.journal={json.dumps(str(folder / 'journal.sqlite'))}", "server.engine_wait_s=30.0"),
        *('server.host="127.0.0.1"', "server.port=0", "server.workers=1"),
    ]
    if where.engines:
        server = await stack.enter_async_context(app.open_server(settings, where.engines, key, overrides))
        sessions = SessionClient(server.url, key, http=http, retry_s=_RETRY_S)
        await Members(sessions, http).wait_joined(where.engines, app.JOIN_S)
        return sessions, _watch_server(server.url, key, http, server)
    return await _started(settings, where.start, (key, overrides), http, stack)


async def _started(
    settings: Settings,
    count: int,
    server_with: tuple[str, list[str]],
    http: aiohttp.ClientSession,
    stack: AsyncExitStack,
) -> tuple[Sessions, Coroutine[object, object, None]]:
    key, overrides = server_with
    model = settings.engine.model_path or app.base_model(settings)
    engines = await stack.enter_async_context(app.open_engines(settings, model, count=count))
    server = await stack.enter_async_context(app.open_server(settings, engines.urls, key, overrides, engines=engines))
    sessions = SessionClient(server.url, key, http=http, retry_s=_RETRY_S)
    members = Members(sessions, http)
    stack.push_async_callback(members.aclose)
    await members.wait_joined(engines.urls, app.JOIN_S)
    return sessions, FleetKeeper(engines, server, members, needs_engines=True).watch()


async def _watch_server(url: str, key: str, http: aiohttp.ClientSession, server: ServerProcess | None) -> None:
    """Look at a server now and then. Raises ``ComponentLost`` when it is gone, or has had no engine for too long."""
    sessions = SessionClient(url, key, http=http, timeout_s=_LOOK_TIMEOUT_S, retry_s=0.0)
    answered = time.monotonic()
    while True:
        await asyncio.sleep(_LOOK_S)
        if server is not None and server.returncode is not None:
            raise server.lost()
        try:
            fleet = await sessions.fleet()
        except TollwayError as error:
            if time.monotonic() - answered > _DOWN_S:
                raise ComponentLost(f"the session server has not answered for {_DOWN_S:g} s: {error}") from error
            continue
        answered = time.monotonic()
        if fleet.get("rollout_down"):
            raise RolloutDown(str(fleet["rollout_down"]))


def _key_of(url: str) -> str:
    if not (key := os.environ.get(ADMIN_KEY_VARIABLE)):
        raise ConfigError(f"set {ADMIN_KEY_VARIABLE} to the admin key of the server at {url}: it alone opens sessions")
    return key
