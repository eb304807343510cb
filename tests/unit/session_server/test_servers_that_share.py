"""Whole session servers whose sessions somebody else places: a service for several of them, or an outer gateway."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from server_helpers import say, user

from tollway.router.config import RouterConfig
from tollway.router.fake import FakeEngine, FakeReply
from tollway.router.placement_link import KEY_VARIABLE
from tollway.router.supervisor import ServerProcess
from tollway.session_server.client import Session
from tollway.session_server.fake import FakeServer

KEY = "the key of the service"
QUICK = RouterConfig(probe_interval_s=0.1, probe_timeout_s=1.0, connect_timeout_s=1.0)
HELLO = [*b"hello", 261]


def turns(engine: FakeEngine, session: Session) -> int:
    """Model calls of a session that an engine served."""
    key = session.session_id
    return sum(r.body.get("routing_key") == key and not r.rid.startswith("tollway-") for r in engine.requests)


@contextlib.asynccontextmanager
async def placement_service(log: Path, port: int = 0) -> AsyncIterator[ServerProcess]:
    """``tollway router`` as a process."""
    argv = [sys.executable, "-P", "-m", "tollway", "router", "--port", str(port)]
    process = await ServerProcess.start(argv, name="router", log=log, env={KEY_VARIABLE: KEY, "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        await process.stop()


async def engines_of(service: str) -> list[dict[str, object]]:
    headers = {"authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{service}/engines") as answer:
        rows: list[dict[str, object]] = (await answer.json())["engines"]
        return rows


async def test_two_servers_one_service_and_a_kill_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    async with contextlib.AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeEngine(say(HELLO))) for _ in range(2)]
        service = await stack.enter_async_context(placement_service(tmp_path / "router.log"))
        router = QUICK.model_copy(update={"placement_url": service.url})
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        one = await stack.enter_async_context(FakeServer(tmp_path / "a", engines=fakes, router=router))
        two = FakeServer(tmp_path / "b", engines=[], router=router)
        async with two:  # it learns the engines from the service
            groups = []
            for number in range(4):
                siblings = [await each.client.create(group_id=f"g{number}") for each in (one, two)]
                for server, session in zip((one, two), siblings, strict=True):
                    await server.client.chat(session, [user("hi")])
                groups.append(siblings)
            for siblings in groups:
                assert sorted([turns(fake, session) for session in siblings] for fake in fakes) == [[0, 0], [1, 1]]
            assert [row["sessions"] for row in await engines_of(service.url)] == [4, 4]
            theirs = groups[0][1]
            home = next(fake for fake in fakes if turns(fake, theirs))
        # Server two starts again on its journal, and the service is killed and starts again empty.
        async with FakeServer(tmp_path / "b", engines=[], router=router) as again:
            base_url = f"{again.url}/sessions/{theirs.session_id}"
            theirs = replace(theirs, base_url=base_url, openai_base_url=f"{base_url}/v1", anthropic_base_url=base_url)
            await again.client.chat(theirs, [user("hi"), {"role": "assistant", "content": "hello"}, user("more")])
            assert turns(home, theirs) == 2
            os.kill(service.pid, signal.SIGKILL)
            await service.wait()
            reply = [user("hi"), {"role": "assistant", "content": "hello"}, user("others")]
            await again.client.chat(theirs, reply)
            assert turns(home, theirs) == 3
            port = int(service.url.rpartition(":")[2])
            successor = await stack.enter_async_context(placement_service(tmp_path / "again.log", port))
            fresh = await one.client.create(group_id="g0")
            await one.client.chat(fresh, [user("hi")])
            # Five of server one, and the one of server two that was used since its start; the others rest.
            async with asyncio.timeout(15):
                while sum(int(str(row["sessions"])) for row in await engines_of(successor.url)) != 6:
                    await asyncio.sleep(0.05)
            async with again.http.get(f"{again.url}/readyz") as answer:
                assert answer.status == 200, await answer.text()


@pytest.mark.skipif(
    importlib.util.find_spec("smg") is None,
    reason="the outer gateway is not installed: pip install 'tollway[gateway]'",
)
async def test_a_session_server_behind_an_outer_gateway(tmp_path: Path) -> None:
    router = QUICK.model_copy(update={"gateway": "smg"})
    async with FakeServer(tmp_path, engines=2, router=router) as server:
        for engine in server.engines:
            engine.script = say(HELLO)
        sessions = [await server.client.create() for _ in range(4)]
        for turn in range(3):
            for session in sessions:
                said = [user("hi")]
                for _ in range(turn):
                    said += [{"role": "assistant", "content": "hello"}, user("more")]
                reply = await server.client.chat(session, said)
                assert reply.message.content == "hello"
        for session in sessions:
            assert sorted(turns(engine, session) for engine in server.engines) == [0, 3]
            (row,) = await server.client.trajectories(session.session_id)
            home = next(engine for engine in server.engines if turns(engine, session))
            assert {name.partition("#")[0] for name in row.engine_ids} == {home.url}
        # A harness that goes away ends its call at the engine, through the gateway.
        gone = sessions[0]
        home = next(engine for engine in server.engines if turns(engine, gone))
        home.script = lambda request: FakeReply(ids=list(range(300)), delay_s=0.1)
        body = {"model": "m", "messages": [user("endless")], "stream": True}
        headers = {"authorization": f"Bearer {gone.token}"}
        async with server.http.post(f"{gone.openai_base_url}/chat/completions", json=body, headers=headers) as answer:
            await answer.content.readany()
            assert home.in_flight == 1
        async with asyncio.timeout(10):
            while home.in_flight:
                await asyncio.sleep(0.01)
