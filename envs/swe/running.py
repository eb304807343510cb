"""One test run in a fresh sandbox: the plan that goes in, the report that comes out.

The programs of ``inside/`` do the work; this module starts them with a nonce and believes nothing that does
not stand behind it. Whatever the tests did, a run ends as a ``Report``; only infrastructure raises. Depends on
``sandboxes.base``.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tollway.errors import EpisodeFailed
from tollway.sandboxes.base import SandboxProvider, SandboxSpec

__all__ = ["PROGRAMS", "PYTHON", "SITE", "Framework", "Plan", "Report", "program_mounts", "run_tests"]

SITE = "/opt/tollway-swe/site"
"""Where the packages that tests need are inside: pytest and what a task lists."""
PROGRAMS = "/opt/tollway-swe/run"
"""Where ``inside/`` is inside."""
PYTHON = "/usr/bin/python3"
WORKSPACE = "/workspace"
Framework = Literal["pytest", "unittest"]
_INSIDE = Path(__file__).with_name("inside")
_REPORT_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run, in the workspace of a sandbox."""

    framework: Framework
    files: Sequence[str]
    """Test files and directories to collect, relative to the workspace."""
    ids: Sequence[str] | None = None
    """Tests to run, in the order of collection; ``None`` for all."""
    roots: Sequence[str] = (".",)
    """Directories of the workspace that Python imports from."""
    packages: Sequence[str] = ()
    """Paths of the library under test; what their code asks the interpreter for is watched."""
    remove: Sequence[str] = ()
    """Paths to delete first."""
    options: Sequence[str] = ()
    """Further options of pytest."""
    python: str | None = None
    """Python of an image, with what is installed for it; ``None`` for the system's, bare."""
    test_s: float = 60.0
    """Longest that one test may take."""
    total_s: float = 600.0
    stop_after: int = 0
    """End early once so many tests have failed; 0 for never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run showed. Outcomes are those words that the worker said in answer to a token."""

    outcomes: Mapping[str, str] = field(default_factory=dict)
    """By node id; "passed" is the only good one."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Why tests failed."""
    errors: tuple[str, ...] = ()
    """Files that could not be collected."""
    problems: tuple[str, ...] = ()
    """Why the run did not reach its end."""
    tampers: tuple[str, ...] = ()
    """What no honest library does: replaced parts of the framework, answers without a question."""
    events: tuple[str, ...] = ()
    """What the library asked the interpreter for that spies use."""
    complete: bool = False
    started: bool = True
    """The test process came so far that it could load tests; without that there is no result."""
    seconds: float = 0.0
    """Time of the tests alone."""
    wall_s: float = 0.0
    log: str = ""


def program_mounts(site: Path | None) -> dict[str, Path]:
    """What every sandbox of a SWE task needs mounted."""
    return {PROGRAMS: _INSIDE, **({SITE: site} if site is not None else {})}


async def run_tests(provider: SandboxProvider, spec: SandboxSpec, plan: Plan) -> Report:
    """Run ``plan`` in a sandbox made from ``spec``, which is gone when this returns."""
    nonce = secrets.token_hex(32)
    begun = secrets.token_hex(32)
    message = {
        "nonce": nonce,
        "begun": begun,
        "framework": plan.framework,
        "files": list(plan.files),
        "ids": list(plan.ids) if plan.ids is not None else None,
        "paths": [*(_inside(root) for root in plan.roots), *([SITE] if plan.framework == "pytest" else [])],
        "watch": [_inside(package) for package in plan.packages],
        "remove": list(plan.remove),
        "options": list(plan.options),
        "bare": plan.python is None,
        "test_s": plan.test_s,
        "collect_s": plan.total_s,
        "total_s": plan.total_s,
        "stop_after": plan.stop_after,
    }
    limit_s = plan.total_s + 30.0
    started = time.monotonic()
    sandbox = await provider.create(replace(spec, ttl_s=max(spec.ttl_s, limit_s + 60.0)))
    try:
        done = await sandbox.exec(
            [plan.python or PYTHON, "-I", "-S", "-B", f"{PROGRAMS}/supervise.py"],
            stdin=json.dumps(message).encode(),
            timeout_s=limit_s,
            max_output=_REPORT_BYTES,
        )
    finally:
        await sandbox.kill()
    if done.timed_out:
        return Report(problems=("the run took too long",), wall_s=time.monotonic() - started)
    said = done.stderr[-500:].decode("utf-8", "replace").strip()
    unanswered = not any(word.encode() in done.stdout for word in (nonce, begun))
    if done.exit_code is not None and 0 < done.exit_code < 128 and unanswered:
        # Its own failure, before anything of the library's ran. What ends it later is the library's.
        raise EpisodeFailed(
            f"the supervisor of tests does not run in the sandbox of provider {provider.name}"
            f" ({plan.python or PYTHON}, exit status {done.exit_code}): {said}"
        )
    report = read_report(done.stdout, nonce, error=done.stderr)
    if not report.started:
        raise EpisodeFailed(
            f"no tests can run in the sandbox: {'; '.join(report.problems)}: {report.log[-500:].strip()}"
        )
    return report


def read_report(output: bytes, nonce: str, *, error: bytes = b"") -> Report:
    """The report behind ``nonce``; exactly one line of the output must carry it."""
    lines = [line for line in output.split(b"\n") if nonce.encode() in line]
    if len(lines) != 1 or not lines[0].startswith(nonce.encode()):
        said = error[-500:].decode("utf-8", "replace").strip()
        tampers = ("more than one report",) if len(lines) > 1 else ()
        return Report(problems=(f"{len(lines)} reports came out: {said}",), tampers=tampers)
    try:
        found = json.loads(lines[0][len(nonce) :])
    except (ValueError, RecursionError):
        return Report(problems=("the report is broken",))
    return Report(
        outcomes=found["outcomes"],
        notes=found["notes"],
        errors=tuple(found["errors"]),
        problems=tuple(found["problems"]),
        tampers=tuple(sorted(set(found["tampers"]))),
        events=tuple(found["events"]),
        complete=found["complete"],
        started=found["started"],
        seconds=found["seconds"],
        wall_s=found["wall_s"],
        log=found["log"],
    )


def _inside(path: str) -> str:
    return WORKSPACE if path == "." else f"{WORKSPACE}/{path}"
