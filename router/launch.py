"""Starts the engines of a run and keeps them running: a restart budget, a floor, and last words when it breaks.

An engine that says a ready line is believed; of any other program the address is ours, and it is ready once it
has generated a token there. Either way it leaves here with a numbered weight version. Whoever owns the routing is
told of a death before anything else happens, and of the new address, which is never one that is taken. Decides
nothing about sessions. Depends on ``supervisor`` and ``engines``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tollway.errors import ComponentLost, InvalidRecord, TollwayError
from tollway.free_ports import free_ports
from tollway.records import parse_version
from tollway.router.engines import EngineClient, Timeouts
from tollway.router.supervisor import RestartBudget, ServerProcess

__all__ = ["EngineLauncher", "EnginePlan", "RestartRule"]

logger = logging.getLogger(__name__)
_POLL_S = 0.25
"""Between two questions whether a starting engine generates."""
_ANSWER_S = 30.0
"""Longest wait for one answer of a starting engine; its first token may have kernels to build."""
_STARTS = 3
"""Of an engine that finds its port taken."""
_LOG_BYTES = 1 << 20
"""Of a failed start's log, the end that is searched for the reason: it listens last of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """How one engine is started."""

    argv: tuple[str, ...]
    """Command line; ``{host}`` and ``{port}`` are filled in."""
    says_ready: bool
    """It prints our ready line and may choose its port; otherwise it is asked for a token until it gives one."""
    host: str = "127.0.0.1"
    port: int = 0
    """Of the first engine, the others follow; 0: any free one."""
    env: Mapping[str, str] = field(default_factory=dict)
    ready_timeout_s: float = 600.0

    def command(self, port: int) -> list[str]:
        """The command line for one port."""
        return [part.replace("{host}", self.host).replace("{port}", str(port)) for part in self.argv]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRule:
    """What a run bears."""

    restarts: int = 3
    """Starts after a death within ``window_s``, all engines together."""
    window_s: float = 600.0
    floor: int = 1
    """Once no restart is left, fewer engines than this are too few."""


@dataclass(slots=True, eq=False)
class _Slot:
    """One engine process after the other."""

    index: int
    process: ServerProcess | None = None
    gone: bool = False
    """Nobody starts it again."""

    @property
    def name(self) -> str:
        return f"engine {self.index}" if self.index else "engine"


class EngineLauncher:
    """Engines of one plan. ``start``, then ``keep`` for as long as they are needed, then ``stop``."""

    def __init__(self, plan: EnginePlan, *, count: int, logs: Path, rule: RestartRule) -> None:
        self._plan, self._logs, self._rule = plan, logs, rule
        self._slots = [_Slot(index) for index in range(count)]
        self._budget = RestartBudget(rule.restarts, rule.window_s)

    @property
    def urls(self) -> list[str]:
        """Addresses of the engines that run."""
        return [slot.process.url for slot in self._slots if slot.process is not None and not slot.gone]

    def dead(self) -> ComponentLost | None:
        """The error with the last words of an engine that is not running, if there is one."""
        for slot in self._slots:
            if slot.process is not None and slot.process.returncode is not None:
                return slot.process.lost()
        return None

    def last_words(self) -> str:
        """What every engine wrote last, for the text of an error."""
        said = [
            f"{slot.name} at {slot.process.url}, its last words:\n{slot.process.last_words()}"
            for slot in self._slots
            if slot.process is not None
        ]
        return "\n".join(said)

    async def start(self) -> None:
        """Start all of them. Raises ``ComponentLost`` with the last words of one that does not come up."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for slot in self._slots:
                    tasks.create_task(self._start(slot), name=f"start {slot.name}")
        except BaseExceptionGroup as errors:
            await self.stop()
            raise errors.exceptions[0] from None
        except BaseException:
            await self.stop()
            raise

    async def keep(
        self,
        *,
        down: Callable[[str], Awaitable[None]],
        up: Callable[[str], Awaitable[None]],
    ) -> None:
        """Watch and restart until cancelled. Raises ``ComponentLost`` when too few are left and none may start.

        ``down`` is awaited with the address of a dead engine before it is started again, ``up`` with the new one.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for slot in self._slots:
                    tasks.create_task(self._keep(slot, down, up), name=slot.name)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def give_up(self, url: str) -> None:
        """The engine at ``url`` runs and answers nobody: end it, and ``keep`` starts another one."""
        for slot in self._slots:
            if slot.process is not None and slot.process.url == url and slot.process.returncode is None:
                logger.error("%s at %s runs and is lost to its router: it is ended", slot.name, url)
                slot.process.kill()

    async def stop(self) -> None:
        """End all of them with everything that they started."""
        await asyncio.gather(*(slot.process.stop() for slot in self._slots if slot.process is not None))

    # -- one engine --------------------------------------------------------------------------------

    async def _keep(
        self, slot: _Slot, down: Callable[[str], Awaitable[None]], up: Callable[[str], Awaitable[None]]
    ) -> None:
        while slot.process is not None:
            await slot.process.wait()
            error = slot.process.lost()
            await down(slot.process.url)
            if not await self._again(slot, error):
                return
            logger.warning("%s serves again, at %s", slot.name, slot.process.url)
            await up(slot.process.url)

    async def _again(self, slot: _Slot, error: ComponentLost) -> bool:
        """Start a dead engine again, as often as the budget lets us; False when it stays down."""
        while self._budget.spend(time.monotonic()):
            logger.error("%s\nit is started again", error)
            await asyncio.sleep(self._budget.pause_s)
            try:
                if slot.process is not None:
                    await slot.process.stop()  # what it left behind may hold the device
                await self._start(slot)
            except ComponentLost as failure:
                error = failure
            else:
                return True
        slot.gone = True
        rule, left = self._rule, sum(not each.gone for each in self._slots)
        spent = f"no restart is left ({rule.restarts} within {rule.window_s:g} s)"
        if left < rule.floor:
            raise ComponentLost(f"{error}\n{spent}, and {left} engines are fewer than the {rule.floor} that are needed")
        logger.error("%s\n%s; %d of %d engines go on", error, spent, left, len(self._slots))
        return False

    async def _start(self, slot: _Slot) -> None:
        """A program that is told its port listens there much later: one that finds it taken is started again."""
        log = self._logs / (f"engine.{slot.index}.log" if slot.index else "engine.log")
        for left in reversed(range(_STARTS)):
            began = log.stat().st_size if log.exists() else 0
            slot.process = await self._launched(slot, log)
            try:
                await self._ready(slot.process)
                return
            except BaseException as error:
                ended = slot.process.returncode is not None
                await slot.process.stop(grace_s=0.5)
                if not (left and ended and isinstance(error, ComponentLost) and _port_was_taken(log, began)):
                    raise
            logger.warning("%s found its port taken, %s; it starts on another one", slot.name, slot.process.url)

    async def _launched(self, slot: _Slot, log: Path) -> ServerProcess:
        plan, env = self._plan, dict(self._plan.env)
        wanted = plan.port + slot.index if plan.port else 0
        if plan.says_ready:
            port = _usable_port(plan.host, wanted) if wanted else 0
            return await ServerProcess.start(
                plan.command(port), name=slot.name, log=log, env=env, ready_timeout_s=plan.ready_timeout_s
            )
        port = _usable_port(plan.host, wanted)
        url = f"http://{f'[{plan.host}]' if ':' in plan.host else plan.host}:{port}"
        return await ServerProcess.spawn(plan.command(port), name=slot.name, log=log, url=url, env=env)

    async def _ready(self, process: ServerProcess) -> None:
        """Wait until it generates, and give it a numbered version. Raises ``ComponentLost``."""
        ended = asyncio.create_task(process.wait())
        generates = asyncio.create_task(self._generates(process))
        try:
            await asyncio.wait(
                (ended, generates), timeout=self._plan.ready_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if generates.done():
                generates.result()
            elif ended.done():
                raise process.lost()
            else:
                raise ComponentLost(
                    f"{process.name} generated nothing within {self._plan.ready_timeout_s:.0f} s at {process.url}; "
                    f"its last words:\n{process.last_words()}"
                )
        finally:
            for task in (ended, generates):
                task.cancel()
            await asyncio.gather(ended, generates, return_exceptions=True)

    async def _generates(self, process: ServerProcess) -> None:
        timeouts = Timeouts(connect_s=5.0, control_s=_ANSWER_S, probe_s=_ANSWER_S)
        async with aiohttp.ClientSession() as http:
            client = EngineClient(process.url, http, timeouts=timeouts)
            while True:
                if await _token(client):
                    break
                await asyncio.sleep(_POLL_S)
            try:
                await _stamp(client)
            except TollwayError as error:
                if process.returncode is not None:
                    raise process.lost() from error
                raise ComponentLost(
                    f"{process.name} at {process.url} started and is no engine: {error}; its last words:\n"
                    f"{process.last_words()}"
                ) from error


async def _token(client: EngineClient) -> bool:
    """Whether it generates a token; a server that is starting refuses, or does not listen yet."""
    try:
        return await client.health_generate()
    except TollwayError:
        return False


async def _stamp(client: EngineClient) -> None:
    """Number its weights: a stock server calls them "default", which cannot be compared."""
    try:
        parse_version((await client.model_info()).weight_version)
    except InvalidRecord:
        await client.set_weight_version(0)


def _usable_port(host: str, wanted: int) -> int:
    """``wanted`` when it is free, else any free port of ``host``, said aloud."""
    try:
        if wanted:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with contextlib.suppress(OSError):
                    probe.bind((host, wanted))
                    return wanted
        (port,) = free_ports(1, host)
    except OSError as error:
        raise ComponentLost(f"no port of {host} to start an engine on: {error.strerror}") from error
    if wanted:
        logger.warning("port %d of %s is taken: the engine starts on %d", wanted, host, port)
    return port


def _port_was_taken(log: Path, began: int) -> bool:
    """Whether a program that ended says in its log, from byte ``began`` on, that somebody else has its address."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(began, log.stat().st_size - _LOG_BYTES))
        return os.strerror(errno.EADDRINUSE).lower().encode() in file.read().lower()
    return False
