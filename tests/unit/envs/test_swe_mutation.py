"""Mutations change one statement, keep the formatting, and are the same for the same seed."""

from __future__ import annotations

import ast
import random
import re

import pytest

from tollway.envs.swe import controls, patches
from tollway.envs.swe.mutation import OPERATORS, means_something_else, mutants, shuffled
from tollway.envs.swe.sentinels import plant

SOURCE = '''\
"""Doc."""

LIMIT = 3


class Box:
    def fill(self, items,  size = 2):  # odd spacing stays
        if not items:
            return None
        total = 0
        for item in items[1:]:
            if item >= size and item != LIMIT:
                total += item   *   size
        self.keep(total, "é")
        return min(total, size)
'''


def test_every_operator_finds_its_place() -> None:
    found = mutants("a.py", SOURCE, 1)
    assert {one.operator for one in found} == set(OPERATORS)
    assert all(one.function == "Box.fill" for one in found)


def test_one_statement_changes_and_nothing_else() -> None:
    for one in mutants("a.py", SOURCE, 1):
        if not means_something_else(one.text, SOURCE):
            continue
        (patch,) = patches.read(patches.make("a.py", SOURCE, one.text))
        (hunk,) = patch.hunks
        removed = [line for tag, line in hunk.lines if tag == "-"]
        added = [line for tag, line in hunk.lines if tag == "+"]
        assert 1 <= len(removed) <= 2
        assert len(added) in (0, len(removed)), one.operator
        assert "  # odd spacing stays" in one.text


def test_the_seed_decides() -> None:
    one, same, other = (
        [(mutant.operator, mutant.text) for mutant in shuffled(mutants("a.py", SOURCE, seed), seed)]
        for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other


@pytest.mark.parametrize("text", ["def (", "x = 1\r\n", "", "\x0c\ndef f(a):\n    return a < 1\n"])
def test_what_cannot_be_changed_has_no_mutants(text: str) -> None:
    assert mutants("a.py", text, 1) == []


TESTS = """\
import unittest
import pytest


@pytest.mark.parametrize("a, b", [(1, 2)])
def test_plain(a, b):
    assert a + 1 == b
    assert a


class TestCase(unittest.TestCase):
    def test_method(self):
        self.assertEqual(1 + 1, 2)
        self.assertTrue(1)
        with self.assertRaises(ValueError):
            int("x")
"""


def outcome(text: str, name: str, *arguments: object) -> str:
    space: dict[str, object] = {}
    exec(compile(text, "t", "exec"), space)
    try:
        if name in space:
            space[name](*arguments)  # type: ignore[operator]
        else:
            case = space["TestCase"]
            getattr(case(name), name)()  # type: ignore[operator]
    except BaseException:
        return "failed"
    return "passed"


@pytest.mark.parametrize("seed", range(8))
def test_falsified_tests_fail_and_the_rest_still_passes(seed: int) -> None:
    tests = {"t.py::test_plain": range(9), "t.py::TestCase::test_method": range(9)}
    made = controls.falsify(TESTS, tests, random.Random(seed))
    ast.parse(made.text)
    assert len(made.must_fail) == 5
    for test, original, place in made.must_fail:
        assert original in tests
        assert place is not None
        arguments = (1, 2) if "plain" in original else ()
        assert outcome(made.text, test.rpartition("::")[2], *arguments) == "failed", (test, place)
    assert outcome(TESTS, "test_plain", 1, 2) == outcome(TESTS, "test_method") == "passed"


@pytest.mark.parametrize("seed", range(8))
def test_of_twins_one_fails_and_the_names_do_not_say_which(seed: int) -> None:
    plain, method = "t.py::test_plain", "t.py::TestCase::test_method"
    tests = {plain: range(9), method: range(9)}
    for swapped in ((), (plain, method), (method,)):
        made = controls.twins(TESTS, tests, random.Random(seed), swapped=swapped)
        assert len(made.must_fail) == 2
        wrong = {test.rpartition("::")[2] for test, _, _ in made.must_fail}
        assert {original for test, original, _ in made.must_fail if test == original} == set(swapped)
        top = ast.parse(made.text).body
        (case,) = (one for one in top if isinstance(one, ast.ClassDef))
        for body, arguments in ((top, (1, 2)), (case.body, ())):
            names = [one.name for one in body if isinstance(one, ast.FunctionDef) and "test" in one.name]
            assert len(names) == 2
            for name in names:
                assert outcome(made.text, name, *arguments) == ("failed" if name in wrong else "passed")
    apart = [controls.twins(TESTS, tests, random.Random(seed), swapped=one).text for one in ((), tests)]
    lines = [sorted(line.split("(")[0] for line in text.splitlines()) for text in apart]
    assert lines[0] == lines[1]


def test_wrong_numbers_and_texts_are_often_near_the_right_ones() -> None:
    text = "def test_a():\n    assert f() == 10\n    assert g() == 'abc'\n"
    numbers, words = set(), set()
    for seed in range(60):
        made = controls.twins(text, {"t.py::test_a": (0, 1)}, random.Random(seed))
        numbers |= {int(one) for one in re.findall(r"f\(\) == (\d+)", made.text)}
        words |= set(re.findall(r"g\(\) == '(\w+)'", made.text))
    assert {9, 11} <= numbers
    assert max(numbers) > 20
    assert {len(word) for word in words} == {3, 4}


def test_without_an_assertion_to_falsify_a_wrong_one_is_added_where_it_is_reached() -> None:
    text = "def test_a():\n    value = 1\n\n\ndef test_b():\n    return 1\n"
    made = controls.falsify(text, {"t.py::test_a": (), "t.py::test_b": ()}, random.Random(1))
    assert [test for test, _, _ in made.must_fail] == ["t.py::test_a"]
    assert outcome(made.text, "test_a") == "failed"


@pytest.mark.parametrize("seed", range(6))
def test_sentinels_behave_and_leave_the_other_tests_alone(seed: int) -> None:
    planted = plant({"tests/t.py": TESTS}, "pytest", random.Random(seed))
    assert not planted.must_fail & planted.must_pass
    text = planted.files["tests/t.py"]
    for kept in ("def test_plain(a, b):\n    assert a + 1 == b\n", "self.assertEqual(1 + 1, 2)"):
        assert kept in text
    inside = {one for one in planted.must_fail | planted.must_pass if one.startswith("tests/t.py::")}
    assert len(inside) == 2
    for one in inside:
        assert outcome(text, one.rpartition("::")[2]) == ("failed" if one in planted.must_fail else "passed")
    assert len(planted.files) == 2
    assert plant({"tests/t.py": TESTS}, "pytest", random.Random(seed + 100)).must_fail != planted.must_fail
