"""The parent of several workers: start them on one socket, restart what dies, say ready once, stop all.

Serves nothing but its workers' placement service: one list of engines and one table for all of them. It holds every
listening socket, so that a worker that starts again has its old address and a taken port is known at once. A worker
that dies is started again within a budget; when that is spent, all end with a non-zero status and the last words of
the dead. Workers end with their parent. Depends on ``crew``, ``serving``, the placement service and the rule by which
children die with their parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

from tollway.errors import ComponentLost, ConfigError
from tollway.router.config import RouterConfig
from tollway.router.placement_service import PlacementServer
from tollway.router.supervisor import PARENT_VARIABLE, RestartBudget
from tollway.serving import announce, listen, read_ready
from tollway.session_server.config import ServerConfig
from tollway.session_server.crew import Crew

__all__ = ["Places", "supervise"]

logger = logging.getLogger(__name__)
_READY_S = 120.0
"""Longest start of a worker, beside the wait for engines that is configured."""
_END_S = 15.0
"""How long a worker may take to end after its running turns."""
_LAST_LINES = 12
_SOCKET_PATH_MAX = 100
"""Bytes of a Unix socket's path that the kernel takes, with room for its name."""


def supervise(config: ServerConfig, router_config: RouterConfig, *, admin_key: str, engine_urls: list[str]) -> None:
    """Run ``config.workers`` workers until a signal comes. Raises ``ConfigError`` and ``ComponentLost``."""
    shared = listen(config.host, config.port, key="server.port")
    owned: list[socket.socket] = []
    places: Places | None = None
    folder: Path | None = None
    try:
        for index in range(config.workers):
            port = config.port + 1 + index if config.port else 0
            if port > 65535:
                raise ConfigError(f"server.port {config.port} leaves no ports for {config.workers} workers; lower it")
            owned.append(listen(config.host, port, key=f"server.port (worker {index} listens {index + 1} above it)"))
        folder = _private_folder()
        settings = folder / "settings.json"
        settings.write_text(
            json.dumps({"server": config.model_dump(mode="json"), "router": router_config.model_dump(mode="json")}),
            encoding="utf-8",
        )
        argv = [sys.executable, "-P", "-m", "tollway", "serve", "-c", str(settings)]
        level = logging.getLevelName(logging.getLogger().level)
        argv += ["--set", f"run.log_level={level if level in ('DEBUG', 'WARNING', 'ERROR') else 'INFO'}"]
        if router_config.placement_url:  # that one has the engines of all its servers
            argv += [part for url in engine_urls for part in ("--engine", url)]
        else:
            places = Places(router_config, engine_urls)
        secret = secrets.token_urlsafe(32)
        workers = [
            _Worker(
                crew=Crew(
                    index=index,
                    size=config.workers,
                    folder=folder,
                    secret=secret,
                    public_fd=shared.fileno(),
                    own_fd=each.fileno(),
                    port=int(each.getsockname()[1]),
                    places_url=places.url if places is not None else "",
                    places_key=places.key if places is not None else "",
                ),
                argv=argv,
                admin_key=admin_key,
                ready_s=_READY_S + config.engine_wait_s,
                end_s=config.drain_s + _END_S,
            )
            for index, each in enumerate(owned)
        ]
        asyncio.run(_Parent(workers, [shared, *owned], places).run())
    finally:
        if places is not None:
            places.close()
        for each in (shared, *owned):
            each.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _private_folder() -> Path:
    """A new folder of this user alone, short enough for Unix sockets."""
    for parent in (None, "/tmp"):  # noqa: S108 - a new folder with a random name, mode 0700
        folder = Path(tempfile.mkdtemp(prefix="tollway-", dir=parent))
        if len(os.fsencode(folder)) < _SOCKET_PATH_MAX - len("/255.sock"):
            (folder / "metrics").mkdir(mode=0o700)
            return folder
        folder.rmdir()
    raise ConfigError(f"no folder for sockets: {tempfile.gettempdir()} is too long a path; set TMPDIR to a shorter one")


class Places:
    """The placement service of the workers, on loopback, with a key that only they have."""

    def __init__(self, config: RouterConfig, engine_urls: list[str]) -> None:
        self.key = secrets.token_urlsafe(32)
        self._engine_urls = engine_urls
        self._listener = listen("127.0.0.1", 0, key="server.host")
        self._server = PlacementServer(config, self._listener, key=self.key)
        self.stopping = False

    @property
    def url(self) -> str:
        """Where workers find it."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    async def run(self) -> None:
        """Serve until ``stop``. Raises ``ConfigError`` for a bad engine URL, else ``ComponentLost``."""
        if not self._engine_urls:
            logger.warning("no engine given: turns are refused until one is added: tollway engines add URL")
        try:
            await self._server.serve(self._engine_urls)
        except ConfigError:
            raise
        except Exception as error:  # boundary: workers cannot go on without it, whatever broke
            raise ComponentLost(f"the placement service of the workers broke: {error!r}") from error
        if not self.stopping:
            raise ComponentLost("the placement service of the workers ended by itself")

    def stop(self) -> None:
        """Let ``run`` end."""
        self.stopping = True
        self._server.stop()

    def close(self) -> None:
        """Close the socket of a service that may never have run."""
        self._listener.close()


@dataclass(slots=True)
class _Worker:
    """One worker process after the other."""

    crew: Crew
    argv: list[str]
    admin_key: str = field(repr=False)
    ready_s: float
    end_s: float
    """How long it may take to end after a signal."""
    process: asyncio.subprocess.Process | None = None
    ready: bool = False
    """The running process serves."""
    _words: deque[bytes] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))

    @property
    def name(self) -> str:
        return f"worker {self.crew.index}"

    async def live(self, on_ready: asyncio.Event, stopping: asyncio.Event) -> int:
        """Run one process to its end; its exit status. Sets ``on_ready`` when it serves."""
        self._words.clear()
        process = self.process = await asyncio.create_subprocess_exec(
            *self.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal reaches the parent alone
            pass_fds=(self.crew.public_fd, self.crew.own_fd),
            env=os.environ | self._environment(),
        )
        if stopping.is_set():  # the signal came before the process did
            self.signal(signal.SIGTERM)
        pipes = asyncio.gather(self._relay(process.stderr), self._heed(process.stdout, on_ready))
        alarm = asyncio.get_running_loop().call_later(self.ready_s, self._too_slow)
        try:
            return await process.wait()
        finally:
            alarm.cancel()
            await self._end(process)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pipes, 2.0)  # a stranger that inherited them may hold them open
            self.ready = False
            mark_process_dead(process.pid, str(self.crew.folder / "metrics"))  # type: ignore[no-untyped-call]

    def _environment(self) -> dict[str, str]:
        return {
            **self.crew.environment(),
            PARENT_VARIABLE: str(os.getpid()),
            "TOLLWAY_ADMIN_KEY": self.admin_key,
            "PROMETHEUS_MULTIPROC_DIR": str(self.crew.folder / "metrics"),
        }

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """End a process that still runs: asked first, made second."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), self.end_s)
        self.signal(signal.SIGKILL)
        await process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if there is one."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def last_words(self) -> str:
        """The end of what the last process wrote, indented, for error texts."""
        lines = [f"    {line.decode('utf-8', 'replace')}" for line in self._words]
        return "\n".join(lines) or "    (it wrote nothing)"

    async def _heed(self, pipe: asyncio.StreamReader | None, on_ready: asyncio.Event) -> None:
        """Wait for the ready line on its stdout; whatever else comes there is only passed on."""
        async for lines in _lines(pipe):
            for line in lines:
                try:
                    read_ready(line)
                except ValueError:
                    self._write([line])
                else:
                    self.ready = True
                    on_ready.set()

    async def _relay(self, pipe: asyncio.StreamReader | None) -> None:
        """Pass on what it writes on stderr and keep the last lines."""
        async for lines in _lines(pipe):
            self._write(lines)

    def _too_slow(self) -> None:
        if not self.ready:
            logger.error("%s was not ready after %.0f s", self.name, self.ready_s)
            self.signal(signal.SIGKILL)

    def _write(self, lines: list[bytes]) -> None:
        self._words.extend(lines)
        sys.stderr.buffer.write(b"".join(line + b"\n" for line in lines))
        sys.stderr.buffer.flush()


class _Parent:
    """Keeps every worker alive until a signal comes or the budget is spent."""

    def __init__(self, workers: list[_Worker], listeners: list[socket.socket], places: Places | None = None) -> None:
        self._workers = workers
        self._listeners = listeners
        self._places = places
        self._budget = RestartBudget()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Start all, say ready, wait for a signal, stop all. Raises ``ConfigError`` and ``ComponentLost``."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        events = [asyncio.Event() for _ in self._workers]
        try:
            async with asyncio.TaskGroup() as group:
                if self._places is not None:
                    group.create_task(self._places.run(), name="placement service")
                kept = [
                    group.create_task(self._keep(worker, event), name=worker.name)
                    for worker, event in zip(self._workers, events, strict=True)
                ]
                group.create_task(self._announce(events), name="ready line")
                group.create_task(self._end_in_time(), name="stop")
                await asyncio.wait(kept)
                if self._places is not None:  # last: a worker that ends still tells it what it has
                    self._places.stop()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    async def _keep(self, worker: _Worker, on_ready: asyncio.Event) -> None:
        """One process of ``worker`` after the other."""
        while not self._stopping.is_set():
            status = await worker.live(on_ready, self._stopping)
            if self._stopping.is_set():
                if status != 0:
                    logger.warning("%s ended with status %d", worker.name, status)
                return
            words = f"{worker.name} ended with status {status}"
            if not on_ready.is_set():
                kind = ConfigError if status == 2 else ComponentLost
                raise kind(f"{words} before it was ready; its last words:\n{worker.last_words()}")
            if not self._budget.spend(time.monotonic()):
                raise ComponentLost(
                    f"{words}, and workers died more than {self._budget.limit} times within "
                    f"{self._budget.window_s:.0f} s; its last words:\n{worker.last_words()}"
                )
            logger.error("%s; it is started again and takes its sessions over from its journal", words)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._budget.pause_s)

    async def _announce(self, events: list[asyncio.Event]) -> None:
        waiting = [asyncio.ensure_future(event.wait()) for event in (self._stopping, *events)]
        try:
            left = set(waiting[1:])
            while left and not waiting[0].done():
                await asyncio.wait((waiting[0], *left), return_when=asyncio.FIRST_COMPLETED)
                left = {each for each in left if not each.done()}
        finally:
            for each in waiting:
                each.cancel()
        if not self._stopping.is_set():
            announce(self._listeners[0], workers=len(self._workers))

    async def _end_in_time(self) -> None:
        """After a signal: shut the door, then end whoever does not end by himself."""
        await self._stopping.wait()
        for listener in self._listeners:
            listener.close()
        deadline = time.monotonic() + max(each.end_s for each in self._workers)
        while any(each.process is not None and each.process.returncode is None for each in self._workers):
            if time.monotonic() > deadline:
                for worker in self._workers:
                    worker.signal(signal.SIGKILL)
                raise ComponentLost("workers did not end in time after a signal and were killed")
            await asyncio.sleep(0.05)

    def _stop(self) -> None:
        """The first signal goes on to the workers; every later one makes them hurry."""
        number = signal.SIGINT if self._stopping.is_set() else signal.SIGTERM
        self._stopping.set()
        for worker in self._workers:
            worker.signal(number)


async def _lines(pipe: asyncio.StreamReader | None) -> AsyncGenerator[list[bytes]]:
    """Whole lines as they come, of any length."""
    rest = b""
    while pipe is not None and (chunk := await pipe.read(65536)):
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the group; what followed from it says less."""
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
