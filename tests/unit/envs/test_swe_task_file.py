"""swe.json is read strictly: every bad field is named, nothing but ``BadRequest`` comes out."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swe_helpers import shapes_fields

from tollway.envs.swe import patches
from tollway.envs.swe.catalogue import SETS, read_set
from tollway.envs.swe.task import Sdist, SweTask, parse_task, read_task
from tollway.envs.swe.writing import instruction, leaks, write_task
from tollway.errors import BadRequest, ConfigError

GOOD = shapes_fields(Path("/nowhere"))


def parsed(**changes: object) -> SweTask:
    fields = {**copy.deepcopy(GOOD), **changes}
    return parse_task(json.dumps({key: value for key, value in fields.items() if value is not None}), source="it")


BAD = {
    "instance_id": ["", "a/b", "../x", 3, None, "x" * 200, " a"],
    "schema": ["tollway-swe/2", None, 1],
    "source": [None, {}, {"kind": "sdist", "name": "x", "version": "1"}, {"kind": "git"}, [], "x"],
    "fix_patch": ["x", "--- a/tests/a.py\n+++ b/tests/a.py\n@@ -1 +1 @@\n-a\n+b\n", 5, ""],
    "packages": ["shapes", ["../shapes"], ["/shapes"], [1], []],
    "test_paths": [[], [".."], None, ["/tests"]],
    "roots": [[], ["../x"], ["/"]],
    "framework": ["nose", 1],
    "FAIL_TO_PASS": [[], None, ["x"], ["other/test_a.py::t"], ["../x.py::t"], "[]", [1]],
    "PASS_TO_PASS": [["tests/test_area.py::test_area"], [""], {}],
    "controls": [{"a": [-1]}, {"a": ["x"]}, []],
    "timeouts": [{"test_s": 0}, {"test_s": -1.0}, {"total_s": 1e9}, {"test_s": "1"}, {"other": 1}],
    "requires": [[{"name": "x", "version": "1", "sha256": "zz"}], [{"name": "x"}], ["x"]],
    "options": [["--rootdir=/x"], ["-c"], [1]],
    "surprise": [1],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_a_bad_field_is_named(key: str, value: object) -> None:
    with pytest.raises(BadRequest) as caught:
        parsed(**{key: value})
    message = str(caught.value)
    assert "it" in message
    named = {"schema": "schema", "packages": "pack", "surprise": "surprise"}.get(key, key.partition("_")[0])
    assert named.lower() in message.lower() or "test" in message, message


def test_the_good_one_is_read_and_written_back(tmp_path: Path) -> None:
    task = parsed()
    again = read_task(write_task(task, {}, tmp_path))
    assert again == task
    assert {one.name for one in (tmp_path / "shapes-1").iterdir()} == {
        *("swe.json", "task.toml", "instruction.md", "environment", "tests", "solution")
    }


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_stands_in_a_field_is_a_task_or_a_bad_request(data: st.DataObject) -> None:
    fields = copy.deepcopy(GOOD)
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("tests/a.py::b"),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=6,
    )
    for key in data.draw(st.lists(st.sampled_from([*fields, "x", "modules", "events"]), min_size=1, max_size=3)):
        fields[key] = data.draw(anything)
    with contextlib.suppress(BadRequest):
        assert parse_task(json.dumps(fields), source="it").fail_to_pass


@given(st.text(max_size=60))
def test_text_that_is_no_task_is_a_bad_request(text: str) -> None:
    with pytest.raises(BadRequest):
        parse_task(text, source="it")


def test_repeated_keys_depth_and_absence_are_refused(tmp_path: Path) -> None:
    for text in ('{"schema": "tollway-swe/1", "schema": "tollway-swe/1"}', "[" * 100_000, "[]", "null"):
        with pytest.raises(BadRequest):
            parse_task(text, source="it")
    with pytest.raises(BadRequest, match=r"no swe\.json"):
        read_task(tmp_path)
    (tmp_path / "swe.json").write_bytes(b"\xff\xfe")
    with pytest.raises(BadRequest, match="cannot read"):
        read_task(tmp_path)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("shapes/area.py", True),
        ("shapes/deep/new.py", True),
        ("tests/test_area.py", False),
        ("shapes/tests/x.py", False),
        ("shapes/conftest.py", False),
        ("shapes/test_x.py", False),
        ("shapes/sitecustomize.py", False),
        ("shapes/data.json", False),
        ("shapes/x.pth", False),
        ("shapes/../tests/a.py", False),
        ("/shapes/a.py", False),
        ("shapes.py", False),
        ("conftest.py", False),
        ("pytest.ini", False),
    ],
)
def test_only_the_librarys_own_python_files_are_taken(path: str, allowed: bool) -> None:
    assert parsed().may_submit(path) is allowed


def test_the_shipped_sets_are_sound_and_hold_no_sources() -> None:
    shipped = read_set("shipped")
    libraries = {entry.task.source.name for entry in shipped if isinstance(entry.task.source, Sdist)}
    assert len(shipped) >= 30
    assert len(libraries) >= 10
    assert len(read_set("tiny")) == 9
    for entry in (*shipped, *read_set("tiny")):
        task = entry.task
        assert 1 <= len(task.fail_to_pass) <= 15
        assert len(task.pass_to_pass) >= 20
        assert task.controls, task.instance_id
        assert len(patches.read(task.bug_patch)) == 1
        assert not leaks(entry.instruction, task), task.instance_id
        assert all(one in entry.instruction for one in task.fail_to_pass)
    files = [one for folder in SETS.values() for one in folder.rglob("*") if one.suffix in (".py", ".gz", ".whl")]
    assert files == []


def test_the_instruction_never_shows_the_patch() -> None:
    task = parsed()
    note = "E   return width + height\nE   assert 5 == 6"
    assert "width + height" not in instruction(task, {"tests/test_area.py::test_area": note})
    assert "assert 5 == 6" in instruction(task, {"tests/test_area.py::test_area": "assert 5 == 6"})


def test_sets_and_patterns() -> None:
    assert {entry.task.instance_id.partition("-")[0] for entry in read_set("tiny", ["spans-*"])} == {"spans"}
    assert len(read_set("tiny", ["!spans-*"])) == 6
    with pytest.raises(ConfigError, match="no task set"):
        read_set("nonsense")
    with pytest.raises(ConfigError, match="no tasks that fit"):
        read_set("tiny", ["x*"])
