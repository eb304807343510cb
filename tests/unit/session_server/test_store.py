"""Sessions in memory and in the journal: what was deleted stays gone, whatever was being read meanwhile."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from server_helpers import ask, post, rows, until, user

from tollway.router.fake import FakeReply
from tollway.session_server.fake import FakeServer
from tollway.session_server.journal import Journal, Read, Row, Statement

T = TypeVar("T")


class HeldJournal:
    """A journal whose writes wait before they begin, and whose reads wait when they are done."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.reading, self.writing = asyncio.Event(), asyncio.Event()
        self.may_read, self.may_write = asyncio.Event(), asyncio.Event()

    async def read(self, sql: str, values: Row = ()) -> list[Row]:
        rows = await self._journal.read(sql, values)
        self.reading.set()
        await self.may_read.wait()
        return rows

    async def use(self, work: Callable[[Read], T]) -> T:
        result = await self._journal.use(work)
        self.reading.set()
        await self.may_read.wait()
        return result

    async def write(self, *statements: Statement) -> None:
        self.writing.set()
        await self.may_write.wait()
        await self._journal.write(*statements)


@pytest.mark.parametrize("order", ["read inside the delete", "read around the delete"])
async def test_a_read_beside_a_delete_does_not_bring_the_session_back(server: FakeServer, order: str) -> None:
    store = server.gateway.store
    session = await server.client.create()
    reply = await ask(server, session, [user("go")])
    held = HeldJournal(server.gateway.journal)
    store._journal = held  # type: ignore[assignment]
    async with asyncio.timeout(10):
        if order == "read inside the delete":
            deleting = asyncio.create_task(store.delete(session.session_id))
            await held.writing.wait()
            held.may_read.set()
            seen = await store.get(session.session_id)
            assert seen is None or seen.state == "closed"
            held.may_write.set()
            await deleting
        else:
            # Not in memory, as a closed session that was long not asked for.
            store._forget(session.session_id)
            getting = asyncio.create_task(store.get(session.session_id))
            await held.reading.wait()
            held.may_write.set()
            await store.delete(session.session_id)
            held.may_read.set()
            assert await getting is None
        assert await store.get(session.session_id) is None
    assert store.summary() == {"open_sessions": 0, "loaded_sessions": 0, "closed_in_memory": 0}
    assert session.session_id not in server.gateway.router.table.pins
    status, _ = await post(server, session, {"messages": [user("go"), reply, user("on")]})
    assert status == 401


async def test_a_session_that_is_being_deleted_takes_no_turn_though_it_is_still_in_the_journal(
    server: FakeServer,
) -> None:
    store = server.gateway.store
    session = await server.client.create()
    await ask(server, session, [user("go")])
    held = HeldJournal(server.gateway.journal)
    held.may_read.set()
    store._journal = held  # type: ignore[assignment]
    deleting = asyncio.create_task(store.delete(session.session_id))
    async with asyncio.timeout(10):
        await held.writing.wait()
        calls = len(server.engine.requests)
        status, value = await post(server, session, {"messages": [user("go")]})
        assert status in (400, 401), value
        assert len(server.engine.requests) == calls
        held.may_write.set()
        await deleting


async def test_two_readers_of_one_session_get_the_same_one(server: FakeServer) -> None:
    store = server.gateway.store
    session = await server.client.create()
    await ask(server, session, [user("go")])
    await server.client.close(session.session_id)
    store._closed.clear()
    one, two = await asyncio.gather(store.get(session.session_id), store.get(session.session_id))
    assert one is two is await store.get(session.session_id)
    assert one is not None
    assert len(one.forest.nodes) == 1
    assert not store._loading


async def test_an_idle_session_leaves_memory_and_comes_back_as_it_was(server: FakeServer) -> None:
    store = server.gateway.store
    session = await server.client.create()
    first = await ask(server, session, [user("one")])
    second = await ask(server, session, [user("one"), first, user("two")])
    before = await server.client.session(session.session_id)
    store.unload(time.time() + server.config.unload_after_s + 1)
    assert store.summary() == {"open_sessions": 1, "loaded_sessions": 0, "closed_in_memory": 0}
    await ask(server, session, [user("one"), first, user("two"), second, user("three")])
    after = await server.client.session(session.session_id)
    assert after["nodes"][:2] == before["nodes"]
    assert [node["reason"] for node in after["nodes"]] == ["root", "continuation", "continuation"]
    (row,) = await rows(server, session)
    assert row.trained_tokens == sum(node["sampled_tokens"] for node in after["nodes"])
    # The router still knows what the engine has of it: no miss without a cause.
    assert server.gateway.router.ledger.total.summary()["unknown_tokens"] == 0
    assert server.gateway.router.ledger.total.summary()["efficiency"] == 1.0


async def test_a_session_in_use_stays_in_memory(server: FakeServer) -> None:
    store = server.gateway.store
    session = await server.client.create()
    server.engine.script = lambda request: FakeReply(ids=[104, 261], delay_s=0.5)
    asking = asyncio.create_task(ask(server, session, [user("one")]))
    await until(lambda: server.engine.in_flight == 1, what="the call reaches the engine")
    store.unload(time.time() + 10_000)
    assert store.summary()["loaded_sessions"] == 1
    await asking
    assert len(await rows(server, session)) == 1


async def test_a_session_that_was_just_loaded_stays_for_whoever_asked_for_it(server: FakeServer) -> None:
    """The sweep may come between the end of the load and the request that waits for it."""
    store = server.gateway.store
    session = await server.client.create()
    store._open[session.session_id].used_at -= 10_000
    store._loaded.clear()
    asking = asyncio.create_task(store.get(session.session_id))
    await until(lambda: session.session_id in store._loaded, what="the session is loaded")
    store.unload(time.time())
    assert await asking is await store.get(session.session_id)


async def test_a_session_that_a_request_holds_is_not_idle(server: FakeServer) -> None:
    """A long body of a call takes its time to arrive."""
    store = server.gateway.store
    session = await server.client.create()
    store._open[session.session_id].used_at -= server.config.idle_ttl_s + 1
    async with store.visit(store._loaded[session.session_id]):
        await store.expire(time.time())
        assert store.open_sessions == 1
    await store.expire(time.time())
    assert store.open_sessions == 1  # it was just used


async def test_a_session_is_deleted_by_its_token_as_path_too(server: FakeServer) -> None:
    session = await server.client.create()
    await server.client.delete(session.token)
    assert server.gateway.store.open_sessions == 0


async def test_a_session_without_calls_is_closed_after_its_idle_time(server: FakeServer) -> None:
    store = server.gateway.store
    idle, used = await server.client.create(), await server.client.create()
    later = time.time() + server.config.idle_ttl_s
    await asyncio.sleep(0.05)
    reply = await ask(server, used, [user("one")])
    await store.expire(later + 0.01)
    assert store.open_sessions == 1
    status, value = await post(server, idle, {"messages": [user("go")]})
    assert status == 400, value
    await ask(server, used, [user("one"), reply, user("two")])


@pytest.mark.parametrize("limit", ["max_session_tokens", "max_session_bytes"])
async def test_a_session_may_not_grow_beyond_its_caps(tmp_path: Path, limit: str) -> None:
    value = {"max_session_tokens": 20, "max_session_bytes": 65536}[limit]
    async with FakeServer(tmp_path, settings={limit: value}) as server:
        session = await server.client.create()
        text = "x" * (5 if limit == "max_session_tokens" else 20_000)
        for _ in range(10):
            status, answer = await post(server, session, {"messages": [user(text)]})
            if status != 200:
                break
        assert status == 400
        assert limit in answer["error"]["message"]
        assert len(await rows(server, session)) >= 1


async def test_what_leaves_memory_is_free_without_a_collection(server: FakeServer) -> None:
    """A full collection is rare in a server with much in memory: cycles would keep every idle session."""
    store = server.gateway.store
    unloaded, deleted = await server.client.create(), await server.client.create()
    for session in (unloaded, deleted):
        await ask(server, session, [user("one")])
    gc.collect()
    gc.disable()
    try:
        held = [weakref.ref(call.task) for each in store._loaded.values() for call in each.calls._by_body.values()]
        assert len(held) == 2
        await server.client.delete(deleted.session_id)
        store.unload(time.time() + 10_000)
        await until(lambda: not any(ref() for ref in held), what="the nodes are freed")
    finally:
        gc.enable()


async def test_sessions_used_longest_ago_make_room_for_others(tmp_path: Path) -> None:
    async with FakeServer(tmp_path, settings={"loaded_sessions": 2}) as server:
        store = server.gateway.store
        sessions = [await server.client.create() for _ in range(3)]
        replies = [await ask(server, session, [user("one")]) for session in sessions]
        await asyncio.sleep(1.1)
        await ask(server, sessions[0], [user("one"), replies[0], user("two")])
        await server.client.create()
        assert set(store._loaded) >= {sessions[0].session_id}
        assert store.summary()["loaded_sessions"] == 2
        for session, reply in zip(sessions[1:], replies[1:], strict=True):
            await ask(server, session, [user("one"), reply, user("two")])
            (row,) = await rows(server, session)
            assert len(row.turn_spans) == 2


async def test_a_session_that_makes_room_while_its_tools_run_keeps_its_share_of_the_engines(tmp_path: Path) -> None:
    """Who is only out of memory comes back soon: admission that forgot its KV would fill the engine twice."""
    async with FakeServer(tmp_path, settings={"loaded_sessions": 1, "unload_after_s": 60.0}) as server:
        store, table = server.gateway.store, server.gateway.router.table
        away = await server.client.create()
        await ask(server, away, [user("one")])
        await asyncio.sleep(1.1)
        await server.client.create()
        assert away.session_id not in store._loaded
        (target,) = table.targets("e0")
        assert (table.pins[away.session_id].resting, target.sessions) == (False, 1)
        store.unload(time.time() + 30)
        assert target.sessions == 1
        store.unload(time.time() + 100)
        assert (table.pins[away.session_id].resting, target.sessions, target.resident_tokens) == (True, 0, 0)
        await server.client.close(away.session_id)
        assert store._away == set()
