"""A disk that is full, and is not full any more: 507 meanwhile, nothing half-written, and then on as before."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from random import Random

import aiohttp
import pytest
from fuzz_process import KEY, Serving
from fuzz_talk import PATHS, Talk, understand
from fuzz_wire import Answer, Client, Shot
from fuzz_witness import Camp, Witness, numbers_in

from tollway.errors import JournalError, SandboxUnavailable
from tollway.router.fake import FakeEngine
from tollway.sandboxes.config import LocalConfig
from tollway.sandboxes.program import find_bwrap
from tollway.session_server.client import SessionClient

DISK = 16 << 20
TEXT = "x" * 20_000
"""What a turn adds; a few hundred of them fill the disk."""


class Disk(ABC):
    """Where the journal lies."""

    journal: Path
    within: tuple[str, ...] = ()

    @abstractmethod
    def fill(self, pid: int) -> None:
        """No byte more for server ``pid``."""

    @abstractmethod
    def free(self, pid: int) -> None:
        """Room again."""

    def rescue(self, pid: int, folder: Path) -> Path:
        """The journal after a crash of the server."""
        return self.journal


class LimitedFiles(Disk):
    """Files of the server may not grow: what a quota looks like (EFBIG)."""

    def __init__(self, folder: Path) -> None:
        self.journal = folder / "journal.sqlite"

    def fill(self, pid: int) -> None:
        largest = max(path.stat().st_size for path in self.journal.parent.glob("journal.sqlite*"))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))

    def free(self, pid: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class SmallDisk(Disk):
    """A file system of its own that something else fills (ENOSPC)."""

    def __init__(self, folder: Path) -> None:
        self._place = folder / "disk"
        self._place.mkdir()
        self.journal = self._place / "journal.sqlite"
        try:
            program = find_bwrap(LocalConfig())
        except SandboxUnavailable as error:
            pytest.skip(str(error))
        size = ("--size", str(DISK), "--tmpfs", str(self._place))
        self.within = (str(program), "--die-with-parent", "--dev-bind", "/", "/", *size, "--")

    def fill(self, pid: int) -> None:
        with contextlib.suppress(OSError), self._seen(pid, "other").open("wb", buffering=0) as other:
            for size in (1 << 16, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while other.write(b"\0" * size):
                        pass

    def free(self, pid: int) -> None:
        self._seen(pid, "other").unlink()

    def rescue(self, pid: int, folder: Path) -> Path:
        """The file system ends with its processes, so the files leave it first."""
        for path in self._seen(pid, "").glob("journal.sqlite*"):
            shutil.copy(path, folder / path.name)
        return folder / "journal.sqlite"

    def _seen(self, pid: int, name: str) -> Path:
        return Path(f"/proc/{pid}/root{self._place}/{name}")


class Writer:
    """A client of one session in all dialects."""

    def __init__(self, url: str, camp: Camp) -> None:
        self.camp = camp
        self._client = Client(url)

    async def call(self, dialect: str, *, stream: bool) -> tuple[Answer, bool]:
        """(answer, whether a reply arrived whole)"""
        talk = Talk(dialect)
        talk.tell(Random(0), TEXT)
        headers = ((b"authorization", b"Bearer " + self.camp.token.encode()),)
        answer = await self._client.fire(
            Shot(PATHS[dialect], json.dumps(talk.body(stream=stream)).encode(), headers=headers)
        )
        if answer.status != 200:
            return answer, False
        said = understand(dialect, answer)
        if said.whole:
            self.camp.seen |= numbers_in(said.text)
        return answer, said.whole

    async def until_refused(self) -> int:
        """Calls until one cannot be written; how many could."""
        for count in range(1000):
            if not (await self.call("chat", stream=False))[1]:
                return count
        raise AssertionError("the disk never filled up")

    def close(self) -> None:
        self._client.close()


@pytest.mark.slow(60)
@pytest.mark.parametrize("kind", [LimitedFiles, SmallDisk])
async def test_a_full_disk_costs_the_turns_of_its_time_and_nothing_else(tmp_path: Path, kind: type[Disk]) -> None:
    disk = kind(tmp_path)
    witness = Witness("compact")
    async with FakeEngine(witness.script, keep_requests=False) as engine, aiohttp.ClientSession() as http:
        serving = Serving(tmp_path, engine, journal=disk.journal, within=disk.within)
        await serving.start()
        client = SessionClient(serving.url, KEY, http=http)
        session = await client.create()
        writer = Writer(serving.url, Camp(session.session_id, session.token))
        assert (await writer.call("chat", stream=True))[1]

        disk.fill(serving.pid)
        await writer.until_refused()
        for dialect in PATHS:
            for stream in (False, True):
                answer, whole = await writer.call(dialect, stream=stream)
                assert not whole
                assert answer.status == 507 or (stream and answer.status == 200)
                assert JournalError.code.encode() in answer.body
        with pytest.raises(JournalError):
            await client.create()
        await prove(client, writer.camp, witness)
        async with http.get(f"{serving.url}/healthz") as response:
            assert response.status == 200

        disk.free(serving.pid)
        for dialect in PATHS:
            for stream in (False, True):
                assert (await writer.call(dialect, stream=stream))[1]
        await client.create()
        await prove(client, writer.camp, witness)

        journal = disk.rescue(serving.pid, tmp_path)
        serving.process.kill()
        await serving.process.wait()
        again = Serving(tmp_path, engine, journal=journal)
        await again.start()
        client = SessionClient(again.url, KEY, http=http)
        await prove(client, writer.camp, witness)
        writer.close()
        writer = Writer(again.url, writer.camp)
        assert (await writer.call("responses", stream=True))[1]
        await prove(client, writer.camp, witness)
        writer.close()
        await again.stop()


async def prove(client: SessionClient, camp: Camp, witness: Witness) -> None:
    """The export holds what was answered and nothing else."""
    state = await client.session(camp.session_id)
    rows = await client.trajectories(camp.session_id)
    assert witness.prove(camp, rows, int(str(state["sampled_tokens"]))) == camp.seen
