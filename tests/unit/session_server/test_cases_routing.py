"""What the engines see of sessions, and what strangers get: keys, stickiness, cached tokens, secrets."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from server_helpers import ROUTES, ask, asked, call, echoed, ok, rows, say, sse, until, user

from tollway.router.fake import FakeEngine, FakeReply, FakeRequest
from tollway.session_server import auth
from tollway.session_server.fake import FakeServer
from tollway.session_server.workers import _private_folder

# -- stickiness -------------------------------------------------------------------------------------


def homes(server: FakeServer) -> list[FakeEngine]:
    """Engines that got calls."""
    return [engine for engine in server.engines if engine.requests]


async def test_every_call_of_a_session_carries_its_key_and_goes_to_one_engine(tmp_path: Path) -> None:
    """Report D1: five chat turns, streamed and not, then a call of another dialect."""
    async with FakeServer(tmp_path, engines=2) as server:
        session = await server.client.create()
        messages: list[Any] = [user("go")]
        for turn in range(5):
            if turn % 2:
                await sse(server, session, {"messages": messages})
                messages += [{"role": "assistant", "content": "ok"}, user("on")]
            else:
                messages += [await ask(server, session, messages), user("on")]
        await ok(server, session, "responses", {"input": "something else"})
        (home,) = homes(server)
        assert len(home.requests) == 6
        assert [request.body["stream"] for request in home.requests] == [False, True, False, True, False, False]
        for request in home.requests:
            assert request.headers["X-SMG-Routing-Key"] == request.body["routing_key"] == session.session_id


async def test_a_harness_header_and_a_changed_fleet_leave_key_and_engine_alone(tmp_path: Path) -> None:
    """Report D9."""
    async with FakeServer(tmp_path, engines=3) as server, FakeEngine() as fourth:
        session = await server.client.create()
        mine = {"x-a": "1", "x-smg-routing-key": "stolen", "x-data-parallel-rank": "7"}
        status, first = await call(server, session, "chat/completions", asked("chat/completions", user("go")), mine)
        assert status == 200
        (home,) = homes(server)
        ids = {engine.url: engine.id for engine in server.gateway.router.fleet.engines.values()}
        other = next(engine for engine in server.engines if engine is not home)
        await server.client.remove_engine(ids[other.url])
        await server.client.add_engine(fourth.url)
        await server.client.add_engine(home.url)
        await until(lambda: len(server.gateway.router.fleet.serving()) == 3, what="the new engine serves")
        more = asked("chat/completions", user("go"), *echoed("chat/completions", first), user("on"))
        assert (await call(server, session, "chat/completions", more, mine))[0] == 200
        assert homes(server) == [home]
        assert [request.headers["X-SMG-Routing-Key"] for request in home.requests] == [session.session_id] * 2
        assert not {"x-a", "x-data-parallel-rank"} & {name.lower() for name in home.requests[0].headers}
        assert "routed_dp_rank" not in home.requests[0].body


async def test_names_of_other_models_move_no_session(tmp_path: Path) -> None:
    """Report D10: the name is echoed; there is one model."""
    async with FakeServer(tmp_path, engines=3) as server:
        session = await server.client.create()
        for model in ("a", "b", "c", "a"):
            value = await ok(server, session, "chat/completions", {"model": model, "messages": [user("go")]})
            assert value["model"] == model
        (home,) = homes(server)
        assert len(home.requests) == 4


# -- cached tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 16])
async def test_prompt_logprobs_are_never_asked_for_so_the_cache_works(tmp_path: Path, page: int) -> None:
    """Report D8: the engine reuses nothing for a call that asks for logprobs from position 0."""
    async with FakeEngine(page_size=page) as engine:

        def script(request: FakeRequest) -> FakeReply:
            reuse = request.body["logprob_start_len"] != 0
            return FakeReply(ids=[*b"x" * 40, 261], cached_tokens=None if reuse else 0)

        engine.script = script
        async with FakeServer(tmp_path, engines=[engine]) as server:
            session = await server.client.create()
            for route in ROUTES:
                first = await ok(server, session, route, asked(route, user("go " + route), logprobs=None))
                more = asked(route, user("go " + route), *echoed(route, first), user("on"), top_logprobs=None)
                await ok(server, session, route, more)
                one, two = engine.requests[-2:]
                assert one.body["logprob_start_len"] == two.body["logprob_start_len"] == -1
                known = one.prompt_tokens + 41
                shown = await server.client.session(session.session_id)
                assert shown["nodes"][-1]["cached_tokens"] >= known - page  # type: ignore[index]


async def test_after_new_weights_nothing_of_the_old_cache_is_used_and_a_frozen_model_keeps_its_own(
    tmp_path: Path,
) -> None:
    """Report D7."""
    async with FakeServer(tmp_path / "policy") as policy, FakeServer(tmp_path / "frozen") as frozen:
        talks = {}
        for server in (policy, frozen):
            session = await server.client.create()
            talks[server] = session, await ask(server, session, [user("go")])
        policy.engine.flush()
        policy.engine.version = "2"
        await policy.client.refit("e0", 2, flushed=True)
        for server, (session, reply) in talks.items():
            await ask(server, session, [user("go"), reply, user("on")])
            (row,) = await rows(server, session)
            kept = row.turn_spans[0].end - 1
            assert row.cached_tokens == (0, 0 if server is policy else kept)
            assert row.weight_version[row.loss_mask == 1].tolist() == [0] * 3 + [2 if server is policy else 0] * 3
        assert (await policy.client.cache())["waste"] == {"refit_flush": kept}
        assert (await frozen.client.cache())["efficiency"] == 1.0


def sized(prompt: int) -> dict[str, Any]:
    """A user message that makes the prompt of a bare byte conversation so long."""
    return user("x" * (prompt - 4))


async def test_a_session_shows_what_was_cached_of_how_much_also_when_it_is_idle(server: FakeServer) -> None:
    """Reports J5 and J6: 100 tokens with none cached, then 150 with 100."""
    server.engine.script = say(
        FakeReply(ids=[*b"y" * 39, 261], cached_tokens=0), FakeReply(ids=[*b"z", 261], cached_tokens=100)
    )
    session = await server.client.create()
    first = sized(100)
    reply = await ask(server, session, [first])
    await ask(server, session, [first, reply, user("x" * 7)])
    assert [request.prompt_tokens for request in server.engine.requests] == [100, 150]
    for _ in range(2):
        shown = await server.client.session(session.session_id)
        cache: Any = shown["cache"]
        assert (cache["cached_tokens"], cache["prompt_tokens"], cache["hit_rate"]) == (100, 250, 0.4)
        assert [node["cached_tokens"] for node in shown["nodes"]] == [0, 100]  # type: ignore[attr-defined]
        total = await server.client.cache()
        assert (total["cached_tokens"], total["prompt_tokens"], total["hit_rate"]) == (100, 250, 0.4)
    (row,) = await rows(server, session)
    assert (row.cached_tokens, row.prompt_tokens) == ((0, 100), (100, 150))


def without_cached(value: dict[str, Any]) -> None:
    del value["meta_info"]["cached_tokens"]


async def test_what_an_engine_does_not_tell_is_unknown_everywhere_and_never_zero(server: FakeServer) -> None:
    """Report J6."""
    server.engine.script = say(FakeReply(ids=[*b"ok", 261], edit=without_cached))
    session = await server.client.create()
    usages = [(await ok(server, session, route, asked(route, user(f"go {route}"))))["usage"] for route in ROUTES]
    assert not [usage for usage in usages if "cache" in json.dumps(usage)]
    shown = await server.client.session(session.session_id)
    assert [node["cached_tokens"] for node in shown["nodes"]] == [None] * 3  # type: ignore[attr-defined]
    cache: Any = shown["cache"]
    assert (cache["calls"], cache["unreported_calls"]) == (0, 3)
    assert cache["hit_rate"] is cache["efficiency"] is cache["ceiling"] is None
    assert {row.cached_tokens for row in await rows(server, session)} == {(None,)}


async def test_input_tokens_are_never_negative_and_both_branches_count(server: FakeServer) -> None:
    """Report J7: 100 tokens and 150 with the reply, then a shorter question of 120 and 140."""
    server.engine.script = say([*b"y" * 49, 261], [*b"z" * 19, 261])
    session = await server.client.create()
    await ask(server, session, [sized(100)])
    await ask(server, session, [sized(120)])
    shown = await server.client.session(session.session_id)
    nodes: Any = shown["nodes"]
    assert [(node["suffix_tokens"], node["tokens"]) for node in nodes] == [(100, 150), (120, 140)]
    assert shown["stored_tokens"] == 150 + 140
    assert shown["sampled_tokens"] == 50 + 20
    # A continuation adds what is new only.
    reply = {"role": "assistant", "content": "y" * 49}
    await ask(server, session, [sized(100), reply, user("on")])
    nodes = (await server.client.session(session.session_id))["nodes"]
    assert nodes[2]["suffix_tokens"] == len([258, *b"on", 261, 259])
    assert all(node["suffix_tokens"] >= 0 for node in nodes)


# -- strangers --------------------------------------------------------------------------------------


def secret_of(token: str) -> str:
    return token.split("_", 2)[2]


def test_a_session_id_cannot_be_guessed() -> None:
    """Report K2: 128 random bits name a session, 256 guard it."""
    made = [auth.new_session_secret(3) for _ in range(2000)]
    numbers = [int(session_id[:32], 16) for session_id, _ in made]
    assert len(set(numbers)) == 2000
    for bit in range(128):  # every bit is drawn: 2,000 fair draws are never so far from half
        assert 800 < sum(number >> bit & 1 for number in numbers) < 1200
    assert len({secret_of(token) for _, token in made}) == 2000
    assert all(len(secret_of(token)) == 43 for _, token in made)


@pytest.mark.parametrize("key", ["none", "session", "admin"])
async def test_a_pickle_sent_anywhere_runs_nothing(server: FakeServer, tmp_path: Path, key: str) -> None:
    """Report K3: no route of the server reads one."""
    witness = tmp_path / "witness"

    class Harm:
        def __reduce__(self) -> Any:
            return (open, (str(witness), "w"))

    plain = pickle.dumps(Harm())
    bodies = [plain, pickle.dumps(Harm(), protocol=0), orjson.dumps({"serialized_named_tensors": [plain.hex()]})]
    session = await server.client.create()
    token = {"none": "", "session": session.token, "admin": server.admin_key}[key]
    async with server.http.get(f"{server.url}/openapi.json") as response:
        paths = (await response.json())["paths"]
    routes = [(method.upper(), path) for path, item in paths.items() for method in item if method != "get"]
    routes += [("POST", path) for path in ("/update_weights_from_tensor", "/update_weights_from_distributed")]
    routes += [("POST", path) for path in ("/workers/fleet", "/init_weights_update_group", "/load")]
    assert len(routes) > 12
    for method, path in routes:
        filled = re.sub(r"\{session_id\}", session.session_id, path)
        filled = re.sub(r"\{[^}]*\}", "e9", filled)
        for body in bodies:
            if method == "DELETE" and key == "admin":
                continue  # takes no body, and would end the session
            async with server.http.request(
                method, server.url + filled, data=body, headers={"authorization": f"Bearer {token}"}
            ) as response:
                await response.read()
                assert response.status < 500, filled
    assert not witness.exists()


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[str, list[web.Request]]]:
    """An address that is no engine, and what it was asked."""
    got: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        got.append(request)
        return web.json_response({"model_path": "m", "weight_version": "0"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", got
    await runner.cleanup()


@pytest.mark.parametrize("bad", ["http://169.254.169.254/latest", "file:///etc/passwd", "http://user:pw@127.0.0.1:1"])
async def test_an_address_that_is_no_engine_is_refused_to_strangers_first(server: FakeServer, bad: str) -> None:
    """Report K7: 401 without the key, whatever is named; then by scheme, credentials and link-local address."""
    for token, status in (("", 401), ((await server.client.create()).token, 401), (server.admin_key, 400)):
        headers = {"authorization": f"Bearer {token}"}
        async with server.http.post(f"{server.url}/engines", json={"url": bad}, headers=headers) as response:
            assert response.status == status
    assert len(await server.client.engines()) == 1


async def test_no_secret_is_ever_sent_to_an_engine(server: FakeServer) -> None:
    """Report K7: neither the admin key nor a session's token, by no route and in no header."""
    async with listening() as (url, got):
        await server.client.add_engine(url)
        await until(lambda: len(got) > 3, what="it is looked at")
        session = await server.client.create()
        await ask(server, session, [user("go")])
        seen = [str(request.headers) + request.path_qs for request in got]
        seen += [str(request.headers) + str(request.body) for request in server.engine.requests]
        for secret in (server.admin_key, session.token, secret_of(session.token)):
            assert not [each for each in seen if secret in each]
        assert not [request for request in got if "authorization" in {name.lower() for name in request.headers}]


def test_a_place_for_sockets_is_new_and_private_whatever_stands_in_the_shared_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Report K8."""
    shared = Path(tempfile.mkdtemp(prefix="k8-"))
    target = shared / "elsewhere"
    target.mkdir()
    for name in ("tollway", "tollway-", "tollway-0", "metrics", "0.sock"):
        (shared / name).symlink_to(target)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    one, two = _private_folder(), _private_folder()
    assert one != two
    for folder in (one, two):
        assert folder.parent == shared
        assert stat.S_IMODE(folder.lstat().st_mode) == 0o700
        assert not folder.is_symlink()
    assert list(target.iterdir()) == []
    shutil.rmtree(shared)
