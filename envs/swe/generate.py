"""Make tasks: break a library in one place and keep what its own tests notice.

A candidate becomes a task only after runs in sandboxes: the untouched library is green twice, the broken one
fails 1 to 15 of those tests, passes at least 20 and loses none. Tests that are not the same twice are left out.
The same seed gives the same candidates in the same order. Depends on ``running``, ``mutation``, ``controls`` and
``cache``.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tollway.envs.swe import controls, patches
from tollway.envs.swe.cache import Cache, read_source, tree_files
from tollway.envs.swe.mutation import Mutant, means_something_else, mutants, shuffled
from tollway.envs.swe.recipe import Recipe
from tollway.envs.swe.running import Plan, Report, program_mounts, run_tests
from tollway.envs.swe.task import FORM, Bundled, Sdist, SweTask
from tollway.errors import BadRequest
from tollway.sandboxes.base import SandboxProvider, SandboxSpec

__all__ = ["Baseline", "Candidate", "Maker", "fixes_between", "mutations_of"]

MOST_FAILING, LEAST_PASSING = 15, 20
MAX_SOURCE_BYTES = 300_000
MEM_MB = 1024


@dataclass(frozen=True, slots=True)
class Candidate:
    """A broken file."""

    path: str
    text: str
    kind: str
    place: str
    """Function or lines, so that tasks spread over a library."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the untouched library shows, both times."""

    passed: frozenset[str]
    left_out: int
    """Tests that do not pass, or not twice."""
    events: tuple[str, ...]
    seconds: float
    wall_s: float


class Maker:
    """Makes tasks from one library."""

    def __init__(self, provider: SandboxProvider, cache: Cache, source: Sdist | Bundled, recipe: Recipe) -> None:
        self._provider, self._source, self.recipe = provider, source, recipe
        self._base = cache.base(source)
        self._site = cache.packages(recipe.requires, download=False) if recipe.framework == "pytest" else None
        self._shape = SweTask.model_construct(
            packages=recipe.packages, modules=recipe.modules, test_paths=recipe.test_paths
        )

    def sources(self) -> dict[str, str]:
        """The library's own files that may be broken."""
        found = {}
        for path in tree_files(self._base):
            if self._shape.may_submit(path) and (self._base / path).stat().st_size <= MAX_SOURCE_BYTES:
                try:
                    found[path] = read_source(self._base / path)
                except BadRequest:
                    continue
        return found

    async def baseline(self) -> Baseline:
        """Two runs of the untouched library. Raises ``BadRequest`` when it is no base for tasks."""
        first = await self._run(total_s=600.0)
        self._check(first)
        second = await self._run(total_s=600.0)
        self._check(second)
        passed = frozenset(one for one, word in first.outcomes.items() if word == second.outcomes.get(one) == "passed")
        if len(passed) < LEAST_PASSING + 1:
            raise BadRequest(f"only {len(passed)} tests pass twice; want more than {LEAST_PASSING}")
        return Baseline(
            passed=passed,
            left_out=len(first.outcomes.keys() | second.outcomes.keys()) - len(passed),
            events=tuple(sorted({*first.events, *second.events})),
            seconds=min(first.seconds, second.seconds),
            wall_s=max(first.wall_s, second.wall_s),
        )

    def _check(self, report: Report) -> None:
        if not report.complete or report.errors or report.tampers:
            why = [*report.problems, *report.errors, *report.tampers]
            raise BadRequest(f"the tests of {self._source.name} do not run: {'; '.join(why)[:1000]}")

    async def make(
        self,
        candidates: Iterator[Candidate],
        baseline: Baseline,
        *,
        count: int,
        tries: int = 200,
        report: Callable[[str], None] = lambda _: None,
    ) -> AsyncIterator[tuple[SweTask, Report]]:
        """Up to ``count`` tasks, with the run that shows each bug."""
        used: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        made = 0
        for candidate in candidates:
            if made >= count or tries <= 0:
                return
            if used[candidate.place] or kinds[candidate.kind] > made / 3 + 1:
                continue
            tries -= 1
            shown = await self._run({candidate.path: candidate.text}, baseline)
            failing, why = judge(shown, baseline)
            report(f"{candidate.kind} in {candidate.path} {candidate.place}: {why}")
            if not failing:
                continue
            task = await self._task(candidate, failing, baseline)
            if task is None:
                report("  the assertions cannot be falsified")
                continue
            used[candidate.place] += 1
            kinds[candidate.kind] += 1
            made += 1
            yield task, shown

    async def _task(self, candidate: Candidate, failing: Sequence[str], baseline: Baseline) -> SweTask | None:
        before = read_source(self._base / candidate.path)
        patch = patches.make(candidate.path, before, candidate.text)
        mark = hashlib.sha256(f"{self._source.name}\0{patch}".encode()).hexdigest()[:8]
        name = self._source.name + (f"-{self._source.version}" if isinstance(self._source, Sdist) else "")
        found = await self.find_controls(failing)
        if not found:
            return None
        fields = {
            "schema": FORM,
            "instance_id": f"{name}-{mark}",
            "source": self._source.model_dump(),
            "bug_patch": patch,
            "packages": self.recipe.packages,
            "modules": self.recipe.modules,
            "roots": self.recipe.roots,
            "framework": self.recipe.framework,
            "test_paths": self.recipe.test_paths,
            "options": self.recipe.options,
            "FAIL_TO_PASS": tuple(sorted(failing)),
            "PASS_TO_PASS": tuple(sorted(baseline.passed - set(failing))),
            "controls": found,
            "events": baseline.events,
            "requires": tuple(one.model_dump() for one in self.recipe.requires),
            # They stop what hangs; a loaded machine may be many times slower than this one.
            "timeouts": {"test_s": 60.0, "total_s": float(max(120, round(20 * baseline.wall_s, -1)))},
        }
        return SweTask.model_validate(fields)

    async def find_controls(self, failing: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """By test function: the assertions that the right library fails when their expectation is wrong."""
        by_file: dict[str, set[str]] = {}
        for one in failing:
            by_file.setdefault(one.partition("::")[0], set()).add(controls.function_of(one))
        files: dict[str, str] = {}
        wanted: list[tuple[str, str, int | None]] = []
        for path, functions in by_file.items():
            text = read_source(self._base / path)
            tests: dict[str, Sequence[int]] = {one: range(40) for one in sorted(functions)}
            falsified = controls.falsify(text, tests, random.Random(1), most=40)
            files[path] = falsified.text
            wanted += falsified.must_fail
        report = await self._run(files, collect=sorted(files))
        usable: dict[str, list[int]] = {}
        for test, original, place in wanted:
            if place is not None and all(
                fails(report, test, one) for one in failing if controls.function_of(one) == original
            ):
                usable.setdefault(original, []).append(place)
        return {test: tuple(sorted(places)) for test, places in usable.items()}

    async def _run(
        self,
        files: Mapping[str, str] | None = None,
        baseline: Baseline | None = None,
        *,
        collect: Sequence[str] = (),
        total_s: float = 0.0,
    ) -> Report:
        recipe = self.recipe
        plan = Plan(
            framework=recipe.framework,
            files=collect or recipe.collect or recipe.test_paths,
            roots=recipe.roots,
            packages=(*recipe.packages, *recipe.modules),
            options=recipe.options,
            test_s=20.0,
            total_s=total_s or (max(60.0, 8 * baseline.wall_s) if baseline else 300.0),
            stop_after=MOST_FAILING + 1 + baseline.left_out if baseline else 0,
        )
        spec = SandboxSpec(
            ttl_s=plan.total_s + 120.0,
            labels={"role": "make-swe", "source": self._source.name},
            tree=self._base,
            files={path: text.encode() for path, text in (files or {}).items()},
            mounts=program_mounts(self._site),
            mem_mb=MEM_MB,
        )
        return await run_tests(self._provider, spec, plan)


def fails(report: Report, function: str, like: str) -> bool:
    """Whether a falsified copy of the test ``like`` failed as a test, not by accident."""
    parameters = like.rpartition("::")[2].partition("[")
    return report.outcomes.get(f"{function}{parameters[1]}{parameters[2]}") == "failed"


def judge(shown: Report, baseline: Baseline) -> tuple[list[str], str]:
    """The failing tests of a good candidate; empty, and why, for another."""
    failing = sorted(one for one in baseline.passed if shown.outcomes.get(one) in ("failed", "error"))
    if len(failing) > MOST_FAILING:
        return [], f"more than {MOST_FAILING} tests fail"
    if not shown.complete or shown.errors:
        return [], f"the tests do not run to their end: {'; '.join([*shown.problems, *shown.errors])[:80]}"
    lost = [one for one in baseline.passed if shown.outcomes.get(one) not in ("passed", "failed", "error")]
    if lost:
        return [], f"{len(lost)} tests vanish"
    if not failing:
        return [], "no test notices"
    if len(baseline.passed) - len(failing) < LEAST_PASSING:
        return [], f"fewer than {LEAST_PASSING} tests pass"
    if shown.tampers:
        return [], f"it looks like an attack: {shown.tampers[0]}"
    return failing, f"{len(failing)} tests fail"


def mutations_of(sources: Mapping[str, str], seed: int) -> Iterator[Candidate]:
    """Candidates by mutation, in a seeded order."""
    found = [one for path, text in sorted(sources.items()) for one in mutants(path, text, seed)]
    for one in shuffled(found, seed):
        if means_something_else(one.text, sources[one.path]):
            yield _candidate(one)


def _candidate(one: Mutant) -> Candidate:
    return Candidate(one.path, one.text, one.operator, one.function)


def fixes_between(fixed: Mapping[str, str], broken: Path, seed: int) -> Iterator[Candidate]:
    """Candidates by undoing single changes that a later release made: ``fixed`` is that release."""
    found = []
    for path, text in sorted(fixed.items()):
        if not (broken / path).is_file():
            continue
        try:
            old = read_source(broken / path)
        except BadRequest:
            continue
        if old == text:
            continue
        for hunk in patches.changes(path, text, old):
            changed = patches.apply([hunk], {path: text})[path]
            if changed is not None and means_something_else(changed, text):
                found.append(Candidate(path, changed, "reversed fix", f"line {hunk.hunks[0].old_start}"))
    random.Random(seed).shuffle(found)
    yield from found
