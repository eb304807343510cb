"""A request reaches the worker that owns its session, whole and in both directions, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from yarl import URL

from tollway.session_server import auth
from tollway.session_server.crew import Crew
from tollway.session_server.forward import Forwarder, from_sibling
from tollway.session_server.siblings import Siblings

KEY = "the-admin-key"
ADMIN = {"authorization": f"Bearer {KEY}"}
SIZE = 3


@dataclass
class Worker:
    """An application that tells what it got, behind a forwarder on real sockets."""

    index: int
    forwarder: Forwarder
    requests: list[dict[str, Any]] = field(default_factory=list)
    parts: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    """What ``/stream`` sends, one part after the other; an empty one ends it, ``b"cut"`` breaks it."""
    arrived: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    """Parts of request bodies, as they come."""
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 200
    url: str = ""
    server: Any = None
    task: Any = None

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnected.set()
                return
            body += message.get("body", b"")
            self.arrived.put_nowait(message.get("body", b""))
            if not message.get("more_body"):
                break
        got = {
            "worker": self.index,
            "method": scope["method"],
            "path": scope["path"],
            "raw_path": scope["raw_path"].decode(),
            "query": scope["query_string"].decode(),
            "headers": [[name.decode(), value.decode("latin-1")] for name, value in scope["headers"]],
            "body": body.decode(),
            "from_sibling": from_sibling(scope),
        }
        self.requests.append(got)
        if scope["path"].endswith("/stream"):
            await self._stream(receive, send)
            return
        data = json.dumps(got).encode()
        headers = [
            *((b"content-type", b"application/json"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")),
            *((b"connection", b"x-hop"), (b"x-hop", b"1"), (b"content-length", str(len(data)).encode())),
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def _stream(self, receive: Any, send: Any) -> None:
        gone = asyncio.ensure_future(receive())
        try:
            started = False
            while True:
                part = asyncio.ensure_future(self.parts.get())
                await asyncio.wait((gone, part), return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    part.cancel()
                    self.disconnected.set()
                    return
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": []})
                    started = True
                if part.result() == b"cut":
                    return
                await send({"type": "http.response.body", "body": part.result(), "more_body": bool(part.result())})
                if not part.result():
                    return
        finally:
            gone.cancel()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def start(worker: Worker, crew: Crew) -> None:
    """Let a worker listen, for everybody and for its siblings."""
    public = socket.socket()
    public.bind(("127.0.0.1", 0))
    inner = socket.socket(socket.AF_UNIX)
    crew.socket_of(worker.index).unlink(missing_ok=True)
    inner.bind(str(crew.socket_of(worker.index)))
    worker.url = f"http://127.0.0.1:{public.getsockname()[1]}"
    worker.server = _Server(
        uvicorn.Config(worker.forwarder, lifespan="off", log_config=None, ws="none", timeout_graceful_shutdown=1)
    )
    worker.task = asyncio.ensure_future(worker.server.serve(sockets=[public, inner]))
    while not worker.server.started:
        await asyncio.sleep(0.001)


async def stop(worker: Worker) -> None:
    """End a worker, with every connection that it has."""
    worker.server.should_exit = True
    await worker.task
    for connection in list(worker.server.server_state.connections):
        connection.transport.abort()


@pytest.fixture
async def crew(tmp_path: Path) -> AsyncIterator[list[Worker]]:
    """Three workers."""
    workers: list[Worker] = []
    async with contextlib.AsyncExitStack() as stack:
        secret = secrets.token_urlsafe(16)
        for index in range(SIZE):
            place = Crew(index=index, size=SIZE, folder=tmp_path, secret=secret)
            siblings = await stack.enter_async_context(Siblings(place, KEY))

            async def app(scope: Any, receive: Any, send: Any, index: int = index) -> None:
                await workers[index].app(scope, receive, send)

            workers.append(Worker(index, Forwarder(app, siblings, admin_key=KEY, max_body_bytes=1000)))
            await start(workers[-1], place)
        yield workers
        await asyncio.gather(*map(stop, workers))


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def header(request: dict[str, Any], name: str) -> list[str]:
    return [value for key, value in request["headers"] if key == name]


@pytest.mark.parametrize("owner", range(SIZE))
async def test_a_session_is_served_by_its_owner_whoever_is_asked(
    crew: list[Worker], http: aiohttp.ClientSession, owner: int
) -> None:
    session_id, token = auth.new_session_secret(owner)
    bearer = {"authorization": f"Bearer {token}"}
    for asked in crew:
        for path, headers in (
            (f"/sessions/{session_id}/v1/chat/completions?x=%2F&y=a+b", bearer),
            (f"/sessions/{session_id}", ADMIN),
            (f"/sessions/{token}/v1/messages", {}),
            ("/v1/responses", {"x-api-key": token}),
            ("/v1/models", bearer),
        ):
            url = URL(asked.url + path, encoded=True)
            async with http.post(url, data=b"abc", headers={**headers, "host": "tollway.test:77"}) as reply:
                got = await reply.json()
            assert (got["worker"], got["body"], got["method"]) == (owner, "abc", "POST"), path
            assert got["raw_path"] + (f"?{got['query']}" if got["query"] else "") == path
            assert header(got, "host") == ["tollway.test:77"]
            assert header(got, "content-length") == ["3"]
            assert not got["from_sibling"], "it is still the client's request"
            assert not header(got, "x-tollway-worker")


async def test_what_no_worker_owns_stays_where_it_came(crew: list[Worker], http: aiohttp.ClientSession) -> None:
    foreign, token = auth.new_session_secret(SIZE)
    for asked in crew:
        for path, headers in (
            (f"/sessions/{foreign}", {}),
            (f"/sessions/{token}", {}),
            ("/v1/models", {"authorization": f"Bearer {token}"}),
            ("/v1/models", ADMIN),
            ("/sessions/nonsense/v1/models", {}),
            ("/sessions/", {}),
            ("/engines", ADMIN),
            ("/healthz", {}),
            ("/", {}),
        ):
            async with http.get(asked.url + path, headers=headers) as reply:
                assert (await reply.json())["worker"] == asked.index, path


async def test_whoever_is_asked_changes_the_fleet(crew: list[Worker], http: aiohttp.ClientSession) -> None:
    for asked in crew:
        for method, path in (("POST", "/engines"), ("DELETE", "/engines/e0"), ("POST", "/engines/e0/drain")):
            for headers in (ADMIN, {}):
                async with http.request(method, asked.url + path, headers=headers) as reply:
                    assert (await reply.json())["worker"] == asked.index


async def test_siblings_of_a_group_meet_and_sessions_without_one_are_spread(
    crew: list[Worker], http: aiohttp.ClientSession
) -> None:
    async def owner(asked: Worker, body: Any) -> int:
        async with http.post(f"{asked.url}/sessions", data=body, headers=ADMIN) as reply:
            got = await reply.json()
            assert got["body"] == body
            return int(got["worker"])

    homes = set()
    for group in range(20):
        body = json.dumps({"group_id": f"group {group}"})
        found = {await owner(asked, body) for asked in crew}
        assert len(found) == 1
        homes |= found
    assert homes == {0, 1, 2}
    for asked in crew:
        assert {await owner(asked, "") for _ in range(SIZE)} == {0, 1, 2}
        assert {await owner(asked, '{"group_id": ""}') for _ in range(SIZE)} == {0, 1, 2}
        for odd in ("[", "[1]", '{"group_id": 5}', '{"group_id"'):
            await owner(asked, odd)


async def test_a_create_of_a_stranger_or_too_long_goes_nowhere(crew: list[Worker], http: aiohttp.ClientSession) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        async with http.post(f"{crew[1].url}/sessions", headers=headers) as reply:
            assert (await reply.json())["worker"] == 1
    async with http.post(f"{crew[1].url}/sessions", data=b"x" * 1001, headers=ADMIN) as reply:
        assert (reply.status, (await reply.json())["error"]["code"]) == (400, "invalid_request")


async def test_a_reply_is_streamed_part_by_part(crew: list[Worker], http: aiohttp.ClientSession) -> None:
    session_id, _ = auth.new_session_secret(2)
    asking = asyncio.ensure_future(http.post(f"{crew[0].url}/sessions/{session_id}/stream"))
    for number in range(3):
        crew[2].parts.put_nowait(b"part %d" % number)
        reply = await asking
        assert await reply.content.readany() == b"part %d" % number, "before the next one exists"
    crew[2].parts.put_nowait(b"")
    assert await reply.content.read() == b""


async def test_a_body_is_streamed_part_by_part(crew: list[Worker], http: aiohttp.ClientSession) -> None:
    session_id, _ = auth.new_session_secret(2)
    go_on = asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        yield b"first "
        await go_on.wait()
        yield b"second"

    asking = asyncio.ensure_future(http.post(f"{crew[0].url}/sessions/{session_id}", data=parts()))
    assert await crew[2].arrived.get() == b"first "
    go_on.set()
    async with await asking as reply:
        got = await reply.json()
    assert got["body"] == "first second"
    assert not header(got, "content-length")


@pytest.mark.parametrize("when", ["before the reply", "inside the reply", "inside the body"])
async def test_a_client_that_leaves_is_seen_to_leave_by_the_owner(crew: list[Worker], when: str) -> None:
    session_id, _ = auth.new_session_secret(2)
    port = int(crew[0].url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    length = 10 if when == "inside the body" else 4
    writer.write(
        f"POST /sessions/{session_id}/stream HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\nbody".encode()
    )
    await crew[2].arrived.get()
    if when == "inside the reply":
        crew[2].parts.put_nowait(b"begun")
        assert b"200" in await reader.readline()
    assert not crew[2].disconnected.is_set()
    writer.close()
    await crew[2].disconnected.wait()
    await writer.wait_closed()


async def test_a_reply_that_the_owner_breaks_off_does_not_look_whole(
    crew: list[Worker], http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    session_id, _ = auth.new_session_secret(2)
    for part in (b"begun", b"cut"):
        crew[2].parts.put_nowait(part)
    async with http.post(f"{crew[0].url}/sessions/{session_id}/stream") as reply:
        assert reply.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await reply.read()
    assert "worker 2 was lost in the middle of a reply" in caplog.text


async def test_the_sessions_of_a_worker_that_is_down_are_a_503_and_others_go_on(
    crew: list[Worker], http: aiohttp.ClientSession
) -> None:
    session_id, _ = auth.new_session_secret(2)
    path = f"/sessions/{session_id}"
    async with http.get(crew[0].url + path) as reply:
        assert reply.status == 200, "and leaves a connection that will be found dead"
    await stop(crew[2])
    for asked in crew[:2]:
        async with http.get(asked.url + path) as reply:
            error = (await reply.json())["error"]
            assert (reply.status, error["code"], error["retryable"]) == (503, "worker_down", True)
            assert reply.headers["retry-after"] == "1"
            assert "worker 2" in error["message"]
        async with http.post(f"{asked.url}{path}/v1/messages") as reply:
            said = await reply.json()
            assert (reply.status, said["type"]) == (503, "error"), "as this dialect's SDKs read it"
        found = []
        for _ in range(6):
            async with http.post(f"{asked.url}/sessions", headers=ADMIN) as reply:
                found.append((await reply.json())["worker"])
        assert set(found) == {0, 1}, "new sessions go to workers that are up"
    await start(crew[2], crew[2].forwarder._crew)
    async with http.get(crew[0].url + path) as reply:
        assert (await reply.json())["worker"] == 2


async def test_a_group_whose_worker_is_down_waits_for_it(crew: list[Worker], http: aiohttp.ClientSession) -> None:
    await stop(crew[2])
    seen = set()
    for group in range(20):
        async with http.post(f"{crew[0].url}/sessions", json={"group_id": f"g{group}"}, headers=ADMIN) as reply:
            seen.add(reply.status)
    assert seen == {200, 503}
    await start(crew[2], crew[2].forwarder._crew)


async def test_headers_of_one_connection_stay_there_and_all_others_pass(
    crew: list[Worker], http: aiohttp.ClientSession
) -> None:
    session_id, _ = auth.new_session_secret(2)
    headers = [
        *(("x-twice", "1"), ("x-twice", "2"), ("x-name", "Zoë"), ("te", "trailers"), ("keep-alive", "1")),
        *(("connection", "x-mine, keep-alive"), ("x-mine", "hop"), ("accept-encoding", "odd"), ("cookie", "a=b")),
    ]
    async with http.get(f"{crew[0].url}/sessions/{session_id}", headers=headers) as reply:
        got = await reply.json()
        assert reply.headers.getall("set-cookie") == ["a=1", "b=2"]
        assert "x-hop" not in reply.headers
        assert len(reply.headers.getall("date")) == 1
    assert header(got, "x-twice") == ["1", "2"]
    assert header(got, "x-name") == ["Zoë".encode().decode("latin-1")]
    assert header(got, "accept-encoding") == ["odd"]
    assert header(got, "cookie") == ["a=b"]
    for gone in ("te", "keep-alive", "x-mine", "x-tollway-worker", "user-agent-of-ours"):
        assert not header(got, gone), gone
    async with aiohttp.ClientSession() as other, other.get(f"{crew[0].url}/sessions/{session_id}") as reply:
        assert not header(await reply.json(), "cookie"), "one client's cookies are not another's"


async def test_a_forged_mark_counts_for_nothing_and_a_genuine_one_ends_the_journey(
    crew: list[Worker], http: aiohttp.ClientSession
) -> None:
    session_id, _ = auth.new_session_secret(2)
    secret = crew[0].forwarder._crew.secret
    for forged in ("", "x", "0" * 22, "call x", "pass", secret, f"call {secret}x"):
        async with http.get(f"{crew[0].url}/sessions/{session_id}", headers={"x-tollway-worker": forged}) as reply:
            assert (await reply.json())["worker"] == 2
        async with http.get(f"{crew[0].url}/healthz", headers={"x-tollway-worker": forged}) as reply:
            got = await reply.json()
            assert (got["from_sibling"], header(got, "x-tollway-worker")) == (False, [])
    place = crew[0].forwarder._crew
    for genuine, own in ((place.passed_on, False), (place.own_call, True)):
        async with http.get(f"{crew[0].url}/sessions/{session_id}", headers={"x-tollway-worker": genuine}) as reply:
            got = await reply.json()
        assert (got["worker"], got["from_sibling"]) == (0, own), "a request is forwarded once at most"


@pytest.mark.parametrize(
    "broken",
    [
        {"raw_path": b"/sessions/%s\r\nx: y"},
        {"raw_path": b"/sessions/%s x"},
        {"raw_path": b"http://elsewhere/%s"},
        {"query_string": b"a\r\nb"},
        {"headers": [(b"x-a", b"1\r\nx-b: 2")]},
        {"headers": [(b"x-a", b"1\n")]},
        {"headers": [(b"x-a", b"\x00")]},
        {"headers": [(b"x a", b"1")]},
        {"headers": [(b"x-a\r\n", b"1")]},
        {"headers": [(b"x-a", b"\xff")]},
    ],
    ids=repr,
)
async def test_bytes_that_would_end_a_line_never_leave(crew: list[Worker], broken: dict[str, Any]) -> None:
    session_id, _ = auth.new_session_secret(2)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    raw = broken.get("raw_path", b"/sessions/%s")
    scope = {
        "type": "http",
        "method": "GET",
        "path": f"/sessions/{session_id}",
        "query_string": b"",
        "headers": [],
        **broken,
        "raw_path": raw.replace(b"%s", session_id.encode()),
    }
    await crew[0].forwarder(scope, receive, send)
    assert sent[0]["status"] == 400
    assert not any(worker.requests for worker in crew)


async def test_many_requests_cross_at_once(crew: list[Worker], http: aiohttp.ClientSession) -> None:
    async def one(number: int) -> None:
        session_id, _ = auth.new_session_secret(number % SIZE)
        asked = crew[(number // SIZE) % SIZE]
        body = f"{number} " * 20_000
        async with http.post(f"{asked.url}/sessions/{session_id}", data=body) as reply:
            got = await reply.json()
            assert (got["worker"], got["body"]) == (number % SIZE, body)

    await asyncio.gather(*(one(number) for number in range(60)))


@pytest.mark.parametrize("path", ["*", "", "/", "//", "/enginesx"])
async def test_a_target_that_is_no_route_is_answered_here(path: str) -> None:
    """``OPTIONS *`` is a request, too."""
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])

    siblings = Siblings(Crew(index=1, size=2, secret=secrets.token_hex()), KEY)
    forwarder = Forwarder(app, siblings, admin_key=KEY, max_body_bytes=1024)
    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    await forwarder({"type": "http", "method": "OPTIONS", "path": path, "headers": headers}, None, None)  # type: ignore[arg-type]
    assert seen == [path]
