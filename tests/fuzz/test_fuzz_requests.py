"""A hundred thousand generated requests: no 5xx of ours, no hang, and sessions that are whole afterwards.

The same generator runs in two ways. A plain loop is fast: several clients at once, one long-lived session beside
many short ones. Hypothesis drives it slowly and shrinks what fails to the few draws that matter.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import aiohttp
import pytest
from fuzz_arena import FULL, QUIET, Arena, arena
from fuzz_ground import FAMILIES, Ground, Served, ground
from fuzz_odd import FIELDS, KINDS, NAMES, TEXTS
from fuzz_process import KEY, Serving
from fuzz_talk import LISTS, PATHS, Talk, understand
from fuzz_wire import Shot
from fuzz_witness import numbers_in
from hypothesis import given, settings
from hypothesis import strategies as st

from tollway.router.fake import FakeEngine
from tollway.session_server.client import SessionClient
from tollway.session_server.fake import FakeServer

__all__ = ["arena"]

CLIENTS = 8
SESSION = 300
"""Requests of a short session before it is proved and replaced."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("requests", [500, pytest.param(45_000, marks=FULL)])
async def test_generated_requests_leave_sessions_whole(tmp_path: Path, family: str, requests: int) -> None:
    async with ground(tmp_path, family) as place:
        shared = await place.camp()
        started = time.monotonic()

        async def one(rng: Random) -> None:
            while place.requests < requests:
                own = await place.camp()
                until = min(requests, place.requests + SESSION)
                while place.requests < until:
                    await place.step(Random(rng.random()), shared if rng.random() < 0.4 else own)
                await place.still_serves(own)

        async with asyncio.TaskGroup() as group:
            for at in range(CLIENTS):
                group.create_task(one(Random(f"{family}-{at}")))
        took = time.monotonic() - started
        turns = sum([await place.prove(camp) for camp in place.camps])
        counts = Counter[int]()
        for (_, status), count in place.statuses.items():
            counts[status] += count
        assert counts[200] > 0.4 * place.requests, counts
        assert counts[400] > 0.1 * place.requests, counts
        assert turns > 0.3 * place.requests, "most good requests are turns"
        assert place.followed > 0.05 * place.requests, "conversations go on"
    async with FakeServer(tmp_path, engines=[place.engine], settings={"engine_wait_s": 0.0}) as again:
        place.server = again
        assert sum([await place.prove(camp) for camp in place.camps]) == turns, "the same after a restart"
    _report(f"{family}: {place.requests} requests, {turns} turns proved, {took:.0f} s", place)


@pytest.mark.parametrize("requests", [600, pytest.param(10_000, marks=FULL)])
async def test_generated_requests_pass_between_workers(tmp_path: Path, requests: int) -> None:
    """All of it comes in on the address that the workers share, so half of it has to be passed on."""
    async with FakeEngine(keep_requests=False) as engine, aiohttp.ClientSession() as http:
        serving = Serving(tmp_path, engine, workers=2)
        await serving.start()
        place = Ground(Served(serving.url, SessionClient(serving.url, KEY, http=http), http), engine, "compact")

        async def one(rng: Random) -> None:
            while place.requests < requests:
                own = await place.camp()
                until = min(requests, place.requests + SESSION)
                while place.requests < until:
                    await place.step(Random(rng.random()), own)

        async with asyncio.TaskGroup() as group:
            for at in range(CLIENTS):
                group.create_task(one(Random(f"workers-{at}")))
        turns = sum([await place.prove(camp) for camp in place.camps])
        assert turns > 0.3 * place.requests
        place.client.close()
        await serving.stop()
        assert "Traceback" not in serving.log
    _report(f"2 workers: {place.requests} requests, {turns} turns proved", place)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", sorted(PATHS))
async def test_four_identical_requests_at_once_are_four_samples(tmp_path: Path, dialect: str, stream: bool) -> None:
    """Best-of-n harnesses send them so; without a key each has an engine call, a node and a reply of its own."""
    async with ground(tmp_path, "compact") as place:
        camp = await place.camp()
        talk = Talk(dialect)
        talk.tell(Random(0), "go")
        one = Shot(PATHS[dialect], json.dumps(talk.body(stream=stream)).encode(), clean=True)
        answers = await asyncio.gather(*(place.fire(camp, one) for _ in range(4)))
        said = [understand(dialect, answer) for answer in answers]
        assert len({each.reply_id for each in said}) == 4
        camp.seen |= set().union(*(numbers_in(each.text) for each in said))
        assert await place.prove(camp) == 4
        state = await place.server.client.session(camp.session_id)
        assert {node["parent"] for node in state["nodes"]} == {None}  # type: ignore[attr-defined]  # a list of nodes


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
SCALARS |= st.sampled_from([*TEXTS, *KINDS]) | st.text(st.characters(categories=["Cs"]), min_size=1, max_size=2)
KEYS = st.sampled_from(NAMES) | st.text(max_size=5)


def _within(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner)


VALUES = st.recursive(SCALARS, _within, max_leaves=8)


@pytest.mark.parametrize("examples", [50, pytest.param(1_500, marks=FULL)])
def test_any_short_history_of_requests_leaves_its_session_whole(arena: Arena, examples: int) -> None:
    """Steps are seeds, not draws: what a step can do depends on what was answered before."""
    place = arena.place

    async def play(steps: list[tuple[int, bool]]) -> None:
        own = await place.camp()
        for seed, shared in steps:
            await place.step(Random(seed), arena.shared if shared else own, spoil=0.1)
        await place.prove(own)

    @settings(QUIET, max_examples=examples)
    @given(st.lists(st.tuples(st.integers(0, 2**32), st.booleans()), min_size=1, max_size=6))
    def check(steps: list[tuple[int, bool]]) -> None:
        arena.run(play(steps))

    check()
    arena.run(place.still_serves(arena.shared))
    assert arena.run(place.prove(arena.shared)) > 0
    _report(f"hypothesis: {examples} histories, {place.requests} requests", place)


@pytest.mark.parametrize("examples", [100, pytest.param(4_000, marks=FULL)])
@pytest.mark.parametrize("dialect", sorted(PATHS))
def test_any_value_in_any_field_is_answered(arena: Arena, dialect: str, examples: int) -> None:
    place = arena.place
    edits = st.lists(st.tuples(st.sampled_from(FIELDS[dialect]), VALUES), min_size=1, max_size=3)
    items = st.lists(
        st.dictionaries(st.sampled_from(("role", "type", "content", *NAMES)), VALUES, max_size=5) | VALUES, max_size=3
    )

    @settings(QUIET, max_examples=examples)
    @given(edits, st.none() | items, st.booleans())
    def check(edits: list[tuple[str, object]], items: list[object] | None, first: bool) -> None:
        talk = Talk(dialect, tools=("run",))
        talk.tell(Random(0), "go")
        value = talk.body(stream=False) | dict(edits)
        if items is not None:
            said = talk.items
            value[LISTS[dialect]] = [*items, *said] if first else [*said, *items]
        one = Shot(PATHS[dialect], json.dumps(value).encode())
        arena.run(place.fire(arena.shared, one))

    check()
    arena.run(place.still_serves(arena.shared))
    assert arena.run(place.prove(arena.shared)) > 0
    _report(f"hypothesis: {examples} {dialect} bodies", place)


def _report(words: str, place: Ground) -> None:
    """Figures for whoever runs it with -s."""
    lines = [f"  {route} {status or 'hung up or left'}: {count}" for (route, status), count in place.statuses.items()]
    sys.stdout.write("\n".join([words, *sorted(lines), ""]))
