"""What happens to a call when its engine fails, refuses, is busy, or has other weights than the call wants."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
from call_helpers import QUICK, call, fleet, home_of, loads, over, states, until

from tollway.errors import EngineBusy, EngineLost, EngineRefused, NoEngine, UpstreamError, VersionNotReady
from tollway.records import Sampling
from tollway.router.fake import FakeEngine, FakeReply, FakeRequest
from tollway.router.fleet import Membership
from tollway.router.service import Lineage, Routed, Router
from tollway.router.targets import Wanted

NONE = Lineage()
OTHERS = QUICK.model_copy(update={"probe_interval_s": 30.0})
"""For engines that are told what they serve: nobody looks again meanwhile."""


def scripted(*replies: FakeReply) -> Callable[[FakeRequest], FakeReply]:
    """Answers in order; the last one repeats."""
    left = list(replies)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


# -- a lost connection ------------------------------------------------------------------------------


async def test_a_re_dispatch_comes_after_the_abort_with_a_new_id_and_is_recorded() -> None:
    """The old request must not decode beside the new one."""
    async with fleet(2) as (router, engines):
        await router.generate("s", call(rid="r0"), lineage=NONE)
        home, other = home_of(engines)
        home.script = lambda request: FakeReply(ids=[5], drop_after=0)
        told: list[bool] = []
        answer = other.script

        def second(request: FakeRequest) -> FakeReply:
            told.append("r1" in home.aborts)
            return answer(request)

        other.script = second
        routed = await router.generate("s", call(rid="r1"), lineage=NONE)
        assert told == [True]
        assert [(each.rid, each.engine_name, each.why) for each in routed.attempts] == [
            ("r1", f"{home.url}#0", ""),
            ("r1-again", f"{other.url}#0", "engine_lost"),
        ]
        assert routed.facts.moved == "engine_lost"


async def test_an_abort_that_does_not_arrive_does_not_hold_up_the_re_dispatch_for_ever() -> None:
    config = QUICK.model_copy(update={"abort_wait_s": 0.05, "probe_timeout_s": 2.0})
    async with fleet(2, config) as (router, engines):
        await router.generate("s", call(rid="r0"), lineage=NONE)
        home, other = home_of(engines)
        release = asyncio.Event()

        async def deaf(rid: str) -> None:
            await release.wait()

        client = router.fleet.engines[router.table.pins["s"].engine_id].client
        client.aborts._send = deaf
        home.script = lambda request: FakeReply(ids=[5], drop_after=0)
        async with asyncio.timeout(5):
            routed = await router.generate("s", call(rid="r1"), lineage=NONE)
        assert routed.dispatches == ("r1", "r1-again")
        assert other.requests[-1].rid == "r1-again"
        release.set()


async def test_there_is_exactly_one_re_dispatch() -> None:
    async with fleet(3) as (router, engines):
        for engine in engines:
            engine.script = lambda request: FakeReply(ids=[5], drop_after=0)
        with pytest.raises(EngineLost):
            await router.generate("s", call(), lineage=NONE)
        assert sorted(request.rid for engine in engines for request in engine.requests) == ["r", "r-again"]


async def test_a_call_to_the_process_before_says_nothing_of_the_one_that_came_back() -> None:
    async with fleet(1, OTHERS) as (router, engines):
        engine = router.fleet.engines["e0"]
        engines[0].script = lambda request: FakeReply(ids=[5], delay_s=0.1, drop_after=0)
        running = asyncio.create_task(router.generate("s", call(), lineage=NONE))
        await until(lambda: engines[0].requests, "the engine has the call")
        engine.client = copy.copy(engine.client)  # as after a loss and a return
        with pytest.raises(EngineLost):
            await running
        assert (engine.health.failures, engine.doubted) == (0, False)


async def test_what_a_client_saw_is_never_sampled_again() -> None:
    async with fleet(2) as (router, engines):
        for engine in engines:
            engine.script = lambda request: FakeReply(ids=[5, 6, 7], drop_after=1)
        with pytest.raises(EngineLost):
            async for _ in router.stream("s", call(), lineage=NONE):
                pass
        assert [request.rid for engine in engines for request in engine.requests] == ["r"]


async def test_a_continuation_that_is_lost_before_its_first_token_goes_to_another_engine() -> None:
    """What the client saw is in the piece that came whole; the rest is asked for once more, elsewhere."""
    async with fleet(2) as (router, engines):
        await router.generate("s", call(rid="r0"), lineage=NONE)
        home, other = home_of(engines)
        home.script = scripted(FakeReply(ids=[5, 6, 7], finish="abort"), FakeReply(ids=[8], drop_after=0))
        other.script = lambda request: FakeReply(ids=[8, 9])
        wanted = replace(call(rid="r1"), sampling=Sampling(max_new_tokens=10))
        items = [item async for item in router.stream("s", wanted, lineage=NONE)]
        routed = items[-1]
        assert isinstance(routed, Routed)
        assert routed.reply.output_ids.tolist() == [5, 6, 7, 8, 9]
        assert [each.why for each in routed.attempts] == ["", "resumed", "engine_lost"]
        assert other.requests[-1].input_ids == [1, 2, 3, 5, 6, 7]
        # Report F3: of 10 tokens 3 are there, so 7 are asked for, also after the move.
        params = other.requests[-1].body["sampling_params"]
        assert isinstance(params, dict)
        assert params["max_new_tokens"] == 7


async def test_an_abort_reaches_the_engine_of_its_request_although_another_engine_is_dead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Report D11: three engines, one refuses connections; the caller gives up on a request of the second."""
    async with fleet(3) as (router, engines):
        await router.generate("s", call(rid="r0"), lineage=NONE)
        home = next(engine for engine in engines if engine.requests)
        dead, third = (engine for engine in engines if engine is not home)
        await dead.stop()
        home.script = lambda request: FakeReply(ids=[5], delay_s=60)
        calling = asyncio.create_task(router.generate("s", call(rid="slow"), lineage=NONE))
        await until(lambda: home.in_flight == 1, "the engine has it")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(calling, 0.01)
        async with asyncio.timeout(1):
            await until(lambda: "slow" in home.aborts, "the abort arrives")
        await until(lambda: home.in_flight == 0, "nothing decodes for nobody")
        home.script = third.script
        assert (await router.generate("s", call(rid="r2"), lineage=NONE)).dispatches == ("r2",)
        assert third.aborts == []
        assert not [record for record in caplog.records if record.levelno > logging.ERROR]


async def test_an_abort_is_sent_again_when_its_own_connection_breaks() -> None:
    async with fleet(1) as (router, engines):
        (engine,) = engines
        client = router.fleet.engines["e0"].client
        send, tries = client.abort, 0

        async def breaks(rid: str) -> None:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise EngineLost("reset")
            await send(rid)

        client.aborts._send = breaks
        engine.script = lambda request: FakeReply(ids=[5], delay_s=60)
        calling = asyncio.create_task(router.generate("s", call(), lineage=NONE))
        await until(lambda: engine.in_flight == 1, "the engine has it")
        calling.cancel()
        await until(lambda: engine.aborts == ["r"], "the abort arrives")
        assert tries == 2


async def test_a_reset_in_the_middle_whose_closing_fails_too_counts_once_and_leaves_no_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Report D3."""
    import aiohttp

    async with fleet(1, OTHERS) as (router, engines):
        leave = aiohttp.ClientResponse.__aexit__

        async def fails(self: aiohttp.ClientResponse, *error: object) -> None:
            await leave(self, *error)  # type: ignore[arg-type]
            raise aiohttp.ClientOSError("closing failed as well")

        monkeypatch.setattr(aiohttp.ClientResponse, "__aexit__", fails)
        engines[0].script = lambda request: FakeReply(ids=[5, 6, 7], drop_after=1)
        with pytest.raises(EngineLost):
            async for _ in router.stream("s", call(), lineage=NONE):
                pass
        monkeypatch.undo()
        assert router.fleet.engines["e0"].health.failures == 1
        assert loads(router)[0][:2] == (0, 0)


async def test_sessions_of_a_removed_engine_move_because_it_was_drained_not_lost() -> None:
    async with fleet(2) as (router, engines):
        await router.generate("s", call(rid="r0"), lineage=NONE)
        home, _ = home_of(engines)
        await router.remove_engine(router.table.pins["s"].engine_id)
        moved = await router.generate("s", call(rid="r1"), lineage=NONE)
        assert moved.facts.moved == "drain"
        assert home.url not in moved.engine_name


async def test_sessions_of_an_engine_that_was_dead_when_it_was_taken_away_lost_it() -> None:
    """A launcher hears first that its engine died and removes it before any call or probe of the router finds out."""
    async with fleet(2, QUICK.model_copy(update={"probe_interval_s": 600.0})) as (router, engines):
        await router.generate("s", call(rid="r0"), lineage=NONE)
        home, _ = home_of(engines)
        engine_id = router.table.pins["s"].engine_id
        await home.stop()
        assert states(router) == ["serving"] * 2, "the router does not know yet"
        await router.remove_engine(engine_id)
        moved = await router.generate("s", call(rid="r1"), lineage=NONE)
        assert moved.facts.moved == "engine_lost"
        assert home.url not in moved.engine_name


# -- 503 and pauses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("retries", [0, 2, 4])
async def test_an_engine_without_room_gets_exactly_the_configured_attempts(retries: int) -> None:
    """Report D12: max_retries 2 against constant 503 is three attempts."""
    async with fleet(1, QUICK.model_copy(update={"max_retries": retries})) as (router, engines):
        (engine,) = engines
        engine.script = lambda request: FakeReply(ids=[], status=503, error="queue is full")
        with pytest.raises(EngineBusy, match="queue is full"):
            await router.generate("s", call(), lineage=NONE)
        assert [request.rid for request in engine.requests] == ["r", *(f"r-retry{n + 1}" for n in range(retries))]
        assert loads(router)[0][:2] == (0, 0)
        assert router.engines()[0]["failures"] == 0, "it lives"


async def test_an_engine_without_room_gets_no_new_session_and_keeps_its_own() -> None:
    async with fleet(2, QUICK.model_copy(update={"busy_pause_s": 60.0})) as (router, engines):
        first = await router.generate("s", call(rid="r0"), lineage=NONE)
        goes_on = Lineage(first.facts, 6)
        home, other = home_of(engines)
        home.script = scripted(FakeReply(ids=[], status=503, error="full"), FakeReply(ids=[7]))
        back = await router.generate("s", call(rid="r1", ids=[1, 2, 3, 111, 107, 261, 9]), lineage=goes_on)
        assert [each.why for each in back.attempts] == ["", "busy"]
        assert back.engine_name == f"{home.url}#0", "its prefix is there"
        # Its reply ended the pause; the next 503 begins another one.
        home.script = lambda request: FakeReply(ids=[], status=503, error="full")
        with pytest.raises(EngineBusy):
            await router.generate("s", call(rid="r2", ids=[1, 2, 3, 111, 107, 261, 9]), lineage=goes_on)
        before = len(home.requests)
        for number in range(4):
            await router.generate(f"t{number}", call(f"t{number}", rid=f"q{number}"), lineage=NONE)
        assert len(home.requests) == before
        assert len(other.requests) == 4


async def test_a_first_call_that_meets_an_engine_without_room_goes_to_another_one() -> None:
    async with fleet(2) as (router, engines):
        for engine in engines:
            engine.script = lambda request: FakeReply(ids=[], status=503, error="full")
        with pytest.raises(EngineBusy):
            await router.generate("x", call("x", rid="x"), lineage=NONE)
        assert len({id(engine) for engine in engines if engine.requests}) == 2, "both were asked"
        assert sum(len(engine.requests) for engine in engines) == 3


async def test_a_session_with_a_running_call_stays_although_another_of_its_calls_finds_no_room() -> None:
    """Two choices of a first turn: one session is on one engine."""
    async with fleet(2) as (router, engines):
        refused: list[str] = []

        def script(request: FakeRequest) -> FakeReply:
            if request.rid == "r0":
                return FakeReply(ids=[7], delay_s=0.3)
            if request.rid not in refused and not refused:
                refused.append(request.rid)
                return FakeReply(ids=[], status=503, error="full")
            return FakeReply(ids=[8])

        for engine in engines:
            engine.script = script
        running = asyncio.create_task(router.generate("s", call(rid="r0"), lineage=NONE))
        await until(lambda: any(engine.requests for engine in engines), "the first choice runs")
        home, other = home_of(engines)
        second = await router.generate("s", call(rid="r1"), lineage=NONE)
        assert second.dispatches == ("r1", "r1-retry1")
        assert {second.engine_name, (await running).engine_name} == {f"{home.url}#0"}
        assert other.requests == []


async def test_refused_versions_use_up_none_of_the_attempts_after_a_503() -> None:
    async with fleet(1, QUICK.model_copy(update={"version_wait_s": 10.0, "max_retries": 1})) as (router, engines):
        refusal = FakeReply(ids=[], status=409, error="version 0 is not loaded yet")
        full = FakeReply(ids=[], status=503, error="full")
        engines[0].script = scripted(refusal, refusal, full, FakeReply(ids=[7]))
        routed = await router.generate("s", call(), lineage=NONE, want=Wanted(minimum=0))
        assert [each.why for each in routed.attempts] == ["", "not_ready", "not_ready", "busy"]
        assert len(set(routed.dispatches)) == 4
        assert router._calls._pause_s(5000) == 8.0, "however often it was refused"


async def test_a_new_session_waits_while_the_only_engine_pauses() -> None:
    """A refit pauses every engine for a moment: that is no reason to refuse the sessions that start then."""
    async with fleet(1) as (router, engines):
        router.note_refit("e0", None, flushed=True, phase="paused")
        assert states(router) == ["paused"]
        starting = asyncio.create_task(router.generate("s", call(), lineage=NONE))
        await asyncio.sleep(0.05)
        assert not starting.done()
        assert engines[0].requests == []
        engines[0].version = "1"
        router.note_refit("e0", 1, flushed=False, phase="resumed")
        assert (await starting).facts.end_version == 1


async def test_calls_to_a_paused_engine_are_not_wasted_on_its_503() -> None:
    async with fleet(1, OTHERS) as (router, engines):
        await router.generate("s", call(rid="r0"), lineage=NONE)
        router.note_refit("e0", None, flushed=True, phase="paused")
        engines[0].script = lambda request: FakeReply(ids=[], status=503, error="paused")
        calling = asyncio.create_task(router.generate("s", call(rid="r1"), lineage=NONE))
        await until(lambda: len(engines[0].requests) == 2, "it was asked once")
        await asyncio.sleep(0.1)
        assert len(engines[0].requests) == 2
        engines[0].script = lambda request: FakeReply(ids=[7], versions=[("1", 0, 1)])
        router.note_refit("e0", 1, flushed=False, phase="resumed")
        assert (await calling).dispatches == ("r1", "r1-retry1")


# -- places -----------------------------------------------------------------------------------------


async def test_a_pin_carries_the_rank_and_every_call_names_it() -> None:
    async with FakeEngine() as engine:
        engine.dp_size = 4
        async with over(engine) as router:
            for turn in range(3):
                for key in ("a", "b", "c", "d"):
                    await router.generate(key, call(key, rid=f"{key}{turn}"), lineage=NONE)
            ranks: dict[str, set[object]] = {}
            for request in engine.requests:
                ranks.setdefault(str(request.body["routing_key"]), set()).add(request.body["routed_dp_rank"])
            assert sorted(map(tuple, ranks.values())) == [(0,), (1,), (2,), (3,)]
            routed = await router.generate("a", call("a", rid="a9"), lineage=NONE)
            assert routed.facts.dp_rank == next(iter(ranks["a"]))


async def test_an_engine_with_one_rank_is_not_told_a_rank() -> None:
    async with fleet(1) as (router, engines):
        await router.generate("s", call(), lineage=NONE)
        assert "routed_dp_rank" not in engines[0].requests[0].body


async def test_a_session_that_asks_other_models_keeps_its_place_at_each() -> None:
    """Report D10: key K uses models A, B, C, then A."""
    engines = [FakeEngine() for _ in range(6)]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        members = {at: Membership(model=("", "judge", "teacher")[at // 2], frozen=at > 1) for at in range(6)}
        router = await stack.enter_async_context(over(*engines, members=members))
        for _ in range(3):
            for model in ("", "judge", "teacher"):
                rid = f"{model}{sum(len(engine.requests) for engine in engines)}"
                await router.generate("k", call("k", rid=rid), lineage=NONE, model=model)
        counts = [len(engine.requests) for engine in engines]
        assert sorted(counts[0:2]) == sorted(counts[2:4]) == sorted(counts[4:6]) == [0, 3]
        with pytest.raises(NoEngine):
            await router.generate("k", call("k", rid="x"), lineage=NONE, model="critic")
        router.release_session("k")
        assert loads(router) == [(0, 0, 0, 0, 0)] * 6


async def test_a_child_starts_where_its_parent_is() -> None:
    async with fleet(4) as (router, _):
        for number in range(8):
            await router.generate(f"p{number}", call(f"p{number}", rid=f"p{number}"), lineage=NONE)
        for number in range(8):
            key = f"c{number}"
            await router.generate(key, call(key, rid=key), lineage=NONE, parent=f"p{number}")
        pins = router.table.pins
        assert all(pins[f"c{number}"].engine_id == pins[f"p{number}"].engine_id for number in range(8))


async def test_an_engine_runs_no_more_calls_than_it_may_and_urgent_ones_are_next() -> None:
    async with FakeEngine() as engine:
        most = 0

        def script(request: FakeRequest) -> FakeReply:
            nonlocal most
            most = max(most, engine.in_flight)
            return FakeReply(ids=[5], delay_s=0.02)

        engine.script = script
        async with over(engine, members={0: Membership(max_in_flight=2)}) as router:
            tasks = []
            for number in range(8):
                key = f"s{number}"
                tasks.append(
                    asyncio.create_task(
                        router.generate(key, call(key, rid=key), lineage=NONE, priority=10 if number == 7 else 0)
                    )
                )
                await asyncio.sleep(0)
            await until(lambda: router.table.targets("e0")[0].waiting == 6, "six wait")
            assert router.engines()[0]["waiting"] == 6
            await asyncio.gather(*tasks)
            assert most == 2
            assert [request.rid for request in engine.requests].index("s7") == 2
            assert loads(router)[0][:2] == (0, 0)


async def test_calls_that_wait_for_a_slot_of_an_engine_that_dies_go_elsewhere() -> None:
    members = dict.fromkeys(range(2), Membership(max_in_flight=1))
    async with FakeEngine() as one, FakeEngine() as two, over(one, two, members=members) as router:
        await router.generate("s", call(rid="r0"), lineage=NONE)
        home, other = home_of([one, two])
        home.script = lambda request: FakeReply(ids=[5], delay_s=60)
        calls = [asyncio.create_task(router.generate("s", call(rid=f"r{n + 1}"), lineage=NONE)) for n in range(5)]
        await until(lambda: home.in_flight == 1, "one runs, four wait")
        await home.stop()
        done = await asyncio.gather(*calls)
        assert {each.engine_name for each in done} == {f"{other.url}#0"}
        assert len(other.requests) == 5
        assert all(load[:2] == (0, 0) for load in loads(router))


async def test_a_session_leaves_an_engine_whose_queue_costs_more_than_its_prefix() -> None:
    """Not for a short wait, and only with the reason recorded."""
    members = dict.fromkeys(range(2), Membership(max_in_flight=1))
    async with FakeEngine() as one, FakeEngine() as two, over(one, two, members=members) as router:
        # What it takes to compute a prefix is known: some microseconds a token.
        for turn in range(4):
            await router.generate("s", call(ids=[1, 2, 3, *range(turn + 1)], rid=f"r{turn}"), lineage=NONE)
            await router.generate("t", call("t", ids=[1, 2, 3, *range(turn + 1)], rid=f"t{turn}"), lineage=NONE)
        target = router.table.target_of(router.table.pins["s"])
        assert target is not None
        home, other = (one, two) if router.fleet.engines[target.engine_id].url == one.url else (two, one)
        home.script = lambda request: FakeReply(ids=[5], delay_s=60)
        blocker = asyncio.create_task(router.generate("s", call(rid="slow"), lineage=NONE))
        await until(lambda: home.in_flight == 1, "the engine is taken")
        target.pace.seconds, target.pace.calls = 1000.0, 1.0  # its calls take long
        moved = await router.generate("s", call(rid="next"), lineage=NONE)
        assert moved.engine_name == f"{other.url}#0"
        assert moved.facts.moved == "migration"
        blocker.cancel()
        await asyncio.gather(blocker, return_exceptions=True)


async def test_a_restored_pin_waits_for_its_engine_to_join_and_keeps_its_rank() -> None:
    async with FakeEngine() as one, FakeEngine() as two:
        one.dp_size = two.dp_size = 2
        async with Router(QUICK) as router:
            for engine in (one, two):
                router.add_engine(engine.url)
            router.restore_session("s", f"{two.url}#3", dp_rank=1, resident_tokens=500)
            await router.generate("s", call(), lineage=NONE)
            assert one.requests == []
            assert two.requests[0].body["routed_dp_rank"] == 1
            assert router.table.load("e1").resident_tokens == 500
            router.restore_session("gone", "http://127.0.0.1:9#0", dp_rank=1)
            assert router.table.pin("gone") is None


async def test_a_session_whose_rank_is_gone_goes_on_at_another_rank_of_its_only_engine() -> None:
    async with fleet(1) as (router, engines):
        router.restore_session("s", f"{engines[0].url}#0", dp_rank=1, resident_tokens=500)
        async with asyncio.timeout(QUICK.admission_timeout_s / 2):
            routed = await router.generate("s", call(), lineage=NONE)
        assert (routed.facts.dp_rank, routed.facts.moved) == (None, "rank")
        assert router.table.load("e0").resident_tokens == 500


async def test_a_session_that_rests_counts_against_no_room_until_it_calls_again() -> None:
    async with fleet(1) as (router, _):
        await router.generate("s", call(), lineage=NONE)
        before = loads(router)
        assert before[0][2:4] == (1, 6)
        router.rest_session("s")
        assert loads(router) == [(0, 0, 0, 0, 0)]
        await router.generate("s", call(rid="r1"), lineage=NONE)
        assert loads(router)[0][2:4] == before[0][2:4]
        router.rest_session("s")
        router.release_session("s")
        assert loads(router) == [(0, 0, 0, 0, 0)]


# -- versions ---------------------------------------------------------------------------------------


async def test_a_wanted_version_steers_where_a_session_starts_and_moves_one_that_has_a_place() -> None:
    async with FakeEngine(version="1") as old, FakeEngine(version="2") as new, over(old, new) as router:
        for number in range(4):
            key = f"n{number}"
            await router.generate(key, call(key, rid=key), lineage=NONE, want=Wanted(minimum=2))
        assert (len(old.requests), len(new.requests)) == (0, 4)
        await router.generate("o", call("o", rid="o0"), lineage=NONE, want=Wanted(exact=1))
        assert len(old.requests) == 1
        moved = await router.generate("o", call("o", rid="o1"), lineage=NONE, want=Wanted(minimum=2))
        assert (moved.engine_name, moved.facts.moved) == (f"{new.url}#0", "version")


async def test_a_version_that_nobody_has_is_refused_with_what_is_there() -> None:
    async with FakeEngine(version="1") as old, FakeEngine(version="2") as new, over(old, new) as router:
        with pytest.raises(VersionNotReady) as caught:
            await router.generate("s", call(), lineage=NONE, want=Wanted(minimum=5))
        error = caught.value
        assert (error.wanted, error.exact, error.serving, error.available) == (5, False, 2, (1, 2))
        assert not old.requests
        assert not new.requests
        assert router.table.pin("s") is None
        assert all(load == (0, 0, 0, 0, 0) for load in loads(router))


async def test_a_call_waits_for_its_version_on_its_own_engine_within_the_deadline() -> None:
    config = OTHERS.model_copy(update={"version_wait_s": 20.0})
    async with fleet(2, config) as (router, engines):
        await router.generate("s", call(rid="r0"), lineage=NONE)
        home, _ = home_of(engines)
        mine = router.table.pins["s"].engine_id
        waiting = asyncio.create_task(router.generate("s", call(rid="r1"), lineage=NONE, want=Wanted(minimum=3)))
        await asyncio.sleep(0.02)
        for engine in engines:
            engine.version = "3"
        router.note_refit(mine, 3, flushed=True)
        assert (await waiting).engine_name == f"{home.url}#0"


async def test_an_exact_version_that_every_engine_has_passed_is_refused_at_once() -> None:
    """Versions only grow: waiting would be for nothing."""
    config = QUICK.model_copy(update={"version_wait_s": 3600.0})
    async with FakeEngine(version="4") as engine, over(engine, config=config) as router:
        with pytest.raises(VersionNotReady, match="exactly"):
            await router.generate("s", call(), lineage=NONE, want=Wanted(exact=3))


async def test_an_engine_that_refuses_a_version_itself_is_asked_again_and_never_counted() -> None:
    async with fleet(2) as (router, engines):
        await router.generate("s", call(rid="r0"), lineage=NONE)
        home, other = home_of(engines)
        refusal = FakeReply(ids=[], status=409, error="version 0 is not loaded yet")
        home.script = scripted(refusal, refusal, FakeReply(ids=[7]))
        routed = await router.generate("s", call(rid="r1"), lineage=NONE, want=Wanted(minimum=0))
        assert [each.why for each in routed.attempts] == ["", "not_ready", "not_ready"]
        assert {each.engine_name for each in routed.attempts} == {f"{home.url}#0"}, "the same target"
        home.script = lambda request: refusal
        with pytest.raises(VersionNotReady):
            await router.generate("s", call(rid="r2"), lineage=NONE, want=Wanted(minimum=0))
        with pytest.raises(EngineRefused, match="not loaded"):
            await router.generate("s", call(rid="r3"), lineage=NONE)
        assert [engine["failures"] for engine in router.engines()] == [0, 0]
        assert other.requests == []


async def test_a_reply_with_tokens_of_other_weights_is_not_what_an_exact_call_wanted() -> None:
    async with fleet(1) as (router, engines):
        engines[0].script = lambda request: FakeReply(ids=[5, 6], versions=[("0", 0, 1), ("1", 1, 2)])
        with pytest.raises(VersionNotReady):
            await router.generate("s", call(rid="r0"), lineage=NONE, want=Wanted(exact=0))
        routed = await router.generate("s", call(rid="r1"), lineage=NONE, want=Wanted(minimum=0))
        assert [span.version for span in routed.reply.versions] == [0, 1]


async def test_sessions_and_calls_that_are_fixed_to_a_version_are_counted_where_they_may_run() -> None:
    async with fleet(2, OTHERS) as (router, engines):
        router.hold_exact("s", 0)
        assert [router.exact_holders(each).sessions for each in ("e0", "e1")] == [1, 1], "it has no place yet"
        await router.generate("s", call(rid="r0"), lineage=NONE, want=Wanted(exact=0))
        home, _ = home_of(engines)
        mine = router.table.pins["s"].engine_id
        other = "e1" if mine == "e0" else "e0"
        assert [router.exact_holders(each).sessions for each in (mine, other)] == [1, 0]
        home.script = lambda request: FakeReply(ids=[5], delay_s=60)
        running = asyncio.create_task(router.generate("s", call(rid="r1"), lineage=NONE, want=Wanted(exact=0)))
        await until(lambda: home.in_flight == 1, "the call runs")
        holders = router.exact_holders(mine)
        assert (holders.sessions, holders.calls, holders.any) == (1, 1, True)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert router.exact_holders(mine).calls == 0
        router.close_session("s")
        assert not router.exact_holders(mine).any
        router.hold_exact("t", 0, "judge")
        assert not router.exact_holders(mine).any, "of another model"


async def test_an_engine_that_never_ends_a_reply_is_an_error_of_its_own() -> None:
    async with fleet(1) as (router, engines):
        engines[0].script = lambda request: FakeReply(ids=[], finish="abort")
        with pytest.raises(UpstreamError, match="max_resumes"):
            await router.generate("s", call(), lineage=NONE)
        assert loads(router)[0][:2] == (0, 0)


# -- the long tail ----------------------------------------------------------------------------------


async def test_turns_of_long_sessions_go_first_and_engines_that_schedule_by_priority_are_told() -> None:
    async with FakeEngine() as engine:
        engine.said = {"enable_priority_scheduling": True}
        async with over(engine) as router:
            for name in range(20):  # what sessions usually become
                await router.generate(f"short{name}", call(f"short{name}"), lineage=NONE)
                router.release_session(f"short{name}")
            await router.generate("s", call(ids=list(range(1, 100))), lineage=NONE)
            await router.generate("s", call(ids=list(range(1, 100)), rid="again"), lineage=NONE, priority=1)
            await router.generate("new", call("new"), lineage=NONE)
            long, new = (request.body["priority"] for request in engine.requests[-2:])
            assert new == 0
            assert long > 1 + 2  # its own, and more than two doublings


async def test_engines_without_priorities_are_sent_none() -> None:
    async with fleet(1) as (router, engines):
        await router.generate("s", call(), lineage=NONE, priority=3)
        assert "priority" not in engines[0].requests[0].body
