"""Wanted versions: which wishes go together, what waiting can bring, and who holds a version."""

from __future__ import annotations

import asyncio

import pytest

from tollway.errors import BadRequest
from tollway.router.targets import ANY, Wanted
from tollway.router.versions import Changes, ExactHolders, narrowed, not_ready, will_come


@pytest.mark.parametrize(
    ("session", "request_", "both"),
    [
        (ANY, ANY, ANY),
        (Wanted(minimum=3), ANY, Wanted(minimum=3)),
        (ANY, Wanted(exact=4), Wanted(exact=4)),
        (Wanted(minimum=3), Wanted(minimum=2), Wanted(minimum=3)),
        (Wanted(minimum=3), Wanted(exact=4), Wanted(minimum=3, exact=4)),
        (Wanted(exact=4), Wanted(exact=4), Wanted(exact=4)),
        (Wanted(exact=4), Wanted(minimum=4), Wanted(minimum=4, exact=4)),
    ],
)
def test_both_wishes_hold(session: Wanted, request_: Wanted, both: Wanted) -> None:
    assert narrowed(session, request_) == both


@pytest.mark.parametrize(
    ("session", "request_", "param"),
    [
        (Wanted(exact=4), Wanted(exact=5), "exact_version"),
        (Wanted(exact=4), Wanted(minimum=5), "min_version"),
        (Wanted(minimum=5), Wanted(exact=4), "min_version"),
    ],
)
def test_wishes_that_exclude_each_other_are_refused_for_good(session: Wanted, request_: Wanted, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        narrowed(session, request_)
    assert caught.value.param == param


def test_waiting_helps_unless_every_engine_has_passed_an_exact_version() -> None:
    assert will_come(Wanted(minimum=9), [1, 2])
    assert will_come(Wanted(exact=3), [4, 2])
    assert will_come(Wanted(exact=3), [4, None]), "one that is on its way may have it"
    assert not will_come(Wanted(exact=3), [4, 5])


def test_the_refusal_says_what_was_wanted_and_what_is_there() -> None:
    error = not_ready(Wanted(minimum=2, exact=7), [3, None, 5, 3])
    assert (error.wanted, error.exact, error.serving, error.available) == (7, True, 5, (3, 5))
    assert "7, exactly" in str(error)
    assert "3, 5" in str(error)
    nobody = not_ready(Wanted(minimum=2), [None])
    assert (nobody.wanted, nobody.exact, nobody.serving, nobody.available) == (2, False, None, ())


async def test_a_change_wakes_everybody_who_waits_and_nobody_later() -> None:
    changes = Changes()
    waiting = [asyncio.create_task(changes.wait(30)) for _ in range(3)]
    await asyncio.sleep(0)
    changes.notify()
    assert await asyncio.gather(*waiting) == [True, True, True]
    assert not await changes.wait(0.01), "an earlier change is over"
    assert not await changes.wait(-1)
    cancelled = asyncio.create_task(changes.wait(30))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert not changes._waiting


def test_holders_are_those_of_this_version_on_this_engine_or_still_without_a_place() -> None:
    holders = ExactHolders()
    homes: dict[str, str] = {"a": "e0", "b": "e1"}
    for key in ("a", "b", "c"):
        holders.hold(key, 3)
    holders.hold("old", 2)
    holders.hold("judge", 3, model="judge")
    on = holders.on("e0", 3, model="", home=homes.get)
    assert (on.sessions, on.calls) == (2, 0)
    running: tuple[tuple[str, int | None], ...] = (("e0", 3), ("e0", None), ("e1", 3))
    for engine_id, version in running:
        holders.begin(engine_id, version)
    assert holders.on("e0", 3, model="", home=homes.get).calls == 1
    for engine_id, version in running:
        holders.end(engine_id, version)
    assert holders.on("e0", 3, model="", home=homes.get).calls == 0
    for key in ("a", "c", "c", "unknown"):
        holders.release(key)
    assert not holders.on("e0", 3, model="", home=homes.get).any
    assert not holders.on("e0", None, model="", home=homes.get).any
