"""The journal's writer: one bad write harms nobody else, and nobody waits for a writer that has ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tollway.errors import ConfigError, JournalError
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
