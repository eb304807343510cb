"""The client: typed errors, bounded waits, retries that never sample twice, and streams that are whole or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from server_helpers import CALL_EDIT, say, until

from tollway import errors
from tollway.errors import (
    BadRequest,
    EngineLost,
    NoEngine,
    NotFound,
    ServerStopping,
    TollwayError,
    UpstreamError,
    VersionNotReady,
    WorkerDown,
)
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.records import Sampling
from tollway.router.fake import FakeEngine, FakeReply
from tollway.session_server.client import SessionClient, SessionOptions
from tollway.session_server.client_forms import StreamReader, choice_json, error_of, sampling_json
from tollway.session_server.fake import FakeServer
from tollway.session_server.http import error_body, error_headers

EDIT = ToolSpec(name="edit", parameters='{"type":"object","properties":{"rule":{"type":"string"}}}')
USER = Message(role="user", content="go")


async def test_a_stream_gives_pieces_and_then_the_whole(server: FakeServer) -> None:
    server.engine.script = say([*b"so ", *CALL_EDIT])
    session = await server.client.create()
    pieces = [piece async for piece in server.client.stream(session, [USER], [EDIT])]
    assert "".join(piece.content for piece in pieces) == "so "
    (call,) = [call for piece in pieces for call in piece.calls]
    assert (call.name, call.arguments) == ("edit", '{"rule": "cast"}')
    whole = pieces[-1].reply
    assert whole is not None
    assert [piece.reply for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert whole.message == Message(role="assistant", content="so ", tool_calls=(call,))
    assert whole.finish_reason == "tool_calls"
    assert whole.usage.completion_tokens == 3 + len(CALL_EDIT)
    again = await server.client.chat(session, [USER, whole.message], [EDIT])
    assert again.usage.cached_tokens, "the message that was put together is the one that was sampled"


async def test_leaving_a_stream_aborts_the_call(server: FakeServer) -> None:
    server.engine.script = say(FakeReply(ids=[*b"x" * 500, 261], delay_s=0.05))
    session = await server.client.create()
    async with aclosing(server.client.stream(session, [USER])) as pieces:
        async for piece in pieces:
            assert piece.content
            break
    await until(lambda: not server.engine.in_flight, what="the engine is let go")
    assert await server.client.trajectories(session.session_id) == ()


async def test_errors_before_and_inside_a_stream_are_raised(server: FakeServer) -> None:
    session = await server.client.create()
    with pytest.raises(BadRequest):
        await anext(server.client.stream(session, [USER], options={"temperature": -1}))
    server.engine.script = say(FakeReply(ids=[*b"abc", 261], drop_after=2))
    with pytest.raises((EngineLost, NoEngine)):
        _ = [piece async for piece in server.client.stream(session, [USER])]


def test_a_stream_that_breaks_off_is_no_reply() -> None:
    reader = StreamReader()
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    assert [piece.content for piece in reader.feed(event[:20])] == []
    assert [piece.content for piece in reader.feed(event[20:])] == ["a"]
    with pytest.raises(EngineLost):
        reader.reply()
    with pytest.raises(UpstreamError):
        list(reader.feed(b'data: {"choices":[{"delta":{}}]}\n\n'))
    with pytest.raises(UpstreamError):
        list(reader.feed(b"data: nonsense\n\n"))


async def test_wishes_reach_the_server(server: FakeServer) -> None:
    session = await server.client.create(options=SessionOptions(min_version=0, branches="main"))
    await server.client.chat(session, [USER], [EDIT], tool_choice="none", options={"max_tokens": 5})
    sent = server.engine.requests[0].body["sampling_params"]
    assert isinstance(sent, dict)
    assert sent["max_new_tokens"] == 5
    late = await server.client.create(options=SessionOptions(exact_version=5))
    with pytest.raises(VersionNotReady) as caught:
        await server.client.chat(late, [USER])
    assert (caught.value.wanted, caught.value.serving) == (5, 0)
    assert choice_json("edit") == {"tool_choice": {"type": "function", "function": {"name": "edit"}}}
    assert choice_json(None) == {}
    assert sampling_json(Sampling(min_p=0.1))["min_p"] == 0.1


@pytest.mark.parametrize("sampling", [Sampling(logit_bias=((5, -1.0),)), Sampling(constraint=(("regex", "a"),))])
async def test_sampling_that_a_session_cannot_fix_is_never_dropped(server: FakeServer, sampling: Sampling) -> None:
    with pytest.raises(BadRequest, match="cannot fix"):
        await server.client.create(sampling=sampling)


async def test_tokens_are_counted_as_the_prompt_has_them(server: FakeServer) -> None:
    server.engine.script = say(CALL_EDIT)
    session = await server.client.create()
    for tools in ([], [EDIT]):
        counted = await server.client.count_tokens(session, [USER], tools)
        reply = await server.client.chat(session, [USER], tools)
        assert counted == reply.usage.prompt_tokens
        result = Message(role="tool", content="done", tool_call_id=reply.message.tool_calls[0].id if tools else "x")
        if tools:
            history = [USER, reply.message, result]
            counted = await server.client.count_tokens(session, history, tools)
            assert counted == (await server.client.chat(session, history, tools)).usage.prompt_tokens
    for bad in (
        Message(role="developer", content="x"),
        Message(role="assistant", tool_calls=(ToolCall("c", "edit", "{"),)),
    ):
        with pytest.raises(BadRequest):
            await server.client.count_tokens(session, [bad])


async def test_the_fleet_is_managed_by_its_calls(tmp_path: Path) -> None:
    async with FakeServer(tmp_path, engines=2) as server, FakeEngine() as third:
        client = server.client
        assert [engine["state"] for engine in await client.engines()] == ["serving", "serving"]
        added = await client.add_engine(third.url)
        assert (await client.add_engine(third.url))["id"] == added["id"] == "e2"
        assert (await client.drain_engine("e0"))["state"] == "draining"
        await client.remove_engine("e1")
        await client.remove_engine("e1")
        await until(lambda: server.gateway.router.fleet.serving() == ["e2"], what="the third serves")
        session = await client.create()
        await client.chat(session, [USER])
        assert len(third.requests) == 1
        assert (await client.cache())["calls"] == 1
        with pytest.raises(NotFound):
            await client.drain_engine("e1")


async def test_a_drained_engine_that_comes_back_is_still_drained(tmp_path: Path) -> None:
    async with FakeServer(tmp_path, engines=2) as server:
        await server.client.drain_engine("e0")
        engine = server.gateway.router.fleet.get("e0")
        await server.engines[0].stop()
        await until(lambda: engine.health.state == "lost", what="its death is noticed")
        await server.engines[0].start()
        await until(lambda: engine.health.takes_calls, what="it is back")
        assert engine.health.state == "draining"


@pytest.mark.parametrize(
    "bad",
    [
        *("http://169.254.169.254/", "http://169.254.169.254:80", "http://0xa9fea9fe", "http://2852039166:80"),
        *("http://[fe80::1]:80", "http://[::ffff:169.254.169.254]", "file:///etc/passwd", "gopher://h:1"),
        *("http://user:pw@host:1", "http://h:1/\r\nx", "http://h h:1", "http://elsewhere:1", "https://"),
    ],
)
async def test_an_engine_that_is_none_is_refused_to_the_admin_and_to_strangers_alike(tmp_path: Path, bad: str) -> None:
    from tollway.router.config import RouterConfig

    hosts = RouterConfig(engine_hosts=("127.0.0.1", "169.*", "[!e]*", "10.*"))
    async with FakeServer(tmp_path, router=hosts, engines=0, settings={"engine_wait_s": 0.0}) as server:
        with pytest.raises(BadRequest):
            await server.client.add_engine(bad)
        stranger = SessionClient(server.url, "wrong", http=server.http)
        with pytest.raises(errors.Unauthorized):
            await stranger.add_engine(bad)
        assert await server.client.engines() == ()


# -- servers that fail ------------------------------------------------------------------------------

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def failing(handler: Handler, **client: Any) -> AsyncIterator[SessionClient]:
    """A client of a server that answers as ``handler`` does."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        yield SessionClient(str(server.make_url("")), "key", http=http, **client)


async def test_a_server_that_never_answers_is_an_error_and_no_empty_export() -> None:
    async def silent(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async with failing(silent, timeout_s=0.1, retry_s=60.0) as client:
        for call in (client.trajectories("s"), client.session("s"), client.create(), client.close("s")):
            with pytest.raises(EngineLost) as caught:
                await call
            assert caught.value.timed_out
        assert not await client.ready()


async def test_a_create_whose_answer_is_lost_opens_one_session(server: FakeServer) -> None:
    """And every other safe call is sent again, too, a few times."""
    seen: list[str] = []

    async def loses(request: web.Request) -> web.StreamResponse:
        seen.append(f"{request.method} {request.path}")
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with server.http.request(
            request.method, server.url + request.path, data=await request.read(), headers=headers
        ) as response:
            data = await response.read()
        if len(seen) % 2 and request.transport is not None:
            request.transport.abort()
        return web.Response(status=response.status, body=data)

    async with failing(loses) as client:
        client._admin = server.client._admin
        session = await client.create(task_id="t")
        assert seen == ["POST /sessions"] * 2
        assert server.gateway.store.open_sessions == 1
        await server.client.chat(session, [USER])
        await client.reward(session.session_id, 1.0)
        await client.close(session.session_id)
        await client.delete(session.session_id)
        assert len(seen) == 8
        keyed = SessionOptions(idempotency_key="k")
        one, two = await client.create(options=keyed), await server.client.create(options=keyed)
        assert one == two
        with pytest.raises(BadRequest, match="different body"):
            await server.client.create(task_id="other", options=keyed)


async def test_a_sample_is_asked_for_twice_only_with_a_key() -> None:
    calls = 0

    async def loses(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async with failing(loses) as client, failing(loses) as other:
        session = _session(client)
        with pytest.raises(EngineLost):
            await client.chat(session, [USER])
        assert calls == 1
        with pytest.raises(EngineLost):
            await other.chat(session, [USER], idempotency_key="k")
        assert calls == 4, "bounded"


@pytest.mark.parametrize("error", [WorkerDown("worker 1"), ServerStopping("soon back")])
async def test_a_worker_that_starts_again_is_waited_for_and_not_for_ever(error: TollwayError) -> None:
    left = 2

    async def returns(request: web.Request) -> web.Response:
        nonlocal left
        left -= 1
        if left >= 0:
            return web.Response(status=503, body=error_body(error), headers={"retry-after": "1"})
        return web.json_response({"engines": []})

    async with failing(returns) as client:
        assert await client.engines() == ()
    left = 10**6
    async with failing(returns, retry_s=0.2) as client:
        with pytest.raises(type(error)):
            await client.engines()


async def test_half_an_answer_to_a_create_is_an_error_of_ours() -> None:
    async def half(request: web.Request) -> web.Response:
        return web.json_response({"session_id": "s"})

    async with failing(half) as client:
        with pytest.raises(UpstreamError, match="token"):
            await client.create()


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_of_the_server_comes_back_as_its_own_class(name: str) -> None:
    kind = getattr(errors, name)
    arguments = {"ContextLengthExceeded": (9, 5), "VersionNotReady": (3, 2)}.get(name, ("words",))
    error = kind(*arguments, **({"upstream_status": 404} if name == "EngineRefused" else {}))
    retry_after = dict(error_headers(error)).get(b"retry-after", b"").decode() or None
    back = error_of(error.status, error_body(error), retry_after)
    assert (back.code, back.status) == (error.code, error.status)
    assert str(back) == str(error)
    if name not in ("EngineRefused", "RateLimited", "TollwayError"):
        assert type(back) is kind
        assert back.retryable == error.retryable


def _session(client: SessionClient) -> Any:
    from tollway.session_server.client import Session

    base = f"{client.base_url}/sessions/s"
    return Session(
        session_id="s",
        token="t",
        base_url=base,
        openai_base_url=f"{base}/v1",
        anthropic_base_url=base,
        expires_at=0.0,
    )
