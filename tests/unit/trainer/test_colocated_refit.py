"""Engines that sleep while the trainer trains: order, failures at every point, and who may serve afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from trainer_helpers import FixedWeights, RecordingEngine

from tollway.errors import ComponentLost, ConfigError, EngineLost, TollwayError, TrainerLost
from tollway.trainer.weights import refit as refit_module
from tollway.trainer.weights.refit import Notify, Refit, RefitNotice, Sharing
from tollway.trainer.weights.turns import Turns
from tollway.trainer.weights.wire import serialise

TAGS = ("kv_cache", "weights", "cuda_graph")


@dataclass
class Device:
    """A trainer that holds memory of a counted device, or not."""

    calls: list[str] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    """What the driver says, call by call; nothing: there is no device."""
    dead: bool = False

    async def device_memory(self) -> tuple[int, int] | None:
        return (self.free.pop(0), 100) if self.free else None

    async def offload(self) -> None:
        self.calls.append("offload")

    async def onload(self) -> None:
        if self.dead:
            raise TrainerLost("gone")
        self.calls.append("onload")


def buckets() -> list[bytes]:
    import torch

    return [serialise([("a", torch.ones(2))]), serialise([("b", torch.zeros(3))])]


class Party:
    """Engines and a trainer on one device."""

    def __init__(self, *engines: RecordingEngine, tags: Sequence[str] = TAGS, notify: Notify | None = None) -> None:
        self.engines = engines
        self.device = Device()
        self.weights = FixedWeights(buckets())
        self.told: list[tuple[str, str | None, int | None]] = []

        async def tell(notice: RefitNotice) -> None:
            self.told.append((notice.url, notice.phase, notice.version))

        self.refit = Refit(engines, self.weights, notify=notify or tell, sharing=Sharing(self.device, tags))
        self.turns = Turns(self.refit, self.device, shared=True)


async def test_a_turn_runs_in_the_order_that_engines_and_device_need() -> None:
    engine = RecordingEngine()
    party = Party(engine)
    await party.turns.trainer()
    assert engine.calls == ["pause:retract", "flush", "release:kv_cache,weights,cuda_graph"]
    assert party.told == [(engine.url, "paused", None)]
    assert party.device.calls == ["onload"]
    engine.calls.clear()
    done = await party.turns.engines(7)
    load = ["resume:weights", "begin", "bucket", "bucket", "end", "version"]
    assert engine.calls == [*load, "resume:kv_cache,cuda_graph", "resume"]
    assert party.device.calls == ["onload", "offload"]
    assert party.told[1:] == [(engine.url, "resumed", 7)]
    assert (engine.version, engine.paused, engine.released, sorted(engine.weights)) == (7, False, set(), ["a", "b"])
    assert (done.pushed.version, done.pushed.weight_bytes, done.freed_bytes) == (7, 20, None)
    assert done.asleep_s is not None


async def test_the_trainers_memory_leaves_before_the_engines_take_theirs() -> None:
    order: list[str] = []

    class Ordered(RecordingEngine):
        async def _stage(self, name: str) -> None:
            order.append(name)
            await super()._stage(name)

    party = Party(Ordered())
    party.device.calls = order
    await party.turns.trainer()
    await party.turns.engines(1)
    assert order.index("release:kv_cache,weights,cuda_graph") < order.index("onload")
    assert order.index("version") < order.index("offload") < order.index("resume:kv_cache,cuda_graph")


async def test_a_second_turn_needs_nothing_of_the_first() -> None:
    engine = RecordingEngine()
    party = Party(engine)
    for version in (1, 2):
        await party.turns.trainer()
        await party.turns.trainer()
        await party.turns.engines(version)
    assert engine.calls.count("pause:retract") == engine.calls.count("resume") == 2
    assert engine.version == 2
    async with party.turns.aside(2):
        assert engine.paused
    assert (engine.version, engine.paused, party.weights.asked) == (2, False, [1, 2, 2])


async def test_what_the_driver_does_not_see_as_free_is_an_error_that_names_the_remedy() -> None:
    party = Party(RecordingEngine())
    party.device.free = [40, 40]
    with pytest.raises(ConfigError, match=r"0 bytes less free.*enable-memory-saver = true under \[engine.sglang\]"):
        await party.turns.trainer()
    assert party.device.calls == []


async def test_memory_that_others_take_while_engines_sleep_is_not_held_against_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An engine that died starts again beside those that sleep: the driver then has less free, and all is well."""
    party = Party(RecordingEngine())
    party.device.free = [10, 60, 50, 30]
    await party.turns.trainer()
    assert (await party.turns.engines(1)).freed_bytes == 50
    await party.turns.trainer()
    assert "20 bytes less free than before: somebody took more meanwhile" in caplog.text
    assert (await party.turns.engines(2)).freed_bytes == -20
    assert party.device.calls == ["onload", "offload"] * 2


async def test_what_the_driver_sees_as_free_is_reported() -> None:
    party = Party(RecordingEngine())
    party.device.free = [40, 90]
    await party.turns.trainer()
    assert (await party.turns.engines(1)).freed_bytes == 50


@pytest.mark.parametrize("stage", ["pause:retract", "flush", "release:kv_cache,weights,cuda_graph"])
async def test_an_engine_that_keeps_its_memory_goes_on_with_whole_weights_and_the_trainer_does_not_start(
    stage: str,
) -> None:
    engine = RecordingEngine(fail_at=stage, version=3)
    party = Party(engine)
    with pytest.raises(ComponentLost, match=f"did not give its memory back.*{stage} refused"):
        await party.turns.trainer()
    assert (engine.calls[-1], engine.version, engine.paused, engine.released) == ("resume", 3, False, set())
    assert party.device.calls == []
    assert [phase for _, phase, _ in party.told] == (["paused", "resumed"] if stage.startswith("release") else [])


async def test_an_engine_that_answers_a_release_with_an_error_of_its_own_never_serves() -> None:
    class Half(RecordingEngine):
        async def release_memory(self, tags: Sequence[str]) -> None:
            await super().release_memory(tags)
            raise EngineLost("no answer", timed_out=True)

    engine = Half()
    party = Party(engine)
    with pytest.raises(ComponentLost, match="no answer"):
        await party.turns.trainer()
    assert "resume" not in engine.calls
    assert engine.calls[-1] == "abort_all"
    assert party.told[-1] == (engine.url, "failed", None)


@pytest.mark.parametrize("stage", ["resume:weights", "begin", "bucket", "end", "version"])
async def test_an_engine_whose_weights_are_gone_never_serves_and_is_served_by_the_next_push(stage: str) -> None:
    good, bad = RecordingEngine(url="http://good"), RecordingEngine(url="http://bad")
    party = Party(good, bad)
    await party.turns.trainer()
    bad.fail_at = stage
    done = await party.turns.engines(1)
    assert done.pushed.quarantined == (bad.url,)
    assert "resume" not in bad.calls
    assert (bad.paused, party.told.count((bad.url, "failed", None))) == (True, 1)
    assert (good.version, good.paused) == (1, False)
    bad.fail_at = None
    await party.turns.trainer()
    assert bad.calls.count("pause:retract") == 1, "it never went on"
    done = await party.turns.engines(2)
    assert done.pushed.quarantined == ()
    assert (bad.version, bad.paused, bad.in_session, bad.released) == (2, False, False, set())
    assert party.told[-1][1:] == ("resumed", 2)


async def test_an_engine_that_kept_its_weights_wakes_with_them_when_the_load_never_began() -> None:
    good, bad = RecordingEngine(url="http://good"), RecordingEngine(url="http://bad", version=3)
    party = Party(good, bad, tags=("kv_cache",))
    await party.turns.trainer()
    bad.fail_at = "begin"
    assert (await party.turns.engines(4)).pushed.quarantined == (bad.url,)
    assert (bad.version, bad.paused, bad.released) == (3, False, set())
    assert (bad.url, "resumed", None) in party.told


async def test_an_engine_that_refuses_the_rest_of_its_memory_stays_quarantined_and_catches_up_alone() -> None:
    good, bad = RecordingEngine(url="http://good"), RecordingEngine(url="http://bad")
    party = Party(good, bad)
    await party.turns.trainer()
    bad.fail_at = "resume:kv_cache,cuda_graph"
    await party.turns.engines(1)
    assert (bad.paused, bad.released, good.paused) == (True, {"kv_cache", "cuda_graph"}, False)
    assert (bad.url, "failed", None) in party.told
    bad.fail_at = None
    party.device.calls.clear()
    before = list(good.calls)
    await party.refit.catch_up([bad])
    assert (bad.version, bad.paused, bad.released) == (1, False, set())
    assert party.device.calls == ["onload", "offload"]
    assert good.calls == before


async def test_no_engine_wakes_is_the_end_and_says_why() -> None:
    engine = RecordingEngine()
    party = Party(engine)
    await party.turns.trainer()
    engine.fail_at = "resume:kv_cache,cuda_graph"
    with pytest.raises(ComponentLost, match=r"no engine woke.*refused"):
        await party.turns.engines(1)


class Mortal(RecordingEngine):
    """An engine whose process may be gone."""

    gone = False

    async def _stage(self, name: str) -> None:
        self._answer()
        await super()._stage(name)

    async def ready(self) -> bool:
        self._answer()
        return await super().ready()

    def _answer(self) -> None:
        if self.gone:
            raise EngineLost(f"engine {self.url}: connection refused", refused=True)


async def test_an_engine_that_dies_asleep_is_left_out_and_the_one_at_its_address_begins_anew() -> None:
    good, mortal = RecordingEngine(url="http://good"), Mortal(url="http://mortal")
    party = Party(good, mortal)
    await party.turns.trainer()
    mortal.gone = True
    assert (await party.turns.engines(1)).pushed.quarantined == (mortal.url,)
    # Another process at the same address: awake, with the weights of its directory, and nothing to resume.
    mortal.gone, mortal.paused, mortal.released, mortal.version = False, False, set(), 0
    mortal.calls.clear()
    await party.refit.catch_up([mortal])
    assert mortal.calls[:3] == ["pause:retract", "flush", "release:kv_cache,weights,cuda_graph"]
    assert (mortal.version, mortal.paused, mortal.released) == (1, False, set())


async def test_an_engine_whose_end_was_seen_while_it_gave_memory_back_is_not_remembered_as_asleep() -> None:
    class Dying(RecordingEngine):
        dying = True

        async def release_memory(self, tags: Sequence[str]) -> None:
            await super().release_memory(tags)
            if self.dying:
                party.refit.forget(self.url)  # its launcher hears of its end before the connection breaks
                raise EngineLost("connection reset")

    good, dying = RecordingEngine(url="http://good"), Dying(url="http://dying")
    party = Party(good, dying)
    await party.turns.trainer()
    # Another process at the same address, on a port of the configuration.
    dying.dying, dying.paused, dying.released = False, False, set()
    dying.calls.clear()
    assert (await party.turns.engines(1)).pushed.quarantined == ()
    assert dying.calls[0] == "pause:retract"
    assert (dying.version, dying.paused) == (1, False)


async def test_a_session_server_that_is_gone_is_not_taken_for_an_engine_without_memory() -> None:
    async def unreachable(notice: RefitNotice) -> None:
        raise EngineLost("no session server there", refused=True)

    engine = RecordingEngine(version=3)
    party = Party(engine, notify=unreachable)
    with pytest.raises(ComponentLost, match=r"did not give its memory back.*no session server there"):
        await party.turns.trainer()
    assert party.device.calls == []
    assert (engine.paused, engine.released, engine.version) == (False, set(), 3)


async def test_an_engine_that_is_silent_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(RecordingEngine):
        async def ready(self) -> bool:
            await asyncio.sleep(3600)
            return True

        async def release_memory(self, tags: Sequence[str]) -> None:
            raise EngineLost("connection reset")

    monkeypatch.setattr(refit_module, "_ANSWER_S", 0.05)
    party = Party(Silent())
    with pytest.raises(ComponentLost, match=r"connection reset; its process has not ended"):
        await asyncio.wait_for(party.turns.trainer(), 10)
    assert party.device.calls == []


async def test_a_turn_of_one_engine_asks_again_for_memory_of_which_nobody_knows() -> None:
    class Unsure(RecordingEngine):
        lost = True

        async def release_memory(self, tags: Sequence[str]) -> None:
            if self.lost:
                await self._stage("release, unheard")
                raise EngineLost("connection reset")
            await super().release_memory(tags)

    engine, late = RecordingEngine(url="http://first"), Unsure(url="http://late")
    party = Party(engine)
    await party.turns.trainer()
    await party.turns.engines(1)
    party.device.calls.clear()
    await party.refit.catch_up([late])
    assert (party.device.calls, late.paused) == ([], True)
    late.lost = False
    party.refit._not_before.clear()
    await party.refit.catch_up([late])
    assert party.device.calls == ["onload", "offload"]
    assert (late.version, late.paused, late.released) == (1, False, set())


@pytest.mark.parametrize("tags", [{"weights"}, {"kv_cache", "cuda_graph"}])
async def test_an_engine_whose_end_is_seen_while_it_gets_memory_back_stops_nobody(tags: set[str]) -> None:
    class Dying(RecordingEngine):
        async def resume_memory(self, given: Sequence[str]) -> None:
            await super().resume_memory(given)
            if set(given) == tags:
                party.refit.forget(self.url)

    good, dying = RecordingEngine(url="http://good"), Dying(url="http://dying")
    party = Party(good, dying)
    await party.turns.trainer()
    await party.turns.engines(1)
    assert (good.version, good.paused) == (1, False)


async def test_an_engine_that_was_started_again_while_others_sleep_is_not_asked_for_memory_that_it_has() -> None:
    good, again = RecordingEngine(url="http://good"), RecordingEngine(url="http://again")
    party = Party(good, again)
    await party.turns.trainer()
    again.paused, again.released, again.version = False, set(), 0
    again.calls.clear()
    party.refit.forget(again.url)
    await party.refit.catch_up([again])
    assert again.calls == [], "what joins while engines sleep waits for the next push"
    await party.turns.engines(1)
    assert again.calls[0] == "pause:retract"
    assert (again.version, again.paused) == (1, False)


async def test_nobody_catches_up_while_the_trainer_has_the_device() -> None:
    engine, late = RecordingEngine(url="http://first"), RecordingEngine(url="http://late")
    party = Party(engine)
    await party.turns.trainer()
    await party.turns.engines(1)
    await party.turns.trainer()
    await party.refit.catch_up([late])
    assert late.calls == []
    await party.turns.engines(2)
    await party.refit.catch_up([late])
    assert (late.version, party.weights.asked) == (2, [1, 2, 2])


async def test_nobody_catches_up_with_weights_that_are_on_their_way() -> None:
    engine = RecordingEngine()
    party = Party(engine)
    await party.turns.trainer()
    engine.stall_at = "resume:kv_cache,cuda_graph"
    waking = asyncio.create_task(party.turns.engines(1))
    while engine.stall_at not in engine.calls:
        await asyncio.sleep(0)
    before = list(engine.calls)
    await asyncio.wait_for(party.refit.catch_up([engine]), 5)
    assert engine.calls == before
    waking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waking


async def test_memory_is_counted_only_once_nobody_catches_up_any_more() -> None:
    class Slow(Device):
        go = asyncio.Event()

        async def onload(self) -> None:
            await super().onload()
            await self.go.wait()

    engine, late = RecordingEngine(url="http://first"), RecordingEngine(url="http://late")
    party = Party(engine)
    await party.turns.trainer()
    await party.turns.engines(1)
    device = Slow(free=[40, 90])
    party.refit._sharing = Sharing(device, TAGS)
    party.turns = Turns(party.refit, device, shared=True)
    catching = asyncio.create_task(party.refit.catch_up([late]))
    while not device.calls:
        await asyncio.sleep(0)
    taking = asyncio.create_task(party.turns.trainer())
    for _ in range(20):
        await asyncio.sleep(0)
    assert device.free == [40, 90], "nobody was asked while one engine sleeps and the trainer is there for it"
    device.go.set()
    await asyncio.gather(catching, taking)
    assert device.calls == ["onload", "offload", "onload"]
    assert (await party.turns.engines(2)).freed_bytes == 50


async def test_a_trainer_that_is_gone_is_not_taken_for_an_engines_failure() -> None:
    engine, late = RecordingEngine(url="http://first"), RecordingEngine(url="http://late")
    party = Party(engine)
    await party.turns.trainer()
    await party.turns.engines(1)
    party.device.dead = True
    with pytest.raises(TrainerLost):
        await party.refit.catch_up([late])


async def test_engines_that_are_all_gone_free_the_device_for_the_trainer() -> None:
    mortal = Mortal()
    mortal.gone = True
    party = Party(mortal)
    party.device.free = [90, 90]
    await party.turns.trainer()
    assert party.device.calls == ["onload"]


@pytest.mark.parametrize("phase", ["paused", "resumed"])
async def test_without_the_session_server_engines_go_on_with_whole_weights(phase: str) -> None:
    async def unreachable(notice: RefitNotice) -> None:
        if notice.phase == phase:
            raise TollwayError("the session server is gone")

    engine = RecordingEngine(version=3)
    party = Party(engine, notify=unreachable)

    async def turn() -> None:
        await party.turns.trainer()
        await party.turns.engines(4)

    with pytest.raises(ComponentLost, match="session server is gone"):
        await turn()
    assert (engine.paused, engine.released) == (False, set())
    assert engine.version == (3 if phase == "paused" else 4)


@pytest.mark.parametrize("at", ["release:kv_cache,weights,cuda_graph", "bucket", "resume:kv_cache,cuda_graph"])
async def test_a_turn_that_is_cancelled_leaves_no_engine_that_serves_without_weights(at: str) -> None:
    engine = RecordingEngine(stall_at=at)
    party = Party(engine)

    async def turn() -> None:
        await party.turns.trainer()
        await party.turns.engines(1)

    running = asyncio.create_task(turn())
    while at not in engine.calls:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (engine.paused, engine.calls[-1]) == (True, "abort_all")
    assert "resume" not in engine.calls
    assert party.told[-1] == (engine.url, "failed", None)


async def test_a_refit_that_shares_no_device_lets_nobody_sleep() -> None:
    engine = RecordingEngine()
    refit = Refit([engine], FixedWeights(buckets()))
    with pytest.raises(ConfigError, match="share no device"):
        await refit.sleep()
    turns = Turns(refit, Device(), shared=False)
    await turns.trainer()
    async with turns.aside(1):
        assert engine.calls == []
    done = await turns.engines(1)
    assert (done.asleep_s, done.freed_bytes, engine.version) == (None, None, 1)


def test_in_place_pauses_keep_what_sleeping_engines_give_back() -> None:
    with pytest.raises(ConfigError, match="in_place keeps keys and values"):
        Refit([RecordingEngine()], FixedWeights([]), mode="in_place", sharing=Sharing(Device(), TAGS))
