"""Every call is entered once, however it went; what is not known stays unknown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tollway.errors import EngineLost, EngineRefused
from tollway.records import Sampling
from tollway.router.config import RouterConfig
from tollway.router.engines import GenerateCall
from tollway.router.fake import FakeEngine, FakeReply
from tollway.router.member import Membership
from tollway.router.service import Lineage, Routed, Router
from tollway.router.wire import Prompt

CONFIG = RouterConfig(probe_interval_s=30.0, connect_timeout_s=0.5, abort_wait_s=0.1)
SAID = [111, 107, 261]
"""What a fake engine answers by default."""


def call(ids: list[int], rid: str, key: str = "s", **more: Any) -> GenerateCall:
    prompt = Prompt.of(np.array(ids, np.int32))
    return GenerateCall(rid=rid, prompt=prompt, sampling=Sampling(max_new_tokens=8), routing_key=key, **more)


@asynccontextmanager
async def fleet(
    count: int = 1, config: RouterConfig = CONFIG, **engine: Any
) -> AsyncIterator[tuple[Router, list[FakeEngine]]]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(**engine)) for _ in range(count)]
        router = await stack.enter_async_context(Router(config))
        for each in engines:
            router.add_engine(each.url)
        await router.fleet.wait_serving(10, count)
        yield router, engines


def after(routed: Routed, ids: list[int]) -> tuple[list[int], Lineage]:
    """A prompt that continues the call whose prompt was ``ids``, and what is known of that call."""
    sequence = ids + routed.reply.output_ids.tolist()
    return [*sequence, 9, 9], Lineage(routed.facts, len(sequence))


def telling(**meta: object) -> Callable[[dict[str, Any]], None]:
    """Changes ``meta_info`` of a reply; ``None`` leaves a key out."""

    def edit(value: dict[str, Any]) -> None:
        value["meta_info"].update(meta)
        value["meta_info"] = {key: each for key, each in value["meta_info"].items() if each is not None}

    return edit


async def until(condition: Callable[[], object], what: str) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never: {what}")


async def test_an_engine_that_does_not_say_is_unknown_and_not_0() -> None:
    async with fleet() as (router, engines):
        engines[0].script = lambda request: FakeReply(SAID, edit=telling(cached_tokens=None))
        routed = await router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage())
        assert routed.reply.cached_tokens is None
        figures = router.ledger.session("s")
        assert (figures["unreported_calls"], figures["unreported_prompt_tokens"]) == (1, 3)
        assert (figures["calls"], figures["hit_rate"]) == (0, None)


async def test_tiers_are_told_apart_where_the_engine_does() -> None:
    async with fleet() as (router, engines):
        first = await router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage())
        assert router.ledger.total.tiered_tokens == 0, "that reply said nothing of tiers"
        ids, lineage = after(first, [1, 2, 3])
        details = {"device": 2, "host": 2, "storage": 1, "storage_backend": "file"}
        engines[0].script = lambda request: FakeReply(
            SAID, cached_tokens=5, edit=telling(cached_tokens_details=details)
        )
        await router.generate("s", call(ids, "r1"), lineage=lineage)
        total = router.ledger.total
        assert (total.host_tokens, total.storage_tokens, total.tiered_tokens) == (2, 1, 5)
        assert (total.wasted_tokens, total.useful_tokens) == (0, 5)


async def test_what_lies_on_the_host_and_is_not_called_cached_is_wasted_for_that_reason() -> None:
    async with fleet() as (router, engines):
        first = await router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage())
        ids, lineage = after(first, [1, 2, 3])
        engines[0].metrics_text = "sglang:evicted_tokens_total 0\nsglang:token_usage 0.95\n"
        await router.fleet.read_evictions(router.fleet.get("e0"))
        details = {"device": 1, "host": 3}
        engines[0].script = lambda request: FakeReply(
            SAID, cached_tokens=1, edit=telling(cached_tokens_details=details)
        )
        await router.generate("s", call(ids, "r1"), lineage=lineage)
        assert router.ledger.total.waste == {"host_tier": 3, "eviction": 1}


async def test_running_requests_that_fill_the_kv_confirm_an_eviction() -> None:
    async with fleet() as (router, engines):
        first = await router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage())
        ids, lineage = after(first, [1, 2, 3])
        engines[0].flush()
        engines[0].metrics_text = 'sglang:token_usage{rank="0"} 0.2\nsglang:token_usage{rank="1"} 0.91\n'
        await router.generate("s", call(ids, "r1"), lineage=lineage)
        assert router.ledger.total.waste == {"eviction": 5}


async def test_a_counter_that_is_shown_from_its_first_count_on_was_0_before() -> None:
    """A stock server's page has no line of evictions until there was one."""
    async with fleet() as (router, engines):
        first = await router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage())
        ids, lineage = after(first, [1, 2, 3])
        engines[0].flush()
        engines[0].metrics_text = "sglang:evicted_tokens_total 700\nsglang:token_usage 0.1\n"
        await router.generate("s", call(ids, "r1"), lineage=lineage)
        assert router.ledger.total.waste == {"eviction": 5}


async def test_an_eviction_that_is_known_already_costs_no_reading() -> None:
    async with fleet() as (router, engines):
        engine = router.fleet.get("e0")
        engines[0].metrics_text = "sglang:evicted_tokens_total 5\n"
        await router.fleet.read_evictions(engine)
        first = await router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage())
        assert first.facts.evicted == 5
        ids, lineage = after(first, [1, 2, 3])
        engines[0].metrics_text = "sglang:evicted_tokens_total 6\n"
        await router.fleet.read_evictions(engine)
        engines[0].metrics_text = "no counters any more"
        engines[0].flush()
        await router.generate("s", call(ids, "r1"), lineage=lineage)
        assert router.ledger.total.waste == {"eviction": 5}


async def test_many_misses_read_the_counters_one_after_the_other_and_share_what_was_read() -> None:
    async with fleet() as (router, engines):
        engine, read, now, most, readings = router.fleet.get("e0"), router.fleet.read_evictions, 0, 0, 0

        async def counted(each: Any) -> None:
            nonlocal now, most, readings
            now, readings = now + 1, readings + 1
            most = max(most, now)
            await read(each)
            now -= 1

        router.fleet.read_evictions = counted  # type: ignore[method-assign]
        first = await router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage())
        ids, lineage = after(first, [1, 2, 3])
        engines[0].script = lambda request: FakeReply(SAID, cached_tokens=0)
        await asyncio.gather(*(router.generate("s", call(ids, f"q{n}"), lineage=lineage) for n in range(20)))
        assert most == 1
        assert router.ledger.total.waste == {"unknown": 100}
        before = readings
        assert await router.accounts._read(engine, float("-inf")), "an earlier reading will do"
        assert readings == before


async def test_misses_without_a_cause_are_said_once_a_minute_and_not_once_a_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fleet() as (router, engines):
        first = await router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage())
        ids, lineage = after(first, [1, 2, 3])
        engines[0].script = lambda request: FakeReply(SAID, cached_tokens=0)
        with caplog.at_level(logging.WARNING, "tollway.router.accounts"):
            for turn in range(3):
                await router.generate("s", call(ids, f"q{turn}"), lineage=lineage)
        (record,) = caplog.records
        assert "5 tokens missed the prefix cache" in record.getMessage()
        assert "--enable-metrics" in record.getMessage()


async def test_branches_of_one_call_are_calls_of_their_own() -> None:
    async with fleet() as (router, _):
        first = await router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage())
        ids, lineage = after(first, [1, 2, 3])
        for branch in range(3):
            await router.generate("s", call([*ids, branch], f"b{branch}"), lineage=lineage)
        total = router.ledger.total
        assert (total.calls, total.first_calls, total.prompt_tokens) == (4, 1, 3 + 3 * 9)
        assert (total.possible_tokens, total.useful_tokens) == (15, 15)
        assert total.shared_tokens == 6, "the second and third find what the first branch left besides"


async def test_a_call_that_was_sent_again_counts_once() -> None:
    async with fleet(2) as (router, engines):
        first = await router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage())
        home = next(each for each in engines if each.requests)
        home.script = lambda request: FakeReply([5], drop_after=0)
        ids, lineage = after(first, [1, 2, 3])
        routed = await router.generate("s", call(ids, "r1"), lineage=lineage)
        assert len(routed.dispatches) == 2
        total = router.ledger.total
        assert (total.calls, total.failed_calls, total.prompt_tokens) == (2, 0, 3 + 8)
        assert total.moved == {"engine_lost": 5}


async def test_a_branch_of_a_call_from_before_a_move_has_the_reason_of_the_move() -> None:
    async with fleet(2) as (router, engines):
        first = await router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage())
        home = next(each for each in engines if each.requests)
        home.script = lambda request: FakeReply([5], drop_after=0)
        ids, lineage = after(first, [1, 2, 3])
        await router.generate("s", call(ids, "r1"), lineage=lineage)
        next(each for each in engines if each is not home).flush()
        await router.generate("s", call([*ids, 7], "r2"), lineage=lineage)
        assert router.ledger.total.moved == {"engine_lost": 10}


async def test_a_reply_from_pieces_counts_once_and_what_its_pieces_cost_beside_it() -> None:
    async with fleet() as (router, engines):
        pieces = [FakeReply([5, 6], finish="abort"), FakeReply([7], edit=telling(num_retractions=2))]
        engines[0].script = lambda request: pieces.pop(0)
        engines[0].flush()
        routed = await router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage())
        assert routed.reply.output_ids.tolist() == [5, 6, 7]
        total = router.ledger.total
        assert (total.calls, total.prompt_tokens, total.cached_tokens) == (1, 3, 0)
        assert (total.resumed_calls, total.resumed_tokens) == (1, 1), "of 5 ids 4 were still cached"
        assert total.retractions == 2


async def test_the_first_prefill_counts_when_the_first_piece_was_aborted_while_it_waited() -> None:
    async with fleet() as (router, engines):
        waited = telling(prompt_tokens=None, cached_tokens=None, output_token_logprobs=None)
        pieces = [FakeReply([], finish="abort", edit=waited), FakeReply([7], cached_tokens=2)]
        engines[0].script = lambda request: pieces.pop(0)
        await router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage())
        total = router.ledger.total
        assert (total.calls, total.unreported_calls, total.cached_tokens, total.resumed_tokens) == (1, 0, 2, 0)


async def test_a_stream_that_is_left_counts_with_what_it_told() -> None:
    async with fleet() as (router, engines):
        first = await router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage())
        ids, lineage = after(first, [1, 2, 3])
        engines[0].script = lambda request: FakeReply([5] * 8, delay_s=0.01)
        async with aclosing(router.stream("s", call(ids, "r1"), lineage=lineage)) as items:
            async for _ in items:
                break
        total = router.ledger.total
        assert (total.calls, total.cancelled_calls, total.useful_tokens) == (2, 1, 5)


async def test_a_call_that_is_cancelled_before_it_told_anything_is_unknown() -> None:
    async with fleet() as (router, engines):
        engines[0].script = lambda request: FakeReply(SAID, delay_s=60)
        running = asyncio.create_task(router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage()))
        await until(lambda: engines[0].requests, "the engine has it")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        total = router.ledger.total
        assert (total.calls, total.cancelled_calls, total.unreported_calls) == (0, 1, 1)
        assert total.unreported_prompt_tokens == 3


async def test_a_lost_call_is_kept_and_a_refused_one_was_never_computed() -> None:
    async with fleet() as (router, engines):
        engines[0].script = lambda request: FakeReply([5], status=400, error="no")
        with pytest.raises(EngineRefused):
            await router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage())
        assert router.ledger.total.summary() == type(router.ledger.total)().summary()
        engines[0].script = lambda request: FakeReply([5], drop_after=0)
        with pytest.raises(EngineLost):
            await router.generate("s", call([1, 2, 3], "r1"), lineage=Lineage())
        total = router.ledger.total
        assert (total.failed_calls, total.unreported_calls, total.unreported_prompt_tokens) == (1, 1, 3)


async def test_a_cancelled_call_is_explained_later_and_leaves_nothing_of_a_forgotten_session() -> None:
    async with fleet() as (router, engines):
        engine, read, go = router.fleet.get("e0"), router.fleet.read_evictions, asyncio.Event()

        async def held(each: Any) -> None:
            await go.wait()
            await read(each)

        first = await router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage())
        ids, lineage = after(first, [1, 2, 3])
        engines[0].metrics_text = "sglang:evicted_tokens_total 5\n"
        await read(engine)
        lineage = replace(lineage, parent=replace(first.facts, evicted=5.0))
        engines[0].metrics_text = "sglang:evicted_tokens_total 6\n"
        router.fleet.read_evictions = held  # type: ignore[method-assign]
        engines[0].script = lambda request: FakeReply([5] * 8, cached_tokens=0, delay_s=0.01)
        async with aclosing(router.stream("s", call(ids, "r1"), lineage=lineage)) as items:
            async for _ in items:
                break
        assert router.ledger.total.cancelled_calls == 0, "it waits for the engine's counter"
        router.release_session("s")
        go.set()
        await router.accounts.aclose()
        assert router.ledger.total.waste == {"eviction": 5}
        assert (router.ledger.total.cancelled_calls, router.ledger.sessions) == (1, {})


async def test_a_parent_from_before_a_restart_of_the_server_is_still_a_parent() -> None:
    async with fleet() as (router, engines):
        first = await router.generate("s", call([1, 2, 3], "r0"), lineage=Lineage())
        ids, lineage = after(first, [1, 2, 3])
        earlier = replace(lineage, parent=replace(first.facts, earlier_run=True, incarnation=4, flush_epoch=9))
        await router.generate("s", call(ids, "r1"), lineage=earlier)
        total = router.ledger.total
        assert (total.first_calls, total.useful_tokens, total.wasted_tokens) == (1, 5, 0)
        engines[0].flush()
        await router.generate("s", call(ids, "r2"), lineage=earlier)
        assert total.waste == {"server_restarted": 5}


async def test_prompt_logprobs_are_never_asked_for_and_the_second_turn_finds_the_first() -> None:
    async with fleet(page_size=4) as (router, engines):
        ids = list(range(1, 31))
        first = await router.generate("s", call(ids, "r0"), lineage=Lineage())
        following, lineage = after(first, ids)
        second = await router.generate("s", call(following, "r1"), lineage=lineage)
        assert all(request.body["logprob_start_len"] == -1 for request in engines[0].requests)
        assert second.reply.cached_tokens is not None
        assert second.reply.cached_tokens >= len(ids) + len(SAID) - 4
        assert router.ledger.total.summary()["efficiency"] == 1.0


async def test_a_frozen_model_keeps_its_hits_when_the_policy_is_flushed() -> None:
    async with fleet(2) as (router, engines):
        await router.remove_engine("e1")
        router.add_engine(engines[1].url, Membership(model="judge", frozen=True))
        await until(lambda: router.fleet.serving("judge"), "the judge serves")
        firsts = {
            model: await router.generate("s", call([1, 2, 3], f"a{model}"), lineage=Lineage(), model=model)
            for model in ("", "judge")
        }
        engines[0].flush()
        router.note_refit("e0", 1, flushed=True)
        for model, first in firsts.items():
            ids, lineage = after(first, [1, 2, 3])
            await router.generate("s", call(ids, f"b{model}"), lineage=lineage, model=model)
        assert router.ledger.models[""].waste == {"refit_flush": 5}
        assert router.ledger.models["judge"].summary()["efficiency"] == 1.0
        assert router.ledger.session("s")["calls"] == 4
