"""SWE-bench-style records: fields by name, tasks that grade, refusals with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from swe_helpers import FIX, LIBRARY, pytest_site, write_files

from tollway.cli import main
from tollway.envs.base import Task, Work
from tollway.envs.swe.attacks import fixed
from tollway.envs.swe.cache import Cache, tree_files
from tollway.envs.swe.catalogue import read_set
from tollway.envs.swe.grading import SweGrader
from tollway.envs.swe.importing import Imported, Refused, Where, import_record, read_records
from tollway.errors import BadRequest
from tollway.sandboxes.local import LocalProvider

TEST_PATCH = (
    "--- /dev/null\n+++ b/tests/test_hidden.py\n@@ -0,0 +1,5 @@\n+from shapes import area\n+\n+\n"
    "+def test_hidden():\n+    assert area(6, 7) == 42\n"
)


def record(**changes: object) -> dict[str, object]:
    return {
        "instance_id": "x__shapes-7",
        "repo": "x/shapes",
        "base_commit": "0" * 40,
        "patch": FIX,
        "test_patch": TEST_PATCH,
        "problem_statement": "Areas are sums.",
        "FAIL_TO_PASS": json.dumps(["tests/test_hidden.py::test_hidden", "tests/test_area.py::test_area"]),
        "PASS_TO_PASS": json.dumps(["tests/test_area.py::test_half", "tests/test_area.py::test_negative"]),
        "version": "1.0",
        "environment_setup_commit": "1" * 40,
        **changes,
    }


@pytest.fixture
def where(tmp_path: Path) -> Where:
    write_files(tmp_path / "checkouts" / "x__shapes-7", LIBRARY)
    return Where(checkout=str(tmp_path / "checkouts" / "{instance_id}"))


async def test_an_imported_task_grades(local: LocalProvider, tmp_path: Path, where: Where) -> None:
    found = import_record(record(), names={}, where=where)
    assert isinstance(found, Imported), found
    assert found.instruction == "Areas are sums."
    assert found.task.packages == ("shapes",)
    assert found.task.test_paths == ("tests",)
    grader = SweGrader(task=found.task, tree=Cache(tmp_path / "cache").tree(found.task), site=pytest_site())
    tree = tree_files(grader.tree)
    task = Task(task_id="t", messages=())
    right = await grader.grade(task, Work(submission=fixed(grader.task, tree), provider=local))
    assert (right.reward, right.flags) == (1.0, ()), right.reason
    # The agent made the file that the test patch adds.
    early = {
        **{path: tree[path] for path in tree if path.startswith("shapes/")},
        "tests/test_hidden.py": b"def test_hidden(): pass\n",
    }
    wrong = await grader.grade(task, Work(submission=early, provider=local))
    assert wrong.reward == 0


def test_fields_have_other_names_there(where: Where) -> None:
    theirs = {f"their_{key}": value for key, value in record().items()}
    found = import_record(theirs, names={key: f"their_{key}" for key in record()}, where=where)
    assert isinstance(found, Imported)
    assert found.task.instance_id == "x__shapes-7"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"patch": ""}, "it has no patch"),
        ({"FAIL_TO_PASS": "[]"}, "fail_to_pass|FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": "test_x (app.tests.Case)"}, "no JSON list"),
        ({"FAIL_TO_PASS": ["test_x (app.tests.Case)"]}, "none of pytest's"),
        ({"FAIL_TO_PASS": [1]}, "no list of test ids"),
        ({"patch": FIX.replace("shapes/area.py", "setup.cfg")}, r"changes setup\.cfg"),
        ({"patch": FIX.replace("shapes/area.py", "docs/a.rst")}, "no Python file"),
        ({"patch": FIX.replace("width + height", "width ? height")}, "does not fit"),
        ({"patch": "rename from a\nrename to b\n"}, "only changes of text files"),
        ({"test_patch": TEST_PATCH.replace("tests/test_hidden.py", "tests/test_area.py")}, "exists"),
        ({"instance_id": "a/b"}, "no directory|instance_id"),
        ({"base_commit": "main"}, "base_commit"),
        ({"repo": 5}, "repo is a int"),
    ],
)
def test_what_cannot_be_graded_is_refused_with_a_reason(changes: dict[str, object], reason: str, where: Where) -> None:
    found = import_record(record(**changes), names={}, where=where)
    assert isinstance(found, Refused)
    import re

    assert re.search(reason, found.reason), found.reason


def test_a_repository_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = import_record(record(), names={}, where=Where(checkout=str(tmp_path / "{repo}")))
    assert isinstance(found, Refused)
    assert "x/shapes" in found.reason
    odd = import_record(record(), names={}, where=Where(checkout="{home}"))
    assert isinstance(odd, Refused)
    assert "{instance_id}" in odd.reason


def test_files_of_records(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps(record()) + "\n\n{broken\n[1]\n")
    found = list(read_records(lines))
    assert [number for number, _ in found] == [1, 3, 4]
    assert isinstance(found[0][1], dict)
    assert [isinstance(one, str) for _, one in found[1:]] == [True, True]
    (tmp_path / "b.json").write_text(json.dumps([record(), 5]))
    assert [isinstance(one, dict) for _, one in read_records(tmp_path / "b.json")] == [True, False]
    with pytest.raises(BadRequest):
        list(read_records(tmp_path / "none"))


def test_the_commands(tmp_path: Path, where: Where, capsys: pytest.CaptureFixture[str]) -> None:
    records = tmp_path / "records.jsonl"
    records.write_text(json.dumps({**record(), "id": "x__shapes-7"}) + "\n" + json.dumps(record(patch="")) + "\n")
    out = tmp_path / "out"
    call = ["tasks", "import", str(records), "--checkout", where.checkout, "--out", str(out), "--map", "instance_id=id"]
    assert main(call) == 0
    said = capsys.readouterr()
    assert "1 tasks" in said.out
    assert "refused" in said.err
    (entry,) = read_set(str(out))
    assert entry.instruction.strip() == "Areas are sums."
    assert main(["tasks", "list", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"][0]["id"] == "x__shapes-7"
    assert main(["tasks", "list", "tiny"]) == 0
    assert capsys.readouterr().out.count("(bundled)") == 9
    assert main(["tasks", "import", str(records), "--checkout", "x", "--map", "nonsense=1"]) == 2
    assert main(["tasks", "make-swe"]) == 2
    assert main(["tasks", "list", str(tmp_path / "nothing")]) == 2


def test_the_tiny_set_needs_no_fetching_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = ["--set", f"env.swe.cache={tmp_path / 'cache'}"]
    assert main(["tasks", "fetch", "tiny", "--json", *there]) == 0
    assert json.loads(capsys.readouterr().out)["ready"] == 9
    assert main(["tasks", "verify", "tiny", "--only", "stockroom-b*", "--json", *there]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["trial"], row["reward"]) for row in found["trials"]] == [
        ("reference fix", 1.0),
        ("nothing changed", 0.0),
    ]


def test_fetching_stops_where_the_same_goes_wrong_for_every_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main(["tasks", "fetch", "shipped", "--set", f"env.swe.cache={tmp_path / 'file'}"]) == 1
    said = capsys.readouterr()
    assert "the others are not tried" in said.err
    assert said.err.count("cannot write the cache") < 10
    assert f"0 of 56 tasks are ready in {tmp_path / 'file'}" in said.out
