"""The workers of one server place as one: groups, budgets, engines and limits over real processes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
from pathlib import Path

import aiohttp
import pytest
from worker_helpers import KEY, Cluster, chat, cluster, home

from tollway.router.config import RouterConfig
from tollway.router.fake import FakeEngine, FakeReply
from tollway.router.placement_link import KEY_VARIABLE
from tollway.session_server.client import Session, SessionClient, SessionOptions
from tollway.session_server.workers import Places

pytestmark = pytest.mark.slow(limit_s=60)


def turns(engine: FakeEngine, session: Session) -> int:
    return sum(request.body.get("routing_key") == session.session_id for request in engine.requests)


def door(running: Cluster, session: Session) -> SessionClient:
    """The worker that has ``session``, for its operator."""
    return SessionClient(session.base_url.rpartition("/sessions/")[0], KEY, http=running.http)


async def call(running: Cluster, session: Session, text: str = "hi") -> int:
    return (await chat(running, session.openai_base_url, session.token, text))[0]


async def nothing_is_left(running: Cluster) -> None:
    """Every counter is 0, in the service and over the workers."""
    while any(row["sessions"] or row["resident_tokens"] for row in await running.places()):
        await asyncio.sleep(0.02)
    for row in await running.client.engines():
        assert {row[name] for name in ("sessions", "resident_tokens", "reserved_tokens", "in_flight", "waiting")} == {0}
        assert (row["exact_sessions"], row["exact_calls"]) == (0, 0)


async def test_siblings_on_different_workers_start_on_one_engine_and_are_counted_once(tmp_path: Path) -> None:
    async with FakeEngine() as one, FakeEngine() as two, cluster(tmp_path, one, two) as running:
        parents = [await home(running, worker) for worker in range(2)]  # a child is opened on its parent's worker
        opened = list(parents)
        for number in range(4):
            mates = [
                await running.client.create(
                    group_id=f"g{number}", options=SessionOptions(parent_id=parent.session_id, exact_version=0)
                )
                for parent in parents
            ]
            assert mates[0].base_url.split("/")[2] != mates[1].base_url.split("/")[2]
            for mate in mates:
                assert await call(running, mate) == 200
            assert sorted([turns(engine, mate) for mate in mates] for engine in (one, two)) == [[0, 0], [1, 1]]
            opened += mates
        rows = await running.client.engines()
        assert [row["sessions"] for row in rows] == [4, 4], "the groups are spread over the engines"
        assert [row["exact_sessions"] for row in rows] == [4, 4]
        while [row["resident_tokens"] for row in await running.places()] != [row["resident_tokens"] for row in rows]:
            await asyncio.sleep(0.02)
        assert [row["sessions"] for row in await running.places()] == [4, 4]
        for session in opened:
            await running.client.delete(session.session_id)
        await nothing_is_left(running)


async def test_the_budget_of_an_engine_is_that_of_all_workers(tmp_path: Path) -> None:
    router = {"kv_budget_tokens": 8000, "admission_timeout_s": 0.5}
    async with FakeEngine() as engine, cluster(tmp_path, engine, router=router) as running:
        placed = []
        while await call(running, session := await home(running, 0), "x" * 1000) == 200:
            placed.append(session)
        assert placed, "one worker may use the whole engine"
        late = await home(running, 1)
        assert await call(running, late, "x" * 1000) == 429, "and then the others have nothing left of it"
        (row,) = await running.places()
        assert (row["sessions"], row["budget_tokens"]) == (len(placed), 8000)
        (row,) = await running.client.engines()
        assert (row["sessions"], row["kv_budget_tokens"]) == (len(placed), 8000)
        for each in placed:
            await running.client.delete(each.session_id)
        assert await call(running, late, "x" * 1000) == 200
        for each in (session, late):
            await running.client.delete(each.session_id)
        await nothing_is_left(running)


async def test_an_engine_added_on_one_worker_serves_the_sessions_of_the_other(tmp_path: Path) -> None:
    async with FakeEngine() as engine, FakeEngine() as late, cluster(tmp_path, engine) as running:
        zero, one = [await home(running, worker) for worker in range(2)]
        assert (await door(running, zero).add_engine(late.url))["id"] == "e1"
        await door(running, one).drain_engine("e0")
        for each in (zero, one):  # true on all workers when the call is answered, and in the service's words
            rows = await door(running, each).engines()
            assert [(row["id"], row["url"]) for row in rows] == [("e0", engine.url), ("e1", late.url)]
        for each in (zero, one):
            assert await call(running, each) == 200
            assert (turns(engine, each), turns(late, each)) == (0, 1)
        await door(running, one).undrain_engine("e0")
        await door(running, one).remove_engine("e1")
        assert await call(running, zero) == 200
        assert turns(engine, zero) == 1


async def test_a_killed_worker_takes_its_places_over(tmp_path: Path) -> None:
    async with FakeEngine() as one, FakeEngine() as two, cluster(tmp_path, one, two) as running:
        sessions = [await home(running, worker) for worker in (0, 1, 1)]
        for session in sessions:
            assert await call(running, session) == 200
        while sum(row["sessions"] for row in await running.places()) != 3:
            await asyncio.sleep(0.02)
        homes = [turns(one, session) for session in sessions]
        before = [row["sessions"] for row in await running.places()]
        os.kill(running.workers()[1], signal.SIGKILL)
        for session in sessions[1:]:
            status = 0
            while status != 200:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    status = await call(running, session)
        assert [turns(one, session) > 0 for session in sessions] == [count > 0 for count in homes], "nobody moved"
        while [row["sessions"] for row in await running.places()] != before:  # they count from their next call on
            await asyncio.sleep(0.02)
        for session in sessions:
            await running.client.delete(session.session_id)
        await nothing_is_left(running)


async def test_workers_divide_an_engines_limit(tmp_path: Path) -> None:
    running_now = most = 0
    free = asyncio.Event()

    def reply(request: object) -> FakeReply:
        return FakeReply(ids=[*b"ok", 261], delay_s=0.05)

    async with FakeEngine(reply) as engine, cluster(tmp_path, engine) as running:
        await running.client.add_engine(engine.url, max_in_flight=3)
        assert [row["max_in_flight"] for row in await running.client.engines()] == [3]
        sessions = [await home(running, worker) for worker in (0, 1) for _ in range(6)]

        async def watch() -> None:
            nonlocal running_now, most
            while not free.is_set():
                running_now = engine.in_flight
                most = max(most, running_now)
                await asyncio.sleep(0)

        watcher = asyncio.ensure_future(watch())
        assert await asyncio.gather(*(call(running, session) for session in sessions)) == [200] * 12
        free.set()
        await watcher
        assert most == 3, "two on one worker and one on the other"
        body = {"url": engine.url, "max_in_flight": 1}
        async with running.http.post(
            f"{running.url}/engines", json=body, headers={"authorization": f"Bearer {KEY}"}
        ) as response:
            assert response.status == 400
            assert "want 2 or more" in (await response.json())["error"]["message"]


async def test_the_key_of_the_service_is_in_no_command_line_and_no_file(tmp_path: Path) -> None:
    async with FakeEngine() as engine, cluster(tmp_path, engine) as running:
        assert await call(running, await home(running, 0)) == 200
        _, crew = running._children()[0]
        key = str(crew["places_key"]).encode()
        for pid in (running.process.pid, *running.workers().values()):
            assert key not in Path(f"/proc/{pid}/cmdline").read_bytes()
        for path in tmp_path.rglob("*"):
            if path.is_file():
                assert key not in path.read_bytes(), path
        async with running.http.get(f"{crew['places_url']}/engines") as response:
            assert response.status == 401


async def test_a_service_of_the_users_wins_and_has_the_workers_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places(RouterConfig(), [])
    serving = asyncio.ensure_future(places.run())
    monkeypatch.setenv(KEY_VARIABLE, places.key)
    router = {"placement_url": places.url}
    async with FakeEngine() as engine, FakeEngine() as late, cluster(tmp_path, engine, router=router) as running:
        zero, one = [await home(running, worker) for worker in range(2)]
        await door(running, one).add_engine(late.url)
        for each in (zero, one):
            assert [row["url"] for row in await door(running, each).engines()] == [engine.url, late.url]
            assert await call(running, each) == 200
        headers = {"authorization": f"Bearer {places.key}"}
        async with running.http.get(f"{places.url}/engines", headers=headers) as response:
            rows = (await response.json())["engines"]
        assert [(row["url"], row["sessions"]) for row in rows] == [(engine.url, 1), (late.url, 1)]
        await door(running, zero).remove_engine("e0")
        assert [row["url"] for row in await door(running, one).engines()] == [late.url]
    places.stop()
    await serving


@pytest.mark.skipif(
    importlib.util.find_spec("smg") is None,
    reason="the outer gateway is not installed: pip install 'tollway[gateway]'",
)
async def test_behind_an_outer_gateway_workers_still_share_the_list_of_engines(tmp_path: Path) -> None:
    async with FakeEngine() as one, FakeEngine() as two, cluster(tmp_path, one, router={"gateway": "smg"}) as running:
        sessions = [await home(running, worker) for worker in range(2)]
        for session in sessions:
            assert await call(running, session) == 200
        assert (await door(running, sessions[1]).add_engine(two.url))["id"] == "e1"
        for session in sessions:
            assert [row["id"] for row in await door(running, session).engines()] == ["e0", "e1"]
            assert await call(running, session, "again") == 200
