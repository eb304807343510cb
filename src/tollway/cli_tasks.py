"""``tollway tasks``: list, fetch, verify, make and import SWE tasks.

Parses, calls ``tollway.envs.swe``, prints. Imports what it needs when it runs, because every command parses this
one's arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tollway import telemetry
from tollway.cli_actions import add_action, cut_line, run_action
from tollway.errors import BadRequest, ConfigError
from tollway.settings import Settings

if TYPE_CHECKING:
    from tollway.envs.swe.cache import Cache
    from tollway.envs.swe.catalogue import Entry
    from tollway.envs.swe.generate import Candidate, Maker
    from tollway.envs.swe.task import Package, Sdist

__all__ = ["DESCRIPTION", "add_arguments", "run"]

DESCRIPTION = "list, fetch and verify SWE tasks, make them from packages, import SWE-bench records"
EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Subcommands and their arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = add_action(actions, "list", _list, "list the tasks of a set")
    fetch = add_action(actions, "fetch", _fetch, "download what the tasks of a set need, checked against their hashes")
    verify = add_action(
        actions, "verify", _verify, "grade the reference fix (wanted: 1) and the untouched tree (wanted: 0)"
    )
    for command, default in ((listed, None), (fetch, "shipped"), (verify, None)):
        text = f"tiny, shipped, or a directory (default: {default or 'env.swe.tasks'})"
        command.add_argument("set_name", nargs="?", metavar="SET", default=default, help=text)
        command.add_argument("--only", action="append", default=[], metavar="PATTERN", help="task ids (may repeat)")
        command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    verify.add_argument("--attacks", action="store_true", help="also try every known attack (wanted: 0 and flagged)")

    make = add_action(actions, "make-swe", _make, "make tasks from source distributions, each proved by its own tests")
    make.add_argument("sources", nargs="*", metavar="NAME==VERSION", help="source distributions of the package index")
    make.add_argument("--fixed", metavar="NAME==VERSION", help="undo single changes of this release instead ...")
    make.add_argument("--broken", metavar="NAME==VERSION", help="... that it made since this one")
    make.add_argument("--out", type=Path, default=Path("swe-tasks"), metavar="DIR", help="default: swe-tasks")
    make.add_argument("--count", type=int, default=3, metavar="N", help="tasks for each source (default: 3)")
    make.add_argument("--tries", type=int, default=60, metavar="N", help="candidates to try at most (default: 60)")
    make.add_argument("--seed", type=int, default=0, help="same seed, same tasks (default: 0)")
    make.add_argument("--tests", action="append", default=[], metavar="PATH", help="where the tests are (may repeat)")
    make.add_argument("--require", action="append", default=[], metavar="NAME==VERSION", help="what they need")

    imported = add_action(actions, "import", _import, "make tasks from SWE-bench-style records (JSON lines)")
    imported.add_argument("file", type=Path)
    imported.add_argument("--map", action="append", default=[], metavar="OURS=THEIRS", help="name of a field there")
    imported.add_argument(
        "--checkout", required=True, metavar="DIR", help="the repositories; {instance_id}, {repo}, {base_commit}"
    )
    imported.add_argument("--image", metavar="NAME", help="image with the dependencies; same names filled in")
    imported.add_argument("--python", metavar="PATH", help="the Python in that image")
    imported.add_argument("--require", action="append", default=[], metavar="NAME==VERSION", help="wheels tests need")
    imported.add_argument("--out", type=Path, default=Path("swe-tasks"), metavar="DIR", help="default: swe-tasks")


def run(arguments: argparse.Namespace) -> int:
    """Do it; the exit status."""
    telemetry.configure("ERROR", component="tasks")
    return run_action(arguments)


def _cache(settings: Settings) -> Cache:
    from tollway.envs.swe.cache import Cache

    return Cache(settings.env.swe.cache)


def _entries(arguments: argparse.Namespace, settings: Settings) -> tuple[Entry, ...]:
    from tollway.envs.swe.catalogue import read_set

    return read_set(arguments.set_name or settings.env.swe.tasks, arguments.only or settings.env.swe.only)


# -- list, fetch, verify ---------------------------------------------------------------------------------


def _list(arguments: argparse.Namespace, settings: Settings) -> int:
    rows = []
    for entry in _entries(arguments, settings):
        task = entry.task
        rows.append(
            {
                "id": task.instance_id,
                "source": _source(entry),
                "fail_to_pass": len(task.fail_to_pass),
                "pass_to_pass": len(task.pass_to_pass),
                "framework": task.framework,
                "folder": str(entry.folder),
            }
        )
    if arguments.json:
        print(json.dumps({"tasks": rows}))
        return 0
    print(f"{'task':36} {'source':28} {'fail':>5} {'pass':>6}")
    for row in rows:
        print(f"{row['id']:36} {row['source']:28} {row['fail_to_pass']:5} {row['pass_to_pass']:6}")
    return 0


def _source(entry: Entry) -> str:
    source = entry.task.source
    if source.kind == "sdist":
        return f"{source.name} {source.version}"
    return f"{source.name} (bundled)" if source.kind == "bundled" else f"{source.repo}@{source.base_commit[:10]}"


def _fetch(arguments: argparse.Namespace, settings: Settings) -> int:
    from tollway.envs.swe.prepared import prepare

    cache = _cache(settings)
    wrong: dict[str, str] = {}
    met: dict[str, str] = {}
    ready = 0
    entries = _entries(arguments, settings)
    for entry in entries:
        try:
            prepare(cache, entry.task, download=True)
        except (BadRequest, ConfigError) as error:
            wrong[entry.task.instance_id] = str(error)
            print(f"{entry.task.instance_id}: {error}", file=sys.stderr)
            if met.setdefault(str(error), _source(entry)) != _source(entry):
                print("tollway: that is no matter of one library, so the others are not tried", file=sys.stderr)
                break
            continue
        ready += 1
        if not arguments.json:
            print(f"{entry.task.instance_id}: ready")
    if arguments.json:
        print(json.dumps({"ready": ready, "failed": wrong, "cache": str(cache.root)}))
    else:
        print(f"{ready} of {len(entries)} tasks are ready in {cache.root}")
    return EXIT_FAILED if wrong else 0


def _verify(arguments: argparse.Namespace, settings: Settings) -> int:
    return asyncio.run(_verify_all(arguments, settings))


async def _verify_all(arguments: argparse.Namespace, settings: Settings) -> int:
    from tollway.envs.swe.checking import trials
    from tollway.envs.swe.environment import Swe
    from tollway.envs.swe.grading import SweGrader
    from tollway.sandboxes.registry import open_provider

    swe = settings.env.swe
    chosen = {
        "tasks": arguments.set_name or swe.tasks,
        "only": tuple(arguments.only) or swe.only,
        "heldout_tasks": None,
    }
    config = settings.env.model_copy(update={"name": "swe", "split": "heldout", "swe": swe.model_copy(update=chosen)})
    environment = Swe(config)
    await environment.open()
    rows = []
    async with open_provider(settings.sandbox) as provider:
        for task_id in environment.ids:
            task = environment.find(task_id)
            grader = environment.grader(task)
            if not isinstance(grader, SweGrader):
                raise ConfigError(f"{task_id} has no grader of ours")
            if not arguments.json:
                print(task_id)
            async for trial in trials(grader, task, provider, attacks=arguments.attacks):
                verdict = trial.verdict
                rows.append(
                    {"task": task_id, "trial": trial.name, "reward": verdict.reward, "flags": list(verdict.flags)}
                    | {"good": trial.good, "reason": verdict.reason}
                )
                if not arguments.json:
                    mark = "ok" if trial.good else "BAD"
                    print(cut_line(f"  {mark:3}  {trial.name:24}  {verdict.reward:.0f}  {verdict.reason}"), flush=True)
    bad = sum(not row["good"] for row in rows)
    if arguments.json:
        print(json.dumps({"trials": rows, "bad": bad}))
    else:
        print(f"{len(rows)} trials over {environment.size} tasks, {bad} bad")
    return EXIT_FAILED if bad else 0


# -- make ------------------------------------------------------------------------------------------------


def _make(arguments: argparse.Namespace, settings: Settings) -> int:
    if bool(arguments.fixed) != bool(arguments.broken) or bool(arguments.sources) == bool(arguments.fixed):
        raise ConfigError("name source distributions, or both --fixed and --broken, such as --fixed a==2 --broken a==1")
    return asyncio.run(_make_all(arguments, settings))


async def _make_all(arguments: argparse.Namespace, settings: Settings) -> int:
    from tollway.envs.swe.generate import Maker
    from tollway.envs.swe.recipe import guess
    from tollway.envs.swe.writing import write_task
    from tollway.sandboxes.registry import open_provider

    cache = _cache(settings)
    requires = tuple([await asyncio.to_thread(_package, cache, one) for one in arguments.require])
    made = 0
    async with open_provider(settings.sandbox) as provider:
        for text in arguments.sources or [arguments.fixed]:
            source = await asyncio.to_thread(_sdist, cache, text)
            try:
                recipe = guess(cache.base(source), tests=arguments.tests, requires=requires)
            except BadRequest as error:
                raise BadRequest(f"{text}: {error}") from error
            await asyncio.to_thread(partial(cache.packages, recipe.requires, download=True))
            maker = Maker(provider, cache, source, recipe)
            baseline = await maker.baseline()
            print(f"{text}: {len(baseline.passed)} tests in {baseline.seconds:.1f} s, {baseline.left_out} left out")
            candidates = await asyncio.to_thread(_candidates, arguments, cache, maker)
            tasks = maker.make(
                candidates,
                baseline,
                count=arguments.count,
                tries=arguments.tries,
                report=lambda line: print(f"  {line}", flush=True),
            )
            async for task, shown in tasks:
                print(f"wrote {write_task(task, shown.notes, arguments.out)}", flush=True)
                made += 1
    print(f"{made} tasks in {arguments.out}")
    return 0 if made else EXIT_FAILED


def _candidates(arguments: argparse.Namespace, cache: Cache, maker: Maker) -> Iterator[Candidate]:
    from tollway.envs.swe.generate import fixes_between, mutations_of

    if not arguments.broken:
        return mutations_of(maker.sources(), arguments.seed)
    return fixes_between(maker.sources(), cache.base(_sdist(cache, arguments.broken)), arguments.seed)


def _sdist(cache: Cache, text: str) -> Sdist:
    name, version = _pin(text)
    return cache.pin_sdist(name, version)


def _package(cache: Cache, text: str) -> Package:
    name, version = _pin(text)
    return cache.pin_wheel(name, version)


def _pin(text: str) -> tuple[str, str]:
    name, equals, version = text.partition("==")
    if not name or not equals or not version:
        raise ConfigError(f"{text!r}: want NAME==VERSION")
    return name, version


# -- import ----------------------------------------------------------------------------------------------


def _import(arguments: argparse.Namespace, settings: Settings) -> int:
    from tollway.envs.swe.importing import FIELDS, Refused, Where, import_record, read_records
    from tollway.envs.swe.writing import write_task

    names = _names(arguments.map, FIELDS)
    requires = tuple(_package(_cache(settings), one) for one in arguments.require)
    where = Where(checkout=arguments.checkout, image=arguments.image, python=arguments.python)
    made = refused = 0
    for number, record in read_records(arguments.file):
        found = (
            Refused(f"line {number}", record)
            if isinstance(record, str)
            else import_record(record, names=names, where=where, requires=requires)
        )
        if isinstance(found, Refused):
            refused += 1
            print(f"refused {found.name}: {found.reason}", file=sys.stderr)
            continue
        print(f"wrote {write_task(found.task, {}, arguments.out, said=found.instruction)}")
        if found.left_out:
            print(f"  left out of its fix: {', '.join(found.left_out)}")
        made += 1
    print(f"{made} tasks in {arguments.out}, {refused} records refused")
    return 0 if made else EXIT_FAILED


def _names(pairs: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    names = {}
    for pair in pairs:
        ours, equals, theirs = pair.partition("=")
        if ours not in known or not equals or not theirs:
            raise ConfigError(f"--map {pair!r}: want OURS=THEIRS with OURS one of {', '.join(known)}")
        names[ours] = theirs
    return names
