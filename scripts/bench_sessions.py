#!/usr/bin/env python3
"""Memory and latency of the session server under many sessions.

Opens idle sessions (one call each, then nothing), waits until they have left memory, then keeps live sessions
going: tool conversations that grow from about 8k to about 30k tokens. Measures the rig's capacity with a closed
loop, then latency with calls arriving at half of it. Engine, harnesses and server share the machine.

rss_ratio  growth of the server's memory since its start, per 9 bytes and token of the live sessions
idle_kib   growth of the server's memory per idle session, once it is idle

    scripts/bench_sessions.py [--live N] [--idle N] [--seconds N]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import session_load as load

TOOL_CHARS = 3200
IDLE_CHARS = 4000
UNLOAD_S = 15.0
SWEEP_S = 6.0
"""A bit more than the pause between two looks of the server for unused sessions; then it gives memory back."""
AT_ONCE = 32


class Crowd:
    """Live sessions, calls to them, and what went wrong."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self.talks: list[load.Talk] = []
        self.errors = 0
        self.latencies_s: list[float] = []

    async def open(self, count: int, chars: int) -> None:
        """Sessions with one call each."""
        for at in range(0, count, AT_ONCE):
            fresh = [
                load.Talk(self._http, self._url, load.Texts(7919 * (at + i))) for i in range(min(AT_ONCE, count - at))
            ]
            await asyncio.gather(*(talk.open(chars) for talk in fresh))
            await asyncio.gather(*(self.call(talk) for talk in fresh))
            self.talks += fresh

    async def call(self, talk: load.Talk) -> None:
        """One turn, timed."""
        started = time.perf_counter()
        try:
            await talk.turn(TOOL_CHARS)
        except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:
            self.errors += 1
            print(f"error: {error}")
        self.latencies_s.append(time.perf_counter() - started)

    def tokens(self) -> int:
        """Ids of the live sessions' paths."""
        return sum(talk.prompt_tokens + load.REPLY_TOKENS for talk in self.talks)


async def saturate(crowd: Crowd, turns: int) -> float:
    """Calls per second of a closed loop over all live sessions, ``turns`` of each on average."""
    queue = [talk for talk in crowd.talks for _ in range(turns)]
    random.Random(0).shuffle(queue)
    busy: set[int] = set()
    started = time.perf_counter()
    done = 0

    async def worker() -> None:
        nonlocal done
        while queue:
            talk = queue.pop()
            if id(talk) in busy:
                queue.insert(0, talk)
                await asyncio.sleep(0)
                continue
            busy.add(id(talk))
            await crowd.call(talk)
            busy.discard(id(talk))
            done += 1

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    return done / (time.perf_counter() - started)


async def paced(crowd: Crowd, rate: float, seconds: float) -> None:
    """Calls at ``rate`` per second with random gaps, whatever the server does."""
    chance = random.Random(1)
    order = list(crowd.talks)
    chance.shuffle(order)
    ends = time.perf_counter() + seconds
    due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        at = 0
        while due < ends:
            due += chance.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(crowd.call(order[at % len(order)]))
            at += 1


async def until_idle(http: aiohttp.ClientSession, url: str) -> None:
    """Wait until no session is in memory, and what they took is given back."""
    headers = {"authorization": f"Bearer {load.ADMIN}"}
    for _ in range(240):
        async with http.get(f"{url}/healthz", headers=headers) as response:
            if (await response.json())["loaded_sessions"] == 0:
                await asyncio.sleep(SWEEP_S)
                return
        await asyncio.sleep(0.5)
    raise RuntimeError("idle sessions stay in memory")


async def measure(live: int, idle: int, seconds: float) -> dict[str, object]:
    """The whole run."""
    engine = load.start_engine(layers=0)
    await load.wait_http(f"{engine.url}/health")
    with load.scratch() as name:
        server = load.start_server(Path(name), engine.url, routes=False, more=f"unload_after_s = {UNLOAD_S}\n")
        timeout = aiohttp.ClientTimeout(total=120)
        try:
            async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
                warm = Crowd(http, server.url)
                await warm.open(4, IDLE_CHARS)
                start = server.rss_bytes()
                resting = Crowd(http, server.url)
                await resting.open(idle, IDLE_CHARS)
                resting_errors = resting.errors
                del resting
                await until_idle(http, server.url)
                rested = server.rss_bytes()
                print(f"{idle:,} idle sessions: {(rested - start) / 2**20:.1f} MiB")
                crowd = Crowd(http, server.url)
                await crowd.open(live, load.chars_for(6500))
                capacity = await saturate(crowd, 8)
                crowd.latencies_s.clear()
                gc.freeze()  # a full collection of this process would show up as latency of the server
                await paced(crowd, capacity / 2, seconds)
                end = server.rss_bytes()
        finally:
            server.stop()
            engine.stop()
    return report(crowd, capacity, (start, rested, end), idle, resting_errors)


def report(crowd: Crowd, capacity: float, rss: Sequence[int], idle: int, idle_errors: int) -> dict[str, object]:
    """Figures of a run."""
    start, rested, end = rss
    ordered = sorted(crowd.latencies_s)
    p50, p99 = statistics.median(ordered), ordered[int(len(ordered) * 0.99)]
    tokens = crowd.tokens()
    print(
        f"{len(crowd.talks):,} live sessions with {tokens:,} tokens, {(end - start) / 2**20:.0f} MiB since start; "
        f"capacity {capacity:.0f} calls/s, {len(ordered):,} calls at half of it"
    )
    return {
        "rss_ratio": round((end - start) / (9 * tokens), 2),
        "idle_kib": round((rested - start) / 1024 / idle, 2),
        "errors": crowd.errors + idle_errors,
        "p50_ms": round(p50 * 1e3, 1),
        "p99_ms": round(p99 * 1e3, 1),
        "capacity_per_s": round(capacity, 1),
        "live_tokens": tokens,
    }


def main() -> None:
    """Run and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", type=int, default=1000)
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=30.0, help="of calls at half capacity")
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(measure(arguments.live, arguments.idle, arguments.seconds))))


if __name__ == "__main__":
    main()
