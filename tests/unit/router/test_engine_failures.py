"""What fails in production, against embedded engines as real processes: each failure ends in the right state."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from live_engines import LiveEngine, Relay, live_engines, talking, write_model
from safetensors.torch import load_file

from tollway.errors import EngineLost, NoEngine, TollwayError
from tollway.records import Sampling
from tollway.router.accounts import Lineage
from tollway.router.calls import Routed
from tollway.router.config import RouterConfig
from tollway.router.engines import EngineClient, GenerateCall
from tollway.router.fleet import Engine
from tollway.router.health import EngineState
from tollway.router.service import Router
from tollway.router.wire import Prompt
from tollway.trainer.weights.payload import Payload, TensorPayload
from tollway.trainer.weights.refit import Refit, RefitNotice
from tollway.trainer.weights.wire import buckets, serialise

pytestmark = pytest.mark.slow(limit_s=60)

QUICK = RouterConfig(
    probe_interval_s=0.05,
    probe_timeout_s=0.6,
    probe_failures=2,
    connect_timeout_s=1.0,
    busy_window_s=0.3,
    progress_timeout_s=20.0,
    abort_wait_s=0.1,
)
LONG = 500
"""Tokens of a call that runs long enough to be met by a failure: half a second or more."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("live") / "model")


@pytest.fixture(scope="module")
def well(model: Path) -> Iterator[LiveEngine]:
    """An engine that no test harms."""
    with LiveEngine(model) as engine:
        yield engine


@pytest.fixture
def sick(model: Path) -> Iterator[LiveEngine]:
    """An engine of the test's own."""
    with LiveEngine(model) as engine:
        yield engine


def call(key: str, tokens: int = 4, *, rid: str = "") -> GenerateCall:
    return GenerateCall(
        rid=rid or f"{key}-{tokens}",
        prompt=Prompt.of(np.arange(1, 20, dtype=np.int32)),
        sampling=Sampling(temperature=0.0, max_new_tokens=tokens),
        routing_key=key,
        ignore_eos=True,
    )


async def until(condition: Callable[[], object], what: str) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never: {what}")


async def reaches(engine: Engine, state: EngineState, words: str = "") -> None:
    await until(
        lambda: engine.health.state is state and words in engine.health.reason,
        f"{engine.url} {state} {words!r}",
    )


@contextlib.asynccontextmanager
async def fleet(*urls: str) -> AsyncIterator[tuple[Router, list[Engine]]]:
    async with Router(QUICK) as router:
        engines = [router.add_engine(url) for url in urls]
        await router.fleet.wait_serving(30, len(urls))
        yield router, engines


async def settle(router: Router, key: str) -> str:
    """Run one call of a session; the id of the engine that it lives on."""
    await router.generate(key, call(key), lineage=Lineage())
    pin = router.table.pin(key)
    assert pin is not None
    return pin.engine_id


async def settle_on(router: Router, key: str, engine: Engine) -> None:
    """Give a session a home on ``engine``."""
    others = [each for each in router.fleet.engines.values() if each is not engine]
    for each in others:
        router.drain_engine(each.id)
    assert await settle(router, key) == engine.id
    for each in others:
        router.fleet.undrain(each)


async def long_call(router: Router, key: str, engine: Engine) -> asyncio.Task[Routed]:
    """A call that runs on the session's engine now, and has not ended."""
    running = asyncio.create_task(router.generate(key, call(key, LONG), lineage=Lineage()))
    async with aiohttp.ClientSession() as http:
        for _ in range(6000):
            async with http.get(f"{engine.url}/v1/loads") as response:
                if (await response.json())["loads"][0]["num_running_reqs"]:
                    return running
            assert not running.done(), "the call ended before anything could fail under it"
            await asyncio.sleep(0.002)
    raise AssertionError("the call never ran")


def one_moved_call(routed: Routed) -> None:
    """It ran to its end, sent exactly twice, all tokens from one engine."""
    assert (routed.reply.output_ids.size, len(routed.attempts)) == (LONG, 2)
    assert routed.facts.moved == "engine_lost"


async def test_kill_9_is_known_at_once_and_the_running_call_ends_elsewhere(sick: LiveEngine, well: LiveEngine) -> None:
    async with fleet(sick.url, well.url) as (router, (engine, other)):
        await settle_on(router, "s", engine)
        running = await long_call(router, "s", engine)
        sick.kill()
        one_moved_call(await running)
        await reaches(engine, EngineState.LOST, "nobody listens there")
        assert router.fleet.serving() == [other.id]
        assert router.fleet.down_s() == 0.0
        assert await settle(router, "t") == other.id


async def test_a_stopped_process_that_accepts_and_never_answers_is_lost_and_returns_as_another_incarnation(
    sick: LiveEngine, well: LiveEngine
) -> None:
    async with fleet(sick.url, well.url) as (router, (engine, other)):
        await settle_on(router, "s", engine)
        running = await long_call(router, "s", engine)
        sick.send(signal.SIGSTOP)
        one_moved_call(await running)
        await reaches(engine, EngineState.LOST, "no answer in time")
        sick.send(signal.SIGCONT)
        await reaches(engine, EngineState.SERVING)
        assert (engine.health.incarnation, engine.version) == (1, 0)
        assert await settle(router, "s") == other.id, "nothing flips back"


async def test_half_open_connections_are_found_by_deadlines_and_healed_ones_are_used_again(
    sick: LiveEngine, well: LiveEngine
) -> None:
    async with (
        Relay(sick.port).running() as relay,
        fleet(relay.url, well.url) as (router, (engine, other)),
    ):
        await settle_on(router, "s", engine)
        running = await long_call(router, "s", engine)
        relay.cut = True
        one_moved_call(await running)
        await reaches(engine, EngineState.LOST)
        relay.cut = False
        await reaches(engine, EngineState.SERVING)
        assert engine.health.incarnation == 1
        assert await settle(router, "s") == other.id


async def test_a_dead_scheduler_behind_a_healthy_front_is_found_and_stays_out(
    model: Path, well: LiveEngine, tmp_path: Path
) -> None:
    flag = tmp_path / "wedged"
    with LiveEngine(model, fault=("wedge", flag)) as wedged:
        async with fleet(wedged.url, well.url) as (router, (engine, other)):
            await settle_on(router, "s", engine)
            running = await long_call(router, "s", engine)
            flag.touch()
            one_moved_call(await running)
            await reaches(engine, EngineState.LOST)
            async with aiohttp.ClientSession() as http:
                client = EngineClient(engine.url, http)
                for _ in range(3):
                    assert await client.health(), "its front says 200 for ever"
                    assert (await client.model_info()).weight_version == "0"
            engine.health.last_error = ""
            await until(lambda: engine.health.last_error, "it was tried again")
            assert engine.health.state is EngineState.LOST, "an answer is no token"
            flag.unlink()
            await reaches(engine, EngineState.SERVING)
            assert engine.health.incarnation == 1
            assert await settle(router, "s") == other.id


async def test_an_idle_engine_with_a_dead_scheduler_is_found_without_any_call(model: Path, tmp_path: Path) -> None:
    flag = tmp_path / "wedged"
    with LiveEngine(model, fault=("wedge", flag)) as wedged:
        async with fleet(wedged.url) as (router, (engine,)):
            flag.touch()
            await reaches(engine, EngineState.LOST)
            with pytest.raises(NoEngine, match="is lost"):
                await router.generate("s", call("s"), lineage=Lineage())


async def test_garbage_metrics_do_no_harm(model: Path, tmp_path: Path) -> None:
    with LiveEngine(model, fault=("metrics", tmp_path)) as odd:
        async with fleet(odd.url) as (router, (engine,)):
            await router.fleet.read_evictions(engine)
            probes = engine.probes
            await until(lambda: engine.probes > probes + 10, "its metrics were read by the watch, too")
            await settle(router, "s")
            assert (engine.health.state, engine.health.failures) == (EngineState.SERVING, 0)
            assert not engine.evicted
            assert engine.usage is None


async def test_a_version_that_is_no_number_keeps_an_engine_out_until_it_is_stamped(model: Path) -> None:
    with LiveEngine(model, options=("--set", "weight_version='default'")) as live:
        async with Router(QUICK) as router, aiohttp.ClientSession() as http:
            engine = router.add_engine(live.url)
            await reaches(engine, EngineState.JOINING, "weight version 'default' is not a decimal number")
            assert "stamp the engine with update_weight_version" in engine.health.reason
            with pytest.raises(NoEngine, match="update_weight_version"):
                await router.generate("s", call("s"), lineage=Lineage())
            await EngineClient(live.url, http).set_weight_version(6)
            await reaches(engine, EngineState.SERVING)
            assert engine.version == 6


async def test_a_duplicate_registration_is_the_same_engine_under_any_spelling(well: LiveEngine) -> None:
    async with fleet(well.url) as (router, (engine,)):
        assert router.add_engine(f"{well.url}/") is engine
        alias = router.add_engine(well.url.replace("127.0.0.1", "localhost"))
        await reaches(alias, EngineState.JOINING, f"it is the same process as e0 at {well.url}")
        await settle(router, "s")
        assert router.fleet.serving() == ["e0"]


async def test_an_address_that_is_no_engine_stays_out_and_the_others_serve(well: LiveEngine) -> None:

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        async with talking(hang_up) as url, fleet(well.url) as (router, _):
            nobody = router.add_engine(f"http://127.0.0.1:{unused.getsockname()[1]}")
            closing = router.add_engine(url)
            await reaches(nobody, EngineState.JOINING, "nobody listens there")
            await reaches(closing, EngineState.JOINING, "it closed the connection without an answer")
            await settle(router, "s")
            assert router.fleet.serving() == ["e0"]


async def test_an_engine_that_is_started_again_at_its_address_waits_for_the_policys_weights(sick: LiveEngine) -> None:
    """It names version 0 as the policy does; its weights are those of its directory."""
    async with fleet(sick.url) as (router, (engine,)):
        router.note_refit(engine.id, 0, flushed=True)
        await settle(router, "s")
        sick.kill()
        sick.launch()
        await reaches(engine, EngineState.SYNCED, "it was started again")
        sick.ready()
        assert engine.health.incarnation == 1
        with pytest.raises(NoEngine, match="waits for the trainer's next refit"):
            await router.generate("s", call("s"), lineage=Lineage())
        router.note_refit(engine.id, 0, flushed=True)
        assert await settle(router, "s") == engine.id


async def test_a_pause_by_somebody_else_shows_and_stops_admission_but_loses_nothing(
    sick: LiveEngine, well: LiveEngine
) -> None:
    async with fleet(sick.url, well.url) as (router, (engine, other)), aiohttp.ClientSession() as http:
        await settle_on(router, "s", engine)
        client = EngineClient(engine.url, http)
        await client.pause("retract")
        await reaches(engine, EngineState.PAUSED, "it says that it is not ready")
        for number in range(3):
            assert await settle(router, f"t{number}") == other.id
        running = asyncio.create_task(router.generate("s", call("s", 8), lineage=Lineage()))
        probes = engine.probes
        await until(lambda: engine.probes > probes + 8, "it was probed for long")
        assert not running.done(), "its session waits where its prefix is"
        assert engine.health.state is EngineState.PAUSED
        await client.resume()
        assert len((await running).attempts) == 1
        await reaches(engine, EngineState.SERVING)


async def test_new_sessions_wait_for_the_end_of_a_pause_when_there_is_no_other_engine(sick: LiveEngine) -> None:
    async with fleet(sick.url) as (router, (engine,)), aiohttp.ClientSession() as http:
        client = EngineClient(sick.url, http)
        await client.pause("retract")
        router.note_refit(engine.id, None, flushed=False, phase="paused")
        waiting = [asyncio.create_task(settle(router, f"s{number}")) for number in range(4)]
        probes = engine.probes
        await until(lambda: engine.probes > probes + 3, "the pause lasted")
        assert not any(each.done() for each in waiting)
        router.note_refit(engine.id, None, flushed=False, phase="resumed")
        await client.resume()
        assert await asyncio.gather(*waiting) == [engine.id] * 4


async def test_half_loaded_weights_serve_nobody_until_a_full_reload(
    model: Path, sick: LiveEngine, well: LiveEngine
) -> None:
    """The second bucket is refused; the sessions of the engine go on elsewhere meanwhile."""
    async with fleet(sick.url, well.url) as (router, (engine, other)), aiohttp.ClientSession() as http:

        async def notify(notice: RefitNotice) -> None:
            router.note_refit(
                engine.id, notice.version, flushed=notice.flushed, phase=notice.phase, reason=notice.reason
            )

        await settle_on(router, "s", engine)
        good = whole_weights(model)
        weights = Given([good[0], b"garbage"])
        refit = Refit([EngineClient(engine.url, http)], weights, notify=notify)
        with pytest.raises(TollwayError):
            await refit.push(1)
        await reaches(engine, EngineState.QUARANTINED, "a refit failed half-way: engine")
        assert await settle(router, "s") == other.id
        probes = engine.probes
        await until(lambda: engine.probes > probes + 5, "it was probed, and answered")
        assert engine.health.state is EngineState.QUARANTINED
        weights.buckets = good
        await refit.push(1)
        assert (engine.health.state, engine.version) == (EngineState.SERVING, 1)
        reply = await EngineClient(engine.url, http).generate(call("x"))
        assert [span.version for span in reply.versions] == [1]


async def test_an_engine_left_in_the_middle_of_an_update_is_quarantined_by_whoever_meets_it_next(
    sick: LiveEngine,
) -> None:
    async with aiohttp.ClientSession() as http, Router(QUICK) as router:
        client = EngineClient(sick.url, http)
        await client.pause("retract")
        await client.begin_weight_update()
        engine = router.add_engine(sick.url)
        await reaches(engine, EngineState.QUARANTINED, "a weight-update session is open")
        assert not router.ready


async def test_all_engines_dead_is_said_with_the_reason_of_each(model: Path) -> None:
    live = LiveEngine(model), LiveEngine(model)
    with live_engines(*live):
        async with fleet(*(each.url for each in live)) as (router, _):
            await settle(router, "s")
            for each in live:
                each.kill()
            with pytest.raises((EngineLost, NoEngine)):
                await router.generate("s", call("s", 9), lineage=Lineage())
            await until(lambda: not router.ready, "both are lost")
            with pytest.raises(NoEngine) as error:
                await router.generate("s", call("s", 10), lineage=Lineage())
            assert str(error.value).count("is lost: engine") == 2
            assert router.fleet.down_s() > 0


@dataclass
class Given:
    """Buckets that a test made."""

    buckets: list[bytes]

    async def payload(self, version: int) -> Payload:
        return TensorPayload(self.buckets, 0)


def whole_weights(model: Path) -> list[bytes]:
    """The model's own weights as buckets."""
    return [serialise(bucket) for bucket in buckets(load_file(model / "model.safetensors").items(), 100_000)]
