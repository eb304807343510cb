"""``tollway engines`` and ``tollway doctor --url`` against a running server, and what its routes answer."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import cast

import pytest

from tollway import cli_engines
from tollway.cli import main
from tollway.doctor import diagnose_server, show_server
from tollway.errors import ConfigError, NotFound
from tollway.router.config import RouterConfig
from tollway.router.fake import FakeEngine
from tollway.router.placement_lease import Service
from tollway.router.placement_wire import EngineSaid, RefitNotice
from tollway.router.service import Router
from tollway.session_server.client import Json
from tollway.session_server.fake import FakeServer
from tollway.session_server.workers import Places

QUICK = RouterConfig(probe_interval_s=0.05, probe_timeout_s=0.5, connect_timeout_s=0.5, busy_window_s=0.05)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli_engines.add_arguments(parser)
    return parser.parse_args(words)


async def command(server: FakeServer, *words: str) -> bool:
    return await asyncio.to_thread(cli_engines.run, parsed(*words), server.url)


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLLWAY_ADMIN_KEY", "admin-key")
    monkeypatch.setenv("COLUMNS", "120")


async def test_an_engine_is_added_drained_opened_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with FakeServer(tmp_path, router=QUICK) as server, FakeEngine(version="3") as more:
        assert await command(server, "add", more.url, "--max-in-flight", "4", "--model", "judge")
        assert await command(server, "add", more.url + "/", "--max-in-flight", "4", "--model", "judge"), "idempotent"
        capsys.readouterr()
        assert await command(server, "list")
        header, first, second = capsys.readouterr().out.splitlines()[:3]
        assert header.split() == [
            "id",
            "state",
            "address",
            "model",
            "version",
            "sessions",
            "calls",
            "KV",
            "tokens",
            "lives",
        ]
        assert first.split() == ["e0", "serving", server.engine.url, "policy", "0", "0", "0", "0", "1"]
        assert second.split() == ["e1", "serving", more.url, "judge", "3", "0", "0/4", "0", "1"]
        assert await command(server, "drain", more.url)
        assert "e1 is draining: takes no new sessions" in capsys.readouterr().out
        assert await command(server, "undrain", "e1")
        assert "serving" in capsys.readouterr().out
        assert await command(server, "remove", "e1")
        assert [row["id"] for row in await server.client.engines()] == ["e0"]
        with pytest.raises(NotFound, match=r"no engine 'e1'; known engines: e0 \(http"):
            await command(server, "remove", "e1")


async def test_an_engine_that_cannot_join_is_a_failure_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with FakeServer(tmp_path, router=QUICK) as server, FakeEngine() as old:
        old.said = {"version": "0.5.16", "engine": None}
        assert not await command(server, "add", old.url)
        assert "runs SGLang 0.5.16" in capsys.readouterr().out.replace("\n", " ")
        assert not await command(server, "add", server.url)
        assert "is no engine" in capsys.readouterr().out.replace("\n", " ")
        assert await command(server, "list", "--json")
        listed = json.loads(capsys.readouterr().out)
        assert [row["state"] for row in listed["engines"]] == ["serving", "joining", "joining"]
        assert (listed["policy_version"], listed["down_s"], listed["rollout_down"]) == (None, 0.0, "")


async def test_a_wrong_call_is_refused_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="name an engine"):
        cli_engines.run(parsed("drain"), "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="set OTHER_KEY"):
        cli_engines.run(parsed("list", "--key-from-env", "OTHER_KEY"), "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--engine", "foo"], "--engine: engine url 'foo': want http://host:port"),
        (["serve", "--engine", "http://127.0.0.1:0"], "--engine: engine url"),
        (["serve", "--engine", "http://127.0.0.1:1", "--start-engines", "1"], "exclude each other"),
        (["serve", "--start-engines", "-1"], "want a number of engines"),
        (
            ["serve", "--start-engines", "1", "--set", "engine.kind=sglang", "--set", "engine.executable=no-such"],
            "no-such",
        ),
        (["engines", "drain"], "name an engine"),
    ],
)
def test_bad_usage_is_status_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = ["--set", f"run.dir={str(tmp_path / 'run')!r}", "--set", "model.fresh.vocab_size=272"]
    assert main([*words, *more]) == 2
    assert said in capsys.readouterr().err


def states(said: Json) -> list[tuple[object, ...]]:
    """State and reason of each engine."""
    return [(row["id"], row["state"], row["reason"]) for row in cast("list[Json]", said["fleet"])]


async def test_doctor_and_readyz_tell_the_same_truth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeServer(tmp_path, engines=2, router=QUICK) as server, FakeEngine(version="default") as unstamped:

        async def both() -> tuple[bool, dict[str, str]]:
            while True:
                said = await server.client.readiness()
                ready, findings = await diagnose_server(server.url, server.admin_key)
                is_ready = await server.client.ready()
                if states(await server.client.readiness()) == states(said):
                    break  # otherwise a probe changed something between two answers
            assert ready is said["ready"] is is_ready
            told = {finding.name: finding.detail for finding in findings}
            rows = said["fleet"]
            assert list(told) == ["server", *(f"engine {row['id']}" for row in rows)]  # type: ignore[attr-defined]
            for row in rows:  # type: ignore[attr-defined]
                assert str(row["state"]) in told[f"engine {row['id']}"]
                assert str(row["reason"]) in told[f"engine {row['id']}"]
            return ready, told

        ready, told = await both()
        assert ready
        assert told["engine e0"] == f"{server.engine.url} is serving with weights 0"
        await server.client.add_engine(unstamped.url)
        await server.client.refit("e0", None, flushed=False, phase="failed", reason="bucket 2 was refused")
        await server.client.refit("e1", None, flushed=False, phase="paused")
        async with asyncio.timeout(10):
            while "update_weight_version" not in (await both())[1]["engine e2"]:
                await asyncio.sleep(0.01)
        ready, told = await both()
        assert "is quarantined with weights 0: a refit failed half-way: bucket 2 was refused" in told["engine e0"]
        assert not ready or "serving" in told["engine e1"]
        await server.client.refit("e1", None, flushed=False, phase="failed", reason="it was cancelled")
        assert not (await both())[0]
        assert not await asyncio.to_thread(show_server, server.url, server.admin_key)
        assert "this server cannot serve turns now" in capsys.readouterr().out


async def test_doctor_of_a_server_that_is_not_there_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert not await asyncio.to_thread(show_server, "http://127.0.0.1:9", "")
    assert "is it running, and is this its address?" in capsys.readouterr().out.replace("\n", " ")


async def test_the_routes_of_the_fleet_check_their_bodies(tmp_path: Path) -> None:
    async with FakeServer(tmp_path, router=QUICK) as server:
        admin = {"authorization": f"Bearer {server.admin_key}"}
        url = server.engine.url
        for path, body, status in (
            ("/engines", {"url": url, "max_in_flight": 0}, 400),
            ("/engines", {"url": url, "colour": "red"}, 400),
            ("/engines", {"url": url, "model": "judge"}, 409),
            ("/engines", {"url": url}, 201),
            ("/engines/e9/undrain", {}, 404),
            ("/engines/e0/refit", {"version": None, "flushed": False, "phase": "half"}, 400),
            ("/engines/e0/refit", {"version": None, "flushed": False, "phase": "failed", "reason": "x" * 2001}, 400),
            ("/engines/e9/refit", {"version": 1, "flushed": False}, 404),
        ):
            async with server.http.post(f"{server.url}{path}", json=body, headers=admin) as response:
                assert response.status == status, (path, body, await response.text())
        assert [row["state"] for row in await server.client.engines()] == ["serving"]


async def test_a_worker_that_starts_takes_over_what_only_others_know() -> None:
    """Weights, quarantine, drain and membership: none of it can be read off an engine."""
    places = Places(QUICK, [])
    serving = asyncio.ensure_future(places.run())

    def worker(index: int) -> Router:
        service = Service(url=places.url, key=places.key, same_ids=True, part=(index, 2))
        return Router(QUICK, server_name=f"w{index}", service=service)

    async with FakeEngine() as first, FakeEngine() as second, FakeEngine() as judge, worker(0) as old:
        lease = old.lease
        assert lease is not None
        for said in (
            EngineSaid(url=first.url),
            EngineSaid(url=second.url),
            EngineSaid(url=judge.url, model="judge", max_in_flight=3),
        ):
            await lease.change("POST", "/engines", said)
        first.version = "4"
        await lease.change("POST", "/engines/e0/refit", RefitNotice(url=first.url, version=4, flushed=True))
        await lease.change("POST", "/engines/e1/refit", RefitNotice(url=second.url, phase="failed", reason="bucket 1"))
        await lease.change("POST", "/engines/e0/drain")
        assert (old.fleet.get("e0").version, old.fleet.get("e0").drained) == (4, True)
        async with worker(1) as new:
            assert list(new.fleet.engines) == ["e0", "e1", "e2"]
            assert new.fleet.policy.version == 4
            async with asyncio.timeout(10):
                while [str(e.health.state) for e in new.fleet.engines.values()] != [
                    "draining",
                    "quarantined",
                    "serving",
                ]:
                    await asyncio.sleep(0.01)
            assert new.fleet.get("e2").model == "judge"
            assert [each.fleet.get("e2").max_in_flight for each in (old, new)] == [2, 1]
            await lease.change("POST", "/engines/e0/undrain")
            assert new.lease is not None
            await new.lease.follow()
            assert new.fleet.serving() == ["e0"]
            await lease.change("DELETE", "/engines/e2")
            await lease.change("POST", "/engines", EngineSaid(url=judge.url, model="judge"))
            await new.lease.follow()
            assert [list(each.fleet.engines) for each in (old, new)] == [["e0", "e1", "e3"]] * 2
    places.stop()
    await serving
