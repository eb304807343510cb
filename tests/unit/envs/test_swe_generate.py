"""Tasks are made from a library in real sandboxes: bugs that tests notice, proved before they are written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tollway.envs.swe.cache import BUNDLED, Cache, tree_files
from tollway.envs.swe.generate import Baseline, Candidate, Maker, fixes_between, judge, mutations_of
from tollway.envs.swe.recipe import Recipe, guess
from tollway.envs.swe.running import Report
from tollway.envs.swe.task import Bundled, read_task
from tollway.envs.swe.writing import write_task
from tollway.errors import BadRequest
from tollway.sandboxes.local import LocalProvider

RECIPE = Recipe(
    packages=("wording",),
    modules=(),
    roots=(".",),
    test_paths=("tests",),
    collect=tuple(f"tests/test_{name}.py" for name in ("cases", "layout", "speech")),
    framework="unittest",
)


async def test_a_task_comes_out_and_is_the_same_for_the_same_seed(local: LocalProvider, tmp_path: Path) -> None:
    maker = Maker(local, Cache(tmp_path / "cache"), Bundled(kind="bundled", name="wording"), RECIPE)
    assert set(maker.sources()) == {f"wording/{name}.py" for name in ("__init__", "cases", "layout", "speech")}
    baseline = await maker.baseline()
    assert len(baseline.passed) == 39
    made = []
    for _ in range(2):
        async for task, shown in maker.make(mutations_of(maker.sources(), 11), baseline, count=1, tries=10):
            made.append(task)
            folder = write_task(task, shown.notes, tmp_path / "out")
    assert len(made) == 2
    assert made[0] == made[1]
    assert read_task(folder) == made[0]
    assert made[0].controls


async def test_a_change_that_no_test_notices_is_no_task(local: LocalProvider, tmp_path: Path) -> None:
    maker = Maker(local, Cache(tmp_path / "cache"), Bundled(kind="bundled", name="wording"), RECIPE)
    baseline = await maker.baseline()
    text = maker.sources()["wording/cases.py"]
    said: list[str] = []

    def candidates() -> Iterator[Candidate]:
        yield Candidate("wording/cases.py", text + "\nUNUSED = 1\n", "compare", "a")
        yield Candidate("wording/cases.py", text.replace("import annotations", "import nothing"), "compare", "c")

    made = [one async for one in maker.make(candidates(), baseline, count=3, report=said.append)]
    assert made == []
    assert "no test notices" in said[0]
    assert "do not run to their end" in said[1]
    assert len(said) == 2


def report(**outcomes: str) -> Report:
    return Report(outcomes=outcomes, complete=True)


def test_the_rules_for_a_good_bug() -> None:
    names = [f"t{number}" for number in range(40)]
    baseline = Baseline(passed=frozenset(names), left_out=0, events=(), seconds=1.0, wall_s=1.0)
    good = dict.fromkeys(names, "passed")
    assert judge(report(**{**good, "t1": "failed", "t2": "error"}), baseline)[0] == ["t1", "t2"]
    for outcomes, why in (
        (good, "no test notices"),
        ({**good, **dict.fromkeys(names[:16], "failed")}, "more than 15"),
        ({name: word for name, word in good.items() if name != "t3"} | {"t1": "failed"}, "1 tests vanish"),
        ({**good, "t1": "failed", "t2": "skipped"}, "1 tests vanish"),
    ):
        failing, said = judge(report(**outcomes), baseline)
        assert failing == []
        assert why in said
    assert judge(Report(outcomes={**good, "t1": "failed"}), baseline)[0] == []


def test_single_changes_between_two_releases_are_undone_one_at_a_time(tmp_path: Path) -> None:
    fixed = {"pkg/a.py": "".join(f"x{number} = {number}\n" for number in range(40))}
    old = fixed["pkg/a.py"].replace("x3 = 3", "x3 = 4").replace("x30 = 30", "x30 = 31")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/a.py").write_text(old)
    found = list(fixes_between(fixed, tmp_path, 1))
    assert sorted(("x3 = 4" in one.text, "x30 = 31" in one.text) for one in found) == [(False, True), (True, False)]
    assert {one.kind for one in found} == {"reversed fix"}


def test_the_usual_layouts_are_found(tmp_path: Path) -> None:
    assert guess(BUNDLED / "spans").packages == ("spans",)
    assert guess(BUNDLED / "spans").test_paths == ("tests",)
    (tmp_path / "src/lib").mkdir(parents=True)
    (tmp_path / "src/lib/__init__.py").write_text("")
    with pytest.raises(BadRequest, match="--tests"):
        guess(tmp_path)
    with pytest.raises(BadRequest, match="has no checks, more; name its tests with --tests"):
        guess(tmp_path, tests=["checks", "src", "more"])
    (tmp_path / "test_lib.py").write_text("")
    found = guess(tmp_path)
    assert (found.packages, found.roots, found.test_paths) == (("src/lib",), ("src", "."), ("test_lib.py",))
    assert not [name for name in tree_files(BUNDLED) if "__pycache__" in name]
