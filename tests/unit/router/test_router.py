"""The router against scripted engines on real sockets: pins, losses, re-dispatch, causes, health."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from call_helpers import QUICK, call, fleet, until

from tollway.errors import (
    BadRequest,
    EngineLost,
    EngineRefused,
    NoEngine,
    TollwayError,
    UpstreamError,
    VersionNotReady,
)
from tollway.records import Sampling
from tollway.router import metrics
from tollway.router.engines import EngineClient, GenerateDelta, Timeouts
from tollway.router.fake import FakeEngine, FakeReply
from tollway.router.health import EngineHealth, EngineState
from tollway.router.service import Lineage, Routed, Router
from tollway.router.targets import Wanted


def states(router: Router) -> list[tuple[object, object]]:
    return [(engine["state"], engine["url"]) for engine in router.engines()]


async def test_a_session_stays_on_its_engine_and_every_call_carries_its_key() -> None:
    async with fleet(2) as (router, engines):
        for turn in range(5):
            await router.generate("s", call("s", rid=f"r{turn}"), lineage=Lineage())
            await router.generate("t", call("t", rid=f"q{turn}"), lineage=Lineage())
        by_engine = [{request.body["routing_key"] for request in engine.requests} for engine in engines]
        assert sorted(map(len, by_engine)) == [1, 1]
        for engine in engines:
            assert all(r.headers["X-SMG-Routing-Key"] == r.body["routing_key"] for r in engine.requests)
            assert all(r.body["logprob_start_len"] == -1 for r in engine.requests)


async def test_a_call_without_a_key_is_an_error() -> None:
    async with fleet(1) as (router, engines):
        with pytest.raises(BadRequest):
            await router.generate("", call(""), lineage=Lineage())
        assert not engines[0].requests


async def test_a_lost_connection_is_sent_again_once_to_another_engine() -> None:
    async with fleet(2) as (router, engines):
        first = await router.generate("s", call(rid="r0"), lineage=Lineage())
        home = next(engine for engine in engines if engine.requests)
        other = next(engine for engine in engines if engine is not home)
        home.script = lambda request: FakeReply(ids=[5], drop_after=0)
        moved = await router.generate("s", call(rid="r1"), lineage=Lineage(first.facts, 6))
        assert moved.dispatches == ("r1", "r1-again")
        assert other.requests[-1].rid == "r1-again"
        await until(lambda: "r1" in home.aborts, "the old request is aborted")
        assert moved.facts.moved == "engine_lost"
        assert router.ledger.total.waste["moved"] == 2
        other.script = lambda request: FakeReply(ids=[5], drop_after=0)
        home.script = lambda request: FakeReply(ids=[5], drop_after=0)
        with pytest.raises(EngineLost):
            await router.generate("s", call(rid="r2"), lineage=Lineage())
        assert [router.table.in_flight(each) for each in ("e0", "e1")] == [0, 0]


async def test_a_dead_engine_is_known_at_once_and_its_sessions_move() -> None:
    async with fleet(2) as (router, engines):
        await router.generate("s", call(rid="r0"), lineage=Lineage())
        home = next(engine for engine in engines if engine.requests)
        await home.stop()
        again = await router.generate("s", call(rid="r1"), lineage=Lineage())
        assert again.engine_name != f"{home.url}#0"
        await until(lambda: ("lost", home.url) in states(router), "the probe finds nobody listening")


async def test_an_engine_without_an_error_is_named_without_one() -> None:
    async with fleet(1) as (router, engines):
        assert f"({engines[0].url} is serving)" in str(router.fleet.none_left())


async def test_no_engine_left_is_said_fast() -> None:
    async with fleet(1) as (router, engines):
        await router.generate("s", call(), lineage=Lineage())
        await engines[0].stop()
        async with asyncio.timeout(5):
            with pytest.raises((EngineLost, NoEngine)):
                await router.generate("s", call(rid="r1"), lineage=Lineage())
            await until(lambda: not router.ready, "the engine is lost")
            with pytest.raises(NoEngine, match="is lost"):
                await router.generate("s", call(rid="r2"), lineage=Lineage())


async def test_losing_or_removing_an_engine_leaves_no_failed_task_behind() -> None:
    """The aborts of its calls cannot be delivered any more, which is nobody's error."""
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    async with fleet(1) as (router, engines):
        engines[0].script = lambda request: FakeReply(ids=[5], delay_s=60)
        running = asyncio.create_task(router.generate("s", call(), lineage=Lineage()))
        await until(lambda: engines[0].requests, "the engine has the call")
        await router.remove_engine("e0")
        with pytest.raises(EngineLost):
            await running
        assert metrics.ENGINES_SERVING._value.get() == 0
    del running
    gc.collect()
    await asyncio.sleep(0)
    assert unhandled == []


async def test_calls_in_flight_end_when_their_engine_hangs() -> None:
    """An engine that answers nothing any more: probes fail, no token comes, the waiting call ends."""
    async with fleet(1) as (router, engines):
        engines[0].script = lambda request: FakeReply(ids=[5], delay_s=60)
        engines[0].health_delay_s = 60
        async with asyncio.timeout(20):
            with pytest.raises(EngineLost):
                await router.generate("s", call(), lineage=Lineage())
        assert router.table.in_flight("e0") == 0
        assert engines[0].most_health_calls == 1, "never two probes at once"


async def test_a_busy_engine_is_not_dead() -> None:
    """Probes time out while tokens flow."""
    async with fleet(1) as (router, engines):
        engines[0].health_delay_s = 60
        engines[0].script = lambda request: FakeReply(ids=[5] * 40, finish="length", delay_s=0.05)
        wanted = replace(call(), sampling=Sampling(max_new_tokens=40))
        items = [item async for item in router.stream("s", wanted, lineage=Lineage())]
        assert isinstance(items[-1], Routed)
        assert router.ready
        assert router.engines()[0]["state"] == "serving"


async def test_refusals_never_count_against_an_engine() -> None:
    async with fleet(1) as (router, engines):
        engines[0].script = lambda request: FakeReply(ids=[], status=400, error="bad request")
        for turn in range(10):
            with pytest.raises(EngineRefused):
                await router.generate("s", call(rid=f"r{turn}"), lineage=Lineage())
        assert router.engines()[0]["failures"] == 0
        assert router.ready


async def test_an_engine_that_comes_back_is_another_incarnation_and_nothing_flips_back() -> None:
    async with fleet(2) as (router, engines):
        first = await router.generate("s", call(rid="r0"), lineage=Lineage())
        home = next(engine for engine in engines if engine.requests)
        await home.stop()
        await router.generate("s", call(rid="r1"), lineage=Lineage())
        await until(lambda: ("lost", home.url) in states(router), "the loss is known")
        home.version = "default"
        asked = home.model_info_calls
        await home.start()
        await until(lambda: home.model_info_calls >= asked + 3, "its version was asked for and judged twice")
        assert len(router.fleet.serving()) == 1, "no traffic before its version is confirmed"
        home.version = "4"
        await until(lambda: len(router.fleet.serving()) == 2, "it serves again")
        described = next(engine for engine in router.engines() if engine["url"] == home.url)
        assert (described["incarnation"], described["version"]) == (1, 4)
        count = len(home.requests)
        last = await router.generate("s", call(rid="r2"), lineage=Lineage())
        assert len(home.requests) == count
        assert last.engine_name != first.engine_name


async def test_an_engine_without_a_numbered_version_does_not_join() -> None:
    async with FakeEngine(version="default") as engine, Router(QUICK) as router:
        router.add_engine(engine.url)
        with pytest.raises(NoEngine, match="update_weight_version"):
            await router.wait_ready(0.3)
        engine.version = "0"
        await router.wait_ready(10)


async def test_something_that_is_no_engine_does_not_join() -> None:
    async with Router(QUICK) as router:
        router.add_engine("http://127.0.0.1:9")
        with pytest.raises(NoEngine):
            await router.wait_ready(0.2)
        with pytest.raises(BadRequest):
            router.add_engine("ftp://127.0.0.1")


async def test_one_url_is_one_engine() -> None:
    async with fleet(1) as (router, engines):
        assert router.add_engine(engines[0].url + "/").id == "e0"
        assert len(router.engines()) == 1


async def test_a_draining_engine_keeps_its_sessions_and_gets_no_new_ones() -> None:
    async with fleet(2) as (router, _):
        await router.generate("s", call(rid="r0"), lineage=Lineage())
        home = router.table.pins["s"].engine_id
        router.drain_engine(home)
        for number in range(4):
            await router.generate(f"t{number}", call(f"t{number}", rid=f"q{number}"), lineage=Lineage())
            assert router.table.pins[f"t{number}"].engine_id != home
        await router.generate("s", call(rid="r1"), lineage=Lineage())
        assert router.table.pins["s"].engine_id == home
        await router.remove_engine(home)
        await router.generate("s", call(rid="r2"), lineage=Lineage())
        assert router.table.pins["s"].engine_id != home


async def test_group_siblings_share_an_engine() -> None:
    async with fleet(3) as (router, _):
        for number in range(6):
            await router.generate(f"s{number}", call(f"s{number}", rid=f"r{number}"), lineage=Lineage(), group="g")
        assert len({pin.engine_id for pin in router.table.pins.values()}) == 1


async def test_a_flush_between_two_turns_is_the_cause_of_the_miss() -> None:
    async with fleet(1) as (router, engines):
        first = await router.generate("s", call(ids=[1, 2, 3], rid="r0"), lineage=Lineage())
        engines[0].flush()
        engines[0].version = "1"
        router.note_refit("e0", 1, flushed=True)
        sequence = [1, 2, 3, 111, 107, 261]
        second = await router.generate("s", call(ids=[*sequence, 9], rid="r1"), lineage=Lineage(first.facts, 6))
        assert router.ledger.total.waste == {"refit_flush": 5}
        await router.generate(
            "s", call(ids=[*sequence, 9, 111, 107, 261, 9], rid="r2"), lineage=Lineage(second.facts, 10)
        )
        assert router.ledger.total.waste == {"refit_flush": 5}
        assert router.ledger.total.summary()["efficiency_without_refit"] == 1.0


async def test_a_reply_read_after_the_notice_of_a_flush_is_still_before_it() -> None:
    """Its tokens carry the old version, so the next miss is the flush's."""
    async with fleet(1) as (router, engines):
        engines[0].script = lambda request: FakeReply(ids=[5, 6], versions=[("0", 0, 2)])
        router.note_refit("e0", 1, flushed=True)
        first = await router.generate("s", call(rid="r0"), lineage=Lineage())
        engines[0].flush()
        engines[0].script = lambda request: FakeReply(ids=[5, 6], versions=[("1", 0, 2)])
        await router.generate("s", call(ids=[1, 2, 3, 5, 6, 9], rid="r1"), lineage=Lineage(first.facts, 5))
        assert router.ledger.total.waste == {"refit_flush": 4}


async def test_a_flush_whose_weights_never_came_is_a_cause_and_its_version_is_not_believed() -> None:
    async with fleet(1) as (router, engines):
        first = await router.generate("s", call(rid="r0"), lineage=Lineage())
        engines[0].flush()
        router.note_refit("e0", None, flushed=True)
        assert router.engines()[0]["version"] == 0
        with pytest.raises(VersionNotReady):
            await router.generate("s", call(rid="rv"), lineage=Lineage(), want=Wanted(minimum=1))
        await router.generate("s", call(ids=[1, 2, 3, 111, 107, 261, 9], rid="r1"), lineage=Lineage(first.facts, 6))
        assert router.ledger.total.waste == {"refit_flush": 5}


async def test_a_reply_read_after_the_notice_of_a_flush_is_before_it_though_its_version_came_later() -> None:
    async with fleet(1) as (router, engines):
        engines[0].script = lambda request: FakeReply(ids=[5, 6], versions=[("0", 0, 2)])
        router.note_refit("e0", None, flushed=True)
        first = await router.generate("s", call(rid="r0"), lineage=Lineage())
        router.note_refit("e0", 1, flushed=False)
        engines[0].flush()
        engines[0].script = lambda request: FakeReply(ids=[5, 6], versions=[("1", 0, 2)])
        second = await router.generate("s", call(ids=[1, 2, 3, 5, 6, 9], rid="r1"), lineage=Lineage(first.facts, 5))
        assert router.ledger.total.waste == {"refit_flush": 4}
        router.note_refit("e0", 2, flushed=False)
        assert not router.fleet.get("e0").flushed_since(second.facts.end_version, 2)


async def test_an_eviction_is_told_from_the_engines_own_counter() -> None:
    async with fleet(1) as (router, engines):
        engines[0].metrics_text = "sglang:evicted_tokens_total 5.0\n"
        await router.fleet.read_evictions(router.fleet.get("e0"))
        first = await router.generate("s", call(rid="r0"), lineage=Lineage())
        engines[0].flush()
        await router.generate("s", call(ids=[1, 2, 3, 111, 107, 261, 9], rid="r1"), lineage=Lineage(first.facts, 6))
        assert router.ledger.total.waste == {"unknown": 5}
        engines[0].flush()
        engines[0].metrics_text = 'sglang:evicted_tokens_total{rank="0"} 9.0\n'
        await router.generate("s", call(ids=[1, 2, 3, 111, 107, 261, 9], rid="r2"), lineage=Lineage(first.facts, 6))
        assert router.ledger.total.waste == {"unknown": 5, "eviction": 5}


@pytest.mark.parametrize("stream", [False, True])
async def test_cancels_at_every_phase_leave_every_counter_at_zero(stream: bool) -> None:
    async with fleet(1) as (router, engines):
        engines[0].script = lambda request: FakeReply(ids=[5] * 5, finish="length", delay_s=0.002)

        async def one(number: int) -> None:
            wanted = call(f"s{number}", rid=f"r{number}", stream=stream)
            if not stream:
                await router.generate(f"s{number}", wanted, lineage=Lineage())
                return
            async with contextlib.aclosing(router.stream(f"s{number}", wanted, lineage=Lineage())) as items:
                async for _ in items:
                    pass

        for number in range(60):
            task = asyncio.ensure_future(one(number))
            await asyncio.sleep(0.0005 * (number % 20))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert router.table.in_flight("e0") == 0
        await until(lambda: engines[0].in_flight == 0, "the engine was told")
        for number in range(60):
            router.release_session(f"s{number}")
        load = router.table.load("e0")
        assert (load.resident_tokens, load.sessions) == (0, 0)


async def test_records_name_the_program_and_the_number_format_that_sampled() -> None:
    async with FakeEngine(route_shape=(3, 2), indexer_shape=(2, 4)) as engine, Router(QUICK) as router:
        engine.precision = "bfloat16"
        router.add_engine(engine.url)
        await router.wait_ready(5)
        wanted = call(return_routed_experts=True, return_indexer_topk=True)
        routed = await router.generate("s", wanted, lineage=Lineage())
        (span,) = routed.reply.versions
        assert (span.version, span.kind, span.precision) == (0, "fake", "bfloat16")
        assert routed.reply.routed_experts is not None
        assert routed.reply.routed_experts.ids.shape == (5, 3, 2)
        assert routed.reply.indexer_topk is not None
        assert routed.reply.indexer_topk.ids.shape == (5, 2, 4)
        (row,) = router.engines()
        assert (row["kind"], row["release"], row["precision"]) == ("fake", "fake", "bfloat16")


async def test_abandoning_a_stream_aborts_it() -> None:
    async with fleet(1) as (router, engines):
        engines[0].script = lambda request: FakeReply(ids=[5] * 100, delay_s=0.01)
        async with contextlib.aclosing(router.stream("s", call(), lineage=Lineage())) as items:
            async for item in items:
                assert isinstance(item, GenerateDelta)
                break
        await until(lambda: "r" in engines[0].aborts, "the abort arrives")


async def test_an_endless_chain_of_aborts_ends() -> None:
    async with fleet(1) as (router, engines):
        engines[0].script = lambda request: FakeReply(ids=[], finish="abort")
        with pytest.raises(UpstreamError, match="max_resumes"):
            await router.generate("s", call(), lineage=Lineage())


async def test_control_calls_say_what_the_engine_said() -> None:
    async with FakeEngine() as engine, aiohttp.ClientSession() as http:
        client = EngineClient(engine.url, http, timeouts=Timeouts(connect_s=1, control_s=2, probe_s=1))
        await client.pause("retract")
        await client.flush_cache()
        await client.begin_weight_update()
        await client.update_weights_from_tensor(b"abc", tp_size=2)
        await client.end_weight_update()
        await client.set_weight_version(7)
        await client.update_weights_from_disk("/m", 8)
        await client.resume()
        await client.abort_all()
        assert await client.health()
        assert await client.health_generate()
        assert (await client.model_info()).weight_version == "7"
        assert (await client.server_info()).context_length == 32768
        sent = dict(engine.control)
        assert sent["/update_weights_from_tensor"]["serialized_named_tensors"] == ["YWJj", "YWJj"]
        assert sent["/update_weights_from_tensor"]["flush_cache"] is False
        assert sent["/update_weight_version"] == {"new_version": "7", "abort_all_requests": False}
        assert sent["/update_weights_from_disk"] == {"model_path": "/m", "flush_cache": False, "weight_version": "8"}
        with pytest.raises(EngineRefused, match="place"):
            await client.pause("place")  # type: ignore[arg-type]
        engine.control_status["/flush_cache"] = 400
        with pytest.raises(EngineRefused, match="refused"):
            await client.flush_cache()
        engine.control_status["/flush_cache"] = 500
        with pytest.raises(UpstreamError):
            await client.flush_cache()
        engine.health_status = 503
        assert not await client.health()
    with pytest.raises(TollwayError):
        async with aiohttp.ClientSession() as http:
            await EngineClient("http://127.0.0.1:9", http).model_info()


@pytest.mark.parametrize("answer", ["", "null", "[]", "<html>OK</html>", "{}", '{"success": null}', '{"succ'])
async def test_an_update_that_an_engine_does_not_confirm_is_none(answer: str) -> None:
    """A proxy's page or an empty body with status 200 would leave old weights under a new version."""
    app = web.Application()

    async def anything(_request: web.Request) -> web.Response:
        return web.Response(text=answer)

    app.router.add_post("/{path}", anything)
    server = TestServer(app)
    await server.start_server()
    async with aiohttp.ClientSession() as http:
        client = EngineClient(str(server.make_url("")), http)
        for update in (
            client.begin_weight_update(),
            client.update_weights_from_tensor(b"abc"),
            client.update_weights_from_disk("/m"),
            client.end_weight_update(),
            client.set_weight_version(7),
        ):
            with pytest.raises(UpstreamError):
                await update
        if answer != '{"succ':
            await client.release_memory(["weights"])  # stock servers say nothing to these
            await client.resume()
    await server.close()


def test_health_rules() -> None:
    health = EngineHealth(max_failures=2, busy_window_s=10.0)
    assert not health.failed(EngineLost("x", refused=True), 0.0), "a joining engine may still be starting"
    health.confirmed()
    assert health.state is EngineState.SYNCED
    health.serve()
    assert not health.failed(EngineRefused("no", upstream_status=409), 0.0)
    assert health.failures == 0
    health.progress(0.0)
    assert not health.failed(EngineLost("slow", timed_out=True), 5.0)
    assert health.failures == 0, "tokens still flow"
    assert not health.failed(EngineLost("slow", timed_out=True), 50.0)
    assert health.failed(UpstreamError("500"), 51.0)
    assert health.state is EngineState.LOST
    health.confirmed()
    health.serve()
    assert (health.state, health.incarnation, health.failures) == (EngineState.SERVING, 1, 0)
    assert health.failed(EngineLost("gone", refused=True), 52.0)
