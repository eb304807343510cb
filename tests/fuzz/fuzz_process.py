"""The server as real processes that can be killed and started again on the same journals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tollway.router.fake import FakeEngine

KEY = "an-admin-key-for-tests"


class Serving:
    """``tollway serve`` on a folder, as often as it takes."""

    def __init__(
        self,
        folder: Path,
        engine: FakeEngine,
        *,
        workers: int = 1,
        journal: Path | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """``within``: a command line that runs the server's."""
        self.workers = workers
        settings = {"port": 0, "journal": str(journal or folder / "journal.sqlite"), "engine_wait_s": 30.0}
        self._argv = [
            *within,
            sys.executable,
            "-P",
            "-m",
            "tollway",
            "serve",
            "--workers",
            str(workers),
            "--engine",
            engine.url,
        ]
        self._argv += [
            part for key, value in settings.items() for part in ("--set", f"server.{key}={json.dumps(value)}")
        ]
        self._folder = folder
        self.up = asyncio.Event()
        self.url = ""
        self.pid = 0
        """Of the server itself."""

    @property
    def log(self) -> str:
        return (self._folder / "stderr").read_text()

    async def start(self) -> None:
        with (self._folder / "stderr").open("ab") as stderr:
            self.process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                cwd=self._folder,
                env={**os.environ, "TOLLWAY_ADMIN_KEY": KEY, "TMPDIR": str(self._folder)},
            )
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line, self.log
        told = json.loads(line)
        self.url, self.pid = str(told["url"]), int(told["pid"])
        self.up.set()

    async def kill(self, rng: Random, *, all_of_it: bool) -> None:
        """SIGKILL: the server, or one of its workers, which its parent has to start again."""
        if self.workers > 1 and not all_of_it:
            os.kill(rng.choice(self._children()), signal.SIGKILL)
            return
        self.up.clear()
        self.process.kill()
        await self.process.wait()
        await self.start()

    async def stop(self) -> None:
        self.up.clear()
        if self.process.returncode is None:
            self.process.terminate()
        await self.process.communicate()

    def _children(self) -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, parent = entry.read_text().rpartition(")")[2].split()[:2]
                if int(parent) == self.process.pid and state != "Z":
                    found.append(int(entry.parent.name))
        return found
