#!/usr/bin/env python3
"""Cost of routing decisions, against a dictionary lookup in the same run.

    scripts/bench_routing.py [--rounds N]

Pinned: the place of a known session. Placement: a new session over 64 targets with 6,400 sessions, half of the targets
full, then its release (timed apart). Each figure is CPU time, the median of the rounds; the spread is their lowest and
highest. The last line is JSON; all values are microseconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable

from tollway.router.queues import AdmissionQueue, SlotQueue
from tollway.router.table import Ask, RoutingTable
from tollway.router.targets import Wanted

TARGETS, SESSIONS = 64, 6400
PINNED_US, PLACE_US = 1.0, 20.0


def fleet() -> RoutingTable:
    """64 engines in an order that is not that of their loads; every second one is full."""
    rng = random.Random(0)
    table = RoutingTable()
    for number in range(TARGETS):
        table.set_engine(f"e{number}", budget_tokens=20_000_000, max_in_flight=256, version=7)
    for number in range(SESSIONS):
        table.place(f"s{number}", tokens=4000, group=f"g{number // 8}")
    for number in range(SESSIONS):
        table.grow(f"s{number}", rng.randrange(4000, 40_000))
    for number in range(0, TARGETS, 2):
        (target,) = table.targets(f"e{number}")
        target.budget_tokens = target.reserved_tokens
    return table


def timed(work: Callable[[], object], count: int) -> float:
    """Microseconds per item of ``work``, which handles ``count``."""
    started = time.thread_time()
    work()
    return (time.thread_time() - started) * 1e6 / count


def pinned(table: RoutingTable, keys: list[str]) -> tuple[float, float, float]:
    """Plain dictionary, table, and table with the target."""
    plain = dict(table.pins)

    def by_dict() -> None:
        for key in keys:
            plain.get(key)

    def by_table() -> None:
        pin = table.pin
        for key in keys:
            pin(key)

    def with_target() -> None:
        pin, target_of = table.pin, table.target_of
        for key in keys:
            if (found := pin(key)) is not None:
                target_of(found)

    return timed(by_dict, len(keys)), timed(by_table, len(keys)), timed(with_target, len(keys))


def place(table: RoutingTable, count: int, want: Wanted | None, group: str = "") -> tuple[float, float]:
    """Microseconds per new placement, and per release."""
    keys = [f"n{number}" for number in range(count)]

    def start() -> None:
        for key in keys:
            if want is None:
                table.place(key, tokens=4000, group=group)
            else:
                table.place(key, tokens=4000, want=want)

    def end() -> None:
        for key in keys:
            table.release(key)

    took = timed(start, count)
    if any(table.pin(key) is None for key in keys):
        raise RuntimeError("a session found no room: the figure would be that of a refusal")
    return took, timed(end, count)


def calls(table: RoutingTable, count: int, size: int) -> float:
    """One call's own bookkeeping: its slot and the growth of its session to ``size`` tokens."""
    slots = SlotQueue(table)
    (target,) = table.targets("e1")

    def work() -> None:
        for number in range(count):
            ticket = slots.ask(target, now=0.0)
            table.grow(f"s{number}", size)
            slots.end(ticket)

    return timed(work, count)


def queue(table: RoutingTable, count: int) -> float:
    """Arrival, admission and release through the queue while 500 others wait that do not fit."""
    waiting = AdmissionQueue(table)
    for number in range(500):
        waiting.offer(Ask(f"w{number}", 19_000_000), now=1.0)
    waiting.pump()

    def work() -> None:
        for number in range(count):
            ticket = waiting.offer(Ask(f"q{number}", 4000), now=2.0 + number)
            waiting.pump()
            waiting.withdraw(ticket)
            table.release(f"q{number}")

    return timed(work, count)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    table = fleet()
    keys = random.Random(1).choices(list(table.pins), k=50_000)
    rows: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            rows.setdefault(name, []).append(value)

    gc.disable()
    for turn in range(rounds):
        by_dict, by_table, with_target = pinned(table, keys)
        placed, released = place(table, 300, None)
        wanted, _ = place(table, 300, Wanted(minimum=7))
        sibling, _ = place(table, 300, None, group="g1")
        note(
            dict_us=by_dict,
            pinned_us=by_table,
            pinned_target_us=with_target,
            place64_us=placed,
            place64_version_us=wanted,
            place_sibling_us=sibling,
            release_us=released,
            call_us=calls(table, 1000, 40_000 + 600 * turn),
            queued_us=queue(table, 20),
        )
        gc.collect()
    print(f"{'us':22}{'median':>9}{'lowest':>9}{'highest':>9}{'x dict':>9}")
    floor = statistics.median(rows["dict_us"])
    for name, values in rows.items():
        middle = statistics.median(values)
        print(f"{name:22}{middle:9.3f}{min(values):9.3f}{max(values):9.3f}{middle / floor:9.1f}")
    print(json.dumps({name: round(statistics.median(values), 3) for name, values in rows.items()}))
    return (
        0
        if statistics.median(rows["pinned_us"]) <= PINNED_US and statistics.median(rows["place64_us"]) <= PLACE_US
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
