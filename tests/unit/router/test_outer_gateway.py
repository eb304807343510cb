"""The router behind a real ``smg``: who serves whom, what passes unchanged, what happens when something dies."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import pytest
from aiohttp import web

from tollway.errors import (
    BadRequest,
    ComponentLost,
    ConfigError,
    ContextLengthExceeded,
    EngineLost,
    NoEngine,
    UpstreamError,
)
from tollway.records import Sampling
from tollway.router.canary import ROUTED_BY, require_fields, require_verbatim
from tollway.router.config import RouterConfig
from tollway.router.engines import GenerateCall, GenerateDelta
from tollway.router.fake import FakeEngine, FakeReply, FakeRequest
from tollway.router.fleet import Membership
from tollway.router.gateway import KEY_VARIABLE, OuterGateway
from tollway.router.gateways import OwnGateway
from tollway.router.service import Lineage, Routed, Router
from tollway.router.smg import Smg, Workers
from tollway.router.wire import Prompt

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("smg") is None,
    reason="the outer gateway is not installed: pip install 'tollway[gateway]'",
)

QUICK = RouterConfig(
    gateway="smg",
    probe_interval_s=0.1,
    probe_timeout_s=1.0,
    connect_timeout_s=1.0,
    progress_timeout_s=5.0,
    busy_window_s=0.4,
)
FIRST = Lineage()


def call(key: str, ids: list[int] | None = None, rid: str = "r", **more: object) -> GenerateCall:
    prompt = np.array(ids or [1, 2, 3], np.int32)
    sampling = Sampling(max_new_tokens=512)
    return GenerateCall(rid=rid, prompt=Prompt.of(prompt), sampling=sampling, routing_key=key, **more)  # type: ignore[arg-type]


def generated(engine: FakeEngine) -> list[FakeRequest]:
    """Calls of sessions that reached an engine through smg, without those that only ask where a session lives."""
    calls = [each for each in engine.requests if not each.rid.startswith("tollway-")]
    # smg does not pass on who the client is.
    assert not [each.rid for each in calls if "aiohttp" in each.headers.get("User-Agent", "")], "a call went past smg"
    return calls


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"never: {what}")


@contextlib.asynccontextmanager
async def behind_smg(count: int, config: RouterConfig = QUICK) -> AsyncIterator[tuple[Router, list[FakeEngine]]]:
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine()) for _ in range(count)]
        router = await stack.enter_async_context(Router(config))
        for engine in engines:
            router.add_engine(engine.url)
        await until(lambda: len(router.fleet.serving()) == count, "all engines serve")
        yield router, engines


def home(router: Router, key: str, engines: list[FakeEngine]) -> FakeEngine:
    """The engine that the router says a session lives on."""
    pin = router.table.pin(key)
    assert pin is not None
    return next(each for each in engines if each.url == router.fleet.get(pin.engine_id).url)


def group_lives(group: int) -> bool:
    """Whether a process group has a member."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def own(router: Router) -> OwnGateway:
    """The smg that a router started."""
    assert isinstance(router.chooser, OuterGateway)
    assert isinstance(router.chooser.end, OwnGateway)
    return router.chooser.end


async def test_sessions_stay_where_the_gateway_put_them_and_records_name_that_engine() -> None:
    async with behind_smg(3) as (router, engines):
        for turn in range(4):
            for number in range(6):
                key = f"s{number}"
                if turn % 2:
                    items = [item async for item in router.stream(key, call(key, rid=f"{key}-{turn}"), lineage=FIRST)]
                    routed = items[-1]
                else:
                    routed = await router.generate(key, call(key, rid=f"{key}-{turn}"), lineage=FIRST)
                assert isinstance(routed, Routed)
                there = home(router, key, engines)
                assert routed.engine_name.startswith(there.url)
                assert routed.facts.engine_id == router.table.pins[key].engine_id
                assert generated(there)[-1].rid == f"{key}-{turn}"
        served = Counter[str]()
        for engine in engines:
            for request in generated(engine):
                assert request.headers["X-SMG-Routing-Key"] == request.body["routing_key"]
                served[request.rid.partition("-")[0]] += 1
        assert served == {f"s{number}": 4 for number in range(6)}
        homes = {key: home(router, key, engines).url for key in served}
        assert all({homes[r.rid.partition("-")[0]]} == {e.url} for e in engines for r in generated(e))


async def test_calls_of_one_session_that_come_at_once_go_to_one_engine() -> None:
    async with behind_smg(3) as (router, engines):
        for engine in engines:
            engine.script = lambda request: FakeReply(ids=[7, 261], delay_s=0.05)

        async def eight(name: str) -> None:
            calls = (router.generate("s", call("s", rid=f"{name}{n}"), lineage=FIRST) for n in range(8))
            await asyncio.gather(*calls)

        await eight("first")
        there = home(router, "s", engines)
        assert [len(generated(e)) for e in engines if e is not there] == [0, 0]
        await there.stop()
        await eight("again")
        new = home(router, "s", engines)
        assert new is not there
        assert {r.rid[:5] for r in generated(new)} == {"again"}
        assert sum(len(generated(e)) for e in engines if e not in (there, new)) == 0


async def test_calls_and_large_replies_arrive_as_they_left() -> None:
    async with FakeEngine(route_shape=(48, 8)) as engine, Router(QUICK) as router:
        router.add_engine(engine.url)
        await until(lambda: bool(router.fleet.serving()), "the engine serves")
        ids = list(range(1, 1201))
        engine.script = lambda request: FakeReply(ids=list(range(2000, 2100)), chunk=10)
        asked = call("s", ids, return_routed_experts=True, routed_experts_start=4, extra_key="v1", top_logprobs=2)
        routed = await router.generate("s", asked, lineage=FIRST)
        (request,) = generated(engine)
        assert request.input_ids == ids
        assert request.body["return_routed_experts"] is True
        assert request.body["routed_experts_start_len"] == 4
        assert request.body["extra_key"] == "v1"
        assert request.body["return_flat_raw_output_top_logprobs"] is True
        assert routed.reply.routed_experts is not None
        assert routed.reply.routed_experts.ids.shape == (1200 + 100 - 1 - 4, 48, 8)  # 2 MB of int32, as base64
        sequence = np.array([*ids, *range(2000, 2100)][:-1][4:])
        first = (sequence * 7 + np.arange(4, 1299) * 13) % 8
        assert np.array_equal(routed.reply.routed_experts.ids[:, 0, 0], first)


async def test_deltas_arrive_one_by_one() -> None:
    async with behind_smg(1) as (router, (engine,)):
        go_on = asyncio.Event()
        engine.script = lambda request: FakeReply(ids=[104, 105, 261], delay_s=0.05)
        seen: list[int] = []
        async for item in router.stream("s", call("s"), lineage=FIRST):
            if isinstance(item, GenerateDelta):
                if not seen:
                    assert engine.in_flight == 1, "the first delta came only with the whole reply"
                seen += item.output_ids.tolist()
                go_on.set()
        assert seen == [104, 105, 261]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_is_gone_at_the_engine(stream: bool) -> None:
    async with behind_smg(2) as (router, engines):
        for engine in engines:
            engine.script = lambda request: FakeReply(ids=list(range(300)), delay_s=0.1 if stream else 30.0)

        async def consume() -> None:
            async for _ in router.stream("s", call("s", rid="gone"), lineage=FIRST):
                pass

        work = consume() if stream else router.generate("s", call("s", rid="gone"), lineage=FIRST)
        task = asyncio.ensure_future(work)
        await until(lambda: any(generated(e) for e in engines), "the call runs")
        there = next(e for e in engines if generated(e))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: there.in_flight == 0 and "gone" in there.aborts, "the engine stopped decoding")
        assert [e.aborts for e in engines if e is not there] == [[]]
        assert router.table.in_flight(router.table.pins["s"].engine_id) == 0


async def test_a_dead_engine_costs_one_redispatch_and_its_sessions_do_not_flip_back() -> None:
    async with behind_smg(2) as (router, engines):
        for number in range(6):
            await router.generate(f"s{number}", call(f"s{number}"), lineage=FIRST)
        old = {f"s{number}": home(router, f"s{number}", engines) for number in range(6)}
        dead = old["s0"]
        alive = next(each for each in engines if each is not dead)
        await dead.stop()
        for key, where in old.items():
            if where is dead and key != "s0":
                await router.generate(key, call(key, rid=f"{key}-down"), lineage=FIRST)
        before = len(generated(alive))
        routed = await router.generate("s0", call("s0", rid="after"), lineage=FIRST)
        assert routed.facts.moved == "engine_lost"
        assert [r.rid for r in generated(alive)[before:]] == [routed.dispatches[-1]]
        assert len(routed.dispatches) <= 2
        await dead.start()
        await until(lambda: len(router.fleet.serving()) == 2, "the engine is back")
        for turn in range(3):
            for key, where in old.items():
                await router.generate(key, call(key, rid=f"{key}-{turn}"), lineage=FIRST)
                if where is dead:
                    assert home(router, key, engines) is alive, "the gateway took a session back"
        assert not [r for r in generated(dead) if r.rid.endswith(("-0", "-1", "-2"))]


async def test_a_broken_connection_is_no_second_decode_behind_our_back() -> None:
    async with behind_smg(1) as (router, (engine,)):
        await router.generate("s", call("s"), lineage=FIRST)
        engine.script = lambda request: FakeReply(ids=[1, 2, 3], drop_after=0)
        before = len(generated(engine))
        with pytest.raises(EngineLost):
            await router.generate("s", call("s", rid="cut"), lineage=FIRST)
        sent = [r.rid for r in generated(engine)[before:]]
        assert len(sent) == len(set(sent)), f"smg sent a call twice: {sent}"


async def test_errors_of_an_engine_pass_and_move_nothing() -> None:
    async with behind_smg(2) as (router, engines):
        await router.generate("s", call("s"), lineage=FIRST)
        there = home(router, "s", engines)
        words = "The input (9000 tokens) is longer than the model's context length (8192 tokens)."
        there.script = lambda request: FakeReply(ids=[], status=400, error=words)
        for _ in range(15):
            with pytest.raises(ContextLengthExceeded):
                await router.generate("s", call("s"), lineage=FIRST)
        there.script = lambda request: FakeReply(ids=[], status=500, error="boom")
        for _ in range(15):  # smg's circuit breaker would open after ten of these
            with pytest.raises(UpstreamError):
                await router.generate("s", call("s"), lineage=FIRST)
        there.script = lambda request: FakeReply(ids=[7, 261])
        await router.generate("s", call("s"), lineage=FIRST)
        assert home(router, "s", engines) is there


async def test_a_call_without_a_key_is_refused_before_it_reaches_the_gateway() -> None:
    async with behind_smg(1) as (router, (engine,)):
        with pytest.raises(BadRequest, match="routing key"):
            await router.generate("s", call(""), lineage=FIRST)
        assert not engine.requests


async def test_a_draining_engine_gets_nothing_more_and_another_model_goes_past_the_gateway() -> None:
    async with behind_smg(2) as (router, engines), FakeEngine() as judge:
        router.add_engine(judge.url, Membership(model="judge"))
        await until(lambda: bool(router.fleet.serving("judge")), "the judge serves")
        await router.generate("j", call("j"), lineage=FIRST, model="judge")
        assert [r.rid for r in judge.requests] == ["r"]
        drained = router.table.targets("e0")[0]
        router.drain_engine(drained.engine_id)
        for number in range(8):
            await router.generate(f"n{number}", call(f"n{number}"), lineage=FIRST)
        assert not generated(engines[0])
        assert len(generated(engines[1])) == 8


async def test_a_gateway_that_dies_is_started_again_and_sessions_stay_on_their_engines() -> None:
    async with behind_smg(2) as (router, engines):
        for number in range(4):
            await router.generate(f"s{number}", call(f"s{number}"), lineage=FIRST)
        old = {f"s{number}": home(router, f"s{number}", engines) for number in range(4)}
        smg = own(router)
        first = smg.pid
        assert first is not None
        os.killpg(first, signal.SIGKILL)
        await until(lambda: smg.pid not in (None, first), "it is back")
        for key, there in old.items():
            await router.generate(key, call(key, rid=f"{key}-after"), lineage=FIRST)
            assert home(router, key, engines) is there
            assert generated(there)[-1].rid == f"{key}-after"


async def test_a_gateway_of_ours_gets_none_of_our_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOLLWAY_ADMIN_KEY", "TOLLWAY_ROUTER_KEY", KEY_VARIABLE):
        monkeypatch.setenv(name, "a-secret-of-ours")
    async with behind_smg(1) as (router, _):
        assert b"a-secret-of-ours" not in Path(f"/proc/{own(router).pid}/environ").read_bytes()


async def test_a_gateway_ends_with_its_router() -> None:
    async with behind_smg(1) as (router, _):
        pid = own(router).pid
    assert pid is not None
    await until(lambda: not group_lives(pid), "nothing of it is left")


# -- gateways that others started ----------------------------------------------------------------------


@contextlib.asynccontextmanager
async def proxy(
    engine: str,
    change: Callable[[dict[str, object]], object],
    *,
    named: bool = True,
    reply: Callable[[bytes], bytes] = bytes,
) -> AsyncIterator[str]:
    """A gateway that changes bodies on their way to its one engine, or replies on their way back."""
    workers = [engine] if engine else []

    async def forward(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        change(body)
        async with aiohttp.ClientSession() as http, http.post(f"{workers[0]}/generate", json=body) as answer:
            headers = {ROUTED_BY: workers[0]} if named else {}
            return web.Response(body=reply(await answer.read()), status=answer.status, headers=headers)

    async def control(request: web.Request) -> web.Response:
        if request.method == "POST":
            workers.append((await request.json())["url"])
        if request.method == "DELETE":
            workers.clear()
        rows = [{"id": "1", "url": url, "model_id": "m", "status": "ready"} for url in workers]
        return web.json_response({"workers": rows})

    app = web.Application()
    app.router.add_post("/generate", forward)
    app.router.add_route("*", "/workers{rest:.*}", control)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_gateway_that_drops_fields_is_refused_at_start() -> None:
    async with FakeEngine() as engine:
        async with proxy(engine.url, lambda body: body.pop("return_routed_experts", None)) as url:
            with pytest.raises(ConfigError, match="drops return_routed_experts"):
                async with Router(RouterConfig(gateway_url=url)):
                    pass
        async with proxy(engine.url, lambda body: None, named=False) as url:
            with pytest.raises(ConfigError, match="does not name the engine"):
                async with Router(RouterConfig(gateway_url=url)):
                    pass


async def test_the_canary_finds_a_gateway_of_ours_in_order() -> None:
    async with aiohttp.ClientSession() as http:
        smg = await Smg.launch(http)
        try:
            await require_verbatim(smg.workers, http, timeout_s=5.0)
        finally:
            await smg.stop()
        with pytest.raises(ComponentLost, match="does not answer"):
            await require_verbatim(Workers(smg.url, http, key="", timeout_s=1.0), http, timeout_s=1.0)


@pytest.mark.parametrize(
    ("change", "named", "reply", "words"),
    [
        (lambda body: body.pop("tollway_canary"), True, bytes, "drops tollway_canary"),
        (lambda body: body.pop("routed_experts_start_len"), True, bytes, "drops routed_experts_start_len"),
        (lambda body: body.update(logprob_start_len=0), True, bytes, "changes logprob_start_len"),
        (lambda body: body.update(model="unknown"), True, bytes, "parses and writes every body again"),
        (lambda body: None, True, lambda text: text + b" ", "changes calls|changes replies"),
    ],
)
async def test_the_canary_tells_what_a_gateway_changes(
    change: Callable[[dict[str, object]], object], named: bool, reply: Callable[[bytes], bytes], words: str
) -> None:
    async with aiohttp.ClientSession() as http, proxy("", change, named=named, reply=reply) as url:
        with pytest.raises(ConfigError, match=words):
            await require_verbatim(Workers(url, http, key="", timeout_s=2.0), http, timeout_s=2.0)


async def test_a_gateway_of_several_models_is_refused() -> None:
    async with aiohttp.ClientSession() as http, FakeEngine() as one, FakeEngine() as two:
        smg = await Smg.launch(http)
        try:
            await smg.workers.add(one.url, model="policy")
            await smg.workers.add(two.url, model="judge")
            with pytest.MonkeyPatch.context() as patch:
                key = smg.workers._headers["authorization"].removeprefix("Bearer ")
                patch.setenv(KEY_VARIABLE, key)
                with pytest.raises(ConfigError, match=r"several models \(judge, policy\)"):
                    async with Router(RouterConfig(gateway_url=smg.url)):
                        pass
        finally:
            await smg.stop()


async def test_a_running_smg_is_used_and_its_strays_are_noticed() -> None:
    async with aiohttp.ClientSession() as http, FakeEngine() as one, FakeEngine() as two:
        smg = await Smg.launch(http)
        try:
            for engine in (one, two):
                await smg.workers.add(engine.url, model="policy")
            await require_fields(smg.url, http, {}, timeout_s=2.0)
            config = QUICK.model_copy(update={"gateway": "", "gateway_url": smg.url})
            async with Router(config) as router:
                router.add_engine(one.url)
                router.add_engine(two.url)
                await until(lambda: len(router.fleet.serving()) == 2, "both serve")
                await router.generate("s", call("s"), lineage=FIRST)
                there = home(router, "s", [one, two])
                other = two if there is one else one
                await smg.workers.remove(there.url)  # behind our back
                for _ in range(500):  # smg takes a moment to do as it was told
                    routed = await router.generate("s", call("s", rid="moved"), lineage=FIRST)
                    if generated(other):
                        break
                assert routed.engine_name.startswith(other.url)
                assert routed.facts.moved == "gateway"
                assert home(router, "s", [one, two]) is other
                assert generated(other)[-1].rid == "moved"
        finally:
            await smg.stop()


async def test_an_engine_that_nobody_registered_here_is_an_error_that_names_it() -> None:
    async with aiohttp.ClientSession() as http, FakeEngine() as known, FakeEngine() as stranger:
        smg = await Smg.launch(http)
        try:
            await smg.workers.add(stranger.url, model="policy")
            config = QUICK.model_copy(update={"gateway": "", "gateway_url": smg.url})
            async with Router(config) as router:
                router.add_engine(known.url)
                await until(lambda: bool(router.fleet.serving()), "it serves")
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("tollway.router.gateway._ASK_S", 0.3)
                    with pytest.raises(NoEngine, match=stranger.url):
                        await router.generate("s", call("s"), lineage=FIRST)
        finally:
            await smg.stop()
