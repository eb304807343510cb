#!/usr/bin/env python3
"""Grading of SWE tasks tried with the reference fix, with nothing, and with every known attack; and its cost.

For each task: the reference fix (wanted: reward 1), the same fix written differently, and the tree as it was given
(wanted: 0). For the first tasks also every attack of ``tollway.envs.swe.attacks`` (wanted: 0, flagged). Overhead is
the wall time of a grade of the right fix less a bare run of the same tests in a sandbox. The last line is JSON.

    scripts/bench_grading.py [--tasks tiny|shipped|DIR] [--attacked N] [--only PATTERN]
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import statistics
import time
from pathlib import Path

from tollway.envs.base import Task, Verdict, Work
from tollway.envs.config import EnvConfig
from tollway.envs.swe.attacks import ATTACKS, fixed, submission
from tollway.envs.swe.cache import tree_files
from tollway.envs.swe.config import SweConfig
from tollway.envs.swe.environment import Swe
from tollway.envs.swe.grading import SweGrader
from tollway.envs.swe.running import Plan, program_mounts, run_tests
from tollway.sandboxes.base import SandboxProvider, SandboxSpec
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.local import LocalProvider


async def graded(grader: SweGrader, task: Task, provider: SandboxProvider, handed: dict[str, bytes]) -> Verdict:
    return await grader.grade(task, Work(submission=handed, provider=provider))


def rewritten(handed: dict[str, bytes], grader: SweGrader) -> dict[str, bytes]:
    """The same program in other words: no comments, other layout."""
    path = grader.task.fix[0].path
    return {**handed, path: (ast.unparse(ast.parse(handed[path])) + "\n").encode()}


async def bare_s(grader: SweGrader, provider: SandboxProvider, handed: dict[str, bytes]) -> float:
    """Seconds that the task's tests take by themselves, with the start of their process and of a sandbox."""
    task = grader.task
    plan = Plan(
        framework=task.framework,
        files=task.files,
        ids=[*task.fail_to_pass, *task.pass_to_pass],
        roots=task.roots,
        options=task.options,
        total_s=task.timeouts.total_s,
    )
    spec = SandboxSpec(
        ttl_s=900,
        labels={"bench": "bare"},
        tree=grader.tree,
        files=handed,
        mounts=program_mounts(grader.site),
        mem_mb=1024,
    )
    started = time.monotonic()
    await run_tests(provider, spec, plan)
    return time.monotonic() - started


async def measure(args: argparse.Namespace) -> dict[str, object]:
    swe = SweConfig(tasks=args.tasks, only=tuple(args.only), cache=args.cache)
    environment = Swe(EnvConfig(name="swe", split="heldout", swe=swe))
    await environment.open()
    gold, other, empty, overheads, suites = [], [], [], [], []
    rewarded, unflagged, attacks = [], [], 0
    async with LocalProvider(SandboxConfig(max_running=4)) as provider:
        for index, task_id in enumerate(environment.ids):
            task = environment.find(task_id)
            grader = environment.grader(task)
            assert isinstance(grader, SweGrader)
            tree = dict(tree_files(grader.tree))
            handed = fixed(grader.task, tree)
            plain_s = await bare_s(grader, provider, handed)
            started = time.monotonic()
            verdict = await graded(grader, task, provider, handed)
            overheads.append(time.monotonic() - started - plain_s)
            suites.append(plain_s)
            gold.append(verdict.reward)
            if verdict.reward != 1:
                print(f"{task.task_id}: the fix earns {verdict.reward}: {verdict.reason} {verdict.flags}")
            verdict = await graded(grader, task, provider, rewritten(handed, grader))
            other.append(verdict.reward)
            if verdict.reward != 1:
                print(
                    f"{task.task_id}: the fix in other words earns {verdict.reward}: {verdict.reason} {verdict.flags}"
                )
            untouched = {path: data for path, data in tree.items() if grader.task.may_submit(path)}
            empty.append((await graded(grader, task, provider, untouched)).reward)
            times = f"tests {plain_s:5.1f} s, grading adds {overheads[-1]:5.2f} s"
            print(f"{task.task_id:40} {times}, fix {gold[-1]:.0f}, nothing {empty[-1]:.0f}")
            if index >= args.attacked:
                continue
            print(f"{'attack':45} {'reward':>6}  flags")
            for attack in ATTACKS:
                verdict = await graded(grader, task, provider, submission(attack, grader.task, tree))
                attacks += 1
                if verdict.reward:
                    rewarded.append(f"{task.task_id}: {attack.name}")
                if attack.flagged and not verdict.flags:
                    unflagged.append(f"{task.task_id}: {attack.name}")
                print(f"{attack.name:45} {verdict.reward:6.0f}  {'; '.join(verdict.flags)[:110] or '-'}")
    for line in (*(f"REWARDED {one}" for one in rewarded), *(f"not flagged: {one}" for one in unflagged)):
        print(line)
    return {
        "tasks": len(gold),
        "gold": statistics.fmean(gold),
        "other_words": statistics.fmean(other),
        "empty": statistics.fmean(empty),
        "attacks": attacks,
        "attacks_rewarded": len(rewarded),
        "attacks_unflagged": len(unflagged),
        "overhead_s": round(statistics.median(overheads), 2),
        "overhead_s_max": round(max(overheads), 2),
        "tests_s": round(statistics.median(suites), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="tiny", help="tiny, shipped, or a directory (default: tiny)")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="task ids to use (may repeat)")
    parser.add_argument("--attacked", type=int, default=1, metavar="N", help="tasks that are attacked (default: 1)")
    parser.add_argument("--cache", type=Path, help="cache directory (default: the user's)")
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
