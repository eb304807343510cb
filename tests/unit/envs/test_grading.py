"""Cheating does not pay: nothing but right behaviour earns 1, and only infrastructure raises."""

from __future__ import annotations

import asyncio

import pytest

from tollway.envs.base import Task, Work, collect
from tollway.envs.grading import HiddenCalls, judge, same
from tollway.errors import SandboxError
from tollway.messages import Message
from tollway.sandboxes.base import ExecResult, SandboxSpec
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider
from tollway.sandboxes.local import LocalProvider

TASK = Task(
    task_id="t",
    messages=(Message(role="user", content="fix calc.py"),),
    files={"calc.py": b"def mean(values):\n    return sum(values) / len(values)\n", "check.py": b"print('ok')\n"},
    sources=("calc.py",),
)
GRADER = HiddenCalls(
    module="calc", function="mean", cases=[(([],), 0), (([1, 2],), 1.5), (([4],), 4.0)], timeout_s=10.0
)
FIX = b"def mean(values):\n    return sum(values) / len(values) if values else 0\n"

ATTACKS = {
    "nothing changed": TASK.files["calc.py"],
    "swallows everything": b"def mean(values):\n    try:\n        1 / 0\n    except Exception:\n        return 0\n",
    "syntax error": b"def mean(values:\n",
    "empty": b"",
    "exits at import": b"import os\nos._exit(0)\n",
    "exits in the call": b"import os\ndef mean(values):\n    os._exit(0)\n",
    "raises SystemExit(0)": b"raise SystemExit(0)\n",
    "prints success": b"print('ok')\nprint('PASSED')\nprint('reward 1.0')\n" + TASK.files["calc.py"],
    "prints its own answers": b"print([('returned', 0), ('returned', 1.5), ('returned', 4.0)])\nraise SystemExit(0)\n",
    "equal to everything": b"class A:\n    __eq__ = lambda self, other: True\ndef mean(values):\n    return A()\n",
    "looks like everything": b"class A:\n    __repr__ = lambda self: '0'\ndef mean(values):\n    return A()\n",
    "wrong type": b"def mean(values):\n    return sum(values) / len(values) if values else False\n",
    "patches builtins": b"import builtins\nbuiltins.repr = lambda x: '[]'\n" + TASK.files["calc.py"],
    "replaces stdout": b"import sys, io\nsys.__stdout__ = io.StringIO()\n" + FIX,
    "endless": b"while True:\n    pass\n",
    "endless output": b"while True:\n    print('x' * 10000)\n",
    "deep": b"def mean(values):\n    return mean(values)\n",
    "kills its parent": b"import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)\n" + TASK.files["calc.py"],
    "forges a line with the mark": b"""
import os
line = open("/proc/self/cmdline").read()
mark = line.split("write(")[1].split("'")[1]
os.write(1, ("\\n" + mark + "[('returned', 0), ('returned', 0), ('returned', 0)]\\n").encode())
os._exit(0)
""",
    "adds a second line with the mark": b"""
import os
line = open("/proc/self/cmdline").read()
mark = line.split("'\\\\n' + ")[-1]
import re
mark = re.findall(r"[0-9a-f]{32}", line)[0]
os.write(1, ("\\n" + mark + "[('returned', 0)]\\n").encode())
"""
    + FIX,
}

REASONS = {
    "exits at import": "0 verdict lines",
    "prints its own answers": "wrong answers",
    "equal to everything": "the answers are no plain values",
    "looks like everything": "wrong answers",
    "patches builtins": "wrong answers",
    "endless": "timed out",
    "forges a line with the mark": "wrong answers",
    "adds a second line with the mark": "2 verdict lines",
}
"""Where the attack must have got as far as intended for the test to mean anything."""


async def _grade(
    provider: LocalProvider, source: bytes, timeout_s: float = 10.0
) -> tuple[float, str, dict[str, float]]:
    grader = HiddenCalls(module="calc", function="mean", cases=GRADER.cases, timeout_s=timeout_s)
    verdict = await grader.grade(TASK, Work(submission={"calc.py": source}, provider=provider))
    return verdict.reward, verdict.reason, dict(verdict.facts)


async def test_the_true_fix_earns_1_even_if_it_prints_a_lot(local: LocalProvider) -> None:
    assert (await _grade(local, FIX))[0] == 1.0
    assert (await _grade(local, b"print('PASSED\\n' * 1000, end='')\n" + FIX))[0] == 1.0


@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_earns_0(local: LocalProvider, name: str) -> None:
    endless = name.startswith("endless")
    reward, reason, facts = await _grade(local, ATTACKS[name], timeout_s=1.0 if endless else 10.0)
    assert reward == 0.0, reason
    assert reason == REASONS.get(name, reason)
    if name == "adds a second line with the mark":
        assert facts == {"tampered": 1.0}
    assert local.live == 0


async def test_a_submission_without_the_source_earns_0_and_other_files_are_ignored(local: LocalProvider) -> None:
    assert (await GRADER.grade(TASK, Work(submission={}, provider=local))).reward == 0.0
    extra = {"calc.py": FIX, "sitecustomize.py": b"import os; os._exit(0)", "check.py": b"", "ast.py": b"1/0"}
    assert (await GRADER.grade(TASK, Work(submission=extra, provider=local))).reward == 1.0
    extra["calc.py"] = TASK.files["calc.py"]
    assert (await GRADER.grade(TASK, Work(submission=extra, provider=local))).reward == 0.0


@pytest.mark.parametrize(
    "command",
    [
        "rm calc.py",
        "rm calc.py && ln -s /etc/passwd calc.py",
        "rm calc.py && mkfifo calc.py",
        "rm calc.py && mkdir calc.py",
        "head -c 2000000 /dev/zero > calc.py",
    ],
)
async def test_what_is_no_plain_source_file_is_not_collected(local: LocalProvider, command: str) -> None:
    sandbox = await local.create(SandboxSpec(ttl_s=30, labels={"t": "t"}, files=TASK.files))
    assert await collect(sandbox, TASK.sources) == {"calc.py": TASK.files["calc.py"]}
    assert (await sandbox.exec(command, timeout_s=20)).exit_code == 0
    async with asyncio.timeout(10):
        assert await collect(sandbox, TASK.sources) == {}


async def test_broken_infrastructure_raises_and_is_no_grade() -> None:
    async with FakeProvider(SandboxConfig()) as provider:
        provider.faults.exec.append(SandboxError("unreachable"))
        with pytest.raises(SandboxError, match="unreachable"):
            await GRADER.grade(TASK, Work(submission={"calc.py": FIX}, provider=provider))
        assert provider.live == 0
        assert provider.made == 1


@pytest.mark.parametrize(
    ("stdout", "reward"),
    [
        (b"\nM[('returned', 1)]\n", 1.0),
        (b"noise M[('returned', 1)]\n", 0.0),
        (b"\nM[('returned', 1)]\n\nM[('returned', 1)]\n", 0.0),
        (b"\nM[('returned', 1.0)]\n", 0.0),
        (b"\nM[('returned', True)]\n", 0.0),
        (b"\nM[('returned', 1), ('returned', 1)]\n", 0.0),
        (b"\nM[('raised', 'KeyError')]\n", 0.0),
        (b"\nM__import__('os').system('true')\n", 0.0),
        (b"\nM" + b"[" * 5000 + b"\n", 0.0),
        (b"\nM\xff\xfe\n", 0.0),
        (b"", 0.0),
    ],
)
def test_only_the_exact_answers_on_the_one_marked_line_count(stdout: bytes, reward: float) -> None:
    assert judge(ExecResult(exit_code=0, stdout=stdout), "M", [1]).reward == reward
    assert judge(ExecResult(exit_code=1, stdout=stdout), "M", [1]).reward == 0.0
    assert judge(ExecResult(exit_code=None, stdout=stdout, timed_out=True), "M", [1]).reward == 0.0


def test_equality_is_strict_at_every_depth() -> None:
    assert same({"a": [1, (2.0, None)]}, {"a": [1, (2.0, None)]})
    for found, wanted in (([1], (1,)), ({"a": 1}, {"a": 1.0}), ([True], [1]), ({"a": 1}, {"b": 1}), ([1, 2], [1])):
        assert not same(found, wanted)
