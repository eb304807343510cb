"""Clients that leave, a thousand at every phase of a turn: what is on disk stays, and nothing else is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_helpers import post, until, user

from tollway.router import metrics
from tollway.router.config import RouterConfig
from tollway.router.fake import FakeReply, FakeRequest
from tollway.session_server.fake import FakeServer
from tollway.session_server.journal import Journal

ROUNDS, AT_ONCE = 5, 200
PATIENT = RouterConfig(probe_interval_s=30.0, probe_timeout_s=20.0, connect_timeout_s=20.0, busy_window_s=30.0)


class HeldWrites:
    """Writes that reach the disk and are reported only when ``go_on`` is set."""

    def __init__(self, journal: Journal) -> None:
        self.go_on, self.count = asyncio.Event(), 0
        self._submit = journal.submit
        journal.submit = self.submit  # type: ignore[method-assign]

    def submit(self, *statements: Any) -> asyncio.Future[None]:
        written = self._submit(*statements)
        if not any("INSERT INTO turns" in sql for sql, _ in statements):
            return written
        self.count += 1

        async def later() -> None:
            await self.go_on.wait()
            await written

        return asyncio.ensure_future(later())


def before_the_first_token(server: FakeServer) -> Callable[[], bool]:
    """The engine says nothing yet."""
    server.engine.script = lambda request: FakeReply(ids=[5], delay_s=60)
    return lambda: server.engine.in_flight == AT_ONCE


def in_the_continuation(server: FakeServer) -> Callable[[], bool]:
    """The engine aborted a first piece and has the second one."""

    def script(request: FakeRequest) -> FakeReply:
        second = request.rid.endswith("-1")
        return FakeReply(ids=[5], delay_s=60) if second else FakeReply(ids=[*b"ab"], finish="abort")

    server.engine.script = script
    return lambda: sum(rid.endswith("-1") for rid in server.engine._running) == AT_ONCE


def at_the_commit(server: FakeServer) -> Callable[[], bool]:
    """The reply is whole and on its way to the disk."""
    held = HeldWrites(server.gateway.journal)
    server.engine.script = lambda request: FakeReply(ids=[*b"ok", 261])
    server.held = held  # type: ignore[attr-defined]
    return lambda: held.count % AT_ONCE == 0 and held.count > 0


@pytest.mark.slow(limit_s=60)
@pytest.mark.parametrize(
    "phase",
    [
        at_the_commit,
        pytest.param(before_the_first_token, marks=pytest.mark.all),  # the router's own tests have a thousand of each
        pytest.param(in_the_continuation, marks=pytest.mark.all),
    ],
)
async def test_a_thousand_clients_that_leave_leave_no_load_behind(
    tmp_path: Path, phase: Callable[[FakeServer], Callable[[], bool]]
) -> None:
    before = metrics.IN_FLIGHT._value.get()
    async with FakeServer(tmp_path, router=PATIENT) as server:
        reached = phase(server)
        held: HeldWrites | None = getattr(server, "held", None)
        store, table = server.gateway.store, server.gateway.router.table
        for _ in range(ROUNDS):
            sessions = await asyncio.gather(*(server.client.create() for _ in range(AT_ONCE)))
            calls = [
                asyncio.create_task(post(server, session, {"messages": [user("go")], "stream": at % 2 == 0}))
                for at, session in enumerate(sessions)
            ]
            await until(reached, what=phase.__name__)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            known = [store._loaded[session.session_id] for session in sessions]
            await until(lambda now=known: not any(each.calls.running for each in now), what="every call has ended")
            assert table.in_flight("e0") == 0
            if held is not None:
                assert all(each.committing for each in known), "the disk goes on"
                held.go_on.set()
                await until(lambda now=known: not any(each.committing for each in now), what="all is taken in")
                held.go_on.clear()
                held.count = 0
            turns = 1 if held is not None else 0
            assert {len(each.forest.nodes) for each in known} == {turns}
            assert {node.delivered for each in known for node in each.forest.nodes.values()} <= {False}
            await asyncio.gather(*(server.client.delete(session.session_id) for session in sessions))
            load = table.load("e0")
            assert (load.in_flight, load.waiting, load.sessions, load.resident_tokens, load.reserved_tokens) == (0,) * 5
            assert store.summary() == {"open_sessions": 0, "loaded_sessions": 0, "closed_in_memory": 0}
            await until(lambda: server.engine.in_flight == 0, what="the engine was told of every one")
        assert await server.gateway.journal.read("SELECT count(*) FROM turns") == [(0,)]
        assert metrics.IN_FLIGHT._value.get() == before
        assert server.gateway.router.fleet.engines["e0"].health.failures == 0
        if held is not None:
            held.go_on.set()
