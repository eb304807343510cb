#!/usr/bin/env python3
"""CPU of one agent turn in the session server, against floors measured in the same run.

A scripted engine on loopback, the real Qwen3 vocabulary, replies of 400 tokens, tool results of about 1,000. The
server is `tollway serve` in a process of its own; its CPU is user and system time of all its threads. Measured
turns continue their conversation, as nearly all do.

floor          one process that does what a turn cannot do without, and nothing else: compare the known bytes, parse
               the new messages, encode them, join and post the body, read the reply, write the record, write the answer
pass-through   a server that reads the same bodies, posts the same bytes upstream and returns the same replies;
               what the session server uses beyond it is its application work

    scripts/bench_turn.py [--sessions N] [--turns N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import session_load as load

from tollway.free_ports import free_ports
from tollway.session_server.columns import unpack_rows

TOOL_CHARS = 4000
TURN_TOKENS, TOOLS_TOKENS = 1250, 800
"""About what a turn adds, and what stands before the first message."""
ROUTED_AT = 34_000


@dataclass
class Cost:
    """CPU per turn at one context length."""

    context: int
    server_ms: float
    through_ms: float
    body_kb: float
    reply_kb: float

    @property
    def application_ms(self) -> float:
        return self.server_ms - self.through_ms


async def talks_at(http: aiohttp.ClientSession, url: str, context: int, count: int, turns: int) -> list[load.Talk]:
    """Conversations whose next ``turns`` prompts have ``context`` tokens on average."""
    out = []
    for at in range(count):
        talk = load.Talk(http, url, load.Texts(context * 1000 + at))
        # One turn opens the conversation, one more is its first continuation.
        await talk.open(load.chars_for(max(100, context - TOOLS_TOKENS - TURN_TOKENS * (2 + (turns - 1) / 2))))
        await talk.turn(TOOL_CHARS)
        await talk.turn(TOOL_CHARS)
        out.append(talk)
    return out


async def server_cost(server: load.Process, talks: list[load.Talk], turns: int) -> float:
    """Server CPU per turn in milliseconds, several conversations side by side."""
    before = server.cpu_s()
    for _ in range(turns):
        await asyncio.gather(*(talk.turn(TOOL_CHARS) for talk in talks))
    return (server.cpu_s() - before) * 1e3 / (turns * len(talks))


async def through_cost(
    folder: Path, http: aiohttp.ClientSession, engine: load.Process, talk: load.Talk, count: int
) -> Cost:
    """The same bodies and replies through a server that looks at nothing."""
    async with http.get(f"{engine.url}/last_body") as response:
        upstream = await response.read()
    async with http.get(f"{engine.url}/last_reply") as response:
        reply_size = len(await response.read())
    (folder / "upstream").write_bytes(upstream)
    (port,) = free_ports()
    popen = subprocess.Popen(  # noqa: ASYNC220 - takes no time
        [sys.executable, __file__, "--pass-through", str(port), engine.url, str(folder / "upstream")],
        cwd=Path(__file__).parent,
    )
    through = load.Process(popen, f"http://127.0.0.1:{port}")
    try:
        await load.wait_http(through.url)

        async def one() -> None:
            async with http.post(through.url, data=talk.last_body) as response:
                await response.read()

        await asyncio.gather(*(one() for _ in range(4)))
        before = through.cpu_s()
        for _ in range(count):
            await asyncio.gather(*(one() for _ in range(4)))
        used = (through.cpu_s() - before) * 1e3 / (count * 4)
    finally:
        through.stop()
    return Cost(talk.prompt_tokens, 0.0, used, len(talk.last_body) / 1e3, reply_size / 1e3)


async def costs(contexts: list[int], *, layers: int, sessions: int, turns: int) -> tuple[list[Cost], float]:
    """(cost at each context, export cost of a 30k-token session in ms)."""
    engine = load.start_engine(layers=layers)
    found = []
    with load.scratch() as name:
        folder = Path(name)
        await load.wait_http(f"{engine.url}/health")
        server = load.start_server(folder, engine.url, routes=layers > 0)
        try:
            timeout = aiohttp.ClientTimeout(total=600)
            async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
                # Imports, first encodings and the engine's confirmation are not of a turn.
                await server_cost(server, await talks_at(http, server.url, 8000, 2, 3), 3)
                for context in contexts:
                    talks = await talks_at(http, server.url, context, sessions, turns)
                    used = await server_cost(server, talks, turns)
                    cost = await through_cost(folder, http, engine, talks[-1], max(10, turns * sessions // 4))
                    cost.server_ms = used
                    found.append(cost)
                export = await export_cost(server, http)
        finally:
            server.stop()
            engine.stop()
    return found, export


async def export_cost(server: load.Process, http: aiohttp.ClientSession) -> float:
    """Server CPU of exporting a session of about 30k tokens, in milliseconds."""
    talk = load.Talk(http, server.url, load.Texts(99))
    await talk.open(load.chars_for(8000))
    while talk.prompt_tokens < 29_000:
        await talk.turn(TOOL_CHARS)
    url = f"{server.url}/sessions/{talk.session_id}/trajectories"
    headers = {"authorization": f"Bearer {talk.token}"}
    rounds = 20
    before = server.cpu_s()
    for _ in range(rounds):
        async with http.get(url, headers=headers) as response:
            data = await response.read()
    used = (server.cpu_s() - before) * 1e3 / rounds
    (row,) = unpack_rows(data)
    print(f"export of {row.token_ids.size:,} tokens, {len(data) / 1e6:.1f} MB: {used:.1f} ms")
    return used


def floor(layers: int, turns: int) -> float:
    """The floor's CPU per turn in milliseconds, measured in a process of its own."""
    engine = load.start_engine(layers=layers)
    try:
        asyncio.run(load.wait_http(f"{engine.url}/health"))
        with load.scratch() as name:
            out = subprocess.run(
                [sys.executable, str(Path(__file__).with_name("bench_turn_floor.py")), engine.url, name, str(turns),
                 str(ROUTED_AT), str(TOOL_CHARS)],
                stdout=subprocess.PIPE, check=True,
            )  # fmt: skip
        return float(json.loads(out.stdout)["floor_ms"])
    finally:
        engine.stop()


def pass_through(port: int, engine_url: str, body_file: str) -> None:
    """Serve: read the request, post the stored body upstream, return what comes back."""
    body = Path(body_file).read_bytes()
    http: list[aiohttp.ClientSession] = []

    async def app(scope, receive, send) -> None:
        while True:
            message = await receive()
            if not message.get("more_body"):
                break
        if scope["method"] == "GET":
            data = b"ok"
        else:
            if not http:
                http.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
            headers = {"content-type": "application/json"}
            async with http[0].post(f"{engine_url}/generate", data=body, headers=headers) as response:
                await response.read()
            data = b"x" * 2500
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(data)).encode())]}
        )
        await send({"type": "http.response.body", "body": data})

    load.serve_app(app, port)


def median_cost(costs: list[Cost]) -> Cost:
    """The costs of several rounds as one."""
    first = costs[0]
    server = statistics.median(cost.server_ms for cost in costs)
    through = statistics.median(cost.through_ms for cost in costs)
    return Cost(first.context, server, through, first.body_kb, first.reply_kb)


def main() -> None:
    """Run it all and print one table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=24, help="conversations side by side")
    parser.add_argument("--turns", type=int, default=4, help="measured turns of each")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of the main figure and of its floor")
    parser.add_argument("--pass-through", nargs=3, metavar=("PORT", "ENGINE", "BODY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pass_through:
        port, engine, body = arguments.pass_through
        pass_through(int(port), engine, body)
        return
    started = time.time()
    runs, floors, exports = [], [], []
    for _ in range(arguments.rounds):
        found, export = asyncio.run(
            costs([4000, ROUTED_AT, 128_000], layers=0, sessions=arguments.sessions, turns=arguments.turns)
        )
        routed, _ = asyncio.run(
            costs([ROUTED_AT], layers=load.LAYERS_1MB, sessions=arguments.sessions // 2, turns=arguments.turns)
        )
        runs.append([*found, *routed])
        exports.append(export)
        floors.append(floor(load.LAYERS_1MB, arguments.sessions * arguments.turns))
    wide, export_routes = asyncio.run(costs([ROUTED_AT], layers=load.LAYERS, sessions=4, turns=arguments.turns))
    wide_floor = floor(load.LAYERS, arguments.sessions)
    small, plain, large, routed_cost = (median_cost([run[at] for run in runs]) for at in range(4))
    print(f"{'context':>9} {'body kB':>8} {'reply kB':>9} {'server ms':>10} {'pass-through':>13} {'application':>12}")
    for cost in [cost for run in runs for cost in run] + wide:
        print(
            f"{cost.context:>9,} {cost.body_kb:>8.0f} {cost.reply_kb:>9.0f} {cost.server_ms:>10.2f} "
            f"{cost.through_ms:>13.2f} {cost.application_ms:>12.2f}"
        )
    main_ms, floor_ms = routed_cost.server_ms, statistics.median(floors)
    print(f"floors with routes: {', '.join(f'{each:.2f}' for each in floors)} ms; {time.time() - started:.0f} s in all")
    line = {
        "cpu_ms_turn": round(main_ms, 2),
        "floor_ms": round(floor_ms, 2),
        "ratio_to_floor": round(main_ms / floor_ms, 2),
        "ratio_128k_4k": round(large.application_ms / small.application_ms, 2),
        "ratio_128k_4k_total": round(large.server_ms / small.server_ms, 2),
        "ms_128k": round(large.server_ms, 2),
        "export_ms": round(statistics.median(exports), 1),
        "cpu_ms_turn_480b": round(wide[0].server_ms, 2),
        "ratio_to_floor_480b": round(wide[0].server_ms / wide_floor, 2),
        "export_ms_480b": round(export_routes, 1),
        "cpu_ms_turn_without_routes": round(plain.server_ms, 2),
        "spread": [round(pick(run[3].server_ms for run in runs), 2) for pick in (min, max)],
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
