"""Every turn is counted once, by how it ended."""

from __future__ import annotations

import asyncio

import pytest
from server_helpers import ask, post, rows, say, until, user

from tollway.errors import JournalError
from tollway.router.fake import FakeReply
from tollway.session_server import metrics
from tollway.session_server.fake import FakeServer
from tollway.session_server.journal import Statement


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


async def test_an_overlong_prompt_is_said_to_be_one_though_the_journal_is_full(server: FakeServer) -> None:
    session = await server.client.create()
    reply = await ask(server, session, [user("go")])
    server.engine.script = say(FakeReply(ids=[], status=400, error="longer than the model's context length (9 tokens)"))
    journal = server.gateway.journal
    write = journal.write

    async def full(*statements: Statement) -> None:
        raise JournalError("full")

    journal.write = full  # type: ignore[method-assign]
    body = {"messages": [user("go"), reply, user("more")]}
    status, value = await post(server, session, body)
    assert (status, value["error"]["code"]) == (400, "context_length_exceeded")
    # With room again, the next such request notes it.
    journal.write = write  # type: ignore[method-assign]
    assert (await post(server, session, body))[0] == 400
    (row,) = await rows(server, session)
    assert row.truncated
