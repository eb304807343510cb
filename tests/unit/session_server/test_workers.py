"""Several workers behind one address: real processes that are asked, killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from server_helpers import user
from worker_helpers import ADMIN, KEY, Cluster, chat, cluster, home, launch, via

from tollway.errors import ComponentLost, NotFound, TollwayError, WorkerDown
from tollway.router.config import RouterConfig
from tollway.router.fake import FakeEngine, FakeReply
from tollway.router.shared_table import SharedTable
from tollway.router.supervisor import RestartBudget
from tollway.session_server import auth
from tollway.session_server.client import Session, SessionClient, SessionOptions
from tollway.session_server.crew import Crew
from tollway.session_server.workers import Places, _Parent, _Worker

pytestmark = pytest.mark.slow(limit_s=60)


async def test_three_workers_are_one_server(tmp_path: Path) -> None:
    """Sessions on each; every route works on any; figures are those of all; siblings of a group meet."""
    async with FakeEngine() as one, FakeEngine() as two, cluster(tmp_path, one, two, workers=3) as running:
        sessions = [await home(running, worker) for worker in (0, 1, 2)]
        ports = {session.base_url.split("/")[2] for session in sessions}
        assert len(ports) == 3
        assert running.url.split("/")[2] not in ports
        for session in sessions:
            for base in (session.openai_base_url, via(running, session), f"{running.url}/v1"):
                assert (await chat(running, base, session.token))[0] == 200, base
            for port in ports:  # any worker's own port serves every session, too
                client = SessionClient(f"http://{port}", KEY, http=running.http)
                assert len(await client.trajectories(session.session_id)) == 3
            await running.client.reward(session.session_id, 1.0)
            (row, *_) = await running.client.trajectories(session.session_id)
            assert row.reward == 1.0
        opened = (await running.get("/healthz"))[1]["open_sessions"]
        assert opened >= 3
        assert (await running.get("/readyz"))[0] == 200
        cache = (await running.get("/cache?sessions=5"))[1]
        assert (cache["calls"], cache["workers_down"], cache["sessions"]) == (9, [], [])
        engines = await running.client.engines()
        assert sum(int(str(engine["sessions"])) for engine in engines) == 3
        async with running.http.get(f"{running.url}/metrics") as response:
            text = await response.text()
        assert f"tollway_sessions_open {opened}.0" in text
        assert "tollway_router_serving_engines 2.0" in text
        counted = re.findall(r"^tollway_cache_prompt_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
        assert sum(map(float, counted)) == cache["prompt_tokens"] > 0
        assert 'tollway_router_calls_total{outcome="ok"} 9.0' in text

        one.requests.clear()
        two.requests.clear()
        for group in range(4):
            mates = [await running.client.create(group_id=f"group {group}") for _ in range(4)]
            assert len({auth.worker_of(mate.session_id) for mate in mates}) == 1
            before = len(one.requests), len(two.requests)
            for mate in mates:
                assert (await chat(running, via(running, mate), mate.token))[0] == 200
            assert sorted((len(one.requests) - before[0], len(two.requests) - before[1])) == [0, 4]

        for session in sessions:
            await running.client.close(session.session_id)
            await running.client.delete(session.session_id)
            await running.client.delete(session.session_id)
            with pytest.raises(NotFound):
                await running.client.trajectories(session.session_id)


async def test_a_stream_and_a_leaving_client_pass_through_another_worker(tmp_path: Path) -> None:
    slow = FakeReply(ids=[*b"abcdef" * 100, 261], delay_s=0.05)
    async with FakeEngine(lambda request: slow) as engine, cluster(tmp_path, engine) as running:
        for worker in range(2):
            session = await home(running, worker)
            other = (await home(running, 1 - worker)).base_url.rpartition("/sessions/")[0]
            url = f"{other}/sessions/{session.session_id}/v1/chat/completions"
            headers = {"authorization": f"Bearer {session.token}"}
            body = {"messages": [user("hi")], "stream": True}
            async with running.http.post(url, json=body, headers=headers) as response:
                assert response.status == 200
                first = await response.content.readuntil(b"\n\n")
                assert first.startswith(b"data: ")
                assert engine.in_flight == 1, "the reply is far from its end"
            while engine.in_flight or len(engine.aborts) <= worker:
                await asyncio.sleep(0.01)
            assert len(engine.aborts) == worker + 1
            asking = asyncio.ensure_future(running.http.post(url, json={"messages": [user("hi")]}, headers=headers))
            while not engine.in_flight:
                await asyncio.sleep(0.01)
            asking.cancel()
            while engine.in_flight:
                await asyncio.sleep(0.01)
            engine.aborts.pop()


async def test_a_killed_worker_comes_back_with_its_sessions_and_with_the_fleet(tmp_path: Path) -> None:
    async with FakeEngine() as engine, FakeEngine() as late, FakeEngine() as gone, cluster(tmp_path, engine) as running:
        client = running.client
        session, other = await home(running, 1), await home(running, 0)
        status, reply = await chat(running, via(running, session), session.token)
        assert status == 200
        assert [str((await client.add_engine(each.url))["id"]) for each in (gone, late)] == ["e1", "e2"]
        await client.remove_engine("e1")
        await client.drain_engine("e2")
        for worker in (1, 0):
            os.kill(running.workers()[worker], signal.SIGKILL)
            victim = session if worker == 1 else other
            status = 0
            while status != 200:  # down, then back
                with contextlib.suppress(aiohttp.ClientConnectionError):  # of the one that was killed
                    status, value = await chat(running, via(running, victim), victim.token)
                    assert status == 200 or (status, value["error"]["code"]) == (503, "worker_down")
            await running.told("is started again", 2 - worker)
            for address in {each.base_url.rpartition("/sessions/")[0] for each in (session, other)}:
                fleet = await SessionClient(address, KEY, http=running.http).engines()
                assert [(each["id"], each["url"]) for each in fleet] == [("e0", engine.url), ("e2", late.url)]
                while "states" in (fleet[1] if fleet[1]["state"] != "joining" else {"states": 1}):
                    fleet = await SessionClient(address, KEY, http=running.http).engines()
                assert fleet[1]["state"] == "draining"
        history = [user("hi"), reply["choices"][0]["message"], user("on")]
        headers = {"authorization": f"Bearer {session.token}"}
        async with running.http.post(
            f"{session.openai_base_url}/chat/completions", json={"messages": history}, headers=headers
        ) as response:
            assert response.status == 200, "on the address that it always had"
        (row,) = [row for row in await client.trajectories(session.session_id) if len(row.turn_spans) == 2]
        assert row.turn_spans[0].end < row.turn_spans[1].start


async def test_the_fleet_is_the_same_on_every_worker_or_the_call_fails(tmp_path: Path) -> None:
    async with FakeEngine() as engine, FakeEngine() as second, cluster(tmp_path, engine) as running:
        client = running.client
        sessions = [await home(running, worker) for worker in range(2)]
        doors = [session.base_url.rpartition("/sessions/")[0] for session in sessions]
        for version, door in enumerate(doors, 7):  # whichever worker is told
            engine.version = str(version)
            await SessionClient(door, KEY, http=running.http).refit("e0", version, flushed=True)
            for each in doors:
                (told,) = await SessionClient(each, KEY, http=running.http).engines()
                assert (told["version"], told["flush_epoch"]) == (version, version - 6)
            owners = set()
            while len(owners) < 2:
                wants = await client.create(options=SessionOptions(exact_version=version))
                owners.add(auth.worker_of(wants.session_id))
                assert (await chat(running, wants.openai_base_url, wants.token))[0] == 200
        with pytest.raises(NotFound, match="e9"):
            await client.refit("e9", 1, flushed=False)
        os.kill(running.workers()[1], signal.SIGKILL)
        with pytest.raises(WorkerDown, match="worker 1"):
            await SessionClient(running.url, KEY, http=running.http, retry_s=0.0).add_engine(second.url)
        assert (await client.add_engine(second.url))["id"] == "e1", "the same call again, until everybody has it"
        (_, added) = await client.engines()
        assert (added["id"], added["url"]) == ("e1", second.url)
        async with running.http.get(f"{running.url}/workers/fleet", headers=ADMIN) as response:
            assert response.status == 404, "siblings only"


async def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    async with FakeEngine() as engine:
        async with cluster(tmp_path, engine) as running:
            port = int(running.url.rpartition(":")[2])
            session = await home(running, 1)
            assert (await chat(running, session.openai_base_url, session.token))[0] == 200
            pids = running.workers()
            assert len(pids) == 2
            running.process.kill()
            while any(Path(f"/proc/{pid}").exists() for pid in pids.values()):
                await asyncio.sleep(0.02)
        async with cluster(tmp_path, engine, port=port) as running:
            client = running.client
            assert len(await client.trajectories(session.session_id)) == 1
            again = await client.create()
            assert int(again.base_url.split("/")[2].rpartition(":")[2]) in (port + 1, port + 2)


async def last_words(folder: Path, **more: Any) -> str:
    """What a start says that must not work."""
    process = await launch(folder, **more)
    await process.communicate()
    assert process.returncode == 2
    return (folder / "stderr").read_text().splitlines()[-1]


async def test_a_taken_port_is_said_before_anything_is_started(tmp_path: Path, listener: socket.socket) -> None:
    listener.listen()
    port = int(listener.getsockname()[1])
    for first in (port, port - 1):
        said = await last_words(tmp_path, workers=2, port=first)
        assert f"cannot listen on 127.0.0.1:{port}" in said
    assert "worker 0 listens 1 above it" in said
    assert [path.name for path in tmp_path.iterdir()] == ["stderr"]


async def test_fewer_workers_than_have_open_sessions_are_refused(tmp_path: Path) -> None:
    async with FakeEngine() as engine:
        async with cluster(tmp_path, engine) as running:
            kept = await home(running, 1)
            running.process.send_signal(signal.SIGTERM)
            assert await running.process.wait() == 0
        said = await last_words(tmp_path, workers=1)
        assert "journal.1.sqlite has 1 open sessions of worker 1" in said
        assert "start at least 2" in said
        async with cluster(tmp_path, engine, workers=3) as running:
            assert len(running.workers()) == 3
            await running.client.close(kept.session_id)
        async with cluster(tmp_path, engine, workers=1) as running:
            assert "journal.1.sqlite belongs to a worker that is not started" in running.log.read_text()
        (tmp_path / "journal.1.sqlite").write_text("no database")
        for workers in (1, 2):
            assert "journal.1.sqlite" in await last_words(tmp_path, workers=workers)


async def test_public_url_names_every_session_and_every_request_finds_its_owner(tmp_path: Path) -> None:
    async with FakeEngine() as engine, cluster(tmp_path, engine, public_url="https://rl.test/tw/") as running:
        sessions = [await home(running, worker) for worker in range(2)]
        for session in sessions:
            assert session.base_url == f"https://rl.test/tw/sessions/{session.session_id}"
            assert (await chat(running, via(running, session), session.token))[0] == 200


async def test_creates_never_wait_for_an_engine(tmp_path: Path) -> None:
    """512 at once while an engine takes a second for its health: no call of it is anybody's create."""
    async with FakeEngine() as engine, cluster(tmp_path, engine, workers=2) as running:
        engine.health_delay_s = 1.0
        before = engine.model_info_calls
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            client = SessionClient(running.url, KEY, http=http)
            sessions = await asyncio.gather(*(client.create() for _ in range(512)))
        assert len({session.session_id for session in sessions}) == 512
        assert (await running.get("/healthz"))[1]["open_sessions"] == 512
        assert engine.model_info_calls - before < 100, "its watch asks for its version, no create does"
        assert engine.most_health_calls <= 3, "one probe of each worker and of their parent, whatever is created"
        assert not engine.requests


async def test_secrets_are_in_no_log_and_no_journal(tmp_path: Path) -> None:
    async with FakeEngine() as engine, cluster(tmp_path, engine) as running:
        tokens = [KEY]
        for worker in range(2):
            session = await home(running, worker)
            tokens.append(session.token)
            for base in (session.openai_base_url, via(running, session), f"{running.url}/sessions/{session.token}/v1"):
                assert (await chat(running, base, session.token))[0] == 200
                assert (await chat(running, base, session.token, temperature=-1))[0] == 400
            for path in (f"/sessions/{session.token}/nothing", f"/sessions/{session.token}", "/v1/nothing"):
                async with running.http.get(running.url + path, headers={"x-api-key": session.token}) as response:
                    await response.read()
        os.kill(running.workers()[1], signal.SIGKILL)
        await running.told("is started again")
        assert "DEBUG" in running.log.read_text(), "the log is as talkative as it gets"
    seen = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"stderr", "journal.sqlite", "journal.1.sqlite"} <= {path.name for path in seen}
    for path in seen:
        data = path.read_bytes()
        for token in tokens:
            assert token.split("_", 2)[-1].encode() not in data, path


@pytest.mark.parametrize("what", ["a turn that ends in time", "a turn that does not", "a second signal"])
async def test_a_stop_lets_turns_end_or_says_that_it_did_not(tmp_path: Path, what: str) -> None:
    """Through another worker, whole and streamed: the reply, or an error, but nothing cut that looks whole."""
    ends = what == "a turn that ends in time"
    slow = FakeReply(ids=[*b"abcdefgh", 261], delay_s=0.1 if ends else 100.0)
    drain = 30.0 if what != "a turn that does not" else 0.3
    async with FakeEngine(lambda request: slow) as engine, cluster(tmp_path, engine, drain_s=drain) as running:
        sessions = [await home(running, worker) for worker in range(2)]
        asked = [
            asyncio.ensure_future(whole(running, session, stream=stream))
            for session in sessions
            for stream in (True, False)
        ]
        while engine.in_flight < 4:
            await asyncio.sleep(0.01)
        running.process.send_signal(signal.SIGTERM)
        for pid in running.workers().values():  # as a service manager does that signals a whole group
            os.kill(pid, signal.SIGTERM)
        if what == "a second signal":
            await running.told("Shutting down", 2)
            running.process.send_signal(signal.SIGTERM)
        replies = await asyncio.gather(*asked)
        assert await running.process.wait() == 0
    for number, (status, text) in enumerate(replies):
        streamed = number % 2 == 0
        if ends:
            assert status == 200
            assert text.endswith("data: [DONE]\n\n") if streamed else '"abcdefgh"' in text
        elif streamed:
            assert "[DONE]" not in text
            assert "server_stopping" in text
        else:
            assert status == 503
            assert json.loads(text)["error"]["code"] == "server_stopping"


async def whole(cluster: Cluster, session: Session, *, stream: bool) -> tuple[int, str]:
    """(status, text) of one call on the shared address."""
    headers = {"authorization": f"Bearer {session.token}"}
    body = {"messages": [user("hi")], "stream": stream}
    async with cluster.http.post(f"{via(cluster, session)}/chat/completions", json=body, headers=headers) as response:
        return response.status, await response.text()


# -- the parent alone -------------------------------------------------------------------------------

READY = 'import sys, time; print(\'noise\', flush=True); print(\'{"event": "ready", "url": "u"}\', flush=True); '


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken


def parent(
    folder: Path, listener: socket.socket, code: str, *, ready_s: float = 30.0, places: Places | None = None
) -> _Parent:
    """A parent of one worker that is a few lines of Python."""
    worker = _Worker(
        crew=Crew(folder=folder, public_fd=listener.fileno(), own_fd=listener.fileno()),
        argv=[sys.executable, "-c", code],
        admin_key=KEY,
        ready_s=ready_s,
        end_s=5.0,
    )
    return _Parent([worker], [listener], places)


async def test_a_worker_that_keeps_dying_ends_the_server_with_its_last_words(
    tmp_path: Path, listener: socket.socket
) -> None:
    keeps_dying = parent(tmp_path, listener, READY + "sys.exit('out of luck')")
    keeps_dying._budget = RestartBudget(2, 60.0)
    with pytest.raises(ComponentLost) as caught:
        await keeps_dying.run()
    assert "worker 0 ended with status 1, and workers died more than 2 times within 60 s" in str(caught.value)
    assert "out of luck" in str(caught.value)


async def test_a_worker_that_never_serves_is_not_tried_again(tmp_path: Path, listener: socket.socket) -> None:
    with pytest.raises(TollwayError, match=r"(?s)status 2 before it was ready.*no such family") as caught:
        await parent(tmp_path, listener, "import sys; sys.stderr.write('no such family'); sys.exit(2)").run()
    assert caught.value.code == "config_error"
    with pytest.raises(ComponentLost, match="before it was ready"):
        await parent(tmp_path, listener, "import time; time.sleep(60)", ready_s=0.3).run()


async def test_a_placement_service_that_ends_ends_the_server_and_says_so(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: SharedTable) -> None:
        await asyncio.sleep(0)
        raise RuntimeError("no leases any more")

    for cause in ("by itself", "no leases any more"):
        places = Places(RouterConfig(), [])
        if cause == "by itself":
            ends = parent(tmp_path, listener, READY + "time.sleep(60)", places=places)
            running = asyncio.ensure_future(ends.run())
            while not ends._workers[0].ready:
                await asyncio.sleep(0.01)
            places._server.stop()
        else:
            monkeypatch.setattr(SharedTable, "_sweep", broken)
            ends = parent(tmp_path, listener, READY + "time.sleep(60)", places=places)
            running = asyncio.ensure_future(ends.run())
        with pytest.raises(ComponentLost, match=f"placement service of the workers.*{cause}"):
            await running
        process = ends._workers[0].process
        assert process is None or process.returncode is not None


async def test_a_worker_that_ignores_a_signal_is_killed(tmp_path: Path, listener: socket.socket) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + READY + "time.sleep(60)"
    stubborn = parent(tmp_path, listener, deaf)
    stubborn._workers[0].end_s = 0.3
    running = asyncio.ensure_future(stubborn.run())
    while not stubborn._workers[0].ready:
        await asyncio.sleep(0.01)
    stubborn._stop()
    with pytest.raises(ComponentLost, match="did not end in time"):
        await running


def test_the_budget_forgets_what_is_long_ago_and_pauses_longer_each_time() -> None:
    budget = RestartBudget(2, 60.0)
    pauses = []
    for now, allowed in ((0.0, True), (1.0, True), (2.0, False), (61.5, True), (200.0, True)):
        assert budget.spend(now) == allowed
        pauses.append(budget.pause_s)
    assert pauses[0] == 0.0
    assert pauses[0] < pauses[1] < pauses[2]
    assert pauses[-1] == 0.0
