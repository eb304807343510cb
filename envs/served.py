"""A program of somebody else's that serves an environment: started on a free port, watched until ready, ended.

It gets none of our environment variables (keys live there), has a process group of its own and ends with us,
however we end. Depends on aiohttp and ``served_config``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

import aiohttp

from tollway.envs.served_config import ServedConfig
from tollway.errors import ComponentLost, ConfigError
from tollway.free_ports import free_ports

__all__ = ["ServedProgram", "bare_variables", "bound_to_us", "end_group", "serve"]

_WORDS = 4000
"""Bytes of the program's output that an error shows."""
_GRACE_S = 5.0
# The kernel ends the program when we die; closes the race in which we are gone before it is asked to.
_BOUND = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"
    "try:\n"
    "    os.execvp(sys.argv[2], sys.argv[2:])\n"
    "except OSError as error:\n"
    "    sys.exit(f'cannot start {sys.argv[2]} (working directory {os.getcwd()}): {error.strerror}')\n"
)


def bare_variables(more: Mapping[str, str]) -> dict[str, str]:
    """The few variables that a foreign program needs, and those that were configured for it."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    return {**kept, **more}


def bound_to_us(argv: Sequence[str]) -> tuple[str, ...]:
    """A command line that runs ``argv`` and does not outlive this process."""
    return (sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), *argv)


class ServedProgram:
    """One running server program."""

    def __init__(self, process: asyncio.subprocess.Process, output: IO[bytes], url: str) -> None:
        self.url = url
        self._process, self._output = process, output

    @property
    def ended(self) -> int | None:
        """Its exit status; ``None`` while it runs."""
        return self._process.returncode

    @property
    def last_words(self) -> str:
        """The end of what it has said."""
        size = os.fstat(self._output.fileno()).st_size
        said = os.pread(self._output.fileno(), _WORDS, max(0, size - _WORDS))
        return said.decode("utf-8", "replace").strip()

    async def aclose(self) -> None:
        """End it and its process group."""
        await end_group(self._process)
        self._output.close()


async def end_group(process: asyncio.subprocess.Process) -> None:
    """Ask a process group to end, then make it."""
    for sign, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await process.wait()
            if sign == signal.SIGTERM:
                continue  # whoever ignored it in the group
            return


async def serve(config: ServedConfig, *, section: str, ready: str, http: aiohttp.ClientSession) -> ServedProgram | str:
    """Start what ``config.command`` says, or take ``config.url``; return when ``ready`` is answered there.

    Raises ``ConfigError`` when neither or both are set, ``ComponentLost`` with the program's last words.
    """
    if (config.url is None) == (not config.command):
        raise ConfigError(f"{section}: set url (a running server) or command (how to start one), one of the two")
    if config.url is not None:
        await _until_ready(config.url.rstrip("/"), ready, config, section, http, None)
        return config.url.rstrip("/")
    if not any("{port}" in part for part in config.command):
        raise ConfigError(f"{section}.command: {config.command!r} has no {{port}} in it")
    (port,) = free_ports()
    argv = [part.replace("{port}", str(port)) for part in config.command]
    output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the program
    try:
        process = await asyncio.create_subprocess_exec(
            *bound_to_us(argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=bare_variables(config.command_env),
        )
    except BaseException:
        output.close()
        raise
    program = ServedProgram(process, output, f"http://127.0.0.1:{port}")
    try:
        await _until_ready(program.url, ready, config, section, http, program)
    except BaseException:
        await program.aclose()
        raise
    return program


async def _until_ready(
    url: str, path: str, config: ServedConfig, section: str, http: aiohttp.ClientSession, program: ServedProgram | None
) -> None:
    problem = "no answer"
    try:
        async with asyncio.timeout(config.ready_timeout_s):
            while True:
                if program is not None and program.ended is not None:
                    raise ComponentLost(f"{section}.command ended with {program.ended}:\n{program.last_words}")
                try:
                    async with http.get(url + path, timeout=aiohttp.ClientTimeout(total=10.0)) as response:
                        if response.status < 500:
                            return
                        problem = f"HTTP {response.status}"
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    problem = str(error) or type(error).__name__
                await asyncio.sleep(0.1)
    except TimeoutError:
        words = f"; it said:\n{program.last_words}" if program is not None else ""
        raise ComponentLost(
            f"{section}: {url}{path} was not ready after {config.ready_timeout_s:g} s ({problem}){words}"
        ) from None
