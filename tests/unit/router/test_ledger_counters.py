"""The ledger beside the counters of real engines: both count the same calls, so both must say the same."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest

from tollway.fresh_model import ModelShape, write_fresh_model
from tollway.records import Sampling
from tollway.router.causes import CallFacts
from tollway.router.config import RouterConfig
from tollway.router.engines import GenerateCall, GenerateDelta
from tollway.router.service import Lineage, Routed, Router
from tollway.router.wire import Prompt

SHAPE = ModelShape(vocab_size=272, hidden_size=32, head_dim=8, intermediate_size=48, max_position_embeddings=1024)
CONFIG = RouterConfig(probe_interval_s=600.0, kv_budget_tokens=1_000_000)
"""Told of more KV than there is, admission holds nobody back; probes, which generate tokens, stay away."""
KV_TOKENS = 1200
"""Room for three or four of the sessions below on each of two engines; seven live there."""
SESSIONS, ROUNDS, FIRST, SAMPLED, TOOL = 14, 5, 90, 12, 40


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """URLs of two engine processes with little KV."""
    model = tmp_path_factory.mktemp("ledger") / "model"
    write_fresh_model(model, SHAPE, seed=1, std=0.15)
    command = [sys.executable, "-m", "tollway.engine", "--model-path", str(model)]
    command += ["--set", f"max_total_tokens={KV_TOKENS}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
        for _ in range(2)
    ]
    try:
        yield [json.loads(each.stdout.readline())["url"] for each in running if each.stdout is not None]
    finally:
        for each in running:
            each.terminate()
        for each in running:
            each.wait(20)
            if each.stdout is not None:
                each.stdout.close()


class Talk:
    """One session: every turn sends what was said plus a tool's answer."""

    def __init__(self, router: Router, key: str, *, seed: int) -> None:
        self.router, self.key = router, key
        self._random = np.random.default_rng(seed)
        self.ids = self._some(FIRST)
        self.facts: CallFacts | None = None
        self._sequence = 0
        self.turns = 0

    def _some(self, count: int) -> list[int]:
        return [int(each) for each in self._random.integers(0, 256, count)]

    def call(self, **more: object) -> GenerateCall:
        sampling = Sampling(max_new_tokens=SAMPLED, seed=1)
        prompt = Prompt.of(np.array(self.ids, np.int32))
        rid = f"{self.key}-{self.turns}-{len(more)}"
        return GenerateCall(
            rid=rid, prompt=prompt, sampling=sampling, routing_key=self.key, ignore_eos=True, **more  # type: ignore[arg-type]
        )  # fmt: skip

    @property
    def lineage(self) -> Lineage:
        return Lineage(self.facts, self._sequence)

    async def turn(self) -> Routed:
        routed = await self.router.generate(self.key, self.call(), lineage=self.lineage)
        self.ids += routed.reply.output_ids.tolist()
        self.facts, self._sequence = routed.facts, len(self.ids)
        self.ids += self._some(TOOL)
        self.turns += 1
        return routed


@asynccontextmanager
async def router_over(urls: list[str]) -> AsyncIterator[Router]:
    async with Router(CONFIG) as router:
        for url in urls:
            router.add_engine(url)
        await router.fleet.wait_serving(20, len(urls))
        yield router


async def round_of(talks: list[Talk]) -> None:
    """One turn of every session, four at a time: more would not fit beside each other."""
    for start in range(0, len(talks), 4):
        await asyncio.gather(*(talk.turn() for talk in talks[start : start + 4]))


NAMES = {
    "prompt_tokens": "sglang:prompt_tokens_total",
    "calls": "sglang:num_requests_total",
    "cached_tokens": "sglang:cached_tokens_total",
}


async def counters(router: Router, engine_id: str) -> dict[str, float]:
    """What the engine itself counted."""
    client = router.fleet.get(engine_id).client
    read = await client.metrics(*NAMES.values(), "sglang:evicted_tokens_total")
    found = {name: sum(read[series]) for name, series in NAMES.items()}
    return {**found, "evicted_tokens": sum(read["sglang:evicted_tokens_total"])}


async def test_the_ledger_says_what_the_engines_counted(engines: list[str]) -> None:
    """Fourteen sessions in too little KV, a refit's flush, a move and an abandoned stream."""
    async with router_over(engines) as router:
        before = {each: await counters(router, each) for each in router.fleet.engines}
        talks = [Talk(router, f"s{number}", seed=number) for number in range(SESSIONS)]
        await round_of(talks)
        await round_of(talks)
        evicted_by_now = {**router.ledger.total.waste}
        assert evicted_by_now.keys() <= {"eviction"}

        for engine in list(router.fleet.engines.values()):
            await engine.client.pause("retract")
            await engine.client.flush_cache()
            await engine.client.set_weight_version(1)
            router.note_refit(engine.id, 1, flushed=True)
            await engine.client.resume()
        await round_of(talks)
        flushed = router.ledger.total.waste["refit_flush"]
        assert flushed == sum(len(talk.ids) - TOOL - SAMPLED - TOOL - 1 for talk in talks), "each session pays once"

        mover = talks[0]
        home = router.table.pin(mover.key)
        assert home is not None
        lost = len(mover.ids) - TOOL - 1
        assert router.table.move(mover.key, "migration", exclude=frozenset((home.engine_id,))) is not None
        await mover.turn()
        assert router.ledger.total.moved == {"migration": lost}

        stream = router.stream(talks[1].key, talks[1].call(stream=True), lineage=talks[1].lineage)
        async with aclosing(stream) as items:
            async for item in items:
                assert isinstance(item, GenerateDelta)
                assert item.cached_tokens is not None
                break
        for _ in range(ROUNDS - 3):
            await round_of(talks[1:])

        total = router.ledger.summary(sessions=SESSIONS)
        assert (total["cancelled_calls"], total["unreported_calls"], total["first_calls"]) == (1, 0, SESSIONS)
        for engine_id, figures in router.ledger.engines.items():
            after = await counters(router, engine_id)
            said = {name: after[name] - before[engine_id][name] for name in after}
            assert said["evicted_tokens"] > 0
            for name in NAMES:
                assert said[name] == getattr(figures, name), f"{engine_id}: {name}"
        waste = router.ledger.total.waste
        assert set(waste) == {"eviction", "refit_flush", "moved"}, "every miss has its cause"
        assert waste["eviction"] > 0
        assert sum(waste.values()) == total["wasted_tokens"]
        listed = total["sessions"]
        assert isinstance(listed, list)
        assert sum(each["wasted_tokens"] for each in listed) == total["wasted_tokens"]
