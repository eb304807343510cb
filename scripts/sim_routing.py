#!/usr/bin/env python3
"""Routing simulator: agent sessions against engines with an LRU prefix cache, policies side by side.

    scripts/sim_routing.py [--seed N] [--trace FILE.jsonl] [--sessions N] [--live N] [--engines N] [--model small]

Columns: efficiency outside tokens lost, moved or flushed; hit rate while all places were taken; virtual seconds to the
end, and to the start of the last session; largest over mean resident tokens of the engines, mean and worst reading.
Runs three cases: (a) ample KV, no faults; (b) too little KV for the live sessions; (c) one engine lost, one joined,
five refits. Deterministic for a seed. The last line is JSON. docs/routing.md explains model and figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from sim_engine import LARGE, SMALL, EngineModel
from sim_policies import POLICIES, Policy
from sim_run import Fault, Outcome, Simulation
from sim_traces import Shape, TraceSession, read_trace, synthetic, write_trace

AMPLE, SCARCE = 1_500_000, 600_000


def faults_for(sessions: int) -> list[Fault]:
    """One engine lost, one joined, five refits, by the share of sessions that have ended."""
    plan = [(0.12, "refit"), (0.25, "lose"), (0.35, "refit"), (0.5, "join"), (0.55, "refit"), (0.75, "refit")]
    return [Fault(int(share * sessions), kind) for share, kind in [*plan, (0.9, "refit")]]


def model_of(args: argparse.Namespace) -> EngineModel:
    """Speeds of the engines."""
    return SMALL if args.model == "small" else LARGE


def case(
    title: str,
    trace: Sequence[TraceSession],
    policies: Sequence[type[Policy]],
    args: argparse.Namespace,
    kv_tokens: int,
    faults: Sequence[Fault] = (),
) -> list[Outcome]:
    """Run and print every policy."""
    print(f"\n{title}")
    print(
        f"{'policy':25}{'hit rate':>9}{'ceiling':>9}{'effic.':>8}{'outside':>9}{'full':>8}{'makespan':>10}{'start':>8}"
        f"{'load':>7}{'worst':>7}{'peak M':>8}{'wait p50/max s':>16}  waste in M tokens"
    )
    out = []
    for policy in policies:
        started = time.perf_counter()
        run = Simulation(
            trace,
            policy,
            engines=args.engines,
            live=args.live,
            model=replace(model_of(args), kv_tokens=kv_tokens),
            faults=faults,
            seed=args.seed,
        ).run()
        waits = run.admission_waits_s
        waste = ", ".join(f"{cause} {tokens / 1e6:.2f}" for cause, tokens in sorted(run.waste.items())) or "none"
        print(
            f"{run.policy:25}{run.hit_rate:9.4f}{run.ceiling:9.4f}{run.efficiency:8.4f}"
            f"{run.efficiency_without_faults:9.4f}{run.full_hit_rate:8.4f}{run.makespan_s:10.1f}{run.last_start_s:8.0f}"
            f"{run.load_max_mean:7.3f}{max(run.load_ratios, default=1):7.3f}{run.resident_peak / 1e6:8.2f}"
            f"{statistics.median(waits):9.1f} /{max(waits):5.0f}  {waste}  [{time.perf_counter() - started:.1f} s]",
            flush=True,
        )
        out.append(run)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--live", type=int, default=384, help="agents at once")
    parser.add_argument("--sessions", type=int, default=1600, help="of the synthetic trace")
    parser.add_argument("--group-size", type=int, default=8, help="sessions that share a first prompt")
    parser.add_argument("--model", choices=("large", "small"), default="large", help="speeds of the engines")
    parser.add_argument("--trace", type=Path, help="recorded sessions instead of synthetic ones")
    parser.add_argument("--write", type=Path, help="write the trace as JSON lines")
    args = parser.parse_args()
    shape = Shape(sessions=args.sessions, group_size=args.group_size)
    try:
        trace = read_trace(args.trace) if args.trace else synthetic(shape, args.seed)
    except (OSError, ValueError) as error:
        parser.error(f"--trace: {error}")
    if args.write:
        write_trace(args.write, trace)
    params = {
        "trace": str(args.trace) if args.trace else asdict(shape),
        "seed": args.seed,
        "engines": args.engines,
        "live": args.live,
        "kv_tokens": [AMPLE, SCARCE],
        "engine": asdict(model_of(args)),
        "faults": [f"{each.kind} after {each.after}" for each in faults_for(len(trace))],
    }
    print("parameters:", json.dumps(params))
    turns = [len(each.turns) for each in trace]
    sizes = [sum(added + sampled for added, sampled, _ in each.turns) for each in trace]
    print(
        f"trace: {len(trace)} sessions, {statistics.mean(turns):.1f} turns each "
        f"(p99 {sorted(turns)[len(turns) * 99 // 100]}), "
        f"{statistics.mean(sizes):,.0f} tokens at the end (largest {max(sizes):,})"
    )
    ample = case(f"(a) {AMPLE:,} KV tokens an engine, no faults", trace, POLICIES, args, AMPLE)
    scarce = case(f"(b) {SCARCE:,} KV tokens an engine", trace, POLICIES[:5], args, SCARCE)
    faulty = case(
        "(c) one engine lost, one joined, five refits", trace, POLICIES[:5], args, AMPLE, faults_for(len(trace))
    )
    print(
        json.dumps(
            {
                "efficiency": round(ample[0].efficiency, 4),
                "load_max_mean": round(ample[0].load_max_mean, 3),
                "makespan_ratio": round(ample[0].makespan_s / min(each.makespan_s for each in ample[1:]), 4),
                "capped_hit_rate": round(scarce[0].hit_rate, 4),
                "efficiency_faults": round(faulty[0].efficiency_without_faults, 4),
                "sticky_hit_rate": round(scarce[1].hit_rate, 4),
                "params": params,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
