"""Sessions under trouble: calls in flight, streams that break, retries, strangers inside an episode, many of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from server_helpers import CALL_EDIT, ROUTES, TOOLS, ask, asked, echoed, ok, post, reasons, rows, say, until, user
from test_server_process import process, ready

from tollway.router import metrics
from tollway.router.fake import FakeEngine, FakeReply
from tollway.session_server.client import Session
from tollway.session_server.fake import FakeServer

ENDS = (b"[DONE]", b"message_stop", b"response.completed", b'"finish_reason":"', b'"stop_reason":"')
"""What only a reply that was committed has."""


async def raw(
    server: FakeServer, session: Session, route: str, *messages: Any, stream: bool = True
) -> tuple[int, bytes]:
    """(status, body) of a call, however it ends."""
    body = asked(route, *messages, stream=stream)
    async with server.http.post(
        f"{session.base_url}/v1/{route}", json=body, headers={"x-api-key": session.token}
    ) as response:
        return response.status, await response.read()


async def in_flight(server: FakeServer, session: Session) -> tuple[object, ...]:
    """Every counter of running calls."""
    shown = await server.client.session(session.session_id)
    engines = [server.gateway.router.table.in_flight(each) for each in server.gateway.router.fleet.engines]
    return shown["in_flight"], metrics.IN_FLIGHT._value.get(), *engines, *(each.in_flight for each in server.engines)


# -- calls in flight --------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_delete_ends_a_running_call_within_two_seconds(server: FakeServer, route: str, stream: bool) -> None:
    """Report C3 and row 40, in every dialect: the engine is told, and nothing is half committed."""
    server.engine.script = say(FakeReply(ids=[*b"abc", 261], delay_s=30.0))
    session = await server.client.create()
    running = asyncio.ensure_future(raw(server, session, route, user("go"), stream=stream))
    await until(lambda: server.engine.in_flight == 1, what="the call is running")
    async with asyncio.timeout(2):
        await server.client.delete(session.session_id)
        status, _ = await running
    assert status == 499
    rid = server.engine.requests[0].rid
    await until(lambda: server.engine.aborts == [rid], what="the engine is told to abort")
    await until(lambda: server.engine.in_flight == 0, what="the engine lets go")
    assert server.gateway.router.table.in_flight("e0") == metrics.IN_FLIGHT._value.get() == 0
    assert await server.gateway.journal.read("SELECT count(*) FROM turns") == [(0,)]
    assert server.gateway.store.summary() == {"open_sessions": 0, "loaded_sessions": 0, "closed_in_memory": 0}


@pytest.mark.parametrize("route", ROUTES)
async def test_a_delete_in_the_middle_of_a_stream_ends_it_with_an_error(server: FakeServer, route: str) -> None:
    server.engine.script = say(FakeReply(ids=[*b"x" * 900, 261], delay_s=0.02))
    session = await server.client.create()
    running = asyncio.ensure_future(raw(server, session, route, user("go")))
    await until(lambda: server.engine.in_flight == 1, what="the call is running")
    await asyncio.sleep(0.2)
    async with asyncio.timeout(2):
        await server.client.delete(session.session_id)
        status, data = await running
    assert status == 200
    assert b"the session was deleted" in data
    assert not [end for end in ENDS if end in data]
    assert await server.gateway.journal.read("SELECT count(*) FROM turns") == [(0,)]


async def test_counters_of_running_calls_are_zero_after_every_kind_of_end(server: FakeServer) -> None:
    """Report C3: an engine that raises, one that breaks off, a client that goes, a call that ends."""
    session = await server.client.create()
    endings = (
        FakeReply(ids=[], status=500, error="boom"),
        FakeReply(ids=[], status=400, error="no"),
        FakeReply(ids=[1], raw=b"{"),
        FakeReply(ids=[*b"ok", 261], delay_s=60.0),
        FakeReply(ids=[*b"ok", 261]),
    )
    for ending in endings:
        server.engine.script = say(ending)
        calls = [
            asyncio.ensure_future(post(server, session, {"messages": [user("go")]})),
            asyncio.ensure_future(raw(server, session, "messages", user("go"))),
        ]
        if ending.delay_s:
            await until(lambda: server.engine.in_flight == 2, what="both are running")
            assert (await in_flight(server, session))[:2] == (2, 2.0)
            for each in calls:
                each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: server.engine.in_flight == 0, what="the engine lets go")
        for _ in range(200):
            if not any(await in_flight(server, session)):
                break
            await asyncio.sleep(0.01)
        assert await in_flight(server, session) == (0, 0.0, 0, 0)
        await until(lambda: server.gateway.router.ready, what="the engine serves")


async def test_a_client_that_times_out_frees_its_engine_within_a_second_though_another_is_dead(tmp_path: Path) -> None:
    """Report D11: the abort goes to the engine that has the call and to no other."""
    async with FakeServer(tmp_path, engines=3) as server:
        sessions = [await server.client.create() for _ in range(3)]
        homes = []
        for session in sessions:
            await ask(server, session, [user("go")])
            homes.append(next(e for e in server.engines if e.requests and e not in homes))
        session, home = sessions[1], homes[1]
        await homes[0].stop()
        home.script = say(FakeReply(ids=[*b"ok", 261], delay_s=30.0), [*b"ok", 261])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(post(server, session, {"messages": [user("on")]}), 0.3)
        old = home.requests[-1].rid
        async with asyncio.timeout(1):
            await until(lambda: home.aborts == [old], what="the abort arrives")
            await until(lambda: home.in_flight == 0, what="the old decode is gone")
        status, _ = await post(server, session, {"messages": [user("on")]}, {"x-stainless-retry-count": "1"})
        assert status == 200
        assert home.requests[-1].rid != old
        assert all(not engine.aborts for engine in server.engines if engine is not home)
        assert len(await rows(server, session)) == 2


async def test_a_retry_beside_the_end_of_the_call_that_its_client_left_is_a_call_of_its_own(server: FakeServer) -> None:
    """It must not get the error of a generation that is just being cancelled."""
    store = server.gateway.store
    server.engine.script = say(FakeReply(ids=[*b"ok", 261], delay_s=30.0), [*b"ok", 261])
    session = await server.client.create()
    body = {"messages": [user("go")]}
    left = asyncio.ensure_future(post(server, session, body))
    await until(lambda: server.engine.in_flight == 1, what="the call is running")
    held = await store.get(session.session_id)
    assert held is not None
    (running,) = held.calls._running
    assert held.calls.find(running.digest, key=None, retry=True) is running
    held.calls.leave(running, grace_s=0.0)
    assert held.calls.find(running.digest, key=None, retry=True) is None
    left.cancel()
    assert (await post(server, session, body, {"x-stainless-retry-count": "1"}))[0] == 200


# -- streams that break -----------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
async def test_an_upstream_that_breaks_off_is_an_error_to_the_client_and_in_the_session(
    server: FakeServer, route: str
) -> None:
    """Report C7: no finish reason, and an episode without a turn can be told from one that had nothing to say."""
    server.engine.script = say(FakeReply(ids=[*b"abcd", 261], drop_after=2), [*b"ok", 261])
    session = await server.client.create()
    status, data = await raw(server, session, route, user("go"))
    assert status in (200, 503)
    assert b"error" in data
    assert not [end for end in ENDS if end in data]
    shown = await server.client.session(session.session_id)
    assert (shown["turns"], shown["failed_calls"]) == (0, {"engine_lost": 1})
    assert await server.client.trajectories(session.session_id) == ()
    await until(lambda: server.gateway.router.ready, what="the engine serves")
    await ok(server, session, route, asked(route, user("go")))
    (row,) = await rows(server, session)
    assert row.trainable
    # What was counted stays when the session leaves memory between two calls.
    server.gateway.store.unload(time.time() + server.config.unload_after_s + 1)
    shown = await server.client.session(session.session_id)
    assert (shown["turns"], shown["failed_calls"]) == (1, {"engine_lost": 1})


@pytest.mark.parametrize("route", ROUTES)
async def test_a_client_whose_socket_breaks_in_the_middle_leaves_no_turn(server: FakeServer, route: str) -> None:
    """Report C7, from the other side: a reset while the server writes."""
    server.engine.script = say(FakeReply(ids=[*b"x" * 900, 261], delay_s=0.01))
    session = await server.client.create()
    body = json.dumps(asked(route, user("go"), stream=True)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    path = f"/sessions/{session.session_id}/v1/{route}"
    head = f"POST {path} HTTP/1.1\r\nhost: h\r\nx-api-key: {session.token}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    assert b"200" in await reader.readline()
    await reader.readuntil(b"data:")
    writer.transport.abort()
    rid = server.engine.requests[0].rid
    await until(lambda: server.engine.aborts == [rid], what="the engine is told")
    await until(lambda: server.engine.in_flight == 0, what="the engine lets go")
    shown = await server.client.session(session.session_id)
    assert (shown["turns"], shown["in_flight"], shown["failed_calls"]) == (0, 0, {"aborted": 1})
    assert await server.client.trajectories(session.session_id) == ()


# -- retries and siblings ---------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sign", ["key", "sdk"])
async def test_a_retry_joins_the_running_call_and_gets_its_bytes_again(
    server: FakeServer, route: str, stream: bool, sign: str
) -> None:
    """Row 25 in every dialect."""
    server.engine.script = say(FakeReply(ids=[*b"abc", 261], delay_s=0.1), [*b"other", 261])
    session = await server.client.create()
    body = json.dumps(asked(route, user("go"), stream=stream)).encode()
    first = {"idempotency-key": "k"} if sign == "key" else {"x-stainless-retry-count": "0"}
    again = {"idempotency-key": "k"} if sign == "key" else {"x-stainless-retry-count": "1"}

    async def send(headers: dict[str, str]) -> tuple[int, bytes]:
        sent = {"x-api-key": session.token, **headers}
        async with server.http.post(f"{session.base_url}/v1/{route}", data=body, headers=sent) as response:
            return response.status, await response.read()

    one = asyncio.ensure_future(send(first))
    await until(lambda: server.engine.in_flight == 1, what="the call is running")
    two, three = await asyncio.gather(send(again), send(again))
    assert await one == two == three == await send(again)
    assert two[0] == 200
    assert len(server.engine.requests) == 1
    assert len(await rows(server, session)) == 1


@pytest.mark.parametrize("route", ROUTES)
async def test_the_same_body_again_is_a_sibling_and_calls_beside_each_other_are_all_kept(
    server: FakeServer, route: str
) -> None:
    """Rows 26 and 27 in every dialect: two samples in turn, then three at once behind one of them."""
    server.engine.script = lambda request: FakeReply(ids=[*f"n{request.number}".encode(), 261], delay_s=0.05)
    session = await server.client.create()
    first = await ok(server, session, route, asked(route, user("go")))
    await ok(server, session, route, asked(route, user("go")))
    assert reasons(server) == ["root", "sibling"]
    more = asked(route, user("go"), *echoed(route, first), user("on"))
    answers = await asyncio.gather(*(ok(server, session, route, more) for _ in range(3)))
    assert len({json.dumps(echoed(route, each)) for each in answers}) == 3
    assert sorted(reasons(server)[2:]) == ["continuation", "sibling", "sibling"]
    found = await rows(server, session)
    assert len(found) == 4
    assert sum(int(row.loss_mask.sum()) for row in found) == 5 * 3


async def test_the_first_question_asked_again_with_another_temperature_may_be_continued(server: FakeServer) -> None:
    """Report C5: no rollback that could be broken; the prompt is rendered from nothing."""
    server.engine.script = say(CALL_EDIT, [263, *b"edit", 265, *b"quote", 261], [*b"ok", 261])
    session = await server.client.create()
    first = await ask(server, session, [user("u1")], TOOLS, temperature=0.25)
    second = await ask(server, session, [user("u1")], TOOLS, temperature=0.75)
    assert first != second
    result = {"role": "tool", "tool_call_id": second["tool_calls"][0]["id"], "content": "t"}
    await ask(server, session, [user("u1"), second, result], TOOLS, temperature=0.75)
    one, two, three = server.engine.requests
    assert one.input_ids == two.input_ids
    answered = [*two.input_ids, *server.engine.replies[two.rid]]
    assert three.input_ids[: len(answered)] == answered
    assert reasons(server) == ["root", "sibling", "continuation"]
    alone, whole = await rows(server, session)
    assert (alone.sampling.temperature, whole.sampling.temperature) == (0.25, 0.75)
    assert (len(alone.turn_spans), len(whole.turn_spans)) == (1, 2)


# -- an episode and what does not belong to it ------------------------------------------------------


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["bare", "with-the-same-tools"])
async def test_a_call_that_does_not_belong_to_the_conversation_changes_nothing_of_it(
    server: FakeServer, tools: list[Any] | None
) -> None:
    """Report C10: a program that the agent started finds the same address."""

    async def episode(stranger: bool) -> tuple[Session, dict[str, Any]]:
        server.engine.script = say(CALL_EDIT, *([[*b"hello", 261]] if stranger else []), [*b"done", 261])
        session = await server.client.create()
        reply = await ask(server, session, [user("fix it")], TOOLS)
        if stranger:
            await ask(server, session, [user("hi")], tools)
        # Call ids are random; the byte family does not render them.
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "8"}
        await ask(server, session, [user("fix it"), reply, result], TOOLS)
        await server.client.reward(session.session_id, 1.0)
        return session, reply

    quiet, _ = await episode(False)
    (expected,) = await rows(server, quiet)
    session, _ = await episode(True)
    found = await rows(server, session)
    assert len(found) == 2
    main = next(row for row in found if len(row.turn_spans) == 2)
    other = next(row for row in found if row is not main)
    for name in ("token_ids", "loss_mask", "weight_version"):
        assert getattr(main, name).tolist() == getattr(expected, name).tolist(), name
    assert main.logprobs[main.loss_mask == 1].tolist() == expected.logprobs[expected.loss_mask == 1].tolist()
    assert (main.reward, main.trainable, main.branch_reason) == (1.0, True, "root")
    assert other.branch_reason == ("new_root" if tools else "new_conversation")
    assert (other.side_request, other.trainable) == (tools is None, tools is not None)


# -- very many --------------------------------------------------------------------------------------


def held_objects() -> Counter[str]:
    """Living objects of this package by type."""
    gc.collect()
    kinds = map(type, gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("tollway."))


@asynccontextmanager
async def forgetful(folder: Path, **settings: object) -> AsyncIterator[FakeServer]:
    """A server over an engine that keeps nothing of what it was asked."""
    engine = FakeEngine(lambda _: FakeReply(ids=[*b"k", 261], cached_tokens=0), keep_requests=False)
    async with engine, FakeServer(folder, engines=[engine], settings=settings) as server:
        yield server


async def test_a_thousand_episodes_that_end_in_an_exception_leave_nothing_behind(tmp_path: Path) -> None:
    """Report C8: every other one is deleted twice."""
    async with forgetful(tmp_path) as server:

        async def episode(number: int) -> None:
            session = await server.client.create()
            with contextlib.suppress(ZeroDivisionError):
                await server.client.chat(session, [user("go")])
                raise ZeroDivisionError("the harness broke")
            for _ in range(1 + number % 2):
                await server.client.delete(session.session_id)

        async def episodes(count: int) -> None:
            for start in range(0, count, 20):
                await asyncio.gather(*(episode(number) for number in range(start, start + 20)))

        await episodes(20)
        before = held_objects()
        await episodes(1000)
        after = held_objects()
        # What other tests of this process still hold is there before, too.
        for name in ("Session", "Node", "Call", "Card", "Pin"):
            assert after[name] <= before[name], name
        assert {name: (before[name], count) for name, count in after.items() if count > before[name] + 40} == {}
        assert server.gateway.store.summary() == {"open_sessions": 0, "loaded_sessions": 0, "closed_in_memory": 0}
        assert server.gateway.router.ledger.sessions == {}
        for table in ("sessions", "turns"):
            assert await server.gateway.journal.read(f"SELECT count(*) FROM {table}") == [(0,)]


async def test_a_third_session_of_two_is_told_when_to_come_back(tmp_path: Path) -> None:
    """Report C9."""
    async with FakeServer(tmp_path, settings={"capacity": 2}) as server:
        opened = [await server.client.create() for _ in range(2)]
        headers = {"authorization": f"Bearer {server.admin_key}"}
        async with server.http.post(f"{server.url}/sessions", json={}, headers=headers) as response:
            assert response.status == 429
            assert int(response.headers["retry-after"]) >= 1
        await server.client.delete(opened[0].session_id)
        assert (await server.client.create()).session_id not in {each.session_id for each in opened}


async def test_finished_episodes_wait_for_their_reader_however_many_they_are(tmp_path: Path) -> None:
    """Report C9: 1,100 end and nobody reads."""
    async with forgetful(tmp_path, keep_closed=16) as server:
        made: list[str] = []

        async def finish(count: int) -> None:
            for _ in range(count):
                session = await server.client.create()
                await server.client.chat(session, [user("go")])
                await server.client.close(session.session_id)
                made.append(session.session_id)

        await asyncio.gather(*(finish(55) for _ in range(20)))
        assert len(set(made)) == 1100
        assert server.gateway.store.summary()["closed_in_memory"] == 16
        assert await server.gateway.journal.read("SELECT count(DISTINCT session_id) FROM turns") == [(1100,)]
        for session_id in made[::100]:
            (row,) = await server.client.trajectories(session_id)
            assert row.trained_tokens == 2


async def test_five_hundred_creates_at_once_ask_no_engine(server: FakeServer) -> None:
    """Report C13: a health check takes long meanwhile, and only the probe's own rhythm asks for it."""
    server.engine.health_delay_s = 10.0
    calls, joins = server.engine.health_calls, server.engine.model_info_calls
    async with asyncio.timeout(9):  # alone on two cores all of them take a third of a second
        made = await asyncio.gather(*(server.client.create() for _ in range(512)))
    assert len({session.session_id for session in made}) == len({session.token for session in made}) == 512
    assert server.engine.health_calls - calls <= 9
    assert server.engine.most_health_calls <= 1
    assert server.engine.model_info_calls - joins <= 9
    assert server.engine.requests == []


async def test_a_server_that_starts_again_while_its_old_port_is_taken_takes_a_new_one_and_says_so(
    tmp_path: Path,
) -> None:
    """Report C11."""
    settings: dict[str, Any] = {"port": 0, "journal": str(tmp_path / "j.sqlite")}
    async with process(**settings) as running:
        first = (await ready(running))["url"]
        running.terminate()
        assert await running.wait() == 0
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(first.rpartition(":")[2])))
        taken.listen()
        async with process(**settings) as running:
            second = (await ready(running))["url"]
            assert second != first
            _, writer = await asyncio.open_connection("127.0.0.1", int(second.rpartition(":")[2]))
            writer.close()
