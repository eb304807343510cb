"""The fleet against scripted engines on real sockets: who may join, who may serve, what is said of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from live_engines import talking

from tollway.errors import BadRequest, Conflict, EngineBusy, EngineLost, NoEngine, NotFound
from tollway.router.addresses import check_url
from tollway.router.config import RouterConfig
from tollway.router.fake import FakeEngine
from tollway.router.fleet import Engine, Fleet, Membership
from tollway.router.health import EngineState

QUICK = RouterConfig(
    probe_interval_s=0.02, probe_timeout_s=0.5, probe_failures=2, connect_timeout_s=0.5, busy_window_s=0.05
)


@contextlib.asynccontextmanager
async def watching(config: RouterConfig = QUICK) -> AsyncIterator[Fleet]:
    fleet = Fleet(config, on_change=lambda engine: None)
    try:
        yield fleet
    finally:
        await fleet.aclose()


async def until(condition: Callable[[], object], what: str) -> None:
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never: {what}")


async def reaches(engine: Engine, state: EngineState, words: str = "") -> None:
    await until(
        lambda: engine.health.state is state and words in engine.health.reason,
        f"{state} {words!r}; it is {engine.health.state}: {engine.health.reason}",
    )


@contextlib.asynccontextmanager
async def stranger(answer: Callable[[web.Request], web.StreamResponse]) -> AsyncIterator[str]:
    """Some HTTP server that is no engine."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


# -- leaving ----------------------------------------------------------------------------------------


async def test_an_engine_that_is_removed_twice_at_once_is_gone_once_and_can_be_added_meanwhile() -> None:
    async with FakeEngine() as fake, watching() as fleet:
        first = fleet.add(fake.url)
        await reaches(first, EngineState.SERVING)
        removals = [asyncio.create_task(fleet.remove("e0")) for _ in range(2)]
        await asyncio.sleep(0)
        second = fleet.add(fake.url)
        outcomes = await asyncio.gather(*removals, return_exceptions=True)
        assert [type(each) for each in outcomes] == [type(None), NotFound]
        await reaches(second, EngineState.SERVING)
        assert (first.http.closed, list(fleet.engines)) == (True, ["e1"])


# -- joining ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda request: web.Response(status=404, text="nothing here"), "answered 404 to /model_info"),
        (lambda request: web.Response(text="<html>"), "is no engine"),
        (lambda request: web.json_response(["a"]), "is no engine"),
        (lambda request: web.json_response({"object": "list"}), "names no weight_version"),
        (lambda request: web.json_response({"weight_version": "1.5"}), "'1.5' is not a decimal number"),
        (lambda request: web.json_response({"weight_version": "-1"}), "update_weight_version"),
    ],
)
async def test_a_server_that_is_no_engine_does_not_join_and_why_is_said(
    answer: Callable[[web.Request], web.StreamResponse], words: str
) -> None:
    async with stranger(answer) as url, watching() as fleet:
        engine = fleet.add(url)
        await reaches(engine, EngineState.JOINING, words)
        assert fleet.serving() == []
        assert words in str(fleet.none_left())


async def test_a_port_that_speaks_something_else_does_not_join() -> None:
    async def banner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        await reader.readuntil(b"\r\n\r\n")

    async with talking(banner) as url, watching() as fleet:
        engine = fleet.add(url)
        await reaches(engine, EngineState.JOINING, "its answer is not HTTP")


@pytest.mark.parametrize(
    ("release", "lacks"),
    [
        (
            "0.5.16",
            "weight-update sessions (begin_weight_update) and no weight versions per token (weight_versions) and no "
            "top log-probabilities of the reply alone (return_flat_raw_output_top_logprobs)",
        ),
        ("0.5.20", "weight-update sessions (begin_weight_update) and no top log-probabilities of the reply alone"),
        ("0.5.21", "top log-probabilities of the reply alone"),
        ("0.4.9.post1", "weight-update sessions"),
    ],
)
async def test_a_release_without_sessions_or_spans_is_refused_with_the_one_that_is_needed(
    release: str, lacks: str
) -> None:
    async with FakeEngine() as fake, watching() as fleet:
        fake.said = {"version": release, "engine": None}
        fake.version = "default"  # a stamp would be in vain: the release comes first
        engine = fleet.add(fake.url)
        await reaches(engine, EngineState.JOINING, f"runs SGLang {release}, which has no {lacks}")
        assert "install SGLang 0.5.22 or later" in engine.health.reason


@pytest.mark.parametrize("release", ["0.5.22", "0.5.23.post2", "1.0.0rc1", "0.0.0.dev1+gabc", "main"])
async def test_a_release_that_can_do_it_or_does_not_say_joins(release: str) -> None:
    async with FakeEngine() as fake, watching() as fleet:
        fake.said = {"version": release, "engine": None}
        fleet.add(fake.url)
        await fleet.wait_serving(10)


async def test_an_engine_that_answers_and_generates_nothing_does_not_join() -> None:
    async with FakeEngine() as fake, watching() as fleet:
        fake.health_status = 503
        engine = fleet.add(fake.url)
        await reaches(engine, EngineState.JOINING, "generates nothing yet")
        fake.health_status = 200
        await reaches(engine, EngineState.SERVING)


async def test_what_an_engine_says_of_itself_may_be_nonsense() -> None:
    async with FakeEngine() as fake, watching() as fleet:
        fake.said = {
            "context_length": "long",
            "page_size": -3,
            "dp_size": None,
            "max_total_num_tokens": [7],
            "internal_states": "none",
            "startup_time": {"a": [None]},
            "version": 5,
        }
        engine = fleet.add(fake.url)
        await reaches(engine, EngineState.SERVING)
        assert (engine.context_length, engine.page_size, engine.dp_ranks, engine.max_total_tokens) == (None, 1, 1, None)


async def test_what_breaks_the_watch_of_one_engine_is_logged_and_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeEngine() as fake, watching() as fleet:
        with monkeypatch.context() as patch:

            def broken(*_: object) -> Any:
                raise RecursionError("a reader of facts is broken")

            patch.setattr("tollway.router.watch.read_facts", broken)
            with caplog.at_level(logging.CRITICAL):
                engine = fleet.add(fake.url)
                await reaches(engine, EngineState.JOINING, "cannot be understood")
        await reaches(engine, EngineState.SERVING)


# -- identity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["{url}/", "{upper}", "{url}"])
async def test_an_engine_that_is_added_twice_is_one_engine(spelling: str) -> None:
    async with FakeEngine() as fake, watching() as fleet:
        engine = fleet.add(fake.url)
        again = fleet.add(spelling.format(url=fake.url, upper=fake.url.upper().replace("HTTP", "http")))
        assert again is engine
        assert list(fleet.engines) == ["e0"]


async def test_a_known_engine_takes_what_is_new_of_it_and_no_other_model() -> None:
    async with FakeEngine() as fake, watching() as fleet:
        engine = fleet.add(fake.url, membership=Membership(model="judge"))
        fleet.add(fake.url, membership=Membership(model="judge", max_in_flight=4, frozen=True))
        assert (engine.max_in_flight, engine.membership.frozen) == (4, True)
        with pytest.raises(Conflict, match="serves model 'judge', not 'policy'; remove it first"):
            fleet.add(fake.url, membership=Membership())
        fleet.add(fake.url)
        assert engine.model == "judge"


async def test_one_process_under_two_addresses_is_one_engine() -> None:
    async with FakeEngine() as fake, watching() as fleet:
        fake.said = {"startup_time": {"total": 12.25}, "random_seed": 4}
        await reaches(fleet.add(fake.url), EngineState.SERVING)
        alias = fleet.add(fake.url.replace("127.0.0.1", "localhost"))
        await reaches(alias, EngineState.JOINING, "the same process as e0")
        await fleet.remove("e0")
        await reaches(alias, EngineState.SERVING)


@pytest.mark.parametrize(
    ("said", "version"),
    [({"startup_time": 2.0}, "7"), ({}, "3"), ({}, "default")],
    ids=["another process", "older weights", "no number"],
)
async def test_an_engine_that_was_started_again_unseen_is_another_incarnation(
    said: dict[str, object], version: str
) -> None:
    async with FakeEngine(version="7") as fake, watching() as fleet:
        fake.said = {"startup_time": 1.0}
        engine = fleet.add(fake.url)
        await reaches(engine, EngineState.SERVING)
        fake.said, fake.version = {"startup_time": 1.0, **said}, version
        await until(
            lambda: "started again" in engine.health.last_error or engine.health.incarnation == 1, "it is known"
        )
        fake.version = version if version.isdigit() else "0"
        await until(lambda: engine.health.incarnation == 1 and fleet.serving(), "it serves again")
        assert engine.version == int(fake.version)


async def test_weights_that_somebody_else_loaded_are_known_soon() -> None:
    async with FakeEngine(version="3") as fake, watching() as fleet:
        engine = fleet.add(fake.url)
        await reaches(engine, EngineState.SERVING)
        fake.version = "4"
        await until(lambda: engine.version == 4, "its new version is known")
        assert (engine.health.incarnation, engine.health.state) == (0, EngineState.SERVING)


# -- the policy's weights ---------------------------------------------------------------------------


async def test_an_engine_with_older_weights_than_the_policy_waits_for_the_trainer() -> None:
    async with FakeEngine() as old, FakeEngine() as new, watching() as fleet:
        await reaches(fleet.add(old.url), EngineState.SERVING)
        old.version = "5"
        fleet.note_refit("e0", 5, flushed=True)
        late = fleet.add(new.url)
        await reaches(late, EngineState.SYNCED, "it has weights 0 and the policy is at 5")
        assert fleet.serving() == ["e0"]
        new.version = "5"
        fleet.note_refit("e1", 5, flushed=False)
        assert fleet.serving() == ["e0", "e1"]


async def test_a_frozen_engine_and_another_model_do_not_follow_the_policy() -> None:
    async with FakeEngine() as a, FakeEngine() as b, FakeEngine() as c, watching() as fleet:
        await reaches(fleet.add(a.url), EngineState.SERVING)
        a.version = "5"
        fleet.note_refit("e0", 5, flushed=True)
        frozen = fleet.add(b.url, membership=Membership(frozen=True))
        judge = fleet.add(c.url, membership=Membership(model="judge"))
        await reaches(frozen, EngineState.SERVING)
        await reaches(judge, EngineState.SERVING)
        c.version = "9"
        fleet.note_refit("e2", 9, flushed=True)
        assert fleet.policy.version == 5
        assert (fleet.serving(), fleet.serving("judge")) == (["e0", "e1"], ["e2"])


@pytest.mark.parametrize(("before", "after"), [(1.0, 2.0), (None, None)])
async def test_a_returned_engine_that_names_the_policys_version_is_not_believed(
    before: float | None, after: float | None
) -> None:
    """A version is a number that somebody stamped: a new process has the weights of its first day."""
    async with FakeEngine() as fake, watching() as fleet:
        fake.said = {"startup_time": before}
        engine = fleet.add(fake.url)
        await reaches(engine, EngineState.SERVING)
        fleet.note_refit("e0", 0, flushed=True)
        await fake.stop()
        await reaches(engine, EngineState.LOST)
        fake.said = {"startup_time": after}
        await fake.start()
        await reaches(engine, EngineState.SYNCED, "may not be the policy's 0 although it says so")
        fleet.note_refit("e0", 0, flushed=True)
        assert fleet.serving() == ["e0"]


async def test_a_connection_that_was_lost_for_a_while_costs_no_reload() -> None:
    async with FakeEngine() as fake, watching() as fleet:
        fake.said = {"startup_time": 1.0}
        engine = fleet.add(fake.url)
        await reaches(engine, EngineState.SERVING)
        fleet.note_refit("e0", 0, flushed=True)
        await fake.stop()
        await reaches(engine, EngineState.LOST)
        await fake.start()
        await reaches(engine, EngineState.SERVING)
        assert engine.health.incarnation == 1


async def test_an_engine_added_as_stale_waits_only_where_a_trainer_brings_weights() -> None:
    async with FakeEngine() as a, FakeEngine() as b, watching() as fleet:
        await reaches(fleet.add(a.url, membership=Membership(stale=True)), EngineState.SERVING)
        fleet.note_refit("e0", 0, flushed=True)
        late = fleet.add(b.url, membership=Membership(stale=True))
        await reaches(late, EngineState.SYNCED, "it was started again")
        fleet.note_refit("e1", 0, flushed=True)
        assert fleet.serving() == ["e0", "e1"]


async def test_a_refit_that_failed_half_way_quarantines_until_a_full_reload() -> None:
    async with FakeEngine() as fake, watching() as fleet:
        engine = fleet.add(fake.url)
        await reaches(engine, EngineState.SERVING)
        fleet.note_refit("e0", None, flushed=True, phase="paused")
        assert engine.health.state is EngineState.PAUSED
        fleet.note_refit("e0", None, flushed=False, phase="failed", reason="bucket 2: unknown tensor")
        assert engine.health.state is EngineState.QUARANTINED
        assert engine.health.reason == "a refit failed half-way: bucket 2: unknown tensor"
        probes = engine.probes
        await until(lambda: engine.probes > probes + 3, "it is watched on")
        assert (engine.health.state, fleet.serving()) == (EngineState.QUARANTINED, [])
        fleet.note_refit("e0", 1, flushed=False, phase="resumed")
        assert engine.health.state is EngineState.SERVING


async def test_an_engine_that_joins_with_an_open_weight_session_is_quarantined() -> None:
    async with FakeEngine() as fake, watching() as fleet:
        fake.said = {"internal_states": [{"weight_update_session": True}]}
        await reaches(fleet.add(fake.url), EngineState.QUARANTINED, "may be half-loaded")


async def test_a_new_process_is_not_quarantined_for_what_the_old_one_had_loaded() -> None:
    async with FakeEngine() as fake, watching() as fleet:
        fake.said = {"startup_time": 1.0}
        engine = fleet.add(fake.url)
        await reaches(engine, EngineState.SERVING)
        fleet.note_refit("e0", None, flushed=False, phase="failed", reason="x")
        await fake.stop()
        await reaches(engine, EngineState.LOST)
        await fake.start()
        await until(lambda: engine.health.incarnation == 1, "it is back")
        assert engine.health.state is EngineState.QUARANTINED, "the same process has the same weights"
        await fake.stop()
        await reaches(engine, EngineState.LOST)
        fake.said = {"startup_time": 2.0}
        await fake.start()
        await reaches(engine, EngineState.SERVING)


# -- pauses and no room -----------------------------------------------------------------------------


async def test_an_engine_that_says_that_it_is_paused_takes_no_new_session_and_is_not_lost() -> None:
    async with FakeEngine() as fake, watching() as fleet:
        engine = fleet.add(fake.url)
        await reaches(engine, EngineState.SERVING)
        fake.ready_status = fake.health_status = 503
        await reaches(engine, EngineState.PAUSED, "not ready for requests")
        probes = engine.probes
        await until(lambda: engine.probes > probes + 5, "it is probed on, and lives")
        assert (engine.health.takes_calls, fleet.serving(), engine.health.failures) == (True, [], 0)
        assert fleet.soon()
        fake.ready_status = fake.health_status = 200
        await reaches(engine, EngineState.SERVING)


async def test_a_pause_whose_end_nobody_told_ends_when_the_engine_generates() -> None:
    async with FakeEngine() as fake, watching() as fleet:
        engine = fleet.add(fake.url)
        await reaches(engine, EngineState.SERVING)
        fleet.note_refit("e0", None, flushed=False, phase="paused")
        assert engine.health.state is EngineState.PAUSED
        await reaches(engine, EngineState.SERVING)


async def test_a_deadline_that_passed_in_a_pause_does_not_count() -> None:
    async with FakeEngine() as fake, watching() as fleet:
        engine = fleet.add(fake.url)
        await reaches(engine, EngineState.SERVING)
        engine.health.pause("x", float("inf"), told=True)
        for _ in range(5):
            fleet.failed(engine, EngineLost("no token", timed_out=True))
        assert engine.health.state is EngineState.PAUSED


async def test_no_room_stops_admission_for_a_while_and_a_reply_ends_that() -> None:
    seen: list[bool] = []
    config = QUICK.model_copy(update={"busy_pause_s": 0.05})
    fleet = Fleet(config, on_change=lambda engine: seen.append(engine.admits(asyncio.get_running_loop().time())))
    async with FakeEngine() as fake:
        engine = fleet.add(fake.url)
        await reaches(engine, EngineState.SERVING)
        seen.clear()
        fleet.failed(engine, EngineBusy("queue full"))
        assert seen == [False]
        assert (engine.health.failures, engine.health.state, fleet.soon()) == (0, EngineState.SERVING, True)
        await until(lambda: seen == [False, True], "its pause is over by itself")
        fleet.failed(engine, EngineBusy("queue full"))
        fleet.relieved(engine)
        assert seen == [False, True, False, True]
        await fleet.aclose()


# -- what is said -----------------------------------------------------------------------------------


async def test_a_fleet_without_a_ready_engine_says_for_how_long_and_when_that_is_too_long() -> None:
    config = QUICK.model_copy(update={"rollout_down_timeout_s": 0.05})
    async with FakeEngine() as fake, watching(config) as fleet:
        assert fleet.down_s() > 0, "nobody is there yet"
        engine = fleet.add(fake.url)
        await reaches(engine, EngineState.SERVING)
        assert (fleet.down_s(), fleet.rollout_down()) == (0.0, "")
        fleet.note_refit("e0", None, flushed=False, phase="paused")
        assert fleet.down_s() == 0.0, "a refit is no outage"
        fleet.note_refit("e0", None, flushed=False, phase="resumed")
        fleet.add("http://127.0.0.1:9")
        assert fleet.down_s() == 0.0, "one more that is not there yet changes nothing"
        fleet.drain(engine)
        await until(fleet.rollout_down, "that is too long")
        words = fleet.rollout_down()
        assert "router.rollout_down_timeout_s 0.05" in words
        assert f"{fake.url} is draining: takes no new sessions" in words
        assert fleet.down_s("judge") == 0.0
        fleet.undrain(engine)
        assert fleet.rollout_down() == ""


async def test_a_lost_engine_is_told_with_who_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine() as one, FakeEngine() as two, watching() as fleet:
        first, second = fleet.add(one.url), fleet.add(two.url)
        await fleet.wait_serving(10, 2)
        with caplog.at_level(logging.ERROR):
            await one.stop()
            await reaches(first, EngineState.LOST, "nobody listens there")
            assert "1 of 2 engines go on" in caplog.text
            await two.stop()
            await reaches(second, EngineState.LOST)
            assert "no other engine is left" in caplog.text


async def test_readiness_and_errors_are_the_same_words() -> None:
    async with FakeEngine() as fake, watching() as fleet:
        engine = fleet.add(fake.url)
        await reaches(engine, EngineState.SERVING)
        fleet.note_refit("e0", None, flushed=False, phase="failed", reason="half a bucket")
        (row,) = fleet.report()
        (line,) = fleet.words()
        assert (row["state"], row["reason"]) == ("quarantined", "a refit failed half-way: half a bucket")
        assert line == f"{fake.url} is quarantined: a refit failed half-way: half a bucket"
        with pytest.raises(NoEngine, match="half a bucket"):
            raise fleet.none_left()


@pytest.mark.parametrize(
    "bad",
    [
        "http://169.254.169.254/latest",
        "http://0xa9fea9fe/",
        "http://[fe80::1]:80",
        "http://[::ffff:169.254.169.254]",
        "file:///etc/passwd",
        "http://user:pw@127.0.0.1:1",
        "http://127.0.0.1:0",
        "http://127.0.0.1:99999",
        "http://127.0.0.1/?a=b",
        "http://host name/",
        "ftp://127.0.0.1",
        "",
    ],
)
def test_addresses_that_name_no_engine_are_refused(bad: str) -> None:
    with pytest.raises(BadRequest):
        check_url(bad)


def test_only_allowed_hosts_may_be_named() -> None:
    assert check_url("http://GPU-1.cluster:30000/", ("gpu-*.cluster",)) == "http://gpu-1.cluster:30000"
    with pytest.raises(BadRequest, match="engine_hosts"):
        check_url("http://127.0.0.1:1", ("gpu-*.cluster",))


async def test_a_look_that_began_before_a_pause_ended_says_nothing_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is on the way while the trainer says that the engine goes on."""
    slow = QUICK.model_copy(update={"probe_interval_s": 30.0})
    async with FakeEngine() as fake, watching(slow) as fleet:
        engine = fleet.add(fake.url)
        await fleet.wait_serving(5)
        asked, answer = asyncio.Event(), asyncio.Event()

        async def not_ready() -> bool:
            asked.set()
            await answer.wait()
            return False

        monkeypatch.setattr(engine.client, "ready", not_ready)
        probes = engine.probes
        engine.wake.set()
        await asked.wait()
        fleet.note_refit(engine.id, None, flushed=False, phase="paused")
        fleet.note_refit(engine.id, 2, flushed=True, phase="resumed")
        answer.set()
        await until(lambda: engine.probes > probes, "the look is over")
        assert engine.health.state is EngineState.SERVING
