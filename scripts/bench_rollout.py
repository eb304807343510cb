#!/usr/bin/env python3
"""A fleet's output tokens per second behind the session server, against the same requests straight to its engines.

Sessions of several turns run side by side: reply, tool result, reply. The gateway side is a harness with text
(`tollway serve`, its own process, one worker); the direct side sends the same ids to the same engines by itself,
in the bodies that the router writes. Rounds alternate (A B B A ...), caches are flushed before each, and both
clients are processes of their own. Sizes are tokens.

ratio          output tokens per second, gateway over direct, median of paired rounds; wanted on a GPU: 0.98. Also
               while all are busy: without the start of a round, when all come at once, and its end, when few are
               left. Longer rounds (--sessions-each) are steadier
exactness      untimed, first: every export against the request logs of the engines, ids and log-probabilities
               bit for bit; one difference and the exit status is 1
--kill-one     untimed, last: an engine gets SIGKILL after a third of the turns; its sessions move, all end, every id
               of their exports stands in the log of some engine, and the ledger names what the move cost

Engines: `[engine]` of the configuration says what is started (kind embedded by default; kind sglang on a GPU, see
scripts/rollout_h200.toml), or --engine names running ones, SGLang with its request log in a file:

    scripts/bench_rollout.py --concurrent 8 16 --turns 3 --prompt 128 --new 32 --tool 32
    scripts/bench_rollout.py -c scripts/rollout_h200.toml --shape qwen3-0.6b
    scripts/bench_rollout.py --engine http://127.0.0.1:30000 /tmp/sglang.log

The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rollout_exact import Comparison, compare, moved_sessions, read_log
from rollout_family import NAME as WIDE
from rollout_fleet import SHAPES, EngineAt, Fleet, difference, fleet
from rollout_load import DirectTurn, Part, Round, Sizes, direct, gateway, join, joined, schedule

from tollway import telemetry
from tollway.errors import TollwayError
from tollway.records import Trajectory
from tollway.settings import Settings, load_settings

KV_SHARE = 0.8
"""Of the engines' room that the sessions of a round may fill: evictions, and sessions that wait for room, are another
benchmark."""
ENDS_S = 600.0
BEGAN = time.monotonic()

Exports = dict[str, tuple[Trajectory, ...]]
Plans = list[list[tuple[str, list[DirectTurn]]]]
"""By place."""


@dataclass(slots=True)
class Level:
    """Rounds at one number of sessions side by side."""

    concurrent: int
    sizes: Sizes
    pairs: list[tuple[Round, Round]] = field(default_factory=list)
    """(gateway, direct)"""
    cache: list[dict[str, object]] = field(default_factory=list)
    """``GET /cache`` of each gateway round, the difference that it made."""
    server_ms: list[float] = field(default_factory=list)
    """CPU of the server per turn, of each gateway round."""
    hits: dict[str, list[float | None]] = field(default_factory=lambda: {"gateway": [], "direct": []})
    """Share of prompt tokens that the engines say they had, of each round."""

    @property
    def ratios(self) -> list[float]:
        """Output tokens per second, gateway over direct, of each pair."""
        return [through.tokens_s / straight.tokens_s for through, straight in self.pairs]

    @property
    def steady_ratios(self) -> list[float]:
        """The same while all places are busy, of each pair that has such a time."""
        return [
            through.steady_tokens_s / straight.steady_tokens_s
            for through, straight in self.pairs
            if through.steady_tokens_s and straight.steady_tokens_s
        ]


class Bench:
    """The rounds of one run over one fleet."""

    def __init__(
        self, engines: Fleet, sizes: Sizes, pool: ProcessPoolExecutor, *, clients: int, each: int, seed: int
    ) -> None:
        self._fleet, self._sizes, self._each = engines, sizes, each
        self._pool, self._clients = pool, clients
        self._next = seed * 1_000_000

    # -- loads -------------------------------------------------------------------------------------------

    async def through(self, places: int, sizes: Sizes, each: int = 1) -> Round:
        """One round through the session server, with texts that no other round has; ``each`` sessions a place."""
        seats = [[(self._next + seat, seat) for seat in range(at * each, (at + 1) * each)] for at in range(places)]
        self._next += places * each
        url, key = self._fleet.server.url, self._fleet.key
        return await self._shared([partial(gateway, url, key, seats[at :: self._clients], sizes) for at in self._all])

    async def straight(self, plans: Plans) -> Round:
        """The same calls to the engines themselves."""
        return await self._shared([partial(direct, plans[at :: self._clients]) for at in self._all])

    async def _shared(self, shares: Sequence[Callable[[], Part]]) -> Round:
        loop = asyncio.get_running_loop()
        return joined(await asyncio.gather(*(loop.run_in_executor(self._pool, share) for share in shares)))

    @property
    def _all(self) -> range:
        return range(self._clients)

    # -- exports -----------------------------------------------------------------------------------------

    async def exports(self, played: Round) -> Exports:
        """What the server kept of every session of a round; the sessions are erased."""
        client = self._fleet.client
        out = {each.name: await client.trajectories(each.name) for each in played.sessions}
        for name in out:
            await client.delete(name)
        return out

    async def plans(self, played: Round) -> Plans:
        """What the direct client does in its place. Raises ``RuntimeError`` for a session that branched."""
        exports = await self.exports(played)
        for name, rows in exports.items():
            if len(rows) != 1:
                raise RuntimeError(f"session {name} has {len(rows)} rows, want 1: the family did not append")
        return [[(each.name, schedule(exports[each.name][0])) for each in place] for place in played.places]

    # -- passes ------------------------------------------------------------------------------------------

    async def level(self, concurrent: int, sizes: Sizes, pairs: int) -> Level:
        """Warm-up, which is also the first schedule, then ``pairs`` times two rounds, A B, B A, A B, ..."""
        level = Level(concurrent, await self._fitting(concurrent, sizes))
        await self._fleet.flush()
        plans = await self.plans(await self.through(concurrent, level.sizes, self._each))
        for at in range(pairs):
            if at % 2:
                straight = await self._straight(level, plans)
                through, plans = await self._through(level)
            else:
                through, plans = await self._through(level)
                straight = await self._straight(level, plans)
            level.pairs.append((through, straight))
            steady = f"{level.steady_ratios[-1]:.3f} " if level.steady_ratios else "none "
            say(
                f"{concurrent:>4} at once: gateway {through.tokens_s:8,.0f} tokens/s, "
                f"direct {straight.tokens_s:8,.0f}, ratio {level.ratios[-1]:.3f}; while all are busy {steady}"
                f"({through.steady_tokens_s:,.0f} and {straight.steady_tokens_s:,.0f}); "
                f"{through.output_tokens:,} and {straight.output_tokens:,} tokens"
            )
        return level

    async def _through(self, level: Level) -> tuple[Round, Plans]:
        await self._fleet.flush()
        cache, cpu, hits = await self._fleet.client.cache(), self._fleet.cpu_s(), await self._fleet.hits()
        played = await self.through(level.concurrent, level.sizes, self._each)
        level.server_ms.append((self._fleet.cpu_s() - cpu) * 1e3 / played.turns)
        level.hits["gateway"].append(hit_share(await self._fleet.hits(), hits))
        level.cache.append(difference(await self._fleet.client.cache(), cache))
        return played, await self.plans(played)

    async def _straight(self, level: Level, plans: Plans) -> Round:
        await self._fleet.flush()
        hits = await self._fleet.hits()
        played = await self.straight(plans)
        level.hits["direct"].append(hit_share(await self._fleet.hits(), hits))
        return played

    async def _fitting(self, concurrent: int, wanted: Sizes, *, lost: int = 0) -> Sizes:
        """The sizes with as many turns as the engines have room for, also when ``lost`` of them are gone."""
        left = 1 - lost / len(self._fleet.engines)
        room, sizes = KV_SHARE * left * await self._fleet.kv_tokens(), wanted
        while room and sizes.turns > 1 and sizes.total * concurrent > room:
            sizes = replace(sizes, turns=sizes.turns - 1)
        if sizes.turns != wanted.turns:
            print(f"{concurrent} sessions of {wanted.total:,} tokens do not fit the engines: {sizes.turns} turns")
        return sizes

    async def exact(self, sessions: int, *, kill: bool) -> tuple[Comparison, dict[str, object], int]:
        """Play with request logs on and compare; what differs, the cache figures, and sessions that moved."""
        marks = self._fleet.marks()
        sizes = await self._fitting(sessions, self._sizes, lost=int(kill))
        await self._fleet.flush()
        await self._fleet.log_requests(True)
        before = await self._fleet.client.cache()
        load = asyncio.create_task(self.through(sessions, sizes))
        try:
            if kill:
                await self._kill_after(sessions * sizes.turns // 3, before, load)
            played = await load
        finally:
            load.cancel()
            await self._fleet.log_requests(False)
        figures = difference(await self._fleet.client.cache(), before)
        exports = await self.exports(played)
        logs = [
            await asyncio.to_thread(read_log, each.log, each.url, begin=marks[each.url])
            for each in self._fleet.engines
            if each.log is not None
        ]
        found = compare(exports, logs, turns=sizes.turns, killed=frozenset(self._fleet.dead))
        return found, figures, moved_sessions(exports)

    async def _kill_after(self, calls: int, before: Mapping[str, object], load: asyncio.Task[Round]) -> None:
        ends = time.monotonic() + ENDS_S
        while int(str((await self._fleet.client.cache())["calls"])) - int(str(before["calls"])) < calls:
            if load.done() or time.monotonic() > ends:
                raise RuntimeError(f"the load ended before {calls} calls, when an engine was to be killed")
            await asyncio.sleep(0.02)
        say(f"killed {self._fleet.kill()}")


def say(text: str) -> None:
    """Print a line at once, with the seconds since the start."""
    print(f"{time.monotonic() - BEGAN:5.0f} s {text}", flush=True)


def hit_share(after: dict[str, float], before: dict[str, float]) -> float | None:
    """Hits over all prompt tokens between two looks at the engines' counters.

    >>> hit_share({"device_hit": 30.0, "input": 20.0}, {"device_hit": 0.0, "input": 10.0})
    0.75
    """
    grown = {mode: value - before.get(mode, 0.0) for mode, value in after.items()}
    whole = sum(grown.values())
    return 1.0 - grown.get("input", 0.0) / whole if whole > 0 else None


# -- report ---------------------------------------------------------------------------------------------


async def described(engines: Fleet, settings: Settings) -> str:
    """What is measured, in one line."""
    rows = await engines.client.engines()
    kinds = ", ".join(f"{row['kind'] or 'engine'} {row['release']} {row['precision']}".strip() for row in rows)
    family, fresh = settings.server.family, settings.model.fresh
    ids = f"random weights over {fresh.vocab_size:,} ids" if fresh is not None else str(rows[0]["model_path"])
    text = " (a byte of text is one id: encoding costs less than with a real vocabulary)" if family == WIDE else ""
    return f"{len(rows)} engines: {kinds}; room for {await engines.kv_tokens():,} tokens; {ids}; family {family}{text}"


def report_level(level: Level) -> dict[str, object]:
    """Print the figures of one level; the part of the JSON line that it gives."""
    throughs, straights = ([pair[at] for pair in level.pairs] for at in (0, 1))
    ratios, n = level.ratios, level.concurrent
    sizes = level.sizes
    print(
        f"\n{n} sessions at once, {sizes.turns} turns, prompt {sizes.prompt}, reply {sizes.new} +- {sizes.spread:.0%}, "
        f"tool {sizes.tool}: ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} pairs)"
    )
    if steady := level.steady_ratios:
        print(f"  while all are busy: {statistics.median(steady):.3f} ({min(steady):.3f} to {max(steady):.3f})")
    print(f"  {'':8} {'tokens/s':>9} {'turn p50 s':>11} {'p99 s':>7} {'prompt tokens':>14} {'engines hit':>12}")
    for name, rounds in (("gateway", throughs), ("direct", straights)):
        p50, p99 = (median_latency(rounds, share) for share in (0.5, 0.99))
        hits = [share for share in level.hits[name] if share is not None]
        shown = f"{statistics.median(hits):.4f}" if hits else "-"
        print(
            f"  {name:8} {statistics.median(each.tokens_s for each in rounds):>9,.0f} {p50:>11.3f} {p99:>7.3f} "
            f"{rounds[-1].prompt_tokens:>14,} {shown:>12}"
        )
    cache = added(level.cache)
    print(
        f"  server: {statistics.median(level.server_ms):.2f} ms CPU a turn "
        f"({throughs[-1].turns / throughs[-1].wall_s:.1f} turns/s in the last round)\n  ledger: {ledger_line(cache)}"
    )
    return {
        f"ratio_{n}": round(statistics.median(ratios), 4),
        f"ratio_{n}_spread": [round(min(ratios), 4), round(max(ratios), 4)],
        f"steady_ratio_{n}": round(statistics.median(steady), 4) if steady else None,
        f"turns_{n}": sizes.turns,
        f"tokens_s_{n}": round(statistics.median(each.tokens_s for each in throughs), 1),
        f"direct_tokens_s_{n}": round(statistics.median(each.tokens_s for each in straights), 1),
        f"server_ms_turn_{n}": round(statistics.median(level.server_ms), 3),
        f"turn_p50_s_{n}": [median_latency(side, 0.5) for side in (throughs, straights)],
        f"turn_p99_s_{n}": [median_latency(side, 0.99) for side in (throughs, straights)],
        f"efficiency_{n}": cache["efficiency"],
        f"waste_{n}": cache["waste"],
    }  # fmt: skip


def median_latency(rounds: Sequence[Round], share: float) -> float:
    """Seconds of a turn that ``share`` of all stay below, the median of several rounds."""
    return round(statistics.median(each.latency_s(share) for each in rounds), 3)


def added(figures: Sequence[dict[str, object]]) -> dict[str, object]:
    """Cache figures of several rounds as one."""
    total: dict[str, object] = {"waste": {}}
    for each in figures:
        for name, value in each.items():
            if isinstance(value, dict):
                known = total.setdefault(name, {})
                for cause, tokens in value.items():
                    known[cause] = known.get(cause, 0) + tokens  # type: ignore[attr-defined, index]
            elif isinstance(value, int):
                total[name] = int(str(total.get(name, 0))) + value
    nothing = {name: 0 for name in total if isinstance(total[name], int)}
    return difference(total, nothing)


def ledger_line(cache: dict[str, object]) -> str:
    """Hit rate, ceiling, efficiency and causes in words."""
    rates = ", ".join(
        f"{what} {cache[name]:.4f}"
        for what, name in (("hit rate", "hit_rate"), ("ceiling", "ceiling"), ("efficiency", "efficiency"))
        if cache[name] is not None
    )
    waste = cache["waste"] or {}
    causes = ", ".join(f"{cause} {tokens:,}" for cause, tokens in waste.items()) or "nothing wasted"  # type: ignore[attr-defined]
    return f"{rates}; of {cache['possible_tokens']:,} possible tokens: {causes}"


def report_exact(what: str, found: Comparison, cache: dict[str, object], moved: int) -> None:
    """Print what an exactness pass found."""
    print(
        f"\n{what}: {found.sessions} sessions, {found.calls} calls, {found.ids:,} ids and {found.logprobs:,} "
        f"log-probabilities against the engines' logs: {len(found.found)} differences"
    )
    for line in found.lines():
        print(f"  {line}")
    print(f"  ledger: {ledger_line(cache)}")
    if what == "kill":
        reasons = cache.get("moved") or {}
        print(
            f"  moved sessions: {moved}; tokens lost by moves: {reasons}; "
            f"finished and not delivered: {found.undelivered}"
        )


def unexplained(cache: dict[str, object], moved: int) -> list[str]:
    """What the loss of an engine does not explain, one line each.

    >>> unexplained({"waste": {"moved": 5, "eviction": 1}, "moved": {"engine_lost": 5}}, 1)
    ['tokens wasted by eviction: 1, want 0']
    """
    out = [] if moved else ["no session moved, although its engine was killed"]
    for name, allowed in (("waste", "moved"), ("moved", "engine_lost")):
        counts = cache[name]
        if isinstance(counts, dict):
            out += [f"tokens wasted by {cause}: {n:,}, want 0" for cause, n in counts.items() if cause != allowed]
    return out


# -- main -----------------------------------------------------------------------------------------------


async def measure(arguments: argparse.Namespace, settings: Settings, folder: Path) -> dict[str, object]:
    """The whole run; the JSON line."""
    given = [_engine(words) for words in arguments.engine]
    sizes = Sizes(
        turns=min(arguments.turns),
        prompt=arguments.prompt,
        new=arguments.new,
        spread=arguments.spread,
        tool=arguments.tool,
        chars_per_token=1.0 if settings.server.family == WIDE else 4.6,
    )
    line: dict[str, object] = {}
    differences = 0
    with ExitStack() as stack:
        context = multiprocessing.get_context("spawn")
        barrier = context.Barrier(arguments.clients)
        pool = stack.enter_context(
            ProcessPoolExecutor(arguments.clients, mp_context=context, initializer=join, initargs=(barrier,))
        )
        async with fleet(settings, given, folder) as engines:
            say(await described(engines, settings))
            bench = Bench(
                engines, sizes, pool, clients=arguments.clients, each=arguments.sessions_each, seed=settings.run.seed
            )
            await bench.through(arguments.clients, replace(sizes, turns=1))
            if arguments.exact_sessions:
                found, cache, moved = await bench.exact(arguments.exact_sessions, kill=False)
                report_exact("exactness", found, cache, moved)
                differences += len(found.found)
                line |= {"exact_sessions": found.sessions, "exact_ids": found.ids}
            last = 0
            for at, count in enumerate(arguments.concurrent if arguments.pairs else ()):
                turns = arguments.turns[min(at, len(arguments.turns) - 1)]
                line |= report_level(await bench.level(count, replace(sizes, turns=turns), arguments.pairs))
                last = count
            if last:
                for name in ("tokens_s", "direct_tokens_s", "efficiency", "server_ms_turn"):
                    line[name] = line[f"{name}_{last}"]
            if arguments.kill_one:
                found, cache, moved = await bench.exact(arguments.exact_sessions, kill=True)
                report_exact("kill", found, cache, moved)
                wrong = unexplained(cache, moved)
                for each in wrong:
                    print(f"  {each}")
                differences += len(found.found) + len(wrong)
                line |= {"moved_sessions": moved, "moved_tokens": cache["moved"], "kill_waste": cache["waste"]}
            whole = await engines.client.cache()
            line |= {"unknown": whole["unknown_tokens"], "failed_calls": whole["failed_calls"]}
    return {**line, "differences": differences, "shape": arguments.shape, "engines": len(engines.engines)}


def _engine(words: Sequence[str]) -> EngineAt:
    if len(words) > 3:
        raise SystemExit(f"--engine takes URL [LOG [PID]], not {len(words)} words")
    url, log, pid = [*words, None, None][:3]
    return EngineAt(url=str(url).rstrip("/"), log=Path(log) if log else None, pid=int(pid) if pid else None)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The configuration, with what a benchmark wants where nothing else is said."""
    wide = [] if any(each.startswith("server.family") for each in arguments.set) else [f"server.family={WIDE!r}"]
    settings = load_settings(arguments.config, [*wide, *arguments.set])
    if settings.model.fresh is None and settings.engine.model_path is None and not arguments.engine:
        model = settings.model.model_copy(update={"fresh": SHAPES[arguments.shape]})
        settings = settings.model_copy(update={"model": model})
    return settings


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("-c", "--config", type=Path, metavar="FILE", help="tollway.toml with [engine], [server], ...")
    out.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one key of it")
    out.add_argument("--shape", choices=sorted(SHAPES), default="tiny", help="of the random weights (default: tiny)")
    out.add_argument(
        "--engine", nargs="+", action="append", default=[], metavar=("URL", "LOG"),
        help="a running engine, the file with its request log, and its process id for --kill-one",
    )  # fmt: skip
    out.add_argument("--concurrent", type=int, nargs="+", default=[64, 256], help="sessions at once (default: 64 256)")
    out.add_argument(
        "--turns",
        type=int,
        nargs="+",
        default=[12, 6],
        help="of a session at each level; the last is also for the rest",
    )
    out.add_argument(
        "--sessions-each", type=int, default=1, metavar="N",
        help="sessions that each of those at once plays, one after the other, in a timed round (default: 1)",
    )  # fmt: skip
    out.add_argument("--prompt", type=int, default=1024, help="tokens of the first prompt")
    out.add_argument("--new", type=int, default=256, help="tokens of a reply, on average")
    out.add_argument(
        "--spread", type=float, default=0.5, metavar="SHARE", help="of --new that replies differ by, at most"
    )
    out.add_argument("--tool", type=int, default=256, help="tokens of a tool result")
    out.add_argument("--pairs", type=int, default=2, help="of rounds at each level; 0 times nothing")
    out.add_argument("--clients", type=int, default=2, help="processes that make the load")
    out.add_argument("--exact-sessions", type=int, default=64, help="of the untimed passes; 0: none")
    out.add_argument("--kill-one", action="store_true")
    return out


def main() -> int:
    """Run and print; 1 when anything differs or a miss has no cause."""
    arguments = parser().parse_args()
    telemetry.configure("WARNING", component="bench")
    runs = Path(__file__).resolve().parents[1] / "runs"
    runs.mkdir(exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="rollout-", dir=runs) as name:
            line = asyncio.run(measure(arguments, settings_of(arguments), Path(name)))
    except TollwayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    print(json.dumps(line))
    return 1 if line["differences"] or line["unknown"] else 0


if __name__ == "__main__":
    sys.exit(main())
