"""Weight versions over HTTP: what sessions and requests want, what replies say, and what a refit waits for."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from server_helpers import ROUTES, ask, asked, call, ok, post, say, sse, until, user

from tollway.errors import BadRequest, EngineLost, NotFound, VersionNotReady
from tollway.fleet_watch import Members
from tollway.router.fake import FakeEngine, FakeReply
from tollway.session_server.client import SessionOptions
from tollway.session_server.fake import FakeServer
from tollway.trainer.weights.refit import RefitNotice


@contextlib.asynccontextmanager
async def two_versions(folder: Path) -> AsyncIterator[tuple[FakeServer, FakeEngine, FakeEngine]]:
    """A server over engines with weights 1 and 2."""
    old, new = FakeEngine(version="1"), FakeEngine(version="2")
    async with old, new, FakeServer(folder, engines=[old, new]) as server:
        await server.gateway.router.fleet.wait_serving(10, 2)
        yield server, old, new


# -- requests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
async def test_a_header_says_which_weights_a_request_wants_in_every_dialect(tmp_path: Path, route: str) -> None:
    async with two_versions(tmp_path) as (server, old, new):
        for header, value, home in (
            ("x-tollway-min-version", "2", new),
            ("X-Tollway-Exact-Version", "1", old),
            ("x-tollway-min-version", "0", None),
        ):
            session = await server.client.create()
            before = len(old.requests), len(new.requests)
            status, value_ = await call(server, session, route, asked(route, user("go")), {header: value})
            assert status == 200, value_
            served = old if len(old.requests) > before[0] else new
            assert home is None or served is home
            assert value_["tollway"]["weight_versions"] == dict.fromkeys(("start", "end"), int(served.version))


async def test_session_and_request_wishes_hold_together(tmp_path: Path) -> None:
    async with two_versions(tmp_path) as (server, _, new):
        body = {"messages": [user("go")]}
        session = await server.client.create(options=SessionOptions(min_version=2))
        assert (await post(server, session, body, {"x-tollway-min-version": "1"}))[0] == 200
        assert len(new.requests) == 1
        fixed = await server.client.create(options=SessionOptions(exact_version=2))
        for header in ({"x-tollway-exact-version": "1"}, {"x-tollway-min-version": "3"}):
            status, value = await post(server, fixed, body, header)
            assert (status, value["error"]["retryable"]) == (400, False), "no retry can cure it"
        with pytest.raises(BadRequest, match="exclude"):
            await server.client.create(options=SessionOptions(min_version=3, exact_version=2))


@pytest.mark.parametrize("value", ["", "-1", "1.5", "two", "1" * 40, "\u0661"])
async def test_a_header_that_is_no_version_is_refused_by_name(server: FakeServer, value: str) -> None:
    session = await server.client.create()
    headers = {"x-tollway-min-version": value}
    status, answer = await post(server, session, {"messages": [user("go")]}, headers)
    assert (status, answer["error"]["param"]) == (400, "x-tollway-min-version")
    assert server.engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_version_that_nobody_has_is_a_409_that_says_what_there_is(tmp_path: Path, stream: bool) -> None:
    async with two_versions(tmp_path) as (server, old, new):
        session = await server.client.create()
        body = {"messages": [user("go")], "stream": stream}
        status, value = await post(server, session, body, {"x-tollway-min-version": "7"})
        error = value["error"]
        assert (status, error["code"], error["retryable"]) == (409, "version_not_ready", True)
        assert (error["wanted"], error["exact"], error["serving"], error["available"]) == (7, False, 2, [1, 2])
        assert old.requests == new.requests == []
        late = await server.client.create(options=SessionOptions(exact_version=9))
        with pytest.raises(VersionNotReady) as caught:
            await server.client.chat(late, [user("hi")])
        assert (caught.value.wanted, caught.value.exact, caught.value.available) == (9, True, (1, 2))


async def test_a_call_waits_for_weights_that_come_in_time(tmp_path: Path) -> None:
    async with FakeServer(tmp_path) as server:
        session = await server.client.create(options=SessionOptions(min_version=1))
        calling = asyncio.create_task(post(server, session, {"messages": [user("go")]}))
        await until(lambda: server.gateway.router.seats._changes._waiting, what="the call waits")
        server.engine.version = "1"
        await server.client.refit("e0", 1, flushed=True)
        status, value = await calling
        assert (status, value["tollway"]["weight_versions"]) == (200, {"start": 1, "end": 1})


async def test_the_same_key_with_another_wanted_version_is_another_request(server: FakeServer) -> None:
    session = await server.client.create()
    body = {"messages": [user("go")]}
    key = {"idempotency-key": "k"}
    one = await post(server, session, body, key)
    assert await post(server, session, body, key) == one
    status, _ = await post(server, session, body, {**key, "x-tollway-min-version": "0"})
    assert status == 400
    assert len(server.engine.requests) == 1


# -- replies ----------------------------------------------------------------------------------------


async def test_every_reply_names_the_weights_of_its_first_and_its_last_token(server: FakeServer) -> None:
    reply = FakeReply(ids=[*b"ab", 261], versions=[("3", 0, 1), ("4", 1, 3)])
    server.engine.script = say(reply)
    session = await server.client.create()
    expected = {"start": 3, "end": 4}
    for route in ROUTES:
        assert (await ok(server, session, route, asked(route, user("go"))))["tollway"]["weight_versions"] == expected
        url = f"{session.base_url}/v1/{route}"
        body = asked(route, user("go"), stream=True)
        async with server.http.post(url, json=body, headers={"x-api-key": session.token}) as response:
            events = [
                json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: {")
            ]
        found = [each for each in map(named, events) if each is not None]
        assert found == [expected], "once, in the end"
    events = await sse(server, session, {"messages": [user("two")], "n": 2})
    assert [named(event) for event in events if event != "[DONE]" and named(event)] == [expected]


async def test_the_client_says_it_too(server: FakeServer) -> None:
    server.engine.script = say(FakeReply(ids=[*b"ab", 261], versions=[("3", 0, 1), ("4", 1, 3)]))
    session = await server.client.create()
    assert (await server.client.chat(session, [user("go")])).weight_versions == (3, 4)
    last = [piece async for piece in server.client.stream(session, [user("go")])][-1].reply
    assert last is not None
    assert last.weight_versions == (3, 4)


def named(event: dict[str, Any]) -> dict[str, Any] | None:
    ours = event.get("tollway") or event.get("response", {}).get("tollway") or {}
    return ours.get("weight_versions")


# -- refits -----------------------------------------------------------------------------------------


async def test_an_engine_says_who_is_fixed_to_its_version(server: FakeServer) -> None:
    fixed = await server.client.create(options=SessionOptions(exact_version=0))
    await server.client.create(options=SessionOptions(min_version=0))
    row = await server.client.engine("e0")
    assert (row["id"], row["exact_sessions"], row["exact_calls"]) == ("e0", 1, 0)
    assert (await server.client.engines())[0]["exact_sessions"] == 1
    server.engine.script = lambda request: FakeReply(ids=[*b"ok", 261], delay_s=60)
    other = await server.client.create()
    body = {"messages": [user("go")]}
    calls = [
        asyncio.create_task(post(server, fixed, body)),
        asyncio.create_task(post(server, other, body, {"x-tollway-exact-version": "0"})),
    ]
    await until(lambda: server.engine.in_flight == 2, what="both run")
    row = await server.client.engine("e0")
    assert (row["exact_sessions"], row["exact_calls"]) == (1, 2)
    await server.client.delete(fixed.session_id)
    await server.client.delete(other.session_id)
    await asyncio.gather(*calls)
    row = await server.client.engine("e0")
    assert (row["exact_sessions"], row["exact_calls"]) == (0, 0)
    with pytest.raises(NotFound):
        await server.client.engine("e9")


@pytest.mark.parametrize("end", ["close", "delete", "expire"])
async def test_a_refit_waits_for_sessions_that_are_fixed_to_the_old_weights(server: FakeServer, end: str) -> None:
    client = server.client
    session = await client.create(options=SessionOptions(exact_version=0), ttl_s=3600)
    await ask(server, session, [user("go")])
    members = Members(client, server.http)
    await members.fleet()
    waiting = asyncio.create_task(members.drained(server.engine.url, limit_s=30))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    if end == "close":
        await client.close(session.session_id)
    elif end == "delete":
        await client.delete(session.session_id)
    else:
        server.gateway.store._open[session.session_id].expires_at = 0
        await server.gateway.store.expire(1.0)
    await waiting
    await members.aclose()


async def test_a_refit_waits_no_longer_than_it_may(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    await server.client.create(options=SessionOptions(exact_version=0))
    members = Members(server.client, server.http)
    await members.fleet()
    await members.drained(server.engine.url, limit_s=0.05)
    assert "1 sessions and 0 calls are fixed to version 0" in caplog.text
    await members.aclose()


async def test_an_engine_that_is_taken_away_during_a_refit_is_lost_to_it_and_ends_nothing_else(
    server: FakeServer,
) -> None:
    await server.client.create(options=SessionOptions(exact_version=0))
    members, url = Members(server.client, server.http), server.engine.url
    await members.fleet()
    waiting = asyncio.create_task(members.drained(url, limit_s=30))
    await asyncio.sleep(0.1)
    await server.client.remove_engine("e0")
    await members.fleet()  # as the keeper does every second
    with pytest.raises((EngineLost, NotFound)):
        await waiting
    for told in (members.tell(RefitNotice(url=url, phase="resumed")), members.drained(url, limit_s=30)):
        with pytest.raises(EngineLost, match="not in the fleet any more"):
            await told
    await members.aclose()


async def test_a_server_that_starts_again_still_knows_who_is_fixed_to_a_version(tmp_path: Path) -> None:
    async with FakeEngine() as engine:
        async with FakeServer(tmp_path, engines=[engine]) as server:
            for options in (SessionOptions(exact_version=0), SessionOptions(exact_version=1), SessionOptions()):
                await server.client.create(options=options)
            done = await server.client.create(options=SessionOptions(exact_version=0))
            await server.client.close(done.session_id)
        async with FakeServer(tmp_path, engines=[engine]) as again:
            assert (await again.client.engine("e0"))["exact_sessions"] == 1
