"""The cache ledger beside a released SGLang: its definitions hold there to the token, and so do its sums."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tollway.records import Sampling
from tollway.router.causes import CallFacts
from tollway.router.config import RouterConfig
from tollway.router.engines import GenerateCall
from tollway.router.service import Lineage, Router
from tollway.router.wire import Prompt

pytestmark = pytest.mark.all
CONFIG = RouterConfig(probe_interval_s=600.0)
"""Probes generate tokens, which the server counts and the ledger does not."""
FIRST, SAMPLED, TOOL, SESSIONS = 90, 12, 40, 6


class Talk:
    """One session that grows by what is sampled and a tool's answer."""

    def __init__(self, key: str, seed: int) -> None:
        self.key, self._random = key, np.random.default_rng(seed)
        self.ids = self._some(FIRST)
        self._facts: CallFacts | None = None
        self._sequence = 0

    def _some(self, count: int) -> list[int]:
        return [int(each) for each in self._random.integers(10, 500, count)]

    async def turn(self, router: Router) -> None:
        call = GenerateCall(
            rid=f"{self.key}-{len(self.ids)}",
            prompt=Prompt.of(np.array(self.ids, np.int32)),
            sampling=Sampling(max_new_tokens=SAMPLED),
            routing_key=self.key,
            ignore_eos=True,
        )
        routed = await router.generate(self.key, call, lineage=Lineage(self._facts, self._sequence))
        self.ids += routed.reply.output_ids.tolist()
        self._facts, self._sequence = routed.facts, len(self.ids)
        self.ids += self._some(TOOL)


async def counted(router: Router) -> tuple[float, float] | None:
    """(prompt tokens, cached tokens) by the server's own counters; ``None`` when it shows none."""
    names = ("sglang:prompt_tokens_total", "sglang:cached_tokens_total", "sglang:token_usage")
    read = await router.fleet.get("e0").client.metrics(*names)
    return (sum(read[names[0]]), sum(read[names[1]])) if read[names[2]] else None


async def test_what_the_ledger_expects_of_the_cache_is_what_sglang_has(real_sglang_url: str) -> None:
    async with Router(CONFIG) as router:
        engine = router.add_engine(real_sglang_url)
        await engine.client.set_weight_version(0)  # a stock server begins with "default"
        engine.wake.set()
        await router.wait_ready(30)
        before = await counted(router)
        talks = [Talk(f"s{number}", number) for number in range(SESSIONS)]
        for _ in range(3):
            await asyncio.gather(*(talk.turn(router) for talk in talks))
        figures = router.ledger.summary()
        assert (figures["calls"], figures["first_calls"], figures["unreported_calls"]) == (3 * SESSIONS, SESSIONS, 0)
        assert figures["waste"] == {}
        assert figures["efficiency"] == 1.0
        assert figures["shared_tokens"] == 0, "not one token more than is possible by definition"
        assert figures["tiered_tokens"] == figures["cached_tokens"]

        await engine.client.flush_cache()
        router.note_refit("e0", None, flushed=True)
        lost = sum(len(talk.ids) - TOOL - 1 for talk in talks)
        for _ in range(2):
            await asyncio.gather(*(talk.turn(router) for talk in talks))
        figures = router.ledger.summary()
        assert figures["waste"] == {"refit_flush": lost // engine.page_size * engine.page_size}
        after = await counted(router)
        if before is not None and after is not None:
            assert after[0] - before[0] == figures["prompt_tokens"]
            assert after[1] - before[1] == figures["cached_tokens"]
