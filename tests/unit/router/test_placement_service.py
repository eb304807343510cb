"""One table for several session servers: shared loads, leases, restarts, engines for all, and strangers."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import uvicorn

from tollway.errors import CapacityExceeded, ConfigError, NoEngine, PlacementDown
from tollway.records import Sampling
from tollway.router.config import RouterConfig
from tollway.router.engines import GenerateCall
from tollway.router.fake import FakeEngine, FakeReply
from tollway.router.fleet import Membership
from tollway.router.placement_client import RemotePlacement
from tollway.router.placement_link import KEY_VARIABLE
from tollway.router.placement_service import MAX_BODY_BYTES, PlacementApp
from tollway.router.service import Lineage, Router
from tollway.router.shared_table import SharedTable
from tollway.router.supervisor import ServerProcess
from tollway.router.wire import Prompt
from tollway.serving import listen

KEY = "the key of the service"
QUICK = RouterConfig(
    probe_interval_s=0.05,
    probe_timeout_s=0.5,
    connect_timeout_s=0.5,
    progress_timeout_s=5.0,
    busy_window_s=0.4,
    admission_timeout_s=10.0,
)
FIRST = Lineage()


def call(key: str, tokens: int = 3, rid: str = "r") -> GenerateCall:
    prompt = np.arange(tokens, dtype=np.int32)
    sampling = Sampling(max_new_tokens=64)
    return GenerateCall(rid=rid, prompt=Prompt.of(prompt), sampling=sampling, routing_key=key)


async def until(condition: Callable[[], object], what: str) -> None:
    for _ in range(1500):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"never: {what}")


class Service:
    """The placement service on a real socket, in this event loop."""

    def __init__(self, *, lease_s: float = 30.0, port: int = 0, config: RouterConfig = QUICK) -> None:
        self.shared = SharedTable(config, lease_s=lease_s)
        self._listener = listen("127.0.0.1", port, key="port")
        self.port = int(self._listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Service:
        await self.shared.start()
        app = PlacementApp(self.shared, key=KEY)
        settings = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(settings)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        await until(lambda: self._server.started, "the service listens")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._task
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # as the death of its process would
        self._listener.close()
        await self.shared.aclose()

    def homes(self) -> Counter[str]:
        """Sessions by engine URL, as the service knows them."""
        ids = {engine.id: engine.url for engine in self.shared.fleet.engines.values()}
        return Counter(ids[pin.engine_id] for _, pin in self.shared.table.places())


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)


@contextlib.asynccontextmanager
async def server(url: str, name: str, **changes: object) -> AsyncIterator[Router]:
    """The router of a session server that asks the service at ``url``."""
    config = QUICK.model_copy(update={"placement_url": url, **changes})
    async with Router(config, server_name=name) as router:
        await router.restored()
        yield router


def remote(router: Router) -> RemotePlacement:
    assert isinstance(router.chooser, RemotePlacement)
    return router.chooser


@contextlib.asynccontextmanager
async def engines(count: int, **more: int) -> AsyncIterator[list[FakeEngine]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeEngine(**more)) for _ in range(count)]  # type: ignore[arg-type]


async def test_two_servers_fill_engines_as_one() -> None:
    async with engines(2) as fakes, Service() as service, server(service.url, "a") as a, server(service.url, "b") as b:
        for fake in fakes:
            a.add_engine(fake.url)
        await until(lambda: len(b.fleet.serving()) == 2, "the other server learns of the engines")
        await until(lambda: len(service.shared.fleet.serving()) == 2, "the service, too")
        for number in range(4):
            await a.generate(f"a{number}", call(f"a{number}", tokens=500), lineage=FIRST)
        # Each server alone would alternate from its own zero; together the loads stay level.
        await a.generate("a-large", call("a-large", tokens=5000), lineage=FIRST)
        await until(lambda: service.homes().total() == 5, "the service knows the sessions")
        large = a.fleet.get(a.table.pins["a-large"].engine_id).url
        for number in range(4):
            await b.generate(f"b{number}", call(f"b{number}", tokens=500), lineage=FIRST)
            assert b.fleet.get(b.table.pins[f"b{number}"].engine_id).url != large
        assert service.homes().total() == 9


async def test_siblings_meet_on_one_engine_whatever_server_opened_them() -> None:
    async with engines(3) as fakes, Service() as service, server(service.url, "a") as a, server(service.url, "b") as b:
        for fake in fakes:
            a.add_engine(fake.url)
        await until(lambda: len(b.fleet.serving()) == len(service.shared.fleet.serving()) == 3, "all are known")
        for number in range(3):
            for router, name in ((a, "a"), (b, "b")):
                key = f"{name}{number}"
                await router.generate(key, call(key), lineage=FIRST, group=f"g{number}")
        for number in range(3):
            first = a.fleet.get(a.table.pins[f"a{number}"].engine_id).url
            assert b.fleet.get(b.table.pins[f"b{number}"].engine_id).url == first


async def test_a_silent_server_loses_its_places_and_a_living_one_keeps_them() -> None:
    async with (
        engines(1) as (fake,),
        Service(lease_s=0.6) as service,
        server(service.url, "a") as a,
        server(service.url, "b") as b,
    ):
        a.add_engine(fake.url)
        await until(lambda: b.fleet.serving() and service.shared.fleet.serving(), "the engine is known")
        await a.generate("a0", call("a0"), lineage=FIRST)
        await b.generate("b0", call("b0"), lineage=FIRST)
        for task in remote(b).lease._tasks:  # it hangs, and its connections stay open
            task.cancel()
        await until(lambda: service.shared.table.pin("b0") is None, "the silent server's session is released")
        assert service.shared.table.pin("a0") is not None
        assert service.shared.snapshot().servers == ["a"]
        # Its session goes on meanwhile, and when it speaks again it gets its place back.
        await b.generate("b0", call("b0", rid="later"), lineage=FIRST)
        assert [r.rid for r in fake.requests][-1] == "later"
        await remote(b).lease.attach()
        assert service.shared.table.pin("b0") is not None
        assert service.shared.snapshot().servers == ["a", "b"]


async def test_a_server_that_starts_again_takes_its_sessions_over() -> None:
    async with engines(2) as fakes, Service() as service, server(service.url, "a") as first:
        for fake in fakes:
            first.add_engine(fake.url)
        await until(lambda: len(service.shared.fleet.serving()) == len(first.fleet.serving()) == 2, "engines serve")
        for number in range(3):
            await first.generate(f"s{number}", call(f"s{number}", tokens=100), lineage=FIRST)
        await until(lambda: service.homes().total() == 3, "three sessions")
        where = {key: first.fleet.get(pin.engine_id) for key, pin in first.table.places()}
        old_boot = remote(first).lease.boot
        for task in remote(first).lease._tasks:  # killed: nothing is said any more
            task.cancel()
        config = QUICK.model_copy(update={"placement_url": service.url})
        async with Router(config, server_name="a") as second:
            assert sorted(e.url for e in second.fleet.engines.values()) == sorted(f.url for f in fakes)
            assert service.homes().total() == 3  # what it has is not known before its journal is read
            for key in ("s0", "s1"):  # the third one ended while it was down
                second.restore_session(key, where[key].name, resident_tokens=103)
            await second.restored()
            assert sorted(key for key, _ in service.shared.table.places()) == ["s0", "s1"]
            await until(lambda: len(second.fleet.serving()) == 2, "engines serve here")
            for key in ("s0", "s1"):
                routed = await second.generate(key, call(key, tokens=200), lineage=FIRST)
                assert routed.engine_name.startswith(where[key].url)
                assert routed.facts.moved is None
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http:
            stale = {"server": "a", "boot": old_boot, "released": ["s0"]}
            async with http.post(f"{service.url}/report", json=stale) as answer:
                assert answer.status == 409
                assert (await answer.json())["error"]["code"] == "attach_first"


async def test_while_the_service_is_away_sessions_go_on_and_new_ones_wait_for_it() -> None:
    async with engines(2) as fakes:
        service = Service()
        async with contextlib.AsyncExitStack() as stack:
            async with service:
                a = await stack.enter_async_context(server(service.url, "a"))
                b = await stack.enter_async_context(server(service.url, "b", admission_timeout_s=0.5))
                for fake in fakes:
                    a.add_engine(fake.url)
                await until(lambda: len(a.fleet.serving()) == len(b.fleet.serving()) == 2, "engines serve")
                await until(lambda: len(service.shared.fleet.serving()) == 2, "for the service, too")
                await a.generate("old", call("old", tokens=50), lineage=FIRST)
                home = a.table.pins["old"].engine_id
            await a.generate("old", call("old", tokens=80), lineage=FIRST)
            assert a.table.pins["old"].engine_id == home
            with pytest.raises(PlacementDown, match=r"router\.placement_url") as caught:
                await b.generate("new-b", call("new-b"), lineage=FIRST)
            assert (caught.value.status, caught.value.retryable) == (503, True)
            waiting = asyncio.create_task(a.generate("new-a", call("new-a"), lineage=FIRST))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            again = await stack.enter_async_context(Service(port=service.port))
            await waiting
            # Nothing was written down: engines and sessions come from the servers.
            await until(lambda: again.homes().total() == 2, "both sessions are known again")
            assert sorted(e.url for e in again.shared.fleet.engines.values()) == sorted(f.url for f in fakes)
            pin = again.shared.table.pin("old")
            assert pin is not None
            assert again.shared.fleet.get(pin.engine_id).url == a.fleet.get(home).url
            assert pin.resident_tokens >= 80
            await until(lambda: again.shared.snapshot().servers == ["a", "b"], "both servers have a lease")


async def test_engines_drains_removals_and_refits_are_for_every_server() -> None:
    async with engines(2) as fakes, Service() as service, server(service.url, "a") as a, server(service.url, "b") as b:
        a.add_engine(fakes[0].url, Membership(max_in_flight=8))
        a.add_engine(fakes[1].url)
        await until(lambda: len(a.fleet.serving()) == len(b.fleet.serving()) == 2, "both know both")

        def at(router: Router, fake: FakeEngine) -> str:
            return next(e.id for e in router.fleet.engines.values() if e.url == fake.url)

        await until(lambda: b.fleet.get(at(b, fakes[0])).max_in_flight == 4, "each server has half of the limit")
        await until(lambda: a.fleet.get(at(a, fakes[0])).max_in_flight == 4, "the one that set it, too")
        a.note_refit(at(a, fakes[0]), 7, flushed=True)
        await until(lambda: b.fleet.get(at(b, fakes[0])).version == 7, "the other one hears of the weights")
        assert b.fleet.get(at(b, fakes[0])).flush_epoch == 1
        assert a.fleet.get(at(a, fakes[0])).flush_epoch == 1
        b.drain_engine(at(b, fakes[1]))
        await until(lambda: a.fleet.get(at(a, fakes[1])).drained, "it is drained everywhere")
        a.fleet.undrain(a.fleet.get(at(a, fakes[1])))
        await until(lambda: not b.fleet.get(at(b, fakes[1])).drained, "and open again everywhere")
        await b.remove_engine(at(b, fakes[1]))
        await until(lambda: len(a.fleet.engines) == 1, "it is gone everywhere")
        assert [e.url for e in service.shared.fleet.engines.values()] == [fakes[0].url]


async def test_what_an_operator_tells_the_service_itself_reaches_its_servers() -> None:
    async with (
        engines(1) as (fake,),
        Service() as service,
        server(service.url, "a") as a,
        aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http,
    ):
        async with http.post(f"{service.url}/engines", json={"url": fake.url}) as answer:
            assert answer.status == 201
        await until(a.fleet.serving, "the server learns of the engine")
        fake.version = "7"
        async with http.post(f"{service.url}/engines/e0/refit", json={"version": 7, "flushed": True}) as answer:
            assert answer.status == 200
        (engine,) = a.fleet.engines.values()
        await until(lambda: engine.flush_epoch == 1, "and of its new weights")
        assert engine.version == a.fleet.policy.version == 7
        async with server(service.url, "late") as late:
            assert late.fleet.policy.version == 7


async def test_an_engine_whose_tokens_flow_at_a_server_lives_for_the_service() -> None:
    async with engines(1) as (fake,), Service() as service, server(service.url, "a") as a:
        a.add_engine(fake.url)
        await until(lambda: service.shared.fleet.serving() and a.fleet.serving(), "it serves")
        (there,) = service.shared.fleet.engines.values()
        assert there.health.last_progress == float("-inf")
        await a.generate("s", call("s"), lineage=FIRST)
        await until(lambda: there.health.last_progress > 0, "the service hears of it")


async def test_a_full_fleet_is_said_by_the_service_and_not_by_a_clock_here() -> None:
    config = QUICK.model_copy(update={"kv_budget_tokens": 1000, "admission_timeout_s": 0.3})
    async with (
        engines(1) as (fake,),
        Service(config=config) as service,
        server(service.url, "a", admission_timeout_s=0.3) as a,
    ):
        a.add_engine(fake.url)
        await until(lambda: service.shared.fleet.serving() and a.fleet.serving(), "it serves")
        await a.generate("first", call("first", tokens=900), lineage=FIRST)
        with pytest.raises(CapacityExceeded):
            await a.generate("second", call("second", tokens=900), lineage=FIRST)


async def test_a_lost_engine_moves_its_sessions_to_where_the_service_has_room() -> None:
    async with engines(3) as fakes, Service() as service, server(service.url, "a") as a, server(service.url, "b") as b:
        for fake in fakes:
            a.add_engine(fake.url)
        await until(
            lambda: len(a.fleet.serving()) == len(b.fleet.serving()) == len(service.shared.fleet.serving()) == 3,
            "all serve",
        )
        await a.generate("s", call("s", tokens=10), lineage=FIRST)
        home = a.fleet.get(a.table.pins["s"].engine_id).url
        loaded, empty = [fake for fake in fakes if fake.url != home]
        for number in range(6):  # a's own table knows nothing of these
            key = f"b{number}"
            await b.generate(key, call(key, tokens=100), lineage=FIRST)
            there = b.fleet.get(b.table.pins[key].engine_id).url
            if there in (empty.url, home):
                b.release_session(key)
        await until(lambda: service.homes()[loaded.url] > 0 == service.homes()[empty.url], "one is loaded")
        await next(fake for fake in fakes if fake.url == home).stop()
        routed = await a.generate("s", call("s", tokens=20, rid="again"), lineage=FIRST)
        assert routed.facts.moved == "engine_lost"
        assert routed.engine_name.startswith(empty.url)
        await until(lambda: service.homes()[empty.url] == 1, "the service has it there")


async def test_a_waiting_session_whose_server_goes_leaves_nothing_behind() -> None:
    config = QUICK.model_copy(update={"kv_budget_tokens": 1000})
    async with (
        engines(1) as (fake,),
        Service(config=config) as service,
        server(service.url, "a", admission_timeout_s=0.6) as a,
    ):
        a.add_engine(fake.url)
        await until(lambda: service.shared.fleet.serving() and a.fleet.serving(), "it serves")
        await a.generate("first", call("first", tokens=900), lineage=FIRST)
        task = asyncio.create_task(a.generate("second", call("second", tokens=900), lineage=FIRST))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not service.shared.admission._tickets, "nobody waits")
        with pytest.raises((CapacityExceeded, PlacementDown)):
            await a.generate("third", call("third", tokens=900), lineage=FIRST)
        await until(lambda: not service.shared.admission._tickets, "nobody waits")
        assert [key for key, _ in service.shared.table.places()] == ["first"]
        a.release_session("first")
        await a.generate("fourth", call("fourth", tokens=900), lineage=FIRST)
        assert [key for key, _ in service.shared.table.places()] == ["fourth"]


async def test_no_engine_is_said_as_such() -> None:
    async with Service() as service, server(service.url, "a") as a:
        with pytest.raises(NoEngine):
            await a.generate("s", call("s"), lineage=FIRST)


async def test_a_wrong_key_stops_a_server_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Service() as service:
        monkeypatch.setenv(KEY_VARIABLE, "another")
        with pytest.raises(ConfigError, match=KEY_VARIABLE):
            async with server(service.url, "a"):
                pass
        assert service.shared.snapshot().servers == []


# -- strangers and nonsense ----------------------------------------------------------------------------

ROUTES = [
    ("GET", "/fleet"),
    ("GET", "/engines"),
    ("POST", "/engines"),
    ("DELETE", "/engines/e0"),
    ("DELETE", "/engines/nobody"),
    ("POST", "/engines/e0/drain"),
    ("POST", "/place"),
    ("POST", "/move"),
    ("POST", "/report"),
    ("POST", "/attach"),
    ("GET", "/no-such-route"),
]


async def test_a_stranger_is_refused_everywhere_alike_and_changes_nothing() -> None:
    async with (
        engines(1) as (fake,),
        Service() as service,
        aiohttp.ClientSession() as http,
        server(service.url, "a") as a,
    ):
        a.add_engine(fake.url)
        await until(service.shared.fleet.serving, "it serves")
        seen = set()
        for method, path in ROUTES:
            for given in ("", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", "Bearer \xff"):
                headers = {"authorization": given} if given else {}
                # Never read: an endless body of a stranger costs nothing.
                async with http.request(method, service.url + path, headers=headers, data=b"x" * 5000) as answer:
                    seen.add((answer.status, await answer.read()))
        ((status, body),) = seen
        assert status == 401
        assert KEY.encode() not in body
        assert list(service.shared.fleet.engines) == ["e0"]
        async with http.get(f"{service.url}/healthz") as answer:
            assert answer.status == 200
        async with http.get(f"{service.url}/readyz") as answer:
            assert (answer.status, await answer.json()) == (200, {"ready": True})


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://0xa9fea9fe",
        "http://[fe80::1]",
        "file:///etc/passwd",
        "http://user:pw@127.0.0.1:1",
        "http://127.0.0.1:1?x=y",
        "gopher://127.0.0.1",
        "",
        "http://",
    ],
)
async def test_an_engine_that_could_be_anything_is_refused(url: str) -> None:
    async with Service() as service, aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http:
        async with http.post(f"{service.url}/engines", json={"url": url}) as answer:
            assert answer.status == 400
        attach = {"server": "a", "boot": "b", "sessions": [], "engines": [{"url": url}]}
        async with http.post(f"{service.url}/attach", json=attach) as answer:
            assert answer.status == 400
        assert not service.shared.fleet.engines


GARBAGE: list[bytes] = [
    b"",
    b"null",
    b"[]",
    b"{",
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"server":"a"}',
    b'{"server":"a","boot":"b","unknown":1}',
    b'{"server":1,"boot":"b"}',
    b'{"server":"","boot":"b","key":"k","tokens":1,"reason":"r"}',
    b'{"server":"a","boot":"b","key":"k","tokens":-1,"reason":"r"}',
    b'{"server":"a","boot":"b","key":"k","tokens":1e400,"reason":"r"}',
    b'{"server":"a","boot":"b","key":"' + b"k" * 1000 + b'","tokens":1,"reason":"r"}',
    b'{"server":"a","boot":"b","sessions":[{"key":"k"}]}',
    b'{"server":"a","boot":"b","grown":{"k":1}}',
    b'{"url":"http://127.0.0.1:1","max_in_flight":0}',
    b'{"url":"http://127.0.0.1:1","model":["x"]}',
]


async def test_garbage_is_a_bad_request_and_moves_nothing() -> None:
    async with Service() as service, aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http:
        for path in ("/place", "/move", "/report", "/attach", "/engines"):
            for body in GARBAGE:
                async with http.post(service.url + path, data=body) as answer:
                    assert answer.status == 400, (path, body[:60], await answer.text())
                    assert (await answer.json())["error"]["code"] == "invalid_request"
        for query in ("revision=x", "wait_s=nan", "wait_s=1e999", "revision=-1&wait_s=%ff"):
            async with http.get(f"{service.url}/fleet?{query}") as answer:
                assert answer.status == 400
        async with http.post(f"{service.url}/attach", data=io.BytesIO(b"x" * (MAX_BODY_BYTES + 1))) as answer:
            assert answer.status == 400
        assert not service.shared.fleet.engines
        assert service.shared.snapshot().servers == []


async def test_what_does_not_exist_is_said_and_foreign_sessions_are_left_alone() -> None:
    async with (
        engines(1) as (fake,),
        Service() as service,
        server(service.url, "a") as a,
        aiohttp.ClientSession() as http,
    ):
        a.add_engine(fake.url)
        await until(lambda: service.shared.fleet.serving() and a.fleet.serving(), "it serves")
        await a.generate("mine", call("mine"), lineage=FIRST)
        http.headers["authorization"] = f"Bearer {KEY}"

        async def post(path: str, **body: object) -> tuple[int, dict[str, object]]:
            async with http.post(service.url + path, json=body) as answer:
                return answer.status, await answer.json()

        assert (await post("/engines/nobody/drain"))[0] == 404
        assert (await post("/engines/nobody/refit", version=1))[0] == 404
        assert (await post("/engines/e0/refit", phase="tea"))[0] == 400
        assert (await post("/engines/e0/explode"))[0] == 404
        status, said = await post("/place", server="thief", boot="1", key="mine", tokens=1)
        assert (status, said["error"]["code"]) == (409, "attach_first")  # type: ignore[index]
        assert (await post("/attach", server="thief", boot="1", sessions=[]))[0] == 200
        row = {"key": "mine", "url": fake.url, "tokens": 5}
        assert (await post("/place", server="thief", boot="1", key="mine", tokens=1))[0] == 409
        assert (await post("/move", server="thief", boot="1", key="mine", reason="drain"))[0] == 409
        await post("/report", server="thief", boot="1", released=["mine"], rested=["mine"], moved=[row])
        await post("/report", server="thief", boot="1", lost={"http://127.0.0.1:9": "boo"}, removed=["http://x"])
        (place,) = service.shared.table.places()
        assert place[0] == "mine"
        assert service.shared._owners == {"mine": "a"}


# -- as a process --------------------------------------------------------------------------------------


async def start_router(log: Path, port: int = 0, *flags: str) -> ServerProcess:
    argv = [sys.executable, "-P", "-m", "tollway", "router", "--port", str(port), *flags]
    return await ServerProcess.start(argv, name="router", log=log, env={KEY_VARIABLE: KEY, "OMP_NUM_THREADS": "1"})


async def test_the_command_serves_survives_kill_minus_nine_of_it_and_ends_with_status_0(tmp_path: Path) -> None:
    async with engines(2) as fakes:
        process = await start_router(tmp_path / "router.log", 0, "--engine", fakes[0].url, "--engine", fakes[1].url)
        port = int(process.url.rpartition(":")[2])
        async with server(process.url, "a") as a:
            await until(lambda: len(a.fleet.serving()) == 2, "the server learns the engines of the service")
            await a.generate("s", call("s"), lineage=FIRST)
            home = a.table.pins["s"].engine_id
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            await a.generate("s", call("s"), lineage=FIRST)
            again = await start_router(tmp_path / "again.log", port)
            for number in range(4):
                await a.generate(f"n{number}", call(f"n{number}"), lineage=FIRST)
            assert Counter(pin.engine_id for _, pin in a.table.places()) == {"e0": 2, "e1": 3} or Counter(
                pin.engine_id for _, pin in a.table.places()
            ) == {"e0": 3, "e1": 2}
            assert a.table.pins["s"].engine_id == home
            again._signal(signal.SIGTERM)
            assert await asyncio.wait_for(again.wait(), 15) == 0
        await process.stop()
        await again.stop()


async def test_the_command_wants_a_key(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "tollway", "router", "--port", "0"),
        env={name: value for name, value in os.environ.items() if name != KEY_VARIABLE},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert KEY_VARIABLE.encode() in said


def test_placement_and_gateway_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        RouterConfig(gateway="smg", placement_url="http://127.0.0.1:1")


async def test_scripted_replies_are_not_disturbed() -> None:
    """The data path is direct: the service sees no call."""
    async with engines(1) as (fake,), Service() as service, server(service.url, "a") as a:
        fake.script = lambda request: FakeReply(ids=[5, 6, 261])
        a.add_engine(fake.url)
        await until(lambda: service.shared.fleet.serving() and a.fleet.serving(), "it serves")
        routed = await a.generate("s", call("s"), lineage=FIRST)
        assert routed.reply.output_ids.tolist() == [5, 6, 261]
        assert [r.rid for r in fake.requests] == ["r"]
