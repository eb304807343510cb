"""The rules of an engine's life, without any engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollway.errors import EngineBusy, EngineLost, EngineRefused, UpstreamError
from tollway.router.health import EngineHealth, EngineState

REFUSED = EngineLost("nobody listens", refused=True)
SLOW = EngineLost("no answer", timed_out=True)


def serving(**more: object) -> EngineHealth:
    health = EngineHealth(max_failures=2, busy_window_s=10.0, **more)  # type: ignore[arg-type]
    health.confirmed()
    health.serve()
    return health


def test_an_engine_serves_only_after_its_version_is_confirmed_and_it_was_opened() -> None:
    health = EngineHealth(max_failures=2, busy_window_s=10.0)
    assert (health.state, health.takes_calls) == (EngineState.JOINING, False)
    health.serve()
    assert health.state is EngineState.JOINING, "nothing opens an engine that was not reached"
    health.confirmed()
    assert (health.state, health.takes_calls) == (EngineState.SYNCED, False)
    health.wait("it waits for weights 3")
    assert health.reason == "it waits for weights 3"
    health.serve()
    assert (health.state, health.reason) == (EngineState.SERVING, "")


def test_a_paused_engine_keeps_its_sessions_and_says_why() -> None:
    health = serving()
    health.pause("it says so", 5.0, told=False)
    assert (health.state, health.takes_calls, health.reason) == (EngineState.PAUSED, True, "it says so")
    health.pause("a trainer", 6.0, told=True)
    assert (health.reason, health.paused_since) == ("a trainer", 6.0), "who was told knows better"
    health.pause("it says so", 7.0, told=False)
    assert health.reason == "a trainer"
    health.resume()
    assert health.state is EngineState.SERVING


def test_a_quarantined_engine_takes_no_call_until_it_was_reloaded() -> None:
    health = serving()
    health.quarantine("bucket 2 was refused")
    health.pause("x", 0.0, told=True)
    health.resume()
    health.serve()
    assert (health.state, health.takes_calls) == (EngineState.QUARANTINED, False)
    health.exited("gone")
    health.confirmed()
    health.serve()
    assert health.state is EngineState.QUARANTINED, "half-loaded weights do not heal by a lost connection"
    health.reloaded()
    assert health.state is EngineState.SERVING


def test_a_drained_engine_is_drained_also_after_it_came_back() -> None:
    health = serving()
    health.drain()
    assert (health.state, health.takes_calls) == (EngineState.DRAINING, True)
    health.exited("gone")
    assert (health.state, health.reason) == (EngineState.LOST, "gone")
    health.confirmed()
    health.serve()
    assert (health.state, health.incarnation) == (EngineState.DRAINING, 1)
    health.undrain()
    assert health.state is EngineState.SERVING


def test_an_engine_that_comes_back_is_closed_until_it_is_opened_again() -> None:
    health = serving()
    health.pause("x", 0.0, told=True)
    health.exited("gone")
    health.confirmed()
    assert (health.state, health.pause_reason) == (EngineState.SYNCED, ""), "the pause died with the process"


@pytest.mark.parametrize("error", [EngineRefused("no", upstream_status=409), EngineBusy("no room"), ValueError("x")])
def test_what_an_engine_refuses_never_counts(error: Exception) -> None:
    health = serving()
    for _ in range(10):
        assert not health.failed(error, 0.0)  # type: ignore[arg-type]
    assert (health.failures, health.state) == (0, EngineState.SERVING)


def test_slow_counts_only_while_no_token_arrives_and_a_refused_connection_is_death() -> None:
    health = serving()
    health.progress(100.0)
    assert not health.failed(SLOW, 105.0)
    assert health.failures == 0
    assert not health.failed(SLOW, 120.0)
    assert health.failed(UpstreamError("garbage"), 121.0)
    assert health.state is EngineState.LOST
    assert not health.failed(REFUSED, 122.0), "it is lost once"
    assert serving().failed(REFUSED, 0.0)
    assert not EngineHealth(max_failures=1, busy_window_s=1.0).failed(REFUSED, 0.0), "it may still be starting"


MOVES = ["confirmed", "serve", "drain", "undrain", "pause", "resume", "quarantine", "reloaded", "wait", "lose", "fail"]


@given(st.lists(st.sampled_from(MOVES), max_size=30))
def test_no_order_of_moves_lets_an_unconfirmed_or_quarantined_engine_serve(moves: list[str]) -> None:
    health = EngineHealth(max_failures=2, busy_window_s=1.0)
    confirmed = quarantined = False
    for move in moves:
        before = health.incarnation
        match move:
            case "pause":
                health.pause("p", 0.0, told=False)
            case "quarantine":
                health.quarantine("q")
            case "wait":
                health.wait("w")
            case "lose":
                health.exited("gone")
            case "fail":
                health.failed(SLOW, 100.0)
            case _:
                getattr(health, move)()
        confirmed = move == "confirmed" or (confirmed and health.state is not EngineState.LOST)
        quarantined = move == "quarantine" or (quarantined and move != "reloaded")
        assert not health.takes_calls or (confirmed and not quarantined)
        assert health.incarnation == before or move == "confirmed"
