"""Sessions over HTTP: secrets, limits, life, rewards, restart."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from server_helpers import ask, post, rows, say, until, user

from tollway.errors import (
    CapacityExceeded,
    Conflict,
    EngineLost,
    JournalError,
    NoEngine,
    NotFound,
    TollwayError,
    Unauthorized,
    UpstreamError,
    VersionNotReady,
)
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.records import Sampling
from tollway.router.fake import FakeEngine, FakeReply
from tollway.session_server.client import SessionClient
from tollway.session_server.fake import FakeServer


async def status_of(server: FakeServer, method: str, path: str, token: str | None, **more: Any) -> tuple[int, bytes]:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with server.http.request(method, server.url + path, headers=headers, **more) as response:
        return response.status, await response.read()


async def test_unknown_and_foreign_sessions_are_answered_alike(server: FakeServer) -> None:
    one, two = await server.client.create(), await server.client.create()
    unknown = f"tw_{secrets.token_hex(16)}_{secrets.token_urlsafe(32)}"
    answers = set()
    for path in ("", "/trajectories", "/v1/models"):
        for target, token in (
            (one.session_id, two.token),
            (one.session_id, unknown),
            (secrets.token_hex(16), two.token),
            (one.session_id, None),
            (one.session_id, one.token[:-1] + ("A" if one.token[-1] != "A" else "B")),
        ):
            answers.add(await status_of(server, "GET", f"/sessions/{target}{path}", token))
    body = {"messages": [user("hi")]}
    for target, token in ((one.session_id, two.token), (secrets.token_hex(16), unknown), (one.session_id, "x")):
        path = f"/sessions/{target}/v1/chat/completions"
        answers.add(await status_of(server, "POST", path, token, json=body))
    assert len(answers) == 1
    assert answers.pop()[0] == 401
    assert not server.engine.requests


async def test_a_session_token_opens_no_admin_route(server: FakeServer) -> None:
    session = await server.client.create()
    path = f"/sessions/{session.session_id}"
    for method, target in (
        ("POST", "/sessions"),
        ("POST", f"{path}/reward"),
        ("DELETE", path),
        ("GET", "/engines"),
        ("POST", "/engines"),
        ("DELETE", "/engines/e0"),
        ("POST", "/engines/e0/drain"),
        ("POST", "/engines/e0/refit"),
        ("GET", "/cache"),
    ):
        assert (await status_of(server, method, target, session.token))[0] == 401, target
        assert (await status_of(server, method, target, None))[0] == 401, target


async def test_a_token_is_accepted_in_every_form(server: FakeServer) -> None:
    session = await server.client.create()
    body = {"messages": [user("hi")]}
    for path, headers in (
        (f"/sessions/{session.session_id}/v1/chat/completions", {"x-api-key": session.token}),
        ("/v1/chat/completions", {"authorization": f"Bearer {session.token}"}),
        ("/v1/chat/completions", {"x-api-key": session.token}),
        (f"/sessions/{session.token}/v1/chat/completions", {}),
    ):
        async with server.http.post(server.url + path, json=body, headers=headers) as response:
            assert response.status == 200, path
    assert len(await rows(server, session)) == 4


async def test_secrets_are_not_stored(server: FakeServer) -> None:
    session = await server.client.create()
    assert session.token not in repr(session)
    await ask(server, session, [user("hi")])
    secret = session.token.split("_", 2)[2].encode()
    for file in server.config.journal.parent.iterdir():
        assert secret not in file.read_bytes()
    shown = json.dumps(dict(await server.client.session(session.session_id)))
    assert session.token not in shown


async def test_models_and_head_answer(server: FakeServer) -> None:
    session = await server.client.create()
    path = f"/sessions/{session.session_id}"
    status, data = await status_of(server, "GET", f"{path}/v1/models", session.token)
    assert (status, json.loads(data)["data"][0]["id"]) == (200, "policy")
    assert (await status_of(server, "GET", "/v1/models", session.token))[0] == 200
    assert (await status_of(server, "GET", "/v1/models", None))[0] == 401
    # Harnesses ask before they send their key; whether there is such a session is not told.
    for where in (path, f"/sessions/{'0' * 34}", "/"):
        assert (await status_of(server, "HEAD", where, None))[0] == 200


async def test_full_means_429_with_a_time_and_closing_makes_room(tmp_path: Path) -> None:
    async with FakeServer(tmp_path, settings={"capacity": 2}) as server:
        first, _ = await server.client.create(), await server.client.create()
        with pytest.raises(CapacityExceeded) as caught:
            await server.client.create()
        assert caught.value.retry_after_s >= 1
        waiting = asyncio.ensure_future(server.client.create(wait_s=30))
        await server.client.close(first.session_id)
        assert (await waiting).session_id != first.session_id


async def test_many_creates_at_once_do_not_pass_the_cap(tmp_path: Path) -> None:
    async with FakeServer(tmp_path, settings={"capacity": 5}) as server:
        made = await asyncio.gather(*(server.client.create() for _ in range(20)), return_exceptions=True)
        assert sum(not isinstance(each, BaseException) for each in made) == 5
        assert all(isinstance(each, CapacityExceeded) for each in made if isinstance(each, BaseException))


async def test_creating_a_session_asks_no_engine(server: FakeServer) -> None:
    server.engine.health_delay_s = 30.0
    before = len(server.engine.requests)
    made = await asyncio.gather(*(server.client.create() for _ in range(64)))
    assert len({each.session_id for each in made}) == 64
    assert len(server.engine.requests) == before


async def test_refusals_name_what_was_found(server: FakeServer) -> None:
    bodies: tuple[tuple[dict[str, object], str], ...] = (
        ({"ttl_s": "soon"}, "found 'soon'"),
        ({"group_id": 7}, "found 7"),
        ({"metadata": [1]}, "found [1]"),
    )
    for body, words in bodies:
        status, said = await status_of(server, "POST", "/sessions", server.admin_key, json=body)
        assert status == 400
        assert words in json.loads(said)["error"]["message"]
    session = await server.client.create()
    status, said = await status_of(server, "GET", f"/sessions/{session.session_id}/v1/models/", session.token)
    assert status == 404
    assert b"no model without a name" in said


async def test_an_expired_session_is_closed_with_its_record(tmp_path: Path) -> None:
    async with FakeServer(tmp_path) as server:
        session = await server.client.create(ttl_s=0.01)
        store = server.gateway.store
        await until(lambda: store.open_sessions == 0, what="the session expires")
        status, _ = await post(server, session, {"messages": [user("hi")]})
        assert status == 400
        assert (await server.client.session(session.session_id))["state"] == "closed"


async def test_a_close_that_the_journal_refused_can_be_repeated_and_expiry_goes_on(tmp_path: Path) -> None:
    async with FakeServer(tmp_path) as server:
        journal, store = server.gateway.journal, server.gateway.store
        trouble = "CREATE TRIGGER trouble BEFORE UPDATE OF state ON sessions BEGIN SELECT RAISE(ABORT, 'trouble'); END"
        await journal.write((trouble, ()))
        one, two = await server.client.create(ttl_s=60), await server.client.create(ttl_s=60)
        await store.expire(time.time() + 61)
        assert store.open_sessions == 0
        with pytest.raises(TollwayError, match="trouble"):
            await server.client.close(one.session_id)
        await journal.write(("DROP TRIGGER trouble", ()))
        await server.client.close(one.session_id)
        states = dict(await journal.read("SELECT id, state FROM sessions"))
        assert states == {one.session_id: "closed", two.session_id: "open"}


async def test_a_closed_session_keeps_its_record_and_takes_no_turn(server: FakeServer) -> None:
    session = await server.client.create()
    await ask(server, session, [user("hi")])
    await server.client.close(session.session_id)
    await server.client.close(session.session_id)
    status, value = await post(server, session, {"messages": [user("hi")]})
    assert status == 400, value  # a retry cannot cure it
    assert len(await rows(server, session)) == 1
    assert server.gateway.router.table.pins == {}


async def test_deleting_is_idempotent_and_leaves_nothing(server: FakeServer) -> None:
    for cycle in range(10):
        session = await server.client.create()
        if cycle % 2:
            server.engine.script = say(FakeReply(ids=[], status=500, error="boom"))
            assert (await post(server, session, {"messages": [user("hi")]}))[0] == 502
        else:
            server.engine.script = say([*b"ok", 261])
            await ask(server, session, [user("hi")])
        await server.client.delete(session.session_id)
        await server.client.delete(session.session_id)
        with pytest.raises(NotFound):
            await server.client.session(session.session_id)
    assert server.gateway.store.open_sessions == 0
    assert server.gateway.router.table.pins == {}
    assert server.gateway.router.ledger.sessions == {}
    assert await server.gateway.journal.read("SELECT count(*) FROM turns") == [(0,)]
    assert await server.gateway.journal.read("SELECT count(*) FROM sessions") == [(0,)]


async def test_a_reward_is_recorded_once(server: FakeServer) -> None:
    session = await server.client.create()
    await ask(server, session, [user("hi")])
    await server.client.reward(session.session_id, 0.5, details={"tests": 3})
    await server.client.reward(session.session_id, 0.5)
    with pytest.raises(Conflict):
        await server.client.reward(session.session_id, 1.0)
    (row,) = await rows(server, session)
    assert row.reward == 0.5


async def test_a_failed_episode_has_an_error_and_no_reward(server: FakeServer) -> None:
    session = await server.client.create()
    await ask(server, session, [user("hi")])
    await server.client.reward(session.session_id, None, error="sandbox gone")
    (row,) = await rows(server, session)
    assert (row.reward, row.error) == (None, "sandbox gone")


async def test_a_reward_must_be_a_number(server: FakeServer) -> None:
    session = await server.client.create()
    for bad in (b'{"reward": "abc"}', b'{"reward": NaN}', b"{}", b'{"reward": 1e999}', b'{"reward": 1, "x": 2}', b"["):
        path = f"/sessions/{session.session_id}/reward"
        status, _ = await status_of(server, "POST", path, server.admin_key, data=bad)
        assert status == 400, bad


async def test_the_sessions_sampling_wins_and_is_in_the_export(server: FakeServer) -> None:
    session = await server.client.create(sampling=Sampling(temperature=0.7, max_new_tokens=9, stop=("zz",)))
    await ask(server, session, [user("hi")], temperature=0.0, max_tokens=500, top_p=0.5)
    sent = server.engine.requests[0].body["sampling_params"]
    assert isinstance(sent, dict)
    assert (sent["temperature"], sent["max_new_tokens"], sent["top_p"]) == (0.7, 9, 1.0)
    assert sent["stop"] == ["zz"]
    assert sent["stop_token_ids"] == [261]
    (row,) = await rows(server, session)
    assert row.sampling.temperature == 0.7
    assert (await server.client.session(session.session_id))["sampling_overridden"] == 2


async def test_a_harness_chooses_where_the_session_leaves_it_open(server: FakeServer) -> None:
    session = await server.client.create()
    await ask(server, session, [user("hi")], temperature=0.5, top_k=3, seed=7, max_completion_tokens=4)
    sent = server.engine.requests[0].body["sampling_params"]
    assert isinstance(sent, dict)
    assert (sent["temperature"], sent["top_k"], sent["sampling_seed"], sent["max_new_tokens"]) == (0.5, 3, 7, 4)


async def test_a_wanted_version_that_nobody_serves_is_a_409_with_numbers(server: FakeServer) -> None:
    admin = {"authorization": f"Bearer {server.admin_key}"}
    async with server.http.post(server.url + "/sessions", json={"min_version": 3}, headers=admin) as response:
        made = await response.json()
    headers = {"authorization": f"Bearer {made['token']}"}
    url = f"{made['openai_base_url']}/chat/completions"
    async with server.http.post(url, json={"messages": [user("hi")]}, headers=headers) as response:
        assert response.status == 409
        assert (await response.json())["error"]["code"] == VersionNotReady.code
    server.engine.version = "3"
    await server.client.refit("e0", 3, flushed=True)
    async with server.http.post(url, json={"messages": [user("hi")]}, headers=headers) as response:
        assert response.status == 200


async def test_a_restarted_server_serves_its_sessions_again(tmp_path: Path) -> None:
    """Tree, pins, rewards and kept replies come back."""
    async with FakeEngine() as one, FakeEngine() as two:
        async with FakeServer(tmp_path, engines=[one, two]) as server:
            session = await server.client.create(group_id="g")
            reply = await ask(server, session, [user("go")])
            key = {"idempotency-key": "k"}
            body = {"messages": [user("go"), reply, user("on")]}
            kept = await post(server, session, body, key)
            closed = await server.client.create()
            await ask(server, closed, [user("bye")])
            await server.client.reward(closed.session_id, 1.0)
            await server.client.close(closed.session_id)
            before = await rows(server, session)
            mine = one if one.requests and one.requests[0].rid.startswith(session.session_id[:12]) else two
        async with FakeServer(tmp_path, engines=[one, two]) as server:
            await until(lambda: len(server.gateway.router.fleet.serving()) == 2, what="both engines serve")
            session = _moved(session, server.url)
            assert await post(server, session, body, key) == kept
            status, refused = await post(server, session, {"messages": [user("other")]}, key)
            assert (status, refused["error"]["param"]) == (400, "idempotency-key")
            told = kept[1]["choices"][0]["message"]
            asked = len(mine.requests)
            await ask(server, session, [user("go"), reply, user("on"), told, user("more")])
            assert len(mine.requests) == asked + 1, "the pin came back"
            (row,) = await rows(server, session)
            assert row.token_ids[: before[0].token_ids.size].tolist() == before[0].token_ids.tolist()
            assert len(row.turn_spans) == 3
            (old,) = await server.client.trajectories(closed.session_id)
            assert old.reward == 1.0


def _moved(session: Any, url: str) -> Any:
    from dataclasses import replace

    base = f"{url}/sessions/{session.session_id}"
    return replace(session, base_url=base, openai_base_url=f"{base}/v1")


async def test_a_full_journal_refuses_with_507_and_keeps_what_it_has(tmp_path: Path) -> None:
    async with FakeServer(tmp_path, settings={"journal_max_bytes": 1_048_576}) as server:
        server.engine.script = lambda request: FakeReply(ids=[*b"x" * 2000, 261])
        session = await server.client.create(sampling=Sampling(max_new_tokens=4000))
        good = 0
        for _ in range(60):
            status, value = await post(server, session, {"messages": [user("y" * 2000)]})
            if status != 200:
                break
            good += 1
        assert (status, value["error"]["code"]) == (507, JournalError.code)
        assert good > 2
        assert len(await rows(server, session)) == good
        count = await server.gateway.journal.read("SELECT count(*) FROM turns")
        assert count == [(good,)]
    async with FakeServer(tmp_path) as server:
        assert len(await server.client.trajectories(session.session_id)) == good


async def test_bodies_are_limited(tmp_path: Path) -> None:
    async with FakeServer(tmp_path, settings={"max_body_bytes": 2048}) as server:
        session = await server.client.create()
        assert (await post(server, session, {"messages": [user("x" * 4000)]}))[0] == 400
        status, _ = await status_of(server, "POST", "/sessions", server.admin_key, data=b" " * 5000)
        assert status == 400


async def test_nodes_are_limited(tmp_path: Path) -> None:
    async with FakeServer(tmp_path, settings={"max_nodes": 2}) as server:
        session = await server.client.create()
        status, _ = await post(server, session, {"messages": [user("x")], "n": 3})
        assert (status, server.engine.requests) == (400, [])
        for _ in range(2):
            await ask(server, session, [user("x")])
        status, value = await post(server, session, {"messages": [user("x")]})
        assert status == 400
        assert "max_nodes" in value["error"]["message"]


async def test_ready_means_that_a_turn_can_be_served(tmp_path: Path) -> None:
    async with FakeServer(tmp_path, engines=[], settings={"engine_wait_s": 0.0}) as server:
        assert (await status_of(server, "GET", "/healthz", None))[0] == 200
        assert not await server.client.ready()
        session = await server.client.create()
        status, value = await post(server, session, {"messages": [user("x")]})
        assert (status, value["error"]["code"]) == (503, NoEngine.code)
        async with FakeEngine() as engine:
            await server.client.add_engine(engine.url)
            await server.gateway.router.wait_ready(10)
            assert await server.client.ready()
            await ask(server, session, [user("x")])
            status, text = await status_of(server, "GET", "/metrics", None)
            assert status == 200
            assert b"tollway_sampled_tokens" in text


async def test_an_engine_url_must_be_an_address(server: FakeServer) -> None:
    for bad in ("file:///etc/passwd", "http://user:pw@host:1", "host:1", "http://", "http://h:1/?q"):
        with pytest.raises(TollwayError) as caught:
            await server.client.add_engine(bad)
        assert caught.value.status == 400, bad


async def test_the_client_speaks_messages_and_tools(server: FakeServer) -> None:
    server.engine.script = say([*b"so ", 263, *b"edit", 265, *b"cast", 261])
    session = await server.client.create(task_id="t", group_id="g", metadata={"a": "b"})
    tool = ToolSpec(name="edit", parameters='{"type":"object","properties":{"rule":{"type":"string"}}}')
    reply = await server.client.chat(session, [Message(role="user", content="go")], [tool])
    assert reply.message.content == "so "
    assert [(call.name, call.arguments) for call in reply.message.tool_calls] == [("edit", '{"rule": "cast"}')]
    assert reply.finish_reason == "tool_calls"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.cached_tokens) == (17, 14, 0)
    result = Message(role="tool", content="ok", tool_call_id=reply.message.tool_calls[0].id)
    again = await server.client.chat(session, [Message(role="user", content="go"), reply.message, result], [tool])
    assert again.usage.cached_tokens == 17 + 14 - 1
    shown = await server.client.session(session.session_id)
    assert (shown["task_id"], shown["turns"]) == ("t", 2)
    assert isinstance(reply.message.tool_calls[0], ToolCall)
    cache = await server.client.cache()
    assert (cache["efficiency"], cache["unknown_tokens"]) == (1.0, 0)
    (engine,) = await server.client.engines()
    assert (engine["state"], engine["url"]) == ("serving", server.engine.url)


async def test_the_client_raises_the_servers_errors(server: FakeServer) -> None:
    session = await server.client.create()
    stranger = SessionClient(server.url, "wrong", http=server.http)
    with pytest.raises(Unauthorized):
        await stranger.create()
    with pytest.raises(NotFound):
        await server.client.trajectories("0" * 32)
    with pytest.raises(NotFound):
        await server.client.refit("e9", 1, flushed=True)
    server.engine.script = say(FakeReply(ids=[], drop_after=0))
    with pytest.raises((EngineLost, NoEngine)):
        await server.client.chat(session, [Message(role="user", content="x")])
    async with aiohttp.ClientSession() as http:
        nobody = SessionClient("http://127.0.0.1:9", "k", http=http)
        with pytest.raises(EngineLost):
            await nobody.create()
        assert not await nobody.ready()


@pytest.mark.parametrize(
    ("status", "retry_after", "expected"),
    [(200, "", UpstreamError), (429, "Wed, 21 Oct 2026 07:28:00 GMT", CapacityExceeded)],
)
async def test_what_a_proxy_answers_in_between_is_an_error_of_ours(
    status: int, retry_after: str, expected: type[TollwayError]
) -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(status=status, text="<html>", headers={"retry-after": retry_after})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", page)
    async with TestServer(app) as proxy, aiohttp.ClientSession() as http:
        with pytest.raises(expected):
            await SessionClient(str(proxy.make_url("")), "key", http=http).create()


async def test_json_and_binary_exports_say_the_same(server: FakeServer) -> None:
    session = await server.client.create()
    reply = await ask(server, session, [user("go")], logprobs=True, top_logprobs=2)
    await ask(server, session, [user("go"), reply, user("on")], logprobs=True, top_logprobs=2)
    (row,) = await rows(server, session)
    assert row.top_logprobs is not None
    assert row.top_logprobs.ids.shape == (6, 2)
    path = f"/sessions/{session.session_id}/trajectories?format=json"
    status, data = await status_of(server, "GET", path, session.token)
    value = json.loads(data)
    assert status == 200
    assert value["columns"]["token_ids"]["data"] == row.token_ids.tolist()
    assert value["columns"]["row_offsets"]["data"] == [0, row.token_ids.size]
    assert value["columns"]["logprobs"]["data"][0] is None
    assert value["rows"][0]["version_start"] == 0
