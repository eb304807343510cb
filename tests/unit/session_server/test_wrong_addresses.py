"""What the commands say when the address, the order or the width is not what they need."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from rich.console import Console

from tollway.cli import main
from tollway.cli_engines import engine_table
from tollway.doctor import diagnose_server
from tollway.errors import BadRequest
from tollway.router.config import RouterConfig
from tollway.router.fake import FakeEngine
from tollway.router.placement_lease import Service
from tollway.router.service import Router
from tollway.session_server.client import SessionClient
from tollway.session_server.fake import FakeServer
from tollway.session_server.wants import requested


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLLWAY_ADMIN_KEY", "admin-key")
    monkeypatch.setenv("COLUMNS", "200")


async def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = await asyncio.to_thread(main, words)
    out = capsys.readouterr()
    return status, out.out + out.err


@pytest.mark.parametrize("command", ["engines", "cache", "doctor"])
async def test_an_address_without_a_server_says_what_to_look_at(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, words = await said(capsys, command, "--url", "http://127.0.0.1:9")
    assert status == 1
    assert "no session server at http://127.0.0.1:9: Connection refused; is it running" in words
    assert "engine_lost" not in words
    status, words = await said(capsys, command, "--url", "127.0.0.1:8700")
    assert status == (1 if command == "doctor" else 2)
    assert "'127.0.0.1:8700': want http://host:port" in words
    async with FakeServer(tmp_path) as server:
        status, words = await said(capsys, command, "--url", f"{server.url}/engines")
        assert status == 1
        assert f"{server.url}/engines is no session server" in words


async def test_removing_says_what_becomes_of_the_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeServer(tmp_path) as server, FakeEngine() as more:
        await server.client.add_engine(more.url)
        _, words = await said(capsys, "engines", "remove", "e1", "--url", server.url)
        assert words == f"removed e1 at {more.url}\n"


def test_engines_fit_in_eighty_columns_and_nothing_is_cut_for_a_pipe() -> None:
    row = {
        "id": "e0",
        "state": "quarantined",
        "url": "http://127.0.0.1:30000",
        "model": "",
        "version": 0,
        "frozen": False,
        "sessions": 12,
        "in_flight": 0,
        "max_in_flight": None,
        "resident_tokens": 1016,
        "kv_budget_tokens": 131072,
        "incarnation": 0,
    }
    for width in (80, 120):
        console = Console(width=width)
        with console.capture() as capture:
            console.print(engine_table([row], narrow=width < 100))
        header, line, *rest = capture.get().splitlines()
        assert not rest
        assert header.split() == ["id", "state", "address", "version", "sessions", "calls", "KV", "tokens", "lives"]
        assert line.split() == ["e0", "quarantined", row["url"], "0", "12", "0", "1,016/131,072", "1"]


def test_a_header_that_is_no_version_is_quoted_as_text() -> None:
    with pytest.raises(BadRequest, match=r"a whole number; got 'abc'$"):
        requested([(b"x-tollway-exact-version", b"abc")])


def test_a_placement_address_without_a_scheme_is_a_wrong_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "--set", "router.placement_url='127.0.0.1:8600'"]) == 2
    assert "router: placement_url '127.0.0.1:8600': want http://host:port" in capsys.readouterr().err


async def test_a_placement_service_that_is_away_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOLLWAY_ROUTER_KEY", "k" * 32)
    caplog.set_level(logging.INFO)
    service = Service(url="http://127.0.0.1:9", key="k" * 32)
    async with Router(RouterConfig(placement_url=service.url), server_name="a", service=service):
        await asyncio.sleep(1.0)
    told = [each for each in caplog.messages if "cannot be asked" in each]
    assert len(told) == 1, told


async def test_doctor_names_an_away_service_and_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeServer(tmp_path) as server:
        answers: list[tuple[dict[str, object], str]] = [
            ({"ready": False, "engines": ["placement service does not answer"], "fleet": []}, "does not answer"),
            ({"ready": True}, "is no session server"),
        ]
        for answer, wanted in answers:

            async def readiness(_: SessionClient, answer: dict[str, object] = answer) -> dict[str, object]:
                return answer

            monkeypatch.setattr(SessionClient, "readiness", readiness)
            ready, findings = await diagnose_server(server.url, server.admin_key)
            assert not ready
            assert wanted in findings[-1].detail
