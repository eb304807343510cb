"""The way from a harness that runs beside a task's sandbox into it: a unix socket that executes commands there.

The socket lies in the bridge's directory with ``tollway-exec``, the program that speaks to it. Asks for the episode's
key, runs what it is asked in the one sandbox that it was made for, and kills a command whose caller goes away. Depends
on ``envs.bridge`` and the sandbox protocol.

One request per connection: a line of JSON with "key", "argv", "cwd", "timeout_s" and "stdin" (its length in bytes),
then that many bytes; answered by a line with "exit_code", "timed_out", "truncated", "stdout" and "stderr" (lengths),
then those bytes; or with "error" alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tollway.envs.bridge import Bridge
from tollway.errors import BadRequest, SandboxError
from tollway.sandboxes.base import Sandbox

__all__ = ["EXEC_KEY", "EXEC_PROGRAM", "ExecSocket"]

EXEC_PROGRAM = "tollway-exec"
EXEC_KEY = ".tollway-exec"
"""File in the harness's home directory from which the program reads the key."""
SOCKET = "exec.sock"
_PROGRAM = Path(__file__).with_name("beside_exec.py")
_MAX_HEAD, _MAX_STDIN = 1 << 20, 1 << 26
_AT_ONCE = 16
_READ_S = 60.0
"""For a request to arrive."""
_MALFORMED = (ValueError, KeyError, TypeError, RecursionError, asyncio.IncompleteReadError)
"""What reading a request may raise, whatever was sent."""


class ExecSocket:
    """Commands for ``sandbox``, while the block is open. At its end what still runs is killed."""

    def __init__(self, bridge: Bridge, sandbox: Sandbox, *, timeout_s: float) -> None:
        self._bridge, self._sandbox, self._timeout_s = bridge, sandbox, timeout_s
        self._running: set[asyncio.Task[None]] = set()
        self.failure: SandboxError | None = None
        """Why the sandbox could not run a command, if that happened: then the run is no agent's."""
        self.commands = 0

    async def __aenter__(self) -> ExecSocket:
        folder = self._bridge.folder
        program = folder / EXEC_PROGRAM
        shutil.copyfile(_PROGRAM, program)
        program.chmod(0o755)
        self._listener = await asyncio.start_unix_server(self._serve, folder / SOCKET, limit=_MAX_HEAD)
        (folder / SOCKET).chmod(0o666)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("connections are served in tasks")
        self._running.add(task)
        try:
            if len(self._running) > _AT_ONCE:
                raise BadRequest(f"more than {_AT_ONCE} commands at once")
            async with asyncio.timeout(_READ_S):
                head, stdin = await self._request(reader)
            await self._run(head, stdin, reader, writer)
        except (*_MALFORMED, BadRequest, TimeoutError) as error:
            _say(writer, {"error": str(error) or type(error).__name__})
        except SandboxError as error:
            self.failure = error
            _say(writer, {"error": f"the sandbox is lost: {error}"})
        except (asyncio.CancelledError, ConnectionError):
            writer.transport.abort()
        finally:
            self._running.discard(task)
            with contextlib.suppress(OSError):
                writer.close()

    async def _request(self, reader: asyncio.StreamReader) -> tuple[dict[str, object], bytes]:
        head = json.loads(await reader.readline())
        if not isinstance(head, dict) or not hmac.compare_digest(str(head.get("key")), self._bridge.key):
            raise BadRequest("wrong key")
        size = int(head.get("stdin", 0))
        if not 0 <= size <= _MAX_STDIN:
            raise BadRequest(f"standard input of {size} bytes; at most {_MAX_STDIN}")
        return head, await reader.readexactly(size)

    async def _run(
        self, head: dict[str, object], stdin: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        argv = head["argv"]
        if not isinstance(argv, list) or not argv or not all(isinstance(part, str) for part in argv):
            raise BadRequest("want argv as a list of texts")
        asked = head.get("timeout_s")
        limit = min(float(asked), self._timeout_s) if isinstance(asked, int | float) else self._timeout_s
        self.commands += 1
        work = asyncio.create_task(
            self._sandbox.exec(argv, cwd=str(head.get("cwd") or "."), timeout_s=limit, stdin=stdin)
        )
        gone = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ConnectionAbortedError("the caller went away")
            done = work.result()
        finally:
            # Whichever is left has nobody to tell: a command is killed before this returns.
            for each in (work, gone):
                each.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        answer = {
            "exit_code": done.exit_code,
            "timed_out": done.timed_out,
            "truncated": done.truncated,
            "stdout": len(done.stdout),
            "stderr": len(done.stderr),
        }
        _say(writer, answer)
        writer.write(done.stdout + done.stderr)
        await writer.drain()


def _say(writer: asyncio.StreamWriter, head: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError):
        writer.write(json.dumps(head).encode() + b"\n")
