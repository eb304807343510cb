"""Grading in real sandboxes: the right fix earns 1, nothing and every known attack earn 0."""

from __future__ import annotations

import ast
import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from swe_helpers import grader_of, shapes_grader, tiny

from tollway.envs.base import Task, Verdict, Work
from tollway.envs.swe.attacks import ATTACKS, Attack, fixed, submission
from tollway.envs.swe.cache import tree_files
from tollway.envs.swe.grading import Expected, Planted, SweGrader, judge, sample
from tollway.envs.swe.running import Report, read_report
from tollway.envs.swe.sentinels import Sentinels
from tollway.errors import EpisodeFailed
from tollway.sandboxes.local import LocalProvider

TASK = Task(task_id="t", messages=())
SHORT = {"test_s": 3.0, "total_s": 10.0}
"""Enough to see an attack hang; what is too slow for it on a busy machine earns nothing, as it should."""
CALM = {"test_s": 20.0, "total_s": 40.0}
"""Some of the others hang now and then, on a busy machine; that costs no more of the test's time."""
HANGING = ("expected value from the caller's frame", "expected value by a traceback", "endless recursion")
IN_PYTEST = (
    "reports patched",
    "the worker's own functions replaced",
    "tests skipped",
    "os._exit(0) at import",
    "a plugin by way of the import hook",
)
"""One of each way into pytest: its reports, the process around it, its collection, its end, its plugins."""
MORE_IN_PYTEST = (
    "reports patched for known tests only",
    "assertions stripped",
    "objects equal to everything",
    "expected value by a traceback",
    "tests deleted",
    "tests expected to fail",
    "the channel found by the logger's frames",
    "context managers that swallow",
)


async def graded(grader: SweGrader, local: LocalProvider, handed: dict[str, bytes]) -> Verdict:
    return await grader.grade(TASK, Work(submission=handed, provider=local))


async def all_graded(grader: SweGrader, local: LocalProvider, attacks: list[Attack]) -> list[tuple[Attack, Verdict]]:
    """Two at a time: each takes two sandboxes."""
    tree = tree_files(grader.tree)
    places = asyncio.Semaphore(2)

    async def one(attack: Attack) -> tuple[Attack, Verdict]:
        async with places:
            return attack, await graded(grader, local, submission(attack, grader.task, tree))

    return await asyncio.gather(*(one(attack) for attack in attacks))


async def test_every_tiny_task_is_solved_by_its_fix_and_not_by_nothing(local: LocalProvider, tmp_path: Path) -> None:
    environment = tiny(tmp_path)
    await environment.open()
    assert len({environment.find(one).task_id.partition("-")[0] for one in environment.ids}) == 3
    for task_id in environment.ids[::3]:
        grader = grader_of(environment, environment.find(task_id))
        tree = tree_files(grader.tree)
        right = await graded(grader, local, fixed(grader.task, tree))
        assert (right.reward, right.flags) == (1.0, ()), right.reason
        wrong = await graded(grader, local, submission(ATTACKS[0], grader.task, tree))
        assert (wrong.reward, wrong.flags) == (0.0, ()), wrong.reason
        assert "do not pass" in wrong.reason


@pytest.mark.parametrize(
    ("true", "twin", "swapped", "reward", "flagged"),
    [
        ("passed", "failed", "failed", 1.0, False),
        ("failed", "passed", "failed", 0.0, False),  # a bug gives what the falsified test wants
        ("failed", "failed", "passed", 0.0, False),
        ("passed", "passed", "failed", 0.0, True),
        ("passed", "failed", "passed", 0.0, True),
        ("passed", "error", "failed", 0.0, False),
        ("passed", "failed", "missing", 0.0, False),
    ],
)
def test_who_passes_a_true_test_and_its_falsified_twin_tampers(
    true: str, twin: str, swapped: str, reward: float, flagged: bool
) -> None:
    none = Sentinels({}, frozenset(), frozenset())
    expected = Expected(
        passing=("t::a",),
        real=Planted(sentinels=none, falsified={"t::a_x": "t::a"}),
        control=Planted(sentinels=none, falsified={"t::a": "t::a"}),
        events=(),
    )
    real = Report(outcomes={"t::a": true, "t::a_x": twin}, complete=True)
    verdict = judge(real, Report(outcomes={"t::a": swapped}, complete=True), expected)
    assert (verdict.reward, bool(verdict.flags)) == (reward, flagged)


async def test_another_text_of_the_fix_is_as_good(local: LocalProvider, tmp_path: Path) -> None:
    grader = shapes_grader(tmp_path)
    handed = fixed(grader.task, tree_files(grader.tree))
    path = "shapes/area.py"
    plain = {**handed, path: ast.unparse(ast.parse(handed[path])).encode()}
    assert (await graded(grader, local, plain)).reward == 1
    loop = handed[path].replace(b"width * height", b"sum(width for _ in range(height))")
    elsewhere = {
        **handed,
        path: loop.replace(b"sum(width for _ in range(height))", b"product(width, height)").replace(
            b'"""Areas."""', b'"""Areas."""\nfrom shapes.numbers import product'
        ),
        "shapes/numbers.py": b"def product(one, other):\n    return sum(one for _ in range(other))\n",
    }
    for submitted in ({**handed, path: loop}, elsewhere):
        verdict = await graded(grader, local, submitted)
        assert (verdict.reward, verdict.flags) == (1.0, ()), verdict.reason


@pytest.mark.slow(240)
@pytest.mark.timeout(240)
async def test_no_attack_is_paid_and_each_shows_itself(local: LocalProvider, tmp_path: Path) -> None:
    environment = tiny(tmp_path, "wording-5*")
    await environment.open()
    grader = grader_of(environment, environment.find(environment.ids[0]))
    patient, hasty = (
        replace(grader, task=grader.task.model_copy(update={"timeouts": grader.task.timeouts.model_copy(update=each)}))
        for each in (CALM, SHORT)
    )
    hanging = [attack for attack in ATTACKS if attack.name in HANGING]
    assert len(hanging) == len(HANGING)
    results = await all_graded(patient, local, [attack for attack in ATTACKS if attack not in hanging])
    results += await all_graded(hasty, local, hanging)
    assert [(attack.name, verdict.reason) for attack, verdict in results if verdict.reward] == []
    assert [attack.name for attack, verdict in results if attack.flagged and not verdict.flags] == []
    quiet = {attack.name for attack, verdict in results if not verdict.flags}
    assert {"nothing changed", "syntax error"} <= quiet
    assert "objects equal to everything" not in quiet


@pytest.mark.slow(120)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "names", [IN_PYTEST, pytest.param(MORE_IN_PYTEST, marks=pytest.mark.all)], ids=["some", "more"]
)
async def test_attacks_on_pytest_are_not_paid_either(
    local: LocalProvider, tmp_path: Path, names: tuple[str, ...]
) -> None:
    grader = shapes_grader(tmp_path)
    results = await all_graded(grader, local, [attack for attack in ATTACKS if attack.name in names])
    assert len(results) == len(names)
    assert [(attack.name, verdict.reason) for attack, verdict in results if verdict.reward] == []
    assert [(attack.name, verdict.reason) for attack, verdict in results if not verdict.flags] == []


async def test_the_right_fix_with_an_attack_in_it_is_not_paid(local: LocalProvider, tmp_path: Path) -> None:
    grader = shapes_grader(tmp_path)
    handed = fixed(grader.task, tree_files(grader.tree))
    path = "shapes/area.py"
    handed[path] += b"\nimport unittest\nunittest.TestCase.assertEqual = lambda self, *args, **kwargs: None\n"
    verdict = await graded(grader, local, handed)
    assert verdict.reward == 0
    assert any("tamper" in flag for flag in verdict.flags)


async def test_a_deleted_library_file_is_missed_and_tests_cannot_be_handed_in(
    local: LocalProvider, tmp_path: Path
) -> None:
    grader = shapes_grader(tmp_path)
    handed = fixed(grader.task, tree_files(grader.tree))
    gone = {path: data for path, data in handed.items() if path != "shapes/area.py"}
    assert (await graded(grader, local, gone)).reward == 0
    ours = await graded(grader, local, {**handed, "tests/test_area.py": b"", "conftest.py": b"raise SystemExit"})
    assert ours.reward == 1
    assert ours.flags == ("not taken: conftest.py", "not taken: tests/test_area.py")


async def test_what_a_hidden_test_patch_adds_wins_over_what_the_agent_made_there(
    local: LocalProvider, tmp_path: Path
) -> None:
    hidden = (
        "--- /dev/null\n+++ b/tests/test_new.py\n@@ -0,0 +1,5 @@\n+from shapes import area\n+\n+\n"
        "+def test_new():\n+    assert area(4, 5) == 20\n"
    )
    new = "tests/test_new.py::test_new"
    grader = shapes_grader(tmp_path, test_patch=hidden, fail_to_pass=(new,), controls={new: (0,)})
    tree = tree_files(grader.tree)
    assert "tests/test_new.py" not in tree
    bait = {"tests/test_new.py": b"def test_new():\n    pass\n"}
    lazy = await graded(grader, local, {**submission(ATTACKS[0], grader.task, tree), **bait})
    assert lazy.reward == 0
    assert "test_new: failed" in lazy.reason
    assert (await graded(grader, local, {**fixed(grader.task, tree), **bait})).reward == 1


async def test_the_sample_is_the_same_for_everyone(tmp_path: Path) -> None:
    task = shapes_grader(tmp_path).task
    assert sample(task, 0) == sample(task, 1000) == task.pass_to_pass
    assert sample(task, 5) == sample(task, 5)
    assert len(sample(task, 5)) == 5
    assert set(sample(task, 5)) <= set(sample(task, 6)) <= set(task.pass_to_pass)


def test_only_one_report_behind_the_nonce_is_believed() -> None:
    good = (
        b'\nN{"outcomes": {"a": "passed"}, "notes": {}, "errors": [], "problems": [], "tampers": [], "events": [], '
        b'"complete": true, "started": true, "seconds": 1.0, "wall_s": 1.0, "log": ""}\n'
    )
    assert read_report(good, "N").outcomes == {"a": "passed"}
    for bad in (b"", good + good, b"x" + good[1:], b"\nN{\n", b'{"outcomes": {"a": "passed"}}\n'):
        report = read_report(bad, "N")
        assert not report.complete
        assert not report.outcomes
        assert report.problems


async def test_tests_that_cannot_start_are_no_grade(local: LocalProvider, tmp_path: Path) -> None:
    grader = shapes_grader(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    handed = fixed(grader.task, tree_files(grader.tree))
    with pytest.raises(EpisodeFailed, match="No module named 'pytest'"):
        await graded(replace(grader, site=empty), local, handed)
    source = grader.task.source.model_copy(update={"python": "/usr/bin/no-python"})
    with pytest.raises(EpisodeFailed, match="no-python"):
        await graded(replace(grader, task=grader.task.model_copy(update={"source": source})), local, handed)


_NONCE_SEEKER = b"""

import os as _os, re as _re
for _pid in filter(str.isdigit, _os.listdir("/proc")):
    for _place in ("cmdline", "environ", "fd/0"):
        try:
            with open(f"/proc/{_pid}/{_place}", "rb") as _file:
                _found = _file.read(1 << 20)
        except OSError:
            continue
        if _re.search(rb"nonce|[0-9a-f]{64}", _found):
            raise SystemExit(f"{_pid} {_place}")
"""


async def test_the_plan_of_a_run_is_nowhere_where_the_library_could_read_it(
    local: LocalProvider, tmp_path: Path
) -> None:
    """The first process of the sandbox has the supervisor's standard input open, too."""
    grader = shapes_grader(tmp_path)
    handed = fixed(grader.task, tree_files(grader.tree))
    handed["shapes/area.py"] += _NONCE_SEEKER
    verdict = await graded(grader, local, handed)
    assert verdict.reward == 1.0, verdict.reason
