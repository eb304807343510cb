"""Patches apply exactly or are refused, and undo themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollway.envs.swe import patches
from tollway.errors import BadRequest

LINES = st.lists(st.sampled_from(["a", "b", "", " c", "\x0c", "é\u2028x", "-d", "+e", "--- f", "@@ x"]), max_size=12)
ENDS = st.booleans()


def text_of(lines: list[str], end: bool) -> str:
    return "\n".join(lines) + ("\n" if end and lines else "")


@given(LINES, ENDS, LINES, ENDS)
def test_a_patch_makes_the_new_text_and_its_reverse_the_old_one(
    old: list[str], old_end: bool, new: list[str], new_end: bool
) -> None:
    before, after = text_of(old, old_end), text_of(new, new_end)
    diff = patches.make("p/f.py", before, after)
    if before == after:
        assert diff == ""
        return
    patch = patches.read(diff)
    assert patches.apply(patch, {"p/f.py": before}) == {"p/f.py": after}
    assert patches.apply(patches.reverse(patch), {"p/f.py": after}) == {"p/f.py": before}
    assert patches.read(patches.render(patch)) == patch
    assert patches.reverse(patches.reverse(patch)) == patch


@given(LINES, LINES)
def test_single_changes_add_up_to_nothing_else(old: list[str], new: list[str]) -> None:
    before, after = text_of(old, True), text_of(new, True)
    for one in patches.changes("f.py", before, after):
        assert patches.apply([one], {"f.py": before})["f.py"] != before


def test_files_are_created_and_deleted() -> None:
    create = patches.read("--- /dev/null\n+++ b/a/b.py\n@@ -0,0 +1,2 @@\n+x\n+y\n")
    assert patches.apply(create, {}) == {"a/b.py": "x\ny\n"}
    assert patches.apply(patches.reverse(create), {"a/b.py": "x\ny\n"}) == {"a/b.py": None}
    with pytest.raises(BadRequest, match="exists"):
        patches.apply(create, {"a/b.py": ""})
    with pytest.raises(BadRequest, match="holds more"):
        patches.apply(patches.reverse(create), {"a/b.py": "x\ny\nz\n"})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "--- a/x\n",
        "--- a/x\n+++ b/x\n",
        "--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n",
        "--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n",
        "--- /etc/passwd\n+++ /etc/passwd\n@@ -1 +1 @@\n-a\n+b\n",
        "--- a/x\n+++ b/x\n@@ -1,3 +1 @@\n-a\n+b\n",
        "--- a/x\n+++ b/x\n@@ -1 +1 @@\n?a\n+b\n",
        "rename from x\nrename to y\n",
        "GIT binary patch\n",
        "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n--- a/x\n+++ b/x\n@@ -9 +9 @@\n-a\n+b\n",
    ],
)
def test_what_is_no_patch_is_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        patches.read(text)


def test_a_patch_for_another_text_does_not_apply() -> None:
    patch = patches.read(patches.make("f.py", "a\nb\nc\n", "a\nB\nc\n"))
    for files in ({"f.py": "a\nx\nc\n"}, {"f.py": "0\na\nb\nc\n"}, {}, {"f.py": ""}):
        with pytest.raises(BadRequest, match=r"f\.py"):
            patches.apply(patch, files)
