"""Processes of the E2B front end: each is one command of a sandbox, watched by any number of streams.

A process runs until it ends, is killed or its sandbox ends; a client that goes away does not end it. Where all
commands of a sandbox share one /tmp, output is passed on while a process runs and input is taken while it runs;
elsewhere output arrives at its end, and one with open input begins when its input is closed. Depends on ``base``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from tollway.errors import BadRequest, SandboxError, SandboxGone, TollwayError
from tollway.sandboxes.base import Sandbox
from tollway.sandboxes.e2b_wire import Json, data_event, end_event, end_of_stream, envelope
from tollway.sandboxes.spec import ExecResult

__all__ = ["Process", "Processes", "Started"]

_RUN = 'mkdir -m 700 "$0" && cd "$0" && { [ -z "$2" ] || mkfifo in; } && cd "$1" && d=$0 && shift 2 && '
_RUN_WITH_INPUT = _RUN + 'exec "$@" <"$d/in" >"$d/out" 2>"$d/err"'
_RUN_ALONE = _RUN + 'exec "$@" </dev/null >"$d/out" 2>"$d/err"'
_LOOK = 'cd "$0" || exit 0; tail -c "+$1" out | head -c "$3" && tail -c "+$2" err | head -c "$3" >&2'
_HOLD = 'while [ ! -p "$0/in" ]; do sleep 0.05; done; exec 3>"$0/in"; : >"$0/held"; exec sleep 86400'
"""Keeps the input open between two writers, or the first one's end would be the input's."""
_GIVE = 'while [ ! -e "$0/held" ]; do sleep 0.05; done; exec cat >"$0/in"'
_PIECE_BYTES = 256 << 10
_FIRST_LOOK_S, _LONGEST_PAUSE_S = 0.15, 1.0
_SHELL_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What a client asked to run."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    tag: str | None
    open_input: bool
    timeout_s: float


class Process:
    """One command, what it has said so far, and how it ended."""

    def __init__(self, sandbox: Sandbox, pid: int, asked: Started, *, most_output: int, streams: bool) -> None:
        self.pid = pid
        self.asked = asked
        self._sandbox = sandbox
        self._streams = streams
        self._place = f"/tmp/.tollway-e2b-{secrets.token_hex(8)}"  # noqa: S108 - inside the sandbox
        self._most = most_output
        self._said: list[tuple[str, bytes]] = []
        self._sizes = {"stdout": 0, "stderr": 0}
        self._news = asyncio.Event()
        self._given = bytearray()
        self._closed = asyncio.Event()
        self._giving = asyncio.Lock()
        self._holder: asyncio.Task[ExecResult] | None = None
        self.killed = False
        if not asked.open_input:
            self._closed.set()
        self.work = asyncio.create_task(self._streamed() if streams else self._whole())

    # -- what clients do -----------------------------------------------------------------------------

    def info(self) -> Json:
        """As ``List`` shows it."""
        config = {"cmd": self.asked.argv[0], "args": list(self.asked.argv[1:]), "envs": dict(self.asked.env)}
        tag = {} if self.asked.tag is None else {"tag": self.asked.tag}
        return {"config": {**config, "cwd": self.asked.cwd}, "pid": self.pid, **tag}

    def kill(self) -> None:
        """End it and everything it started."""
        self.killed = True
        self.work.cancel()

    async def give(self, data: bytes) -> None:
        """More input; ``BadRequest`` when it is closed."""
        if self._closed.is_set():
            raise BadRequest("the input of this process is closed, or was never open")
        if not self._streams:
            self._given.extend(data)
            return
        async with self._giving:  # in the order of the calls
            await self._sandbox.exec(["sh", "-c", _GIVE, self._place], stdin=data, timeout_s=_SHELL_S)

    async def close_input(self) -> None:
        """The end of its input."""
        async with self._giving:
            self._closed.set()
            if self._holder is not None:
                self._holder.cancel()

    async def events(self, *, keepalive_s: float) -> AsyncIterator[bytes]:
        """The envelopes of a stream that watches it, from its start to its end."""
        yield envelope({"event": {"start": {"pid": self.pid}}})
        at = 0
        while True:
            over = self.work.done()
            while at < len(self._said):
                for event in data_event(*self._said[at]):
                    yield event
                at += 1
            if over:
                break
            news = asyncio.ensure_future(self._news.wait())
            await asyncio.wait([self.work, news], timeout=keepalive_s, return_when=asyncio.FIRST_COMPLETED)
            if not news.done() and not self.work.done():
                yield envelope({"event": {"keepalive": {}}})
            news.cancel()
        for event in self._ending():
            yield event

    def _ending(self) -> list[bytes]:
        if self.killed or self.work.cancelled():
            return [end_event(137), end_of_stream()]
        problem = self.work.exception()
        if problem is not None:
            return [end_of_stream(*_told(problem))]
        done = self.work.result()
        if done.timed_out:
            return [end_of_stream("deadline_exceeded", f"the command ran longer than {self.asked.timeout_s:.0f} s")]
        cut = done.truncated or any(size > self._most for size in self._sizes.values())
        code = -1 if done.exit_code is None else done.exit_code
        return [end_event(code, " (output was cut)" if cut else ""), end_of_stream()]

    # -- running ---------------------------------------------------------------------------------------

    async def _whole(self) -> ExecResult:
        await self._closed.wait()
        asked = self.asked
        done = await self._sandbox.exec(
            asked.argv, timeout_s=asked.timeout_s, cwd=asked.cwd, env=asked.env, stdin=bytes(self._given)
        )
        self._say("stdout", done.stdout)
        self._say("stderr", done.stderr)
        return done

    async def _streamed(self) -> ExecResult:
        asked = self.asked
        program = _RUN_WITH_INPUT if asked.open_input else _RUN_ALONE
        argv = ["sh", "-c", program, self._place, asked.cwd, "in" if asked.open_input else "", *asked.argv]
        running = asyncio.create_task(
            self._sandbox.exec(argv, timeout_s=asked.timeout_s, cwd="/", env=asked.env, max_output=_PIECE_BYTES)
        )
        if asked.open_input:
            hold = ["sh", "-c", _HOLD, self._place]
            self._holder = asyncio.create_task(self._sandbox.exec(hold, timeout_s=asked.timeout_s))
        try:
            pause_s, end = _FIRST_LOOK_S, time.monotonic() + asked.timeout_s
            while not running.done() and time.monotonic() < end:
                await asyncio.wait([running], timeout=pause_s)
                more = not running.done() and await self._look()
                pause_s = _FIRST_LOOK_S if more else min(_LONGEST_PAUSE_S, pause_s * 1.5)
            done = await running
            while await self._look(last=True):
                pass
            self._say("stderr", done.stderr)  # what the shell itself could not do
            return done
        finally:
            helpers = [task for task in (running, self._holder) if task is not None]
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            with contextlib.suppress(TollwayError):
                await self._sandbox.exec(["rm", "-rf", self._place], timeout_s=_SHELL_S)

    async def _look(self, *, last: bool = False) -> bool:
        """Take over what it has said since the last look; whether there may be more at once."""
        at = [str(size + 1) for size in self._sizes.values()]
        look = ["sh", "-c", _LOOK, self._place, *at, str(_PIECE_BYTES)]
        news = await self._sandbox.exec(look, timeout_s=_SHELL_S, max_output=_PIECE_BYTES)
        if last and news.exit_code != 0:
            raise SandboxError("cannot read what the command said: the sandbox may have reached a limit")
        self._say("stdout", news.stdout)
        self._say("stderr", news.stderr)
        return bool(news.stdout or news.stderr) and max(self._sizes.values()) <= self._most

    def _say(self, stream: str, data: bytes) -> None:
        kept = data[: max(0, self._most - self._sizes[stream])]
        self._sizes[stream] += len(data)
        if kept:
            self._said.append((stream, kept))
            self._news.set()
            self._news = asyncio.Event()


def _told(problem: BaseException) -> tuple[str, str]:
    if isinstance(problem, SandboxGone):
        return "unavailable", f"the sandbox was not found: {problem}"
    if isinstance(problem, TollwayError):
        return ("invalid_argument" if problem.status == 400 else "internal"), str(problem)
    return "internal", f"{type(problem).__name__} in the server"


class Processes:
    """The processes of one sandbox that still run."""

    def __init__(self, sandbox: Sandbox, *, most: int, most_output: int, streams: bool) -> None:
        self._sandbox = sandbox
        self._most = most
        self._most_output = most_output
        self._streams = streams
        self._pids = itertools.count(1000)
        self._running: dict[int, Process] = {}

    def start(self, asked: Started) -> Process | None:
        """Begin one; ``None`` when too many run."""
        if len(self._running) >= self._most:
            return None
        pid = next(self._pids)
        process = Process(self._sandbox, pid, asked, most_output=self._most_output, streams=self._streams)
        self._running[pid] = process
        process.work.add_done_callback(lambda _: self._running.pop(pid, None))
        # Nobody may be watching when it fails.
        process.work.add_done_callback(lambda work: work.cancelled() or work.exception())
        return process

    def find(self, selector: object) -> Process | None:
        """The process that a selector, ``{"pid": 1}`` or ``{"tag": "x"}``, names."""
        if not isinstance(selector, dict):
            return None
        for process in self._live():
            if process.pid == selector.get("pid") or (process.asked.tag or object()) == selector.get("tag"):
                return process
        return None

    def infos(self) -> list[Json]:
        """All of them, as ``List`` shows them."""
        return [process.info() for process in self._live()]

    def _live(self) -> list[Process]:
        """A killed one is gone for clients, also while its end takes its time."""
        return [process for process in self._running.values() if not process.killed]

    async def end(self) -> None:
        """Kill all and wait until they are gone."""
        works = [process.work for process in self._running.values()]
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
