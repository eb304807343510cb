"""The journal's writer: one bad write harms nobody else, and nobody waits for a writer that has ended."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from server_helpers import ask, rows, until, user

from tollway.errors import ConfigError, JournalError
from tollway.router.fake import FakeReply
from tollway.session_server.fake import FakeServer
from tollway.session_server.journal import Journal

STATE = "UPDATE sessions SET created_at=?"


async def test_a_value_that_sqlite_cannot_take_fails_its_own_write_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    async with asyncio.timeout(10):
        with pytest.raises(JournalError, match="too large"):
            await journal.write((STATE, (2**70,)))
        await journal.write((STATE, (1.0,)))
    await journal.aclose()


async def test_a_write_beside_the_close_is_refused_and_never_left_waiting(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    before = journal.submit((STATE, (1.0,)))
    closing = asyncio.create_task(journal.aclose())
    await asyncio.sleep(0)  # the close has begun and has not ended
    with pytest.raises(JournalError, match="closed"):
        async with asyncio.timeout(5):
            await journal.write((STATE, (2.0,)))
    await closing
    await before


async def test_a_second_server_on_a_journal_is_refused_until_the_first_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tollway.session_server.journal._LOCK_WAIT_S", 0.1)
    first, second, third = (Journal(tmp_path / "journal.sqlite") for _ in range(3))
    await first.open()
    with pytest.raises(ConfigError, match="another server"):
        await second.open()
    await second.aclose()
    await first.aclose()
    await third.open()
    await third.aclose()


async def test_space_of_erased_sessions_goes_back_to_the_file_system(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    settings = {"compact_after_bytes": 1 << 20}
    async with FakeServer(tmp_path, settings=settings) as server:
        server.engine.script = lambda request: FakeReply(ids=[*b"x" * 3000, 261])
        kept = await server.client.create()
        reply = await ask(server, kept, [user("y" * 1000)])
        for _ in range(20):
            session = await server.client.create()
            await asyncio.gather(*(ask(server, session, [user("y" * 20_000)]) for _ in range(4)))
            await server.client.delete(session.session_id)
        await until(lambda: path.stat().st_size < 1 << 20, what="the file shrinks")
        await ask(server, kept, [user("y" * 1000), reply, user("on")])
        (row,) = await rows(server, kept)
        assert row.trained_tokens == 6002


async def test_a_checkpoint_that_is_held_up_by_a_reader_loses_nothing(tmp_path: Path) -> None:
    settings = {"compact_after_bytes": 1 << 16}
    async with FakeServer(tmp_path, settings=settings) as server:
        server.engine.script = lambda request: FakeReply(ids=[*b"x" * 3000, 261])
        kept, gone = await server.client.create(), await server.client.create()
        await ask(server, kept, [user("a")])
        await ask(server, gone, [user("b" * 25_000)])
        reader = sqlite3.connect(tmp_path / "journal.sqlite")
        try:
            cursor = reader.execute("SELECT * FROM turns")
            cursor.fetchone()
            await server.client.delete(gone.session_id)
            await ask(server, kept, [user("c")])
        finally:
            reader.close()
        assert len(await rows(server, kept)) == 2


async def test_a_kept_reply_is_found_without_reading_the_session(tmp_path: Path) -> None:
    """A row's key lies behind its arrays: a scan would read megabytes for every call with a new key."""
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    query = "SELECT reply FROM turns WHERE session_id=? AND idempotency_key=? AND reply IS NOT NULL"
    ((*_, plan),) = await journal.read(f"EXPLAIN QUERY PLAN {query}", ("s", "k"))
    await journal.aclose()
    assert "turns_by_key" in str(plan)
