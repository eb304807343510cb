"""Our side of the verifiers worker: requests over a pipe, sandbox calls of tasks answered, every failure typed.

Only JSON crosses the pipe. A worker that dies fails the episodes that it was scoring, as infrastructure, and is
started again for the next one. Depends on ``envs.served``, ``sandboxes.base`` and the kernel.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from tollway.envs.served import bare_variables, bound_to_us, end_group
from tollway.envs.verifiers.config import VerifiersConfig
from tollway.errors import ConfigError, EpisodeFailed, TollwayError
from tollway.sandboxes.base import Sandbox

__all__ = ["WorkerLink"]

logger = logging.getLogger(__name__)
_WORKER = Path(__file__).with_name("worker.py")
_LINE_BYTES = 256 << 20
_WORDS = 3000
Json = Mapping[str, object]


class WorkerLink:
    """One worker process. ``start`` before the first request."""

    def __init__(self, config: VerifiersConfig, taskset_config: Json) -> None:
        self._config, self._taskset_config = config, dict(taskset_config)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[object]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()
        self._words: IO[bytes] | None = None
        self.sandboxes: dict[str, Sandbox] = {}
        """Of open episodes, for the calls of their tasks."""
        self.dropped: list[str] = []
        """Episodes that were never scored; the worker hears of them with the next request."""

    @property
    def alive(self) -> bool:
        """Whether the process answers."""
        return self._process is not None and self._process.returncode is None and self._reader is not None

    async def start(self) -> list[Json]:
        """Start the process, load the taskset, list its tasks. Raises ``ConfigError`` with the worker's words."""
        python = self._config.python
        if python is None or not self._config.taskset:
            raise ConfigError("env.verifiers: set python (an interpreter with verifiers) and taskset")
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        argv = [str(python), "-P", str(_WORKER), *(str(each.absolute()) for each in self._config.path)]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *bound_to_us(argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._words,
                start_new_session=True,
                env=bare_variables(self._config.env),
                limit=_LINE_BYTES,
            )
        except OSError as error:
            raise ConfigError(f"env.verifiers.python: cannot start {python}: {error}") from error
        self._reader = asyncio.create_task(self._read(self._process))
        fields = {
            "taskset": self._config.taskset,
            "config": self._taskset_config,
            "limit": self._config.max_tasks,
        }
        try:
            result = await self._request("load", fields, self._config.load_timeout_s)
        except EpisodeFailed as error:
            raise ConfigError(f"env.verifiers: {self._config.taskset!r} does not load: {error}") from error
        tasks = result.get("tasks") if isinstance(result, dict) else None
        if not isinstance(tasks, list) or not tasks:
            raise ConfigError(f"env.verifiers: {self._config.taskset!r} has no tasks")
        return tasks

    async def request(self, op: str, fields: Json, limit_s: float) -> Json:
        """One request's result. Raises ``EpisodeFailed``: what the taskset raised, a dead worker, a late one."""
        if not self.alive:
            async with self._starting:
                if not self.alive:
                    await self.aclose()
                    await self.start()
        while self.dropped:
            await self._request("drop", {"episode": self.dropped.pop()}, limit_s)
        result = await self._request(op, fields, limit_s)
        if not isinstance(result, dict):
            raise EpisodeFailed(f"the verifiers worker answered {op} with {result!r:.200}")
        return result

    async def aclose(self) -> None:
        """End the process."""
        if self._process is not None:
            await end_group(self._process)
        left = [task for task in (self._reader, *self._calls) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self._words is not None:
            self._words.close()
        self._process = self._reader = self._words = None

    async def _request(self, op: str, fields: Json, limit_s: float) -> object:
        number = next(self._numbers)
        waiting: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            self._send({"id": number, "op": op, **fields})
            async with asyncio.timeout(limit_s):
                return await waiting
        except TimeoutError:
            raise EpisodeFailed(f"the verifiers worker took longer than {limit_s} s for {op}{self._said()}") from None
        finally:
            self._waiting.pop(number, None)

    def _send(self, message: Json) -> None:
        if self._process is None or self._process.stdin is None or self._process.returncode is not None:
            raise EpisodeFailed(f"the verifiers worker is gone{self._said()}")
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Until the pipe ends: hand answers to who waits, start what tasks ask of their sandboxes."""
        why = "ended"
        try:
            while process.stdout is not None and (line := await process.stdout.readline()):
                message = json.loads(line)
                if "call" in message:
                    call = asyncio.create_task(self._answer(message))
                    self._calls.add(call)
                    call.add_done_callback(self._calls.discard)
                    continue
                waiting = self._waiting.get(message["id"])
                if waiting is None or waiting.done():
                    continue
                if message["ok"]:
                    waiting.set_result(message["result"])
                else:
                    waiting.set_exception(EpisodeFailed(f"verifiers: {message['error']}"))
        except (ValueError, KeyError, TypeError) as error:
            why = f"sent what is no message ({error})"
        finally:
            self._reader = None
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(EpisodeFailed(f"the verifiers worker {why}{self._said()}"))
                    waiting.exception()  # whoever waited may be gone

    async def _answer(self, message: dict[str, object]) -> None:
        """Do in an episode's sandbox what its task asked for."""
        reply: dict[str, object] = {"reply": message["call"]}
        sandbox = self.sandboxes.get(str(message["episode"]))
        try:
            if sandbox is None:
                raise EpisodeFailed("this episode has no sandbox; set env.verifiers.tools")
            reply["result"] = await _done(sandbox, message, self._config.tool_timeout_s)
        except TollwayError as error:
            reply["error"] = str(error)
        try:
            self._send(reply)
        except EpisodeFailed:
            logger.debug("the worker went away before it heard of its call")

    def _said(self) -> str:
        if self._words is None:
            return ""
        self._words.seek(0, 2)
        self._words.seek(max(0, self._words.tell() - _WORDS))
        words = self._words.read().decode("utf-8", "replace").strip()
        return f"; it said:\n{words}" if words else ""


async def _done(sandbox: Sandbox, message: Mapping[str, object], limit_s: float) -> Json:
    what, path = message["what"], str(message.get("path", ""))
    if what == "exec":
        argv, env = message["argv"], message["env"]
        if not isinstance(argv, list) or not isinstance(env, dict):
            raise EpisodeFailed("a command without arguments")
        done = await sandbox.exec([str(part) for part in argv], timeout_s=limit_s, env=env)
        code = 124 if done.timed_out or done.exit_code is None else done.exit_code
        return {"exit_code": code, "stdout": _text(done.stdout), "stderr": _text(done.stderr)}
    if what == "read":
        limit = message.get("max_bytes")
        program = ["head", "-c", str(limit if isinstance(limit, int) else 1 << 20), "--", path]
        done = await sandbox.exec(program, timeout_s=limit_s)
        if done.exit_code != 0 or done.truncated:
            why = "more than the sandbox gives out at once" if done.truncated else _text(done.stderr)
            raise EpisodeFailed(f"cannot read {path}: {why}")
        return {"data": base64.b64encode(done.stdout).decode()}
    if what == "write":
        program = ["/bin/sh", "-c", 'mkdir -p "$(dirname "$1")" && cat > "$1"', "write", path]
        done = await sandbox.exec(program, timeout_s=limit_s, stdin=base64.b64decode(str(message["data"])))
        if done.exit_code != 0:
            raise EpisodeFailed(f"cannot write {path}: {_text(done.stderr)}")
        return {}
    raise EpisodeFailed(f"a task asked for {what!r}, which nobody knows")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
