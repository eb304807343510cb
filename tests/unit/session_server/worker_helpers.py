"""A server of several workers as real processes, for tests that ask, kill and start them again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from server_helpers import user

from tollway.router.fake import FakeEngine
from tollway.session_server import auth
from tollway.session_server.client import Session, SessionClient

KEY = "an-admin-key-for-tests"
ADMIN = {"authorization": f"Bearer {KEY}"}


@dataclass
class Cluster:
    """A running server of several workers."""

    process: asyncio.subprocess.Process
    url: str
    http: aiohttp.ClientSession
    log: Path

    @property
    def client(self) -> SessionClient:
        return SessionClient(self.url, KEY, http=self.http)

    def workers(self) -> dict[int, int]:
        """Pids by index: the children of the parent."""
        return {index: pid for index, (pid, _) in self._children().items()}

    async def places(self) -> list[dict[str, Any]]:
        """Engines with their loads as the workers' placement service has them."""
        _, crew = next(iter(self._children().values()))
        headers = {"authorization": f"Bearer {crew['places_key']}"}
        async with self.http.get(f"{crew['places_url']}/engines", headers=headers) as response:
            rows: list[dict[str, Any]] = (await response.json())["engines"]
            return rows

    def _children(self) -> dict[int, tuple[int, dict[str, Any]]]:
        """(pid, place in the crew) by index."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, StopIteration):
                state, parent = entry.read_text().rpartition(")")[2].split()[:2]
                if int(parent) == self.process.pid and state != "Z":
                    environment = (entry.parent / "environ").read_bytes().split(b"\0")
                    place = next(each for each in environment if each.startswith(b"TOLLWAY_WORKER="))
                    crew = json.loads(place.partition(b"=")[2])
                    found[int(crew["index"])] = (int(entry.parent.name), crew)
        return found

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        async with self.http.get(self.url + path, headers=ADMIN, **more) as response:
            return response.status, await response.json()

    async def told(self, text: str, times: int = 1) -> None:
        """Wait until the log has ``text``."""
        while self.log.read_text().count(text) < times:
            await asyncio.sleep(0.02)


async def launch(
    folder: Path, *engines: FakeEngine, workers: int, router: dict[str, Any] | None = None, **server: Any
) -> asyncio.subprocess.Process:
    """``tollway serve`` with several workers; ``server`` and ``router`` are settings."""
    settings = {"port": 0, "journal": str(folder / "journal.sqlite"), "engine_wait_s": 30.0, **server}
    argv = [sys.executable, "-P", "-m", "tollway", "serve", "--workers", str(workers), "--set", "run.log_level=DEBUG"]
    argv += [part for name, value in settings.items() for part in ("--set", f"server.{name}={json.dumps(value)}")]
    argv += [part for name, value in (router or {}).items() for part in ("--set", f"router.{name}={json.dumps(value)}")]
    argv += [part for engine in engines for part in ("--engine", engine.url)]
    with (folder / "stderr").open("ab") as stderr:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            cwd=folder,
            env={**os.environ, "TOLLWAY_ADMIN_KEY": KEY, "TMPDIR": str(folder)},
        )


@contextlib.asynccontextmanager
async def cluster(folder: Path, *engines: FakeEngine, workers: int = 2, **server: Any) -> AsyncIterator[Cluster]:
    """The same, ready, and ended afterwards."""
    process = await launch(folder, *engines, workers=workers, **server)
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        assert line, (folder / "stderr").read_text()
        told = json.loads(line)
        assert (told["event"], told["pid"], told.get("workers", 1)) == ("ready", process.pid, workers)
        async with aiohttp.ClientSession() as http:
            yield Cluster(process, told["url"], http, folder / "stderr")
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
        await process.communicate()


async def chat(cluster: Cluster, base: str, token: str, text: str = "hi", **more: Any) -> tuple[int, Any]:
    """One model call: (status, JSON)."""
    headers = {"authorization": f"Bearer {token}"}
    body = {"messages": [user(text)], **more}
    async with cluster.http.post(f"{base}/chat/completions", json=body, headers=headers) as response:
        return response.status, await response.json()


def via(cluster: Cluster, session: Session) -> str:
    """The session's base URL on the shared address."""
    return f"{cluster.url}/sessions/{session.session_id}/v1"


async def home(cluster: Cluster, worker: int) -> Session:
    """A new session on ``worker``."""
    while True:
        session = await cluster.client.create()
        if auth.worker_of(session.session_id) == worker:
            return session
