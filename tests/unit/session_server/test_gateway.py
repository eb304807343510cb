"""The parts of a server are started and stopped together, also when a start fails half-way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tollway.errors import JournalError, NoEngine, TollwayError
from tollway.router.config import RouterConfig
from tollway.router.fake import FakeEngine
from tollway.session_server.config import ServerConfig
from tollway.session_server.gateway import Gateway
from tollway.session_server.journal import Journal


def gateway(tmp_path: Path, urls: list[str], **settings: object) -> Gateway:
    values = {"journal": tmp_path / "journal.sqlite", "engine_wait_s": 0.0, **settings}
    return Gateway(ServerConfig.model_validate(values), RouterConfig(), admin_key="k", engine_urls=urls)


@pytest.mark.parametrize("stage", ["a bad engine url", "an unreadable journal", "no engine in time"])
async def test_a_start_that_fails_leaves_no_task_and_no_lock(tmp_path: Path, stage: str) -> None:
    before = asyncio.all_tasks()
    urls = ["http://127.0.0.1:9", *(["nonsense"] if stage == "a bad engine url" else [])]
    server = gateway(tmp_path, urls, engine_wait_s=0.05 if stage == "no engine in time" else 0.0)
    if stage == "an unreadable journal":

        class Unreadable(Journal):
            async def read(self, *_: object) -> list[tuple[None]]:  # type: ignore[override]
                raise JournalError("disk I/O error")

        server.journal = Unreadable(server.config.journal)
    with pytest.raises(NoEngine if stage == "no engine in time" else TollwayError):
        await server.start()
    assert asyncio.all_tasks() == before
    await server.stop()
    async with FakeEngine() as engine:
        again = gateway(tmp_path, [engine.url], engine_wait_s=10.0)
        await again.start()
        await again.stop()
        await again.stop()
    assert asyncio.all_tasks() == before
