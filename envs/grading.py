"""Grading by hidden calls: the answers come out of a fresh sandbox, the right ones never go in.

The submitted source files are laid over a pristine copy of the project in a sandbox of the grader's own. A
driver there calls the function with hidden arguments and prints what it returned, on one line behind a
random mark; comparison happens here. So nothing that the graded code prints, patches, or does to its
process can earn anything: it would have to know the right answers. Whatever is missing, doubled or
malformed is a grade of 0; only infrastructure raises. Depends on ``envs.base`` and ``sandboxes.base``.
"""

from __future__ import annotations

import ast
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from tollway.envs.base import Grader, Task, Verdict, Work
from tollway.sandboxes.base import ExecResult, SandboxSpec

__all__ = ["HiddenCalls", "judge", "same"]

PYTHON = ("/usr/bin/python3", "-I", "-S", "-B")
"""The sandbox's Python: no site, no user files, no bytecode written."""

_DRIVER = """\
import sys
sys.path.insert(0, "")
answers = []
try:
    function = getattr(__import__({module!r}, fromlist=["*"]), {function!r})
    for args in {calls!r}:
        try:
            answers.append(("returned", function(*args)))
        except Exception as error:
            answers.append(("raised", type(error).__name__))
except BaseException as error:
    answers.append(("broken", type(error).__name__))
sys.__stdout__.write("\\n" + {mark!r} + repr(answers) + "\\n")
sys.__stdout__.flush()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenCalls(Grader):
    """Calls ``module.function`` with each case's arguments; the reward is 1 when every answer is right, else 0."""

    module: str
    function: str
    cases: Sequence[tuple[tuple[object, ...], object]]
    """(arguments, right answer): values that ``ast.literal_eval`` can read."""
    timeout_s: float = 30.0

    async def grade(self, task: Task, work: Work) -> Verdict:
        """Judge in a fresh sandbox, which is gone when this returns."""
        submission = work.submission
        missing = [path for path in task.sources if path not in submission]
        if missing:
            return Verdict(reward=0.0, reason=f"{missing[0]} is missing")
        allowed = {path: submission[path] for path in task.sources}
        spec = SandboxSpec(
            ttl_s=60.0 + self.timeout_s,
            labels={"task": task.task_id, "role": "grader"},
            files={**task.files, **allowed},
        )
        mark = secrets.token_hex(16)
        calls = [args for args, _ in self.cases]
        driver = _DRIVER.format(module=self.module, function=self.function, calls=calls, mark=mark)
        sandbox = await work.provider.create(spec)
        try:
            done = await sandbox.exec([*PYTHON, "-c", driver], timeout_s=self.timeout_s)
        finally:
            await sandbox.kill()
        return judge(done, mark, [want for _, want in self.cases])


def judge(done: ExecResult, mark: str, wanted: Sequence[object]) -> Verdict:
    """Compare what the driver printed behind ``mark`` with ``wanted``, in value and in type."""
    if done.timed_out or done.exit_code != 0:
        return Verdict(reward=0.0, reason="timed out" if done.timed_out else f"exit code {done.exit_code}")
    lines = [line for line in done.stdout.split(b"\n") if mark.encode() in line]
    if len(lines) != 1 or not lines[0].startswith(mark.encode()):
        # More than one: somebody forged a line, and which of them is real cannot be told.
        return Verdict(reward=0.0, reason=f"{len(lines)} verdict lines", facts={"tampered": float(len(lines) > 1)})
    try:
        answers = ast.literal_eval(lines[0][len(mark) :].decode())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return Verdict(reward=0.0, reason="the answers are no plain values")
    if not same(answers, [("returned", want) for want in wanted]):
        return Verdict(reward=0.0, reason="wrong answers")
    return Verdict(reward=1.0, reason="all hidden calls are right")


def same(found: object, wanted: object) -> bool:
    """Equality that tells 1 from 1.0 and from True, at every depth.

    >>> same([1, {"a": 2.0}], [1, {"a": 2.0}]), same(True, 1)
    (True, False)
    """
    if type(found) is not type(wanted):
        return False
    if isinstance(found, (list, tuple)) and isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    return found == wanted
