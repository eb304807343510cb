"""Where sessions live, as their creators say it: parents, models, priorities; and what a restart keeps of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from server_helpers import ask, post, until, user

from tollway.errors import BadRequest, NotFound, WorkerDown
from tollway.router.config import RouterConfig
from tollway.router.fake import FakeEngine, FakeReply
from tollway.router.fleet import Membership
from tollway.router.placement_lease import Service
from tollway.router.service import Router
from tollway.session_server.client import Session, SessionOptions
from tollway.session_server.crew import Crew
from tollway.session_server.fake import FakeServer
from tollway.session_server.fanout import Fanout
from tollway.session_server.forward import _relatives_in
from tollway.session_server.journal import Journal
from tollway.session_server.siblings import Siblings
from tollway.session_server.workers import Places


def pin_of(server: FakeServer, session: Session, model: str = "") -> Any:
    return server.gateway.router.table.pin(session.session_id, model)


def at(server: FakeServer, session: Session) -> Session:
    """A session of a server that has another port now."""
    base = f"{server.url}/sessions/{session.session_id}"
    return replace(session, base_url=base, openai_base_url=f"{base}/v1", anthropic_base_url=base)


@contextlib.asynccontextmanager
async def fleet(folder: Path, count: int, **models: str) -> AsyncIterator[FakeServer]:
    """A server over ``count`` engines of the policy and one of each further model."""
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(FakeServer(folder, engines=count))
        for name, version in models.items():
            engine = await stack.enter_async_context(FakeEngine(version=version))
            server.engines.append(engine)
            await server.client.add_engine(engine.url, model=name, frozen=True)
            await server.gateway.router.fleet.wait_serving(10, 1, name)
        yield server
        for engine in server.engines[count:]:
            server.engines.remove(engine)


# -- creation ---------------------------------------------------------------------------------------


async def test_a_child_session_starts_on_its_parents_engine(tmp_path: Path) -> None:
    async with fleet(tmp_path, 3) as server:
        parents = [await server.client.create() for _ in range(6)]
        for parent in parents:
            await ask(server, parent, [user("go")])
        for parent in parents:
            child = await server.client.create(options=SessionOptions(parent_id=parent.session_id, priority=3))
            await ask(server, child, [user("sub-task")])
            assert pin_of(server, child).engine_id == pin_of(server, parent).engine_id
            shown = await server.client.session(child.session_id)
            assert (shown["parent_id"], shown["priority"]) == (parent.session_id, 3)


async def test_a_parent_that_was_never_here_is_refused(server: FakeServer) -> None:
    with pytest.raises(BadRequest, match="no session of this server"):
        await server.client.create(options=SessionOptions(parent_id="0" * 34))
    parent = await server.client.create()
    await server.client.close(parent.session_id)
    child = await server.client.create(options=SessionOptions(parent_id=parent.session_id))
    await ask(server, child, [user("go")])


async def test_a_session_has_one_model_for_its_life_whatever_its_requests_name(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, judge="0", teacher="0") as server:
        judge = next(e for e in server.gateway.router.fleet.engines.values() if e.model == "judge")
        engine = next(engine for engine in server.engines if engine.url == judge.url)
        session = await server.client.create(options=SessionOptions(model="judge"))
        for name in ("policy", "teacher", "gpt"):
            await ask(server, session, [user("go " + name)], model=name)
        assert len(engine.requests) == 3
        assert pin_of(server, session) is None
        assert pin_of(server, session, "judge").engine_id == judge.id
        async with server.http.get(
            f"{session.openai_base_url}/models", headers={"x-api-key": session.token}
        ) as response:
            assert [each["id"] for each in (await response.json())["data"]] == ["judge"]
        plain = await server.client.create(options=SessionOptions(model=server.config.model_name))
        await ask(server, plain, [user("go")])
        assert pin_of(server, plain) is not None
        with pytest.raises(BadRequest, match="the fleet has policy, judge, teacher"):
            await server.client.create(options=SessionOptions(model="critic"))


async def test_the_context_of_a_session_is_that_of_its_models_engines(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(FakeServer(tmp_path))
        small = await stack.enter_async_context(FakeEngine(context_length=64))
        await server.client.add_engine(small.url, model="judge", frozen=True)
        await server.gateway.router.fleet.wait_serving(10, 1, "judge")
        body = {"messages": [user("x" * 100)]}
        policy = await server.client.create()
        judge = await server.client.create(options=SessionOptions(model="judge"))
        assert (await post(server, policy, body))[0] == 200
        status, value = await post(server, judge, body)
        assert (status, value["error"]["code"], value["error"]["limit"]) == (400, "context_length_exceeded", 64)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", ("", None)),
        (b'{"group_id": "g"}', ("g", None)),
        (b'{"parent_id": "' + b"0" * 32 + b'0a"}', ("", 10)),
        (b'{"parent_id": "short", "group_id": 5}', ("", None)),
        (b'["parent_id"]', ("", None)),
        (b'{"parent_id": ', ("", None)),
    ],
)
def test_a_child_is_created_by_the_worker_of_its_parent(body: bytes, expected: tuple[str, int | None]) -> None:
    assert _relatives_in(body) == expected


# -- restarts ---------------------------------------------------------------------------------------


async def test_a_restart_brings_back_rank_model_parent_and_priority(tmp_path: Path) -> None:
    async with FakeEngine() as one, FakeEngine() as two, FakeEngine() as other:
        for engine in (one, two, other):
            engine.dp_size = 4
        options = SessionOptions(model="judge", priority=-2)
        async with FakeServer(tmp_path, engines=[one, two]) as server:
            await server.client.add_engine(other.url, model="judge", frozen=True)
            await server.gateway.router.fleet.wait_serving(10, 1, "judge")
            judge = await server.client.create(options=options)
            policy = [await server.client.create() for _ in range(5)]
            replies = {each.session_id: await ask(server, each, [user("go")]) for each in (judge, *policy)}
            before = {
                each.session_id: (pin.engine_id, pin.dp_rank)
                for each in policy
                if (pin := pin_of(server, each)) is not None
            }
            rank = pin_of(server, judge, "judge").dp_rank
        async with FakeServer(tmp_path, engines=[one, two]) as again:
            await again.client.add_engine(other.url, model="judge", frozen=True)
            await again.gateway.router.fleet.wait_serving(10, 1, "judge")
            for each in (judge, *policy):
                await ask(again, at(again, each), [user("go"), replies[each.session_id], user("on")])
            assert len(before) == 5
            assert before == {
                each.session_id: (pin_of(again, each).engine_id, pin_of(again, each).dp_rank) for each in policy
            }
            assert pin_of(again, judge, "judge").dp_rank == rank
            shown = await again.client.session(judge.session_id)
            assert (shown["model"], shown["priority"]) == ("judge", -2)


async def test_sessions_of_an_older_journal_have_defaults_for_what_is_new(tmp_path: Path) -> None:
    async with FakeEngine() as engine:
        async with FakeServer(tmp_path, engines=[engine]) as server:
            session = await server.client.create()
            reply = await ask(server, session, [user("go")])
            rows = await server.gateway.journal.read("SELECT settings FROM sessions")
            settings = orjson.loads(rows[0][0])  # type: ignore[arg-type]
            for name in ("parent_id", "priority"):
                del settings[name]
            meta = orjson.loads((await server.gateway.journal.read("SELECT meta FROM turns"))[0][0])  # type: ignore[arg-type]
            del meta["attempts"]
            await server.gateway.journal.write(
                ("UPDATE sessions SET settings=?", (orjson.dumps(settings),)),
                ("UPDATE turns SET meta=?", (orjson.dumps(meta),)),
            )
        async with FakeServer(tmp_path, engines=[engine]) as again:
            await ask(again, at(again, session), [user("go"), reply, user("on")])
            shown = await again.client.session(session.session_id)
            assert (shown["parent_id"], shown["priority"]) == ("", 0)


async def test_a_turn_remembers_the_attempts_that_it_took(tmp_path: Path) -> None:
    async with FakeEngine() as one, FakeEngine() as two:
        async with FakeServer(tmp_path, engines=[one, two]) as server:
            await server.gateway.router.fleet.wait_serving(10, 2)
            session = await server.client.create()
            first = await ask(server, session, [user("go")])
            home, other = (one, two) if one.requests else (two, one)
            home.script = lambda request: FakeReply(ids=[5], drop_after=0)
            await ask(server, session, [user("go"), first, user("on")])
            nodes: Any = (await server.client.session(session.session_id))["nodes"]
            assert "attempts" not in nodes[0], "one is the rule"
            rids = [home.requests[-1].rid, other.requests[-1].rid]
            expected = [[rids[0], f"{home.url}#0", ""], [rids[1], f"{other.url}#0", "engine_lost"]]
            assert nodes[1]["attempts"] == expected
        async with FakeServer(tmp_path, engines=[other]) as again:
            nodes = (await again.client.session(session.session_id))["nodes"]
            assert nodes[1]["attempts"] == expected


async def test_a_session_that_leaves_memory_leaves_room_and_takes_it_again_with_its_next_call(
    server: FakeServer,
) -> None:
    session = await server.client.create()
    reply = await ask(server, session, [user("go")])
    table = server.gateway.router.table
    assert table.load("e0").sessions == 1
    server.gateway.store.unload(time.time() + server.config.unload_after_s + 1)
    assert (table.load("e0").sessions, table.load("e0").resident_tokens) == (0, 0)
    await server.client.session(session.session_id)
    assert table.load("e0").sessions == 0, "whoever looks at it does not use it"
    await ask(server, session, [user("go"), reply, user("on")])
    assert table.load("e0").sessions == 1
    await server.client.delete(session.session_id)
    assert (table.load("e0").sessions, table.load("e0").resident_tokens) == (0, 0)


# -- delivery and the journal -----------------------------------------------------------------------


async def test_a_kept_reply_that_reaches_its_client_is_delivered(tmp_path: Path) -> None:
    """The client went during the commit, and came back for the reply with its key: nothing supersedes it."""
    async with FakeServer(tmp_path, settings={"retry_grace_s": 0.0}) as server:
        session = await server.client.create()
        body = {"messages": [user("go")], "n": 2}
        key = {"idempotency-key": "k"}
        journal, started, go_on = server.gateway.journal, asyncio.Event(), asyncio.Event()
        submit = journal.submit

        def held(*statements: Any) -> asyncio.Future[None]:
            written = submit(*statements)

            async def later() -> None:
                started.set()
                await go_on.wait()
                await written

            return asyncio.ensure_future(later())

        journal.submit = held  # type: ignore[method-assign]
        calling = asyncio.create_task(post(server, session, body, key))
        await started.wait()
        calling.cancel()
        (found,) = server.gateway.store._loaded.values()
        await until(lambda: not found.calls.running, what="the call is cancelled")
        journal.submit = submit  # type: ignore[method-assign]
        go_on.set()
        await until(lambda: len(found.forest.nodes) == 2, what="the turn is taken in")
        assert [node.delivered for node in found.forest.nodes.values()] == [False, False]
        status, value = await post(server, session, body, key)
        assert (status, len(value["choices"])) == (200, 2)
        assert len(server.engine.requests) == 2, "from the journal"
        assert [node.delivered for node in found.forest.nodes.values()] == [True, True]
        await post(server, session, {"messages": [user("go")]})
        assert [node.reason for node in found.forest.nodes.values()] == ["root", "choice", "sibling"]
        assert not any(node.superseded for node in found.forest.nodes.values())


async def test_a_reply_that_nobody_waited_for_is_not_delivered_until_somebody_gets_it(tmp_path: Path) -> None:
    async with FakeServer(tmp_path, settings={"retry_grace_s": 30.0}) as server:
        session = await server.client.create()
        server.engine.script = lambda request: FakeReply(ids=[*b"ok", 261], delay_s=0.2)
        body, key = {"messages": [user("go")]}, {"idempotency-key": "k"}
        calling = asyncio.create_task(post(server, session, body, key))
        await until(lambda: server.engine.in_flight == 1, what="the engine has it")
        calling.cancel()
        (found,) = server.gateway.store._loaded.values()
        await until(lambda: found.forest.nodes and not found.calls.running, what="the turn is there")
        (node,) = found.forest.nodes.values()
        assert not node.delivered
        assert (await post(server, session, body, key))[0] == 200
        assert node.delivered
        assert len(server.engine.requests) == 1


async def test_the_journal_says_what_failed_whatever_was_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite")
    await journal.open()
    with pytest.raises(Exception, match=r"nothing was written to journal j\.sqlite: no such table: nowhere"):
        await journal.write(("INSERT INTO nowhere VALUES (1)", ()))
    await journal.aclose()


# -- the fleet of several workers -------------------------------------------------------------------


async def test_a_change_that_is_refused_stays_refused_although_a_sibling_is_down(tmp_path: Path) -> None:
    places = Places(RouterConfig(), [])
    serving = asyncio.ensure_future(places.run())
    service = Service(url=places.url, key=places.key, same_ids=True, part=(0, 2))
    crew = Crew(index=0, size=2, folder=tmp_path, secret="s")
    async with (
        FakeEngine() as engine,
        Siblings(crew, "key") as siblings,
        Router(RouterConfig(), server_name="w0", service=service) as router,
    ):
        fanout = Fanout(siblings, router)
        with pytest.raises(NotFound, match="e9"):
            await fanout.remove("e9")
        with pytest.raises(NotFound, match="e9"):
            await fanout.drain("e9", drained=True)
        for url in ("http://169.254.1.1", "ftp://x"):
            with pytest.raises(BadRequest):
                await fanout.add(url, Membership())
        with pytest.raises(BadRequest, match="max_in_flight 1 is for 2 workers"):
            await fanout.add(engine.url, Membership(max_in_flight=1))
        with pytest.raises(WorkerDown, match="worker 1"):
            await fanout.add(engine.url, Membership(max_in_flight=5))
        assert [row["max_in_flight"] for row in router.engines()] == [5]
        assert router.fleet.get("e0").max_in_flight == 3, "its share; the other one has two"
    places.stop()
    await serving
