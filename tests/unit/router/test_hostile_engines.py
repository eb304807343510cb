"""Engines that answer whatever they like: refused by name, bounded in memory, never in anybody's way."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import orjson
import pytest
from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver
from call_helpers import QUICK, call, fleet, loads, until
from live_engines import talking

from tollway import telemetry
from tollway.errors import BadRequest, EngineBusy, EngineLost, UpstreamError
from tollway.router.addresses import Resolver, check_url
from tollway.router.fake import FakeReply
from tollway.router.fleet import Engine
from tollway.router.health import EngineState
from tollway.router.placement_wire import Attach, EngineSaid, FleetRow, Report, decode, encode
from tollway.router.seats import Terms
from tollway.router.service import Lineage, Router
from tollway.router.shared_table import SharedTable
from tollway.router.wire import GenerateCall

DEEP = b"[" * 1000 + b"]" * 1000
"""As deep as the parser takes, and deeper than Python writes out."""
MODEL = b'{"model_path":"/m","weight_version":"0"}'
SERVER = b'{"engine":"fake","version":"1.0"}'
Answers = dict[str, bytes]


@asynccontextmanager
async def joining(router: Router, answers: Answers, *, endless: str = "") -> AsyncIterator[Engine]:
    """An engine that answers with ``answers``, and at ``endless`` never comes to an end."""
    said = {"/model_info": MODEL, "/server_info": SERVER, "/ready": b"{}", "/health_generate": b"{}", "/metrics": b""}
    said |= answers

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            path = line.split()[1].decode()
            while (await reader.readline()).strip():
                pass
            if path == endless:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    writer.write(b" " * (1 << 20))
                    await writer.drain()
            body = said.get(path, b"{}")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()

    async with talking(handle) as url:
        engine = router.add_engine(url)
        yield engine
        await router.remove_engine(engine.id)  # whatever it says


def with_field(base: bytes, name: str, value: bytes) -> bytes:
    return base[:-1] + b',"' + name.encode() + b'":' + value + b"}"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"/server_info": with_field(SERVER, "dp_size", b"1000000000")}, "dp_size 1000000000, want 1024 at most"),
        ({"/server_info": with_field(SERVER, "page_size", b"18446744073709551615")}, "says page_size 1844"),
        ({"/server_info": with_field(SERVER, "max_total_num_tokens", b"9223372036854775808")}, "max_total_num_tokens"),
        ({"/model_info": b'{"weight_version":' + DEEP + b"}"}, "weight version '[[[["),
        ({"/model_info": DEEP}, "a JSON list, want an object"),
    ],
)
async def test_an_engine_with_impossible_facts_is_refused_by_name_and_can_be_removed(
    answers: Answers, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Router(QUICK) as router, joining(router, answers) as engine:
        await until(lambda: engine.health.last_error, "it was looked at")
        assert words in engine.health.reason
        assert engine.health.state is EngineState.JOINING
        assert not router.table.targets(engine.id)
        assert not [each for each in caplog.records if each.exc_info]


@pytest.mark.parametrize(
    "answers",
    [
        {"/server_info": with_field(SERVER, "startup_time", DEEP)},
        {"/server_info": with_field(SERVER, "speculative_algorithm", DEEP)},
        {"/server_info": b'{"version":"' + b"9" * 5000 + b'.1.1"}'},
        {"/model_info": b'{"weight_version":"0","model_path":' + DEEP + b"}"},
        {"/server_info": b'{"engine":"%b","version":"%b","dtype":"%b"}' % ((b"x" * 1_000_000,) * 3)},
        {"/model_info": with_field(b'{"weight_version":"0"}', "model_path", b'"' + b"p" * 1_000_000 + b'"')},
    ],
)
async def test_odd_facts_that_do_not_matter_are_kept_short(answers: Answers) -> None:
    async with Router(QUICK) as router, joining(router, answers) as engine:
        await router.wait_ready(5)
        assert len(orjson.dumps(router.describe_engine(engine))) < 6000
        assert len(engine.start_id) <= 2000


@pytest.mark.parametrize("path", ["/model_info", "/server_info", "/health_generate", "/metrics"])
async def test_of_an_answer_without_end_only_a_part_is_read(path: str) -> None:
    config = QUICK.model_copy(update={"probe_timeout_s": 30.0})  # the deadline is not what ends it
    async with Router(config) as router, joining(router, {}, endless=path) as engine:
        await until(lambda: engine.health.last_error or engine.health.takes_calls, "it was looked at")
        assert "in time" not in engine.health.last_error


async def drained(router: Router, wanted: GenerateCall) -> None:
    async for _ in router._calls.run("s", wanted, Lineage(), Terms()):
        pass


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_retractions", 2**63),
        ("reasoning_tokens", 2**63),
        ("cached_tokens_details", {"device": 2**64 - 1, "host": 0, "storage": 0}),
        ("cached_tokens_details", ["x" * 1_000_000]),
        ("cached_tokens", "9" * 1_000_000),
        ("prompt_tokens", [[[[[[[[[[0]]]]]]]]]] * 1000),
        ("finish_reason", {"type": "x" * 1_000_000}),
        ("weight_versions", [{"version": [[[[[[0]]]]]] * 1000, "start": 0, "end": 1}]),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_lie_is_refused_in_few_words_and_leaves_the_ledger_readable(
    field: str, value: object, streamed: bool
) -> None:
    async with fleet(1) as (router, engines):
        engines[0].script = lambda request: FakeReply(
            ids=[5], edit=lambda said: said["meta_info"].update({field: value})
        )  # type: ignore[attr-defined]
        with pytest.raises(UpstreamError) as error:
            await drained(router, call(stream=streamed))
        assert len(str(error.value)) < 600
        assert orjson.dumps([router.ledger.summary(sessions=5), router.engines()])
        assert loads(router)[0][:2] == (0, 0)


async def test_a_stream_beyond_what_was_asked_for_is_ended_at_once_and_aborted() -> None:
    async with fleet(1) as (router, engines):
        engines[0].script = lambda request: FakeReply(ids=[5] * 100_000, incremental=True, delay_s=0.001)
        with pytest.raises(UpstreamError, match="9 output ids, 8 were asked for"):
            async for _ in router.stream("s", call(rid="long"), lineage=Lineage()):
                pass
        await until(lambda: "long" in engines[0].aborts, "the engine heard of it")


async def remove(router: Router) -> None:
    await router.remove_engine("e0")


async def lose(router: Router) -> None:
    engine = router.fleet.engines["e0"]
    engine.health.exited("its scheduler is dead")
    router.fleet._lose(engine)


@pytest.mark.parametrize("end", [remove, lose])
@pytest.mark.parametrize("shown", [0, 1])
async def test_a_stream_ends_when_its_engine_is_given_up_though_the_engine_says_nothing(
    end: Callable[[Router], object], shown: int
) -> None:
    async with fleet(1) as (router, engines):
        engines[0].script = lambda request: FakeReply(ids=[5] * 8, delay_s=0.3 if shown else 60, incremental=True)
        seen = asyncio.Event()
        client = router.fleet.engines["e0"].client

        async def consume() -> None:
            async for _ in client.stream(call(stream=True)):
                seen.set()

        running = asyncio.create_task(consume())
        await until(lambda: seen.is_set() if shown else engines[0].in_flight, "it reads the reply")
        async with asyncio.timeout(3):
            await end(router)  # type: ignore[misc]
            with pytest.raises(EngineLost):
                await running


async def test_what_is_told_of_a_removed_engine_does_not_touch_the_one_that_has_its_id_now() -> None:
    async with fleet(1) as (router, engines):
        old = router.fleet.engines["e0"]
        await router.remove_engine("e0")
        new = router.fleet.add(engines[0].url, engine_id="e0")
        await router.wait_ready(5)
        router.fleet.failed(old, EngineBusy("no room"))
        assert not router.fleet._timers
        assert router.table.targets(new.id)[0].serves


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254.",
        "http://[::169.254.169.254]",
        "http://[::ffff:0:169.254.169.254]",
        "http://[64:ff9b::a9fe:a9fe]",
        "http://[2002:a9fe:a9fe::1]",
        "http://[::ffff:169.254.169.254]",
        "http://0xa9fea9fe",
        "http://%31%36%39.254.169.254",
        "http://" + "a" * 70 + ".com",
        "http://a..b",
        "http://.",
        "http://h%00",
        "http://@h",
        "http://:@h",
        "http://h/" + "x" * 5000,
    ],
)
def test_addresses_that_no_engine_has_are_refused_in_every_notation(url: str) -> None:
    with pytest.raises(BadRequest) as error:
        check_url(url)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("url", ["http://a-b.c_d.e:1", "http://[::1]:1", "http://127.1:5", "http://h."])
def test_ordinary_addresses_pass(url: str) -> None:
    assert check_url(url) == url


async def test_a_name_that_leads_to_a_link_local_address_is_not_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ["169.254.169.254", "10.0.0.1"]

    async def resolve(self: ThreadedResolver, host: str, port: int = 0, family: object = None) -> list[ResolveResult]:
        return [ResolveResult(hostname=host, host=each, port=port, family=2, proto=0, flags=0) for each in found]

    monkeypatch.setattr(ThreadedResolver, "resolve", resolve)
    assert [each["host"] for each in await Resolver().resolve("both.example")] == ["10.0.0.1"]
    found.remove("10.0.0.1")
    async with Router(QUICK) as router:
        engine = router.add_engine("http://metadata.example")
        await until(lambda: engine.health.last_error, "it was looked at")
        assert "is a link-local address" in engine.health.reason


def test_what_an_engine_says_cannot_pass_for_a_line_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    before = logging.getLogger().level
    telemetry.configure()
    try:
        logging.getLogger("tollway.test").warning("engine said %s", "x\n2026 CRITICAL forged\r\x1b[2J\x9b")
    finally:
        for handler in telemetry._handlers:
            logging.getLogger().removeHandler(handler)
        telemetry._handlers.clear()
        logging.getLogger().setLevel(before)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[1] == "    2026 CRITICAL forged\\x0d\\x1b[2J\\x9b"


async def test_long_last_words_do_not_keep_servers_from_reading_the_fleet() -> None:
    shared = SharedTable(QUICK, lease_s=30.0)
    try:
        async with fleet(1) as (_, engines):
            engine = shared.add(EngineSaid(url=engines[0].url))
            await shared.fleet.wait_serving(5)
            shared.attach(Attach(server="s", boot="b"))
            shared.report(Report(server="s", boot="b", lost={engine.url: "x" * 4096}))
            assert len(engine.health.last_error) > 4096
            engine.health.exited(engine.health.last_error)
            assert decode(encode(shared.snapshot()), FleetRow).engines[0].state == "lost"
    finally:
        await shared.aclose()
