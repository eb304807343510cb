"""Every turn is counted once, by how it ended."""

from __future__ import annotations

import asyncio

import pytest
from server_helpers import ask, post, say, until, user

from tollway.router.fake import FakeReply
from tollway.session_server import metrics
from tollway.session_server.fake import FakeServer


def counted() -> dict[str, float]:
    (family,) = metrics.TURNS.collect()
    return {sample.labels["outcome"]: sample.value for sample in family.samples if sample.name.endswith("_total")}


def since(before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in counted().items() if value != before.get(name, 0)}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_turn_is_counted_as_such(server: FakeServer, stream: bool) -> None:
    server.engine.script = say(FakeReply(ids=[*b"x" * 1000, 261], delay_s=60))
    session = await server.client.create()
    before = counted()
    body = {"messages": [user("go")], "stream": stream}
    call = asyncio.create_task(post(server, session, body))
    await until(lambda: server.engine.in_flight == 1, what="the call runs")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: server.engine.in_flight == 0, what="the engine lets go")
    await until(lambda: since(before) == {"cancelled": 1.0}, what="the turn is counted")


async def test_finished_and_refused_turns_are_counted(server: FakeServer) -> None:
    session = await server.client.create()
    before = counted()
    await ask(server, session, [user("go")])
    await server.client.close(session.session_id)
    assert (await post(server, session, {"messages": [user("more")]}))[0] == 400
    assert since(before) == {"ok": 1.0, "invalid_request": 1.0}
