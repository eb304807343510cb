"""The bridge's outside end: what passes, what does not, and that it ends."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from bridge_helpers import ID, TOKEN, chat, raw, request, status, upstream
from hypothesis import given
from hypothesis import strategies as st

from tollway.envs.bridge import Bridge, BridgeLimits, recorded_turns
from tollway.envs.bridge_rules import route_of
from tollway.errors import ContextLengthExceeded, EngineLost, NoEngine, UpstreamError
from tollway.router.fake import FakeReply
from tollway.session_server.fake import FakeServer

CALL = "/v1/chat/completions"


def over(bridge: Bridge) -> aiohttp.ClientSession:
    """An HTTP client that knows only the bridge's socket and key."""
    return aiohttp.ClientSession(
        base_url="http://model",
        connector=aiohttp.UnixConnector(str(bridge.socket)),
        headers={"authorization": f"Bearer {bridge.key}"},
    )


async def test_all_dialects_reach_the_real_server_with_and_without_the_sessions_prefix(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    bodies: dict[str, dict[str, object]] = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": messages, "max_tokens": 8},
    }
    async with FakeServer(tmp_path) as server:
        session = await server.client.create()
        async with Bridge(session) as bridge, over(bridge) as http:
            for prefix in ("", f"/sessions/{session.session_id}"):
                for path, body in bodies.items():
                    async with http.post(prefix + path, json={"model": "policy", **body}) as answer:
                        assert answer.status == 200, await answer.text()
                async with http.post(f"{prefix}/v1/messages/count_tokens", json=bodies["/v1/messages"]) as answer:
                    assert (await answer.json())["input_tokens"] > 0
                async with http.get(f"{prefix}/v1/models") as answer:
                    assert (await answer.json())["data"]
                async with http.head(prefix or "/") as answer:
                    assert answer.status == 200
            assert await recorded_turns(session) == 6 == bridge.tally.answered
            assert bridge.tally.failure is None


async def test_the_sessions_token_and_admin_routes_are_of_no_use_inside(tmp_path: Path) -> None:
    async with FakeServer(tmp_path) as server:
        session, other = await server.client.create(), await server.client.create()
        async with Bridge(session) as bridge:
            for key in ("", "x", session.token, other.token, server.admin_key, bridge.key[:-1], f"{bridge.key}x"):
                assert status(await raw(bridge, request("POST", CALL, key, chat()))) == 401, key
            for target in (f"/sessions/{other.session_id}{CALL}", f"/sessions/{session.session_id}/close", "/engines"):
                assert status(await raw(bridge, request("POST", target, bridge.key, chat()))) == 403, target
        assert await recorded_turns(session) == await recorded_turns(other) == 0
        assert not server.engine.requests


HOSTILE = (
    "/",
    "//v1/chat/completions",
    "/v1//chat/completions",
    "/v1/chat/completions/",
    "/v1/chat/completions#x",
    "/v1/chat/completions;x",
    "/v1/chat/../chat/completions",
    "/v1/chat/%2e%2e/chat/completions",
    "/v1/chat%2Fcompletions",
    "/v1/chat\\completions",
    "/%2e%2e/engines",
    "/..%2fengines",
    "/V1/chat/completions",
    "/v1/chat/completions%00",
    "/v1/chat/completions?%2e%2e%2fengines",
    "/v1/chat/completions?x=/engines",
    "/sessions",
    f"/sessions/{ID}",
    f"/sessions/{ID}/reward",
    f"/sessions/{ID}/close",
    f"/sessions/{ID}/trajectories",
    f"/sessions/{ID}/../{ID}/v1/responses",
    f"/sessions/{ID}/%2e%2e/%2e%2e/engines",
    f"/sessions/{ID}/sessions/{ID}/v1/responses",
    f"/sessions/{'cd' * 17}/v1/responses",
    "http://127.0.0.1:8700/v1/chat/completions",
    f"http://model/sessions/{ID}/v1/chat/completions",
    "https://example.org/",
    "*",
    "/engines",
    "/cache",
    "/metrics",
    "/healthz",
    "/openapi.json",
    "/v1/embeddings",
    "/generate",
)


@pytest.mark.parametrize("target", HOSTILE)
async def test_no_other_target_passes_however_it_is_written(target: str) -> None:
    async with upstream() as server, Bridge(server.session) as bridge:
        for method in ("POST", "GET", "DELETE", "PUT", "PATCH", "OPTIONS"):
            answer = await raw(bridge, request(method, target, bridge.key, chat()))
            assert status(answer) in (400, 403), answer
        assert server.seen == []


async def test_connect_and_upgrades_open_no_tunnel() -> None:
    async with upstream() as server, Bridge(server.session) as bridge:
        connect = request("CONNECT", server.url.removeprefix("http://"), bridge.key, close=False)
        assert status(await raw(bridge, connect + request("GET", "/engines", bridge.key))) in (400, 403)
        upgrade = (("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13"), ("Sec-WebSocket-Key", "x" * 22 + "=="))
        asked = request("GET", "/v1/responses", bridge.key, headers=(*upgrade, ("Connection", "Upgrade")), close=False)
        assert status(await raw(bridge, asked)) == 403
        assert server.seen == []


HIDDEN = b"POST /engines HTTP/1.1\r\nHost: model\r\nContent-Length: 2\r\n\r\n{}"
FRAMINGS = {
    "both lengths": (
        b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n" % (5 + len(HIDDEN)),
        b"0\r\n\r\n" + HIDDEN,
    ),
    "two lengths": (b"Content-Length: 2\r\nContent-Length: %d\r\n" % (2 + len(HIDDEN)), b"{}" + HIDDEN),
    "signed length": (b"Content-Length: +2\r\n", b"{}" + HIDDEN),
    "no length": (b"", b"{}" + HIDDEN),
    "odd coding": (b"Transfer-Encoding: xchunked\r\n", b"0\r\n\r\n" + HIDDEN),
    "coding twice": (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", b"0\r\n\r\n" + HIDDEN),
    "space before colon": (b"Transfer-Encoding : chunked\r\nContent-Length: 5\r\n", b"0\r\n\r\n" + HIDDEN),
    "folded header": (b"X-A: 1\r\n Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", b"0\r\n\r\n" + HIDDEN),
    "bare line feeds": (b"X-A: 1\nTransfer-Encoding: chunked\nContent-Length: 5\r\n", b"0\r\n\r\n" + HIDDEN),
    "chunk extension": (b"Transfer-Encoding: chunked\r\n", b"2;a=\n1\r\n{}\r\n0\r\n\r\n" + HIDDEN),
    "pipelined": (b"Content-Length: 2\r\n", b"{}" + HIDDEN),
}


@pytest.mark.parametrize("name", FRAMINGS)
async def test_no_second_request_hides_in_the_first(name: str) -> None:
    headers, body = FRAMINGS[name]
    async with upstream() as server, Bridge(server.session) as bridge:
        head = f"POST {CALL} HTTP/1.1\r\nHost: model\r\nAuthorization: Bearer {bridge.key}\r\n".encode()
        answer = await raw(bridge, head + headers + b"\r\n" + body)
        assert answer
        assert {target for _, target, _, _ in server.seen} <= {f"/sessions/{ID}{CALL}"}
        assert all(b"/engines" not in data or name == "both lengths" for _, _, _, data in server.seen)


async def test_the_server_gets_its_token_and_nothing_that_speaks_of_the_sender() -> None:
    sent = (
        ("X-Tollway-Worker", "w"),
        ("X_Tollway_Worker", "w"),
        ("X-HTTP-Method-Override", "DELETE"),
        ("X-Original-URL", "/metrics"),
        ("X-Forwarded-For", "10.0.0.1"),
        ("Forwarded", "for=10.0.0.1"),
        ("Cookie", "a=b"),
        ("X-Api-Key", "other"),
        ("Proxy-Authorization", "Basic x"),
        ("Keep-Alive", "timeout=5"),
        ("TE", "trailers"),
        ("X-Secret-Hop", "1"),
        ("Connection", "X-Secret-Hop, close"),
        ("Idempotency-Key", "k1"),
        ("X-Stainless-Retry-Count", "1"),
        ("Anthropic-Beta", "b1"),
    )
    async with upstream() as server, Bridge(server.session) as bridge:
        answer = await raw(bridge, request("POST", f"{CALL}?beta=true", bridge.key, chat(), sent, close=False))
        assert status(answer) == 200
        ((method, target, headers, body),) = server.seen
        assert (method, target, body) == ("POST", f"/sessions/{ID}{CALL}?beta=true", chat())
        names = {name.lower() for name in headers}
        assert headers["Authorization"] == f"Bearer {TOKEN}"
        assert {"idempotency-key", "x-stainless-retry-count", "anthropic-beta", "content-type"} <= names
        gone = ("worker", "forward", "cookie", "api-key", "proxy", "keep-alive", "te", "hop", "override", "original")
        assert not [name for name in names for part in gone if name.endswith(part) or part in name.split("-")]
        assert headers["Accept-Encoding"] == "identity"
        assert TOKEN.encode() not in answer


async def test_either_form_of_the_key_is_taken() -> None:
    async with upstream() as server, Bridge(server.session) as bridge:
        both = request("POST", "/v1/messages", "placeholder", chat(), (("x-api-key", bridge.key),))
        assert status(await raw(bridge, both)) == 200
        assert [headers["Authorization"] for _, _, headers, _ in server.seen] == [f"Bearer {TOKEN}"]


async def test_a_stream_arrives_while_it_is_written() -> None:
    go_on = asyncio.Event()

    async def events(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await out.prepare(request)
        await out.write(b"data: one\n\n")
        await go_on.wait()
        await out.write(b"data: [DONE]\n\n")
        return out

    async with upstream(events) as server, Bridge(server.session) as bridge, over(bridge) as http:
        async with http.post(CALL, json={}) as answer:
            # The upstream says no more before this has come through.
            assert await answer.content.readany() == b"data: one\n\n"
            go_on.set()
            assert await answer.content.read() == b"data: [DONE]\n\n"
        assert bridge.tally.answered == 1


async def test_a_body_travels_while_it_is_sent() -> None:
    arrived = asyncio.Event()

    async def take(request: web.Request) -> web.StreamResponse:
        first = await request.content.readany()
        arrived.set()
        return web.json_response({"body": (first + await request.content.read()).decode()})

    async def pieces():
        yield b'{"a":'
        # The rest is not sent before the beginning was read at the other end.
        await asyncio.wait_for(arrived.wait(), 20)
        yield b"1}"

    async with (
        upstream(take, whole=False) as server,
        Bridge(server.session) as bridge,
        over(bridge) as http,
        http.post(CALL, data=pieces()) as answer,
    ):
        assert await answer.json() == {"body": '{"a":1}'}


async def test_a_client_that_asks_before_it_sends_is_told_to_go_on() -> None:
    async with upstream() as server, Bridge(server.session) as bridge:
        head, _, body = request("POST", CALL, bridge.key, chat(), (("Expect", "100-continue"),)).partition(b"\r\n\r\n")
        reader, writer = await asyncio.open_unix_connection(bridge.socket)
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert status(await reader.read()) == 200
        writer.close()
        assert [data for *_, data in server.seen] == [body]


async def test_a_harness_that_goes_away_aborts_its_call() -> None:
    async def wait(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with upstream(wait) as server, Bridge(server.session) as bridge:
        _, writer = await asyncio.open_unix_connection(bridge.socket)
        writer.write(request("POST", CALL, bridge.key, chat()))
        while not server.seen:
            await asyncio.sleep(0.01)
        writer.close()
        await asyncio.wait_for(server.cancelled.wait(), 20)
        assert bridge.tally.failure is None


async def test_half_a_reply_never_looks_whole() -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await out.prepare(request)
        await out.write(b"data: one\n\n")
        assert request.transport is not None
        request.transport.abort()
        return out

    async with upstream(breaks) as server, Bridge(server.session) as bridge, over(bridge) as http:
        with pytest.raises(aiohttp.ClientError):
            async with http.post(CALL, json={}) as answer:
                await answer.read()
        assert isinstance(bridge.tally.failure, EngineLost)


async def test_a_stream_without_its_last_event_is_no_answer() -> None:
    async def ends_early(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b'data: {"error": {}}\n\n', content_type="text/event-stream")

    async with upstream(ends_early) as server, Bridge(server.session) as bridge, over(bridge) as http:
        async with http.post(CALL, json={}) as answer:
            await answer.read()
        assert isinstance(bridge.tally.failure, UpstreamError)
        assert bridge.tally.answered == 0


@pytest.mark.parametrize(
    ("events", "whole"),
    [
        (b"data: {}\n\ndata: [DONE]\n\n", True),
        (b'event: message_stop\ndata: {"type":"message_stop"}\n\n', True),
        (b'event: response.completed\ndata: {"response": "' + b"x" * 300_000 + b'"}\n\n', True),
        (b'event: response.failed\ndata: {"response": "event: response.completed"}\n\n', False),
        (b'data: {"content": "data: [DONE]"}\n\n', False),
    ],
)
async def test_a_stream_is_whole_by_its_last_event_however_it_is_cut(events: bytes, whole: bool) -> None:
    def cut(step: int):
        async def answer(request: web.Request) -> web.StreamResponse:
            out = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await out.prepare(request)
            for at in range(0, len(events), step):
                await out.write(events[at : at + step])
            return out

        return answer

    for step in (7, 1 << 20) if len(events) < 1000 else (50_000,):
        async with upstream(cut(step)) as server, Bridge(server.session) as bridge, over(bridge) as http:
            async with http.post(CALL, json={}) as answer:
                assert await answer.read() == events
            assert (bridge.tally.failure is None) == whole


async def test_a_lost_server_is_an_error_that_names_it() -> None:
    async with upstream() as server:
        session = server.session
    async with Bridge(session) as bridge, over(bridge) as http:
        async with http.post(CALL, json={}) as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["code"] == "engine_lost"
        assert isinstance(bridge.tally.failure, EngineLost)
        with pytest.raises(EngineLost, match="recorded"):
            await recorded_turns(session)


async def test_the_tally_keeps_the_servers_own_errors_and_forgets_them_with_the_next_answer(tmp_path: Path) -> None:
    async with FakeServer(tmp_path, settings={"engine_wait_s": 0.1}) as server:
        session = await server.client.create()
        async with Bridge(session) as bridge, over(bridge) as http:

            async def call(text: str) -> int:
                async with http.post(CALL, data=chat(text), headers={"content-type": "application/json"}) as answer:
                    await answer.read()
                    return answer.status

            assert await call("x" * 40_000) == 400
            assert isinstance(bridge.tally.failure, ContextLengthExceeded)
            assert await call("hi") == 200
            assert bridge.tally.failure is None
            server.engine.script = lambda request: FakeReply(ids=[], status=500, error="broken")
            assert await call("once more") >= 500
            assert bridge.tally.failure is not None
            await server.engine.stop()
            while await call("again") != 503 or not isinstance(bridge.tally.failure, NoEngine):
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("framed", ["length", "chunks"])
async def test_a_body_beyond_the_limit_never_arrives_whole(framed: str) -> None:
    async def pieces():
        for _ in range(64):
            yield b"x" * 1024

    async with upstream() as server, Bridge(server.session, limits=BridgeLimits(body_bytes=4096)) as bridge:
        async with over(bridge) as http:
            try:
                async with http.post(CALL, data=b"x" * 65_536 if framed == "length" else pieces()) as answer:
                    assert answer.status == 413
            except aiohttp.ClientError:
                assert framed == "chunks"  # it hung up while we were still writing
        assert server.seen == []


async def test_connections_are_bounded_and_a_full_bridge_says_so() -> None:
    async with upstream() as server, Bridge(server.session, limits=BridgeLimits(connections=2)) as bridge:
        held = [await asyncio.open_unix_connection(bridge.socket) for _ in range(2)]
        await asyncio.sleep(0)
        answer = await raw(bridge, request("POST", CALL, bridge.key, chat()))
        assert status(answer) == 429, answer
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        while status(await raw(bridge, request("POST", CALL, bridge.key, chat()))) != 200:
            await asyncio.sleep(0.01)


async def test_it_ends_with_calls_in_flight_and_leaves_nothing() -> None:
    async def wait(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with upstream(wait) as server:
        async with Bridge(server.session) as bridge:
            private = bridge.socket.parent.parent
            reader, writer = await asyncio.open_unix_connection(bridge.socket)
            writer.write(request("POST", CALL, bridge.key, chat()))
            while not server.seen:
                await asyncio.sleep(0.01)
        await asyncio.wait_for(server.cancelled.wait(), 20)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        assert not private.exists()


async def test_strangers_cannot_list_its_directory_and_find_no_secret_in_it() -> None:
    async with upstream() as server, Bridge(server.session) as bridge:
        (folder,) = bridge.mounts.values()
        assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder)] == [0o711, 0o711]
        texts = [path.read_bytes() for path in folder.iterdir() if path.is_file()]
        assert texts
        assert not [text for text in texts if bridge.key.encode() in text or TOKEN.encode() in text]
        assert bridge.key not in repr(bridge)


SEGMENTS = st.sampled_from(
    ["v1", "chat", "completions", "responses", "messages", "count_tokens", "models", "sessions", ID, "..", ".", "",
     "%2e%2e", "engines", "reward", "close", "x", "?", "a=b", "#", ";", "\\", "%2f"]
)  # fmt: skip


@given(
    method=st.sampled_from(["GET", "POST", "HEAD", "DELETE", "PUT"]),
    target=st.one_of(st.text(), st.lists(SEGMENTS, max_size=8).map("/".join), st.lists(SEGMENTS).map("".join)),
)
def test_whatever_passes_is_one_of_the_few_routes_letter_by_letter(method: str, target: str) -> None:
    target = f"/{target}"
    route = route_of(method, target, ID)
    if route is None:
        return
    assert target.removeprefix(f"/sessions/{ID}") == route or (method, route) == ("HEAD", "")
    path = route.partition("?")[0]
    calls = {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"}
    assert path in {"POST": calls, "HEAD": {""}}.get(method, ()) or (method == "GET" and path.startswith("/v1/models"))
    assert not set(route) & set("%\\#;")
    assert not [odd for odd in ("//", "/.") if odd in route]


def test_models_are_asked_for_by_name_and_only_read() -> None:
    assert route_of("GET", "/v1/models/org/some-model:free", ID) == "/v1/models/org/some-model:free"
    for target in ("/v1/models/../engines", "/v1/models/.", "/v1/models//x", "/v1/models/", "/v1/modelsx"):
        assert route_of("GET", target, ID) is None, target
    assert route_of("POST", "/v1/models", ID) is None
    assert route_of("HEAD", f"/sessions/{ID}", ID) == ""
    assert route_of("HEAD", "/sessions/other", ID) is None
