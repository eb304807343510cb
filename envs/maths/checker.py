"""Compares answers in killable processes: whatever a model wrote, it costs bounded time and memory.

A comparison that its process dies of is "not equal"; a process that cannot be started, or hangs without
computing, is an infrastructure failure. Depends on asyncio and ``worker``, as a program.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from dataclasses import dataclass

from tollway.envs.maths.config import MathsConfig
from tollway.errors import ConfigError, EpisodeFailed

__all__ = ["Checker", "Comparison"]

MAX_TEXT = 10_000
"""Characters of an answer; longer ones are not equal to anything."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outcome of one comparison."""

    equal: bool
    reason: str


class Checker:
    """A few checking processes, started when first needed. Use as ``async with``."""

    def __init__(self, config: MathsConfig) -> None:
        self._config = config
        self._free: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._places = asyncio.Semaphore(config.workers)

    async def __aenter__(self) -> Checker:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def same(self, answer: str, reference: str) -> Comparison:
        """Whether ``answer`` means what ``reference`` means. Raises ``EpisodeFailed`` when nobody could tell."""
        if len(answer) > MAX_TEXT:
            return Comparison(False, f"an answer of {len(answer)} characters")
        line = json.dumps({"answer": answer, "reference": reference, "tolerance": self._config.tolerance}) + "\n"
        async with self._places:
            process = await self._take()
            try:
                async with asyncio.timeout(self._config.wall_s):
                    reply = await _ask(process, line.encode())
            except TimeoutError:
                await self._end(process)
                raise EpisodeFailed(
                    f"a checking process neither answered nor used up its CPU time in {self._config.wall_s} s; "
                    "the machine is overloaded, or raise env.maths.wall_s"
                ) from None
            except BaseException:
                await self._end(process)
                raise
            if reply:
                self._free.append(process)
                found = json.loads(reply)
                return Comparison(bool(found["equal"]), str(found["reason"]))
            code = await process.wait()
            self._all.discard(process)
        if code in (-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGABRT):
            # Of the comparison itself: CPU time used up, or the C stack or memory ran out.
            return Comparison(False, "too expensive to compare")
        raise EpisodeFailed(f"a checking process ended with {code} instead of answering")

    async def aclose(self) -> None:
        """End all processes."""
        for process in list(self._all):
            await self._end(process)
        self._free.clear()

    async def _take(self) -> asyncio.subprocess.Process:
        if self._free:
            return self._free.pop()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tollway.envs.maths.worker"),
            *(str(self._config.cpu_s), str(self._config.memory_mb)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._all.add(process)
        try:
            async with asyncio.timeout(self._config.wall_s):
                ready = await process.stdout.readline() if process.stdout else b""
                said = await process.stderr.read(4000) if not ready and process.stderr else b""
        except BaseException as error:
            await self._end(process)
            if isinstance(error, TimeoutError):
                raise EpisodeFailed(f"a checking process did not start in {self._config.wall_s} s") from None
            raise
        if not ready:
            await self._end(process)
            last = said.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no word"]
            raise ConfigError(f"answers cannot be checked: {last[0]}; install tollway[maths]")
        return process

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        self._all.discard(process)


async def _ask(process: asyncio.subprocess.Process, line: bytes) -> bytes:
    if process.stdin is None or process.stdout is None:
        raise EpisodeFailed("a checking process without pipes")
    try:
        process.stdin.write(line)
        await process.stdin.drain()
        return await process.stdout.readline()
    except (BrokenPipeError, ConnectionResetError):
        return b""
