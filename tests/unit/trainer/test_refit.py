"""Refit sessions: the order of calls, and that a failure anywhere leaves no engine half-way."""

from __future__ import annotations

import asyncio

import pytest
import torch
from trainer_helpers import FixedWeights, RecordingEngine

from tollway.errors import ComponentLost, ConfigError, EngineLost
from tollway.trainer.weights import refit as refit_module
from tollway.trainer.weights import session as session_module
from tollway.trainer.weights.refit import Limits, PauseMode, Refit, RefitNotice
from tollway.trainer.weights.wire import serialise

BUCKETS = [serialise([("a", torch.ones(2))]), serialise([("b", torch.zeros(3))])]


def refit(*engines: RecordingEngine, mode: PauseMode = "retract", **options: object) -> Refit:
    return Refit(engines, FixedWeights(BUCKETS), mode=mode, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
async def test_a_session_runs_in_the_order_that_engines_need(mode: PauseMode) -> None:
    engine = RecordingEngine()

    async def notify(notice: RefitNotice) -> None:
        assert engine.paused, "told while calls run"
        engine.calls.append(f"notify:{notice.phase}:{notice.version}:{notice.flushed}")

    report = await refit(engine, mode=mode, notify=notify).push(7)
    flush = ["notify:paused:None:False"] if mode == "in_place" else ["flush", "notify:paused:None:True"]
    session = ["begin", "bucket", "bucket", "end", "version", "notify:resumed:7:False", "resume"]
    assert engine.calls == [f"pause:{mode}", *flush, *session]
    assert (engine.version, engine.paused, engine.in_session) == (7, False, False)
    assert sorted(engine.weights) == ["a", "b"]
    assert report.wire_bytes == sum(map(len, BUCKETS))
    assert report.quarantined == ()


@pytest.mark.parametrize("mode", ["place", "", "IN_PLACE"])
def test_an_unknown_pause_mode_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match="retract, in_place, abort"):
        refit(RecordingEngine(), mode=mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", ["pause:retract", "flush", "begin"])
async def test_a_failure_before_the_first_bucket_leaves_the_engine_serving_old_weights(stage: str) -> None:
    engine = RecordingEngine(fail_at=stage, version=3)
    with pytest.raises(ComponentLost, match=f"{stage} refused"):
        await refit(engine).push(4)
    assert engine.calls[-1] == "resume"
    assert (engine.version, engine.paused) == (3, False)


@pytest.mark.parametrize("stage", ["bucket", "end", "version"])
async def test_half_loaded_weights_never_serve_and_nobody_waits_for_them(stage: str) -> None:
    engine = RecordingEngine(fail_at=stage, version=3)
    with pytest.raises(ComponentLost, match=f"{stage} refused"):
        await refit(engine).push(4)
    assert engine.calls[-1] == "abort_all"
    assert "resume" not in engine.calls
    assert (engine.version, engine.paused) == (3, True)


@pytest.mark.parametrize("stage", ["pause:retract", "flush", "begin", "bucket", "end", "version", "resume"])
async def test_the_push_after_a_failed_one_succeeds(stage: str) -> None:
    engine = RecordingEngine(fail_at=stage)
    session = refit(engine)
    with pytest.raises(ComponentLost):
        await session.push(1)
    engine.fail_at = None
    await asyncio.wait_for(session.push(2), 10)
    assert (engine.version, engine.paused, engine.in_session) == (2, False, False)


@pytest.mark.parametrize("stage", ["flush", "begin", "bucket", "end", "version", "resume"])
async def test_the_session_server_hears_of_every_flush_and_of_no_version_that_never_came(stage: str) -> None:
    good, bad = RecordingEngine(url="http://good", version=3), RecordingEngine(url="http://bad", version=3)
    bad.fail_at = stage
    believed = {good.url: 3, bad.url: 3}
    flushes: list[str] = []

    async def notify(notice: RefitNotice) -> None:
        engine = good if notice.url == good.url else bad
        assert engine.paused, "told while calls run"
        if notice.version is not None:
            believed[notice.url] = notice.version
        if notice.flushed:
            flushes.append(notice.url)

    report = await refit(good, bad, notify=notify).push(4)
    assert report.quarantined == (bad.url,)
    assert believed == {good.url: good.version, bad.url: bad.version}
    assert bad.version == (4 if stage == "resume" else 3)
    assert sorted(flushes) == ([good.url] if stage == "flush" else [bad.url, good.url])


async def test_one_bad_engine_is_quarantined_and_the_others_go_on() -> None:
    good, bad = RecordingEngine(url="http://good"), RecordingEngine(url="http://bad", fail_at="bucket")
    session = refit(good, bad)
    report = await session.push(1)
    assert report.quarantined == ("http://bad",)
    assert (good.version, good.paused, bad.version) == (1, False, -1)
    bad.fail_at = None
    assert (await session.push(2)).quarantined == ()
    assert (good.version, bad.version) == (2, 2)


@pytest.mark.parametrize("stage", ["pause:retract", "flush", "bucket", "resume"])
async def test_an_engine_that_stalls_is_given_up_in_bounded_time(stage: str) -> None:
    engine = RecordingEngine(stall_at=stage)
    with pytest.raises(ComponentLost, match="took longer than"):
        await asyncio.wait_for(refit(engine, limits=Limits(0.05)).push(1), 5)


async def test_a_session_server_that_cannot_be_told_stops_the_push_before_weights_move() -> None:
    engine = RecordingEngine()

    async def notify(notice: RefitNotice) -> None:
        raise ComponentLost("session server is gone")

    with pytest.raises(ComponentLost, match="session server is gone"):
        await refit(engine, notify=notify).push(1)
    assert "begin" not in engine.calls
    assert engine.calls[-1] == "resume"


@pytest.mark.parametrize(("stage", "last"), [("flush", "resume"), ("bucket", "abort_all")])
async def test_whoever_stops_a_run_does_not_wait_long_for_an_engine_that_hangs(
    monkeypatch: pytest.MonkeyPatch, stage: str, last: str
) -> None:
    monkeypatch.setattr(session_module, "_CANCELLED_S", 0.05)
    engine = RecordingEngine(stall_at=stage)
    push = asyncio.create_task(refit(engine, limits=Limits(1000)).push(1))
    while stage not in engine.calls:
        await asyncio.sleep(0)
    engine.stall_at = last
    push.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(push), 5)
    assert last in engine.calls


@pytest.mark.parametrize(("stage", "last"), [("flush", "resume"), ("bucket", "abort_all")])
async def test_cancelling_a_push_releases_the_engine(stage: str, last: str) -> None:
    engine = RecordingEngine(stall_at=stage)
    push = asyncio.create_task(refit(engine).push(1))
    while stage not in engine.calls:
        await asyncio.sleep(0)
    push.cancel()
    with pytest.raises(asyncio.CancelledError):
        await push
    assert engine.calls[-1] == last


def test_a_refit_needs_an_engine() -> None:
    with pytest.raises(ConfigError, match="at least one engine"):
        refit()


@pytest.mark.parametrize(
    ("stage", "phases"),
    [
        ("flush", []),
        ("begin", ["paused", "resumed"]),
        ("bucket", ["paused", "failed"]),
        ("end", ["paused", "failed"]),
        ("version", ["paused", "failed"]),
        ("resume", ["paused", "resumed", "resumed"]),
    ],
)
async def test_the_session_server_hears_whether_the_engine_may_serve_again(stage: str, phases: list[str]) -> None:
    engine, heard = RecordingEngine(fail_at=stage), []

    async def notify(notice: RefitNotice) -> None:
        assert "abort_all" not in engine.calls, "what is ended must not come back here"
        heard.append((notice.phase, notice.reason))

    with pytest.raises(ComponentLost):
        await refit(engine, notify=notify).push(1)
    assert [phase for phase, _ in heard] == phases
    assert [reason for phase, reason in heard if phase == "failed"] == [f"{stage} refused"] * phases.count("failed")


async def test_an_engine_that_comes_later_gets_the_weights_of_the_last_push() -> None:
    first, late = RecordingEngine(url="http://first"), RecordingEngine(url="http://late")
    there = [first]

    async def source() -> list[RecordingEngine]:
        return there

    session = Refit(source, FixedWeights(BUCKETS))
    await session.catch_up([late])
    assert late.calls == [], "there is nothing to bring yet"
    await session.push(3)
    await session.catch_up([late])
    assert (late.version, sorted(late.weights), late.paused) == (3, ["a", "b"], False)
    there.append(late)
    await session.push(4)
    assert (first.version, late.version) == (4, 4)


async def test_an_engine_that_cannot_catch_up_is_not_tried_without_end() -> None:
    engine, late = RecordingEngine(url="http://first"), RecordingEngine(url="http://late", fail_at="bucket")
    session = refit(engine)
    await session.push(1)
    for _ in range(20):
        await session.catch_up([late])
    assert late.calls.count("begin") == 1


async def test_a_push_waits_for_an_engine_when_all_are_gone_and_not_for_one_that_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refit_module, "_AGAIN_S", 0.0)
    engine, rounds = RecordingEngine(), 0

    async def source() -> list[RecordingEngine]:
        nonlocal rounds
        rounds += 1
        return [engine] if rounds > 3 else []

    session = Refit(source, FixedWeights(BUCKETS), limits=Limits(patience_s=60.0))
    assert (await asyncio.wait_for(session.push(1), 10)).version == 1
    engine.fail_at = "bucket"
    with pytest.raises(ComponentLost, match="bucket refused"):
        await session.push(2)
    assert rounds == 5
    with pytest.raises(ComponentLost, match="there is none") as error:
        await Refit(_nobody, FixedWeights(BUCKETS)).push(1)
    assert isinstance(error.value.__cause__, EngineLost)


async def _nobody() -> list[RecordingEngine]:
    return []


async def test_an_engine_is_paused_only_once_nobody_needs_its_old_weights() -> None:
    engines = [RecordingEngine(url=f"http://{number}") for number in range(2)]
    asked: list[str] = []

    async def drained(url: str) -> None:
        asked.append(url)
        assert next(engine for engine in engines if engine.url == url).calls == []
        await asyncio.sleep(0)

    await refit(*engines, drained=drained).push(1)
    assert sorted(asked) == ["http://0", "http://1"]
    assert [engine.version for engine in engines] == [1, 1]


async def test_a_resume_that_hangs_once_is_sent_again_and_the_engine_goes_on() -> None:
    """Report D12."""

    class HangsOnce(RecordingEngine):
        async def resume(self) -> None:
            if self.calls.count("resume") == 0:
                self.stall_at = "resume"
            else:
                self.stall_at = None
            await super().resume()

    engine, other = HangsOnce(url="http://hangs"), RecordingEngine(url="http://other")
    report = await refit(engine, other, limits=Limits(0.05)).push(1)
    assert engine.calls.count("resume") == 2
    assert (engine.paused, engine.version) == (False, 1)
    assert other.version == report.version == 1
