"""Answers that get lost while a real engine sleeps and wakes: what is asked again, what is not, and who is gone."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from aiohttp import web

from tollway.errors import ComponentLost
from tollway.fresh_model import ModelShape, write_fresh_model
from tollway.router.engines import EngineClient
from tollway.trainer.backends.base import WeightBuckets
from tollway.trainer.weights.refit import Limits, Refit, RefitNotice, Sharing
from tollway.trainer.weights.transport import TensorWeights
from tollway.trainer.weights.turns import Turns
from tollway.trainer.weights.wire import buckets, serialise

TAGS = ("kv_cache", "weights")
SHAPE = {"vocab_size": 32, "hidden_size": 32, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64}
Far = Literal["asked", "answered", "broken off", "whole"]
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


@dataclass
class Wire:
    """What lies between a refit and an engine: it loses answers, and notes what a stock server would die of."""

    target: str
    loses: dict[str, list[Far]] = field(default_factory=dict)
    """By path, how far the next exchanges come, one after the other; what comes later passes."""
    away: set[str] = field(default_factory=set)
    """Tags that the engine has released."""
    in_vain: list[str] = field(default_factory=list)
    """Calls that release what is away or resume what is not."""
    asked: list[str] = field(default_factory=list)
    """Paths of all calls, in order."""

    async def forward(self, request: web.Request) -> web.StreamResponse:
        path, body = request.path, await request.read()
        self.asked.append(path)
        far = (self.loses.get(path) or ["whole"]).pop(0)
        if far == "asked":
            return self._cut(request)
        if path in (RELEASE, RESUME):
            self._note(path, set(json.loads(body)["tags"]))
        sent = {name: value for name, value in request.headers.items() if name.lower() == "content-type"}
        async with (
            aiohttp.ClientSession() as http,
            http.request(request.method, self.target + path, data=body, headers=sent) as got,
        ):
            status, data = got.status, await got.read()
        if far == "answered":
            return self._cut(request)
        out = web.StreamResponse(status=status, headers={"content-length": str(len(data))})
        await out.prepare(request)
        if far == "broken off":
            await out.write(data[:-1])
            return self._cut(request)
        await out.write(data)
        return out

    def _cut(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.StreamResponse()

    def _note(self, path: str, tags: set[str]) -> None:
        if (self.away & tags) if path == RELEASE else (tags - self.away):
            self.in_vain.append(f"{path} {sorted(tags)} with {sorted(self.away)} away")
        self.away = self.away | tags if path == RELEASE else self.away - tags


@dataclass
class Trainer:
    """Weights for the engine, and memory that comes and goes without a device."""

    model: Path
    calls: list[str] = field(default_factory=list)

    async def weight_buckets(self, max_bytes: int, transport: str) -> WeightBuckets:
        from safetensors.torch import load_file

        named = sorted(load_file(self.model / "model.safetensors").items())
        sent = tuple(serialise(bucket) for bucket in buckets(iter(named), max_bytes))
        return WeightBuckets(sent, sum(tensor.nbytes for _, tensor in named))

    async def device_memory(self) -> tuple[int, int] | None:
        return None

    async def offload(self) -> None:
        self.calls.append("offload")

    async def onload(self) -> None:
        self.calls.append("onload")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_fresh_model(folder, ModelShape.model_validate(SHAPE), seed=2)
    return folder


@contextmanager
def engine_of(model: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-P", "-m", "tollway.engine", "--model-path", str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"], process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[str]:
    """One engine for all tests that leave it alive."""
    with engine_of(model) as (url, _):
        yield url


class Party:
    """A trainer and one engine that take turns, over a wire."""

    def __init__(self, model: Path, engine: EngineClient, wire: Wire) -> None:
        self.engine, self.wire, self.trainer = engine, wire, Trainer(model)
        self.heard: list[RefitNotice] = []
        weights = TensorWeights(self.trainer, bucket_bytes=10_000, transport="tensor")  # type: ignore[arg-type]
        self.refit = Refit(
            [engine], weights, sharing=Sharing(self.trainer, TAGS), notify=self._hear, limits=Limits(30.0, 30.0)
        )
        self.turns = Turns(self.refit, self.trainer, shared=True)

    async def _hear(self, notice: RefitNotice) -> None:
        self.heard.append(notice)

    async def state(self) -> tuple[bool, list[str], str]:
        """Paused, what is released, and the version, as the engine says."""
        raw: dict[str, Any] = dict((await self.engine.server_info()).raw)
        inner = raw["internal_states"][0]
        return inner["paused"], inner["released_tags"], raw["weight_version"]


@asynccontextmanager
async def over_a_wire(model: Path, served: str) -> AsyncIterator[Party]:
    """A party whose engine is at ``served``; it gets back what it came with."""
    wire = Wire(served)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{rest:.*}", wire.forward)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as http:
        engine, direct = (EngineClient(url, http) for url in (f"http://127.0.0.1:{runner.addresses[0][1]}", served))
        try:
            yield Party(model, engine, wire)
        finally:
            await engine.aclose()
            await runner.cleanup()
            if wire.away:
                await direct.resume_memory(sorted(wire.away))
            await direct.set_weight_version(0)
            await direct.resume()


@pytest.fixture
async def party(model: Path, served: str) -> AsyncIterator[Party]:
    async with over_a_wire(model, served) as made:
        yield made


FAR = pytest.mark.parametrize("far", ["asked", "answered", "broken off"])


@FAR
@pytest.mark.parametrize("path", ["/pause_generation", "/flush_cache", "/continue_generation"])
async def test_what_may_be_said_twice_is_said_twice_and_costs_nothing(party: Party, path: str, far: Any) -> None:
    party.wire.loses[path] = [far]
    await party.turns.trainer()
    assert (await party.state())[:2] == (True, sorted(TAGS))
    done = await party.turns.engines(1)
    assert party.wire.asked.count(path) == 2
    assert (done.pushed.quarantined, await party.state()) == ((), (False, [], "1"))
    assert party.trainer.calls == ["onload", "offload"]
    assert [notice.phase for notice in party.heard] == ["paused", "resumed"]


@FAR
async def test_an_engine_that_serves_goes_on_after_a_lost_answer_to_go_on(party: Party, far: Any) -> None:
    party.wire.loses["/continue_generation"] = [far]
    apart = Refit([party.engine], party.refit._weights)
    assert (await apart.push(3)).quarantined == ()
    assert await party.state() == (False, [], "3")


@FAR
async def test_an_engine_that_lives_and_may_have_kept_its_memory_ends_the_turn(party: Party, far: Any) -> None:
    party.wire.loses[RELEASE] = [far]
    with pytest.raises(
        ComponentLost, match=r"did not give its memory back, which the trainer needs.*its process has not ended"
    ):
        await party.turns.trainer()
    assert party.trainer.calls == [], "the trainer took a device that may be taken"
    assert (await party.state())[0], "an engine of which nobody knows what it has may not serve"
    assert party.heard[-1].phase == "failed"
    assert party.wire.asked.count(RELEASE) == 1, "a stock server dies of the second"


@pytest.mark.parametrize("path", ["/pause_generation", "/flush_cache"])
async def test_an_engine_that_answers_everything_but_one_call_kept_its_memory(party: Party, path: str) -> None:
    party.wire.loses[path] = ["answered"] * 9
    with pytest.raises(ComponentLost, match="did not give its memory back"):
        await party.turns.trainer()
    assert party.trainer.calls == []
    assert await party.state() == (False, [], "0"), "it goes on with what it had"


@pytest.mark.parametrize("far", ["answered", "broken off"])
async def test_a_lost_answer_to_a_resume_costs_no_restart(party: Party, far: Any) -> None:
    await party.turns.trainer()
    party.wire.loses[RESUME] = [far]  # of the weights: the push finds that nobody took them, and tries again
    await party.turns.engines(1)
    assert await party.state() == (False, [], "1")
    assert [notice.phase for notice in party.heard] == ["paused", "failed", "resumed"]

    await party.turns.trainer()
    party.wire.loses[RESUME] = ["whole", far]  # of the rest: it stays paused, and its keeper brings it the weights
    await party.turns.engines(2)
    assert (party.heard[-1].phase, (await party.state())[0]) == ("failed", True)
    await party.refit.catch_up([party.engine])
    assert await party.state() == (False, [], "2")
    assert party.heard[-1].phase == "resumed"
    assert party.wire.in_vain == []


async def test_an_engine_that_is_killed_in_the_middle_of_a_release_is_gone_and_frees_the_device(model: Path) -> None:
    with engine_of(model) as (url, process):

        class Killed(EngineClient):
            async def release_memory(self, tags: Sequence[str]) -> None:
                process.send_signal(signal.SIGSTOP)  # so that it cannot answer before its end
                asyncio.get_running_loop().call_later(0.2, process.kill)
                await super().release_memory(tags)

        async with aiohttp.ClientSession() as http:
            party = Party(model, Killed(url, http), Wire(url))
            await party.turns.trainer()
            assert party.trainer.calls == ["onload"]
            await party.engine.aclose()
        assert process.wait(10) == -signal.SIGKILL


async def test_an_engine_whose_launcher_saw_its_end_is_gone_although_something_accepts_at_its_address(
    party: Party,
) -> None:
    """As a container's port does, whose forwarder lives longer than the program."""
    party.wire.loses = {RELEASE: ["asked"], "/ready": ["asked"] * 1000}
    taking = asyncio.create_task(party.turns.trainer())
    while party.wire.asked.count("/ready") < 2 and not taking.done():
        await asyncio.sleep(0.01)
    assert party.trainer.calls == []
    party.refit.forget(party.engine.url)
    await taking
    assert party.trainer.calls == ["onload"]


@pytest.mark.all
async def test_the_released_sglang_bears_every_answer_that_is_lost_but_that_of_a_release(real_sglang_url: str) -> None:
    async with aiohttp.ClientSession() as http:
        own = (await EngineClient(real_sglang_url, http).model_info()).model_path
    async with over_a_wire(Path(own), real_sglang_url) as party:
        said_twice = ("/pause_generation", "/flush_cache", "/continue_generation")
        party.wire.loses = {path: ["answered"] for path in said_twice} | {RESUME: ["answered"]}
        await party.turns.trainer()
        await party.turns.engines(1)
        assert [party.wire.asked.count(path) for path in said_twice] == [2, 2, 2]
        assert await party.engine.health_generate()

        await party.turns.trainer()
        party.wire.loses[RESUME] = ["whole", "answered"]
        await party.turns.engines(2)
        await party.refit.catch_up([party.engine])
        assert party.wire.in_vain == []
        assert await party.engine.health_generate()
        assert (await party.engine.model_info()).weight_version == "2"
