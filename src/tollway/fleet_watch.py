"""The engines of a running fleet, seen from the process that owns it: who is there, who needs weights, who is gone.

Joins three parts that know nothing of each other: the launcher that starts engines, the session server that routes
to them, and the trainer's refit. Owns the rule that ends a run without engines. Depends on all three.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import cast

import aiohttp

from tollway.envs.base import Environment, Task
from tollway.envs.episode import Episode
from tollway.envs.runner import EpisodeRunner
from tollway.errors import ComponentLost, EngineLost, NoEngine, RolloutDown
from tollway.ports import EpisodeSource, GroupRequest
from tollway.records import Group, Sampling
from tollway.router.engines import EngineClient, Timeouts
from tollway.router.health import EngineState
from tollway.router.launch import EngineLauncher
from tollway.router.supervisor import ServerProcess
from tollway.session_server.client import Json, SessionClient
from tollway.trainer.weights.refit import Refit, RefitNotice

__all__ = ["FleetKeeper", "Members", "PatientEpisodes"]

logger = logging.getLogger(__name__)
_LOOK_S = 1.0
"""Between two looks at the fleet."""
_LAST_WORDS_S = 2.0
"""How long a call without an answer waits for the news that the session server ended."""
_GROUP_TRIES = 5
"""How often a group whose every attempt met a dead engine is run anew."""
_GONE = (EngineState.JOINING, EngineState.LOST)
_NEEDS_WEIGHTS = (EngineState.SYNCED, EngineState.QUARANTINED)


class Members:
    """The engines that the session server knows, with a client for each. ``control_s`` bounds each call of a refit."""

    def __init__(self, sessions: SessionClient, http: aiohttp.ClientSession, *, control_s: float = 120.0) -> None:
        self._sessions, self._http = sessions, http
        self._timeouts = Timeouts(control_s=control_s)
        self._clients: dict[str, EngineClient] = {}
        self._ids: dict[str, str] = {}
        """Engine id by address."""

    async def aclose(self) -> None:
        """Wait for what is still on its way to engines."""
        await asyncio.gather(*(client.aclose() for client in self._clients.values()))

    async def fleet(self) -> Json:
        """``GET /engines``."""
        fleet = await self._sessions.fleet()
        self._ids = {str(row["url"]): str(row["id"]) for row in _rows(fleet)}
        return fleet

    async def targets(self) -> Sequence[EngineClient]:
        """Every engine that a trainer brings weights to and that can be reached."""
        return [
            self._client(row)
            for row in _rows(await self.fleet())
            if not row["model"] and not row["frozen"] and row["state"] not in _GONE
        ]

    async def waiting(self) -> Sequence[EngineClient]:
        """Those of ``targets`` that may not serve before they got weights."""
        return [
            self._client(row)
            for row in _rows(await self.fleet())
            if not row["model"] and not row["frozen"] and row["state"] in _NEEDS_WEIGHTS
        ]

    async def tell(self, notice: RefitNotice) -> None:
        """Let the session server know what a refit did to one engine."""
        await self._sessions.refit(
            self._id(notice.url), notice.version, flushed=notice.flushed, phase=notice.phase, reason=notice.reason
        )

    async def drained(self, url: str, *, limit_s: float) -> None:
        """Wait until nobody needs exactly the weights that an engine has, for at most ``limit_s``."""
        clock, pause_s = asyncio.get_running_loop().time, 0.05
        deadline = clock() + limit_s
        while True:
            row = await self._sessions.engine(self._id(url))
            sessions, calls = row.get("exact_sessions", 0), row.get("exact_calls", 0)
            if not sessions and not calls:
                return
            left_s = deadline - clock()
            if left_s <= 0:
                logger.warning(
                    "engine %s gets new weights although %s sessions and %s calls are fixed to version %s: they had "
                    "trainer.exact_drain_s, which is %g s",
                    *(url, sessions, calls, row.get("version"), limit_s),
                )
                return
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LOOK_S)

    async def forget(self, url: str) -> None:
        """Take an engine out of routing; one that is not in it is fine."""
        await self.fleet()
        if (engine_id := self._ids.get(url)) is not None:
            await self._sessions.remove_engine(engine_id)

    async def welcome(self, url: str) -> None:
        """Add an engine that was started again: its weights are those of the first day."""
        await self._sessions.add_engine(url, stale=True)

    async def wait_joined(self, urls: Sequence[str], timeout_s: float) -> None:
        """Wait until the session server routes to all of ``urls``. Raises ``ComponentLost`` with what hinders them."""
        rows: list[Json] = []
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    rows = [row for row in _rows(await self.fleet()) if row["url"] in urls]
                    if len([row for row in rows if row["state"] not in _GONE]) == len(urls):
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            words = "; ".join(_words(row) for row in rows if row["state"] in _GONE)
            raise ComponentLost(f"engines that were started did not join within {timeout_s:g} s: {words}") from None

    def _id(self, url: str) -> str:
        """Its id. Raises ``EngineLost`` for an engine that was taken away while a refit was at it."""
        try:
            return self._ids[url]
        except KeyError:
            raise EngineLost(f"engine {url} is not in the fleet any more") from None

    def _client(self, row: Json) -> EngineClient:
        url = str(row["url"])
        if url not in self._clients:
            self._clients[url] = EngineClient(url, self._http, timeouts=self._timeouts)
        return self._clients[url]


class FleetKeeper:
    """Watches a fleet. One that ``needs_engines`` ends when none has been ready for too long."""

    def __init__(
        self, engines: EngineLauncher, server: ServerProcess, members: Members, *, needs_engines: bool
    ) -> None:
        self._engines, self._server, self._members, self._needs_engines = engines, server, members, needs_engines
        self.refit: Refit | None = None
        """Brings weights to engines that come back, once there is one."""

    async def watch(self) -> None:
        """Never returns. Raises ``ComponentLost`` when the fleet cannot go on, with last words."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_server(), name="session server")
                tasks.create_task(self._engines.keep(down=self._forget, up=self._members.welcome))
                tasks.create_task(self._catch_up(), name="catch up")
                tasks.create_task(self._look_after(), name="fleet")
        except BaseExceptionGroup as errors:
            lost = next((each for each in errors.exceptions if isinstance(each, ComponentLost)), None)
            if lost is None:
                # A call that got no answer says less than the end of whoever should have given it.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._server.wait(), _LAST_WORDS_S)
                    lost = self._server.lost()
            raise lost or errors.exceptions[0] from None

    async def wait_ready(self) -> None:
        """Wait until an engine takes sessions; ``watch`` ends the run when none ever does."""
        while True:
            if any(row["state"] == EngineState.SERVING for row in _rows(await self._members.fleet())):
                return
            await asyncio.sleep(_LOOK_S)

    async def _forget(self, url: str) -> None:
        """An engine died: what is started at its address has neither its weights nor its sleep."""
        if self.refit is not None:
            self.refit.forget(url)
        await self._members.forget(url)

    async def _keep_server(self) -> None:
        await self._server.wait()
        raise self._server.lost()

    async def _catch_up(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if self.refit is not None and (waiting := await self._members.waiting()):
                await self.refit.catch_up(waiting)

    async def _look_after(self) -> None:
        said = 0.0
        while True:
            await asyncio.sleep(_LOOK_S)
            fleet = await self._members.fleet()
            for row in _rows(fleet):
                if row["state"] == EngineState.LOST:
                    self._engines.give_up(str(row["url"]))
            down_s = cast(float, fleet["down_s"])
            if self._needs_engines and fleet["rollout_down"]:
                raise RolloutDown(f"{fleet['rollout_down']}\n{self._engines.last_words()}")
            words = "; ".join(map(_words, _rows(fleet))) or "none is registered"
            if down_s and not said:
                logger.error("no engine is ready: %s", words)
            elif said and not down_s:
                logger.warning("engines are ready again after %.0f s: %s", said, words)
            said = down_s


class PatientEpisodes(EpisodeSource):
    """Runs anew what no engine answered any attempt of, once there is an engine again."""

    def __init__(self, source: EpisodeRunner, keeper: FleetKeeper, environment: Environment) -> None:
        self._source, self._keeper = source, keeper
        self.environment = environment

    async def run_group(self, request: GroupRequest) -> Group:
        for _ in range(_GROUP_TRIES - 1):
            try:
                return await self._source.run_group(request)
            except ComponentLost as error:
                if not isinstance(error.__cause__, NoEngine | EngineLost):
                    raise
                logger.warning("group %s waits for an engine: %s", request.group_id, error)
            await self._keeper.wait_ready()
        return await self._source.run_group(request)

    async def run_task(self, task: Task, *, group_id: str, samples: int, sampling: Sampling) -> list[Episode]:
        """As ``EpisodeRunner.run_task``."""
        for tries in range(1, _GROUP_TRIES + 1):
            found = await self._source.run_task(task, group_id=group_id, samples=samples, sampling=sampling)
            lost = [each.failure for each in found if isinstance(each.error, NoEngine | EngineLost)]
            if len(lost) < len(found) or tries == _GROUP_TRIES:
                break
            logger.warning("%s waits for an engine: %s", task.task_id, lost[0])
            await self._keeper.wait_ready()
        return found


def _rows(fleet: Json) -> list[Json]:
    return cast("list[Json]", fleet["engines"])


def _words(row: Json) -> str:
    return f"{row['url']} is {row['state']}" + (f": {row['reason']}" if row["reason"] else "")
