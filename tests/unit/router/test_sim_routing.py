"""The routing simulator: every token accounted once, the same figures for the same seed, the router's own code."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from sim_engine import LARGE, Call, SimEngine
from sim_policies import POLICIES, Policy, StickySessions, Tollway
from sim_run import Fault, Outcome, Simulation
from sim_traces import Shape, TraceSession, read_trace, synthetic, write_trace

SMALL = Shape(sessions=48, group_size=4, turns=6, max_turns=20)
TRACE = synthetic(SMALL, seed=3)
FAULTS = [Fault(5, "refit"), Fault(10, "lose"), Fault(16, "join"), Fault(24, "refit"), Fault(40, "refit")]


def played(
    policy: type[Policy],
    *,
    kv_tokens: int = 400_000,
    faults: list[Fault] | None = None,
    trace: list[TraceSession] = TRACE,
    live: int = 24,
) -> Outcome:
    model = replace(LARGE, kv_tokens=kv_tokens)
    return Simulation(trace, policy, engines=3, live=live, model=model, faults=faults or [], seed=1).run()


def sums(trace: list[TraceSession]) -> tuple[int, int, int]:
    """Calls, prompt tokens and possible hits of a trace: no policy can change them."""
    calls = prompt = possible = 0
    for session in trace:
        length = 0
        for added, sampled, _ in session.turns:
            calls += 1
            prompt += length + added
            possible += max(0, min(length - 1, length + added - 1))
            length += added + sampled
    return calls, prompt, possible


@pytest.mark.parametrize("policy", POLICIES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("faults", [[], FAULTS], ids=["quiet", "faults"])
@pytest.mark.parametrize("kv_tokens", [400_000, 60_000])
def test_every_token_is_accounted_once(policy: type[Policy], faults: list[Fault], kv_tokens: int) -> None:
    out = played(policy, faults=faults, kv_tokens=kv_tokens)
    assert (out.calls, out.prompt, out.possible) == sums(TRACE)
    assert out.ended == len(out.admission_waits_s) == len(TRACE)
    assert out.possible == out.cached + sum(out.waste.values())
    computed = out.prompt - out.cached - out.shared
    if faults:
        assert out.computed >= computed  # interrupted and lost calls were computed again
        assert set(out.waste) <= {"lost", "moved", "flushed", "evicted"}
    else:
        assert out.computed == computed
        assert not out.waste["lost"]
        assert not out.waste["flushed"]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda each: each.__name__)
def test_figures_are_the_same_for_the_same_seed(policy: type[Policy]) -> None:
    assert played(policy, faults=FAULTS) == played(policy, faults=FAULTS)


def test_with_ample_room_the_router_reaches_the_ceiling() -> None:
    out = played(Tollway, kv_tokens=2_000_000)
    assert out.efficiency == 1.0
    assert out.hit_rate == out.ceiling
    assert out.redispatched == 0


def test_faults_cost_what_was_lost_and_flushed_and_nothing_else() -> None:
    out = played(Tollway, kv_tokens=2_000_000, faults=FAULTS)
    assert out.efficiency_without_faults == 1.0
    assert out.efficiency < 1.0
    assert out.waste["lost"] > 0
    assert out.waste["flushed"] > 0
    assert out.waste["moved"] == out.waste["evicted"] == 0


def test_admission_keeps_the_hits_that_plain_stickiness_loses_when_room_is_scarce() -> None:
    trace = synthetic(replace(SMALL, sessions=90, turns=12), seed=5)
    ours = played(Tollway, kv_tokens=110_000, trace=trace, live=60)
    plain = played(StickySessions, kv_tokens=110_000, trace=trace, live=60)
    assert ours.efficiency > 0.95
    assert plain.efficiency < 0.85
    assert max(ours.admission_waits_s) > 0 == max(plain.admission_waits_s)


def test_the_routers_counters_are_zero_in_the_end() -> None:
    simulation = Simulation(TRACE, Tollway, engines=3, live=24, model=LARGE, faults=FAULTS)
    simulation.run()
    policy = simulation._policy
    assert isinstance(policy, Tollway)
    for target in policy.table.of_model(""):
        left = (target.sessions, target.resident_tokens, target.reserved_tokens, target.in_flight, target.waiting)
        assert left == (0, 0, 0, 0, 0)
    assert len(policy.queue) == 0
    assert policy.table.pins == {}


class Rig:
    """One engine with its own clock."""

    def __init__(self, **model: object) -> None:
        self.events: list[tuple[float, int]] = []
        self.ended: list[tuple[float, Call]] = []
        self.engine = SimEngine(
            0,
            replace(LARGE, **model),  # type: ignore[arg-type]
            wake=lambda at, engine, tick: self.events.append((at, tick)),
            done=lambda now, engine, call: self.ended.append((now, call)),
        )

    def run(self) -> float:
        now = 0.0
        while self.events:
            self.events.sort()
            now, tick = self.events.pop(0)
            self.engine.event(now, tick)
        return now


def test_a_calls_time_is_its_prefill_and_its_steps() -> None:
    rig = Rig(step_s=0.01, prefill_tokens_per_s=1000.0, kv_read_s=0.0)
    first = Call("s", "", prompt=500, sampled=11)
    rig.engine.submit(0.0, first)
    assert rig.run() == pytest.approx(0.01 + 0.5 + 10 * 0.01)
    again = Call("s", "", prompt=600, sampled=1)
    rig.engine.submit(10.0, again)
    assert rig.run() == pytest.approx(10.0 + 0.01 + (600 - 510) / 1000)
    assert (first.cached, again.cached) == (0, 510)  # the last sampled token was never computed


def test_context_that_is_read_slows_every_step() -> None:
    rig = Rig(step_s=0.01, prefill_tokens_per_s=1e9, kv_read_s=1e-5)
    rig.engine.submit(0.0, Call("s", "", prompt=1000, sampled=2))
    assert rig.run() == pytest.approx(0.01 + 0.01 + 1000e-5, rel=0.01)


def test_the_least_recently_used_session_is_evicted_from_its_end() -> None:
    rig = Rig(kv_tokens=1000)
    for number, name in enumerate("abc"):
        rig.engine.submit(10.0 * number, Call(name, "", prompt=300, sampled=1))
        rig.run()
    late = Call("d", "", prompt=250, sampled=1)
    rig.engine.submit(40.0, late)
    rig.run()
    hits = []
    for number, name in enumerate("bca"):
        again = Call(name, "", prompt=301, sampled=1)
        rig.engine.submit(50.0 + 10 * number, again)
        rig.run()
        hits.append(again.cached)
    assert hits[:2] == [300, 300]
    assert hits[2] is not None
    assert hits[2] < 300
    assert rig.engine.evicted_tokens > 0


def test_siblings_find_their_shared_prompt_and_hold_it_once() -> None:
    rig = Rig(kv_tokens=1000)
    calls = [Call(f"s{number}", "g", prompt=600, sampled=50, shared=600) for number in range(4)]
    for number, call in enumerate(calls):
        rig.engine.submit(10.0 * number, call)
        rig.run()
    assert [call.cached for call in calls] == [0, 599, 599, 599]
    assert rig.engine.evicted_tokens == 0


def test_a_call_waits_until_it_fits_beside_those_that_run() -> None:
    rig = Rig(kv_tokens=1000, step_s=0.01, prefill_tokens_per_s=1e6, kv_read_s=0.0)
    rig.engine.submit(0.0, Call("a", "", prompt=700, sampled=100))
    rig.engine.submit(0.0, Call("b", "", prompt=700, sampled=1))
    rig.run()
    assert [call.session for _, call in rig.ended] == ["a", "b"]
    assert rig.ended[1][0] > rig.ended[0][0]


def test_a_flush_drops_the_cache_and_computes_running_replies_again() -> None:
    rig = Rig(step_s=0.01, prefill_tokens_per_s=1000.0, kv_read_s=0.0)
    call = Call("s", "", prompt=500, sampled=101)
    rig.engine.submit(0.0, call)
    at, tick = rig.events.pop()
    rig.engine.event(at, tick)
    rig.engine.flush(1.01, 2.0)  # 50 of 101 tokens are there
    assert rig.run() == pytest.approx(1.01 + 2.0 + 0.01 + 0.55 + 0.5, abs=0.03)
    assert call.cached == 0
    assert rig.engine.computed_tokens == pytest.approx(500 + 550, abs=2)
    again = Call("s", "", prompt=700, sampled=1)
    rig.engine.submit(50.0, again)
    rig.run()
    assert again.cached == 600


def test_traces_survive_a_file_and_broken_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    odd = [*TRACE, TraceSession("odd\u2028name", "", ((5, 1, 0.0),))]
    write_trace(path, odd)
    assert read_trace(path) == odd
    assert played(Tollway, trace=read_trace(path)) == played(Tollway, trace=odd)
    for line in (
        '{"session": "s"}',
        "nonsense",
        '{"session": "s", "turns": []}',
        '{"session": "s", "turns": [[1, 0, 1]]}',
        '{"session": "s", "group": "g", "turns": [[7, 1, 0]]}',
    ):
        path.write_text('{"session": "a", "group": "g", "turns": [[1, 1, 0]]}\n' + line + "\n", encoding="utf-8")
        with pytest.raises(ValueError, match=r"trace\.jsonl:2: "):
            read_trace(path)


def test_sessions_leave_a_long_queue_for_a_free_place_and_that_is_accounted_as_a_move() -> None:
    """Few places for calls: the estimated wait soon exceeds three times what a session's prompt takes."""
    model = replace(LARGE, max_running=3)
    simulation = Simulation(TRACE, Tollway, engines=3, live=24, model=model, seed=1)
    out = simulation.run()
    policy = simulation._policy
    assert isinstance(policy, Tollway)
    assert policy.moves > 0
    assert out.waste["moved"] > 0
    assert (out.calls, out.prompt, out.possible) == sums(TRACE)
    assert out.possible == out.cached + sum(out.waste.values())
    assert out.efficiency > 0.8
