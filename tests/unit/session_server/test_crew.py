"""What names a worker, its sessions and its journal."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest

from tollway.errors import BadRequest, ConfigError
from tollway.session_server import auth
from tollway.session_server.config import ServerConfig
from tollway.session_server.crew import Crew, check_journals, component, journal_of
from tollway.session_server.journal import Journal
from tollway.session_server.repeats import Repeats
from tollway.session_server.workers import _private_folder


@pytest.mark.parametrize("worker", [0, 1, 255])
def test_an_id_names_its_worker_and_has_128_random_bits_beside(worker: int) -> None:
    made = [auth.new_session_secret(worker) for _ in range(200)]
    for session_id, token in made:
        assert auth.worker_of(session_id) == worker
        assert auth.session_of(token) == session_id
    for at in range(32):
        assert len({session_id[at] for session_id, _ in made}) > 8, "every digit of the first 32 is random"


@pytest.mark.parametrize(
    "text", ["", "0" * 32, "0" * 33, "0" * 35, "g" * 34, "A" * 34, "0" * 34 + "\n", "../" * 11 + "a"]
)
def test_what_is_no_session_id_names_no_worker(text: str) -> None:
    assert auth.worker_of(text) is None


def test_a_place_travels_to_the_worker_and_is_seen_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crew = Crew(index=2, size=3, folder=tmp_path, secret="hidden", public_fd=5, own_fd=6)
    assert "hidden" not in repr(crew)
    ((name, value),) = crew.environment().items()
    assert component() == "serve"
    monkeypatch.setenv(name, value)
    assert component() == "serve.2"
    assert Crew.from_environment() == crew
    assert Crew.from_environment() is None, "what the worker starts does not inherit it"
    assert crew.siblings == (0, 1)


async def journal(path: Path, *, state: str, expires_at: float) -> None:
    made = Journal(path)
    await made.open()
    await made.write(
        (
            "INSERT INTO sessions (id, token_hash, state, task_id, group_id, created_at, expires_at, settings) "
            "VALUES ('s', x'', ?, '', '', 0, ?, x'')",
            (state, expires_at),
        )
    )
    await made.aclose()


async def test_only_open_sessions_of_absent_workers_are_in_the_way(tmp_path: Path) -> None:
    base = tmp_path / "j[1].sqlite"
    assert [journal_of(base, index).name for index in range(3)] == ["j[1].sqlite", "j[1].1.sqlite", "j[1].2.sqlite"]
    assert check_journals(tmp_path / "nowhere" / "j.sqlite", 1) == []
    later = time.time() + 1000
    await journal(base, state="open", expires_at=later)
    await journal(journal_of(base, 1), state="closed", expires_at=later)
    await journal(journal_of(base, 2), state="open", expires_at=1.0)
    await journal(journal_of(base, 3), state="open", expires_at=later)
    (tmp_path / "j[1].x.sqlite").write_text("not ours")
    (tmp_path / "other.7.sqlite").write_text("not ours")
    assert check_journals(base, 4) == []
    with pytest.raises(ConfigError, match=r"worker 3.*start at least 4"):
        check_journals(base, 3)
    journal_of(base, 3).unlink()
    assert check_journals(base, 1) == [journal_of(base, 1), journal_of(base, 2)]
    sqlite3.connect(journal_of(base, 5)).close()
    journal_of(base, 5).write_text("garbage" * 1000)
    with pytest.raises(ConfigError, match="cannot tell"):
        check_journals(base, 2)


def test_the_workers_folder_is_private_and_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import tempfile

    folders = [_private_folder() for _ in range(2)]
    assert len(set(folders)) == 2
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    (tmp_path / ("x" * 100)).mkdir()
    folders.append(_private_folder())
    assert list((tmp_path / ("x" * 100)).iterdir()) == []
    for folder in folders:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(str(folder)) < 90
        (folder / "metrics").rmdir()
        folder.rmdir()


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://h", "http://", "h:1", "http://a b", "http://h/\r\nx: y", "http://h?x=1", "http://h#x"),
        *("http://user:pw@h", "http://h:0", "http://h:99999", 'http://h/"', "http://h\x00", "http://ü"),
    ],
)
def test_a_public_url_that_is_no_plain_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="public_url"):
        ServerConfig(public_url=url)


def test_a_public_url_may_have_a_path() -> None:
    assert ServerConfig(public_url="https://rl.example:8443/tollway").public_url == "https://rl.example:8443/tollway"


async def test_a_call_with_a_key_is_made_once_and_a_failure_is_tried_anew() -> None:
    repeats, made = Repeats(limit=2), 0
    go_on = asyncio.Event()

    async def make() -> bytes:
        nonlocal made
        made += 1
        await go_on.wait()
        if made == 2:
            raise RuntimeError("once")
        return b"%d" % made

    first = asyncio.ensure_future(repeats.once("k", b"a", make))
    second = asyncio.ensure_future(repeats.once("k", b"a", make))
    await asyncio.sleep(0)
    first.cancel()
    go_on.set()
    assert await second == b"1"
    assert await repeats.once("k", b"a", make) == b"1", "also when its first client has gone"
    with pytest.raises(BadRequest):
        await repeats.once("k", b"b", make)
    with pytest.raises(RuntimeError):
        await repeats.once("x", b"a", make)
    assert await repeats.once("x", b"a", make) == b"3"
    assert await repeats.once(None, b"a", make) == b"4"
    assert await repeats.once("y", b"a", make) == b"5"
    assert await repeats.once("k", b"b", make) == b"6", "the oldest was forgotten"
