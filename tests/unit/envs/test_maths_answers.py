"""Mathematical answers: what is the same, what is not, and that no answer can do or cost anything."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollway.envs.maths.checker import Checker
from tollway.envs.maths.compare import same_answer
from tollway.envs.maths.config import MathsConfig
from tollway.envs.maths.expressions import Unreadable, read
from tollway.envs.maths.extract import final_answer, last_boxed
from tollway.errors import EpisodeFailed

SAME = [
    ("1/2", "0.5"), (r"\frac{2}{4}", r"\frac12"), ("50%", "1/2"), ("50", r"50\%"), ("1,000", "1000"), ("x=5", "5"),
    ("(x+1)^2", "x^2+2x+1"), (r"\sqrt{8}", r"2\sqrt{2}"), ("1, 2, 3", "3,1,2"), (r"\{1,2\}", "2,1"),
    ("[0,1)", "[0, 1)"), (r"(-\infty,3]\cup[5,\infty)", r"[5,\infty) \cup (-\infty, 3]"), ("5 cm", "5"),
    (r"5\text{ cm}", "5 cm"), ("$12", "12"), (r"\$12.50", "12.5"), ("(B)", "B"), (r"\text{Yes}", "yes"),
    (r"2\pm\sqrt3", r"2+\sqrt3, 2-\sqrt3"), ("0.333333333", "1/3"), ("3.14159265", r"\pi"), ("2y=4x+2", "y=2x+1"),
    ("x>2", "2<x"), (r"90^\circ", "90"), ("3 1/2", "7/2"), (r"3\frac12", "3.5"), (r"e^{i\pi}", "-1"),
    (r"\sin^2 x+\cos^2 x", "1"), (r"\log_2 8", "3"), (r"$\frac{1}{2}$", "0.5"), ("2^{10}", "1024"), ("1e3", "1000"),
    (r"\dfrac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"), (r"12\text{ square meters}", "12"), (r"x \in [1,2]", "[1,2]"),
    (r"\left(\frac12, 3\right)", "(0.5,3)"), ("2 and 3", "3, 2"), ("10!", "3628800"), (r"\binom{5}{2}", "10"),
    ("5 apples", "5"), (r"|{-3}|", "3"), ("−7", "-7"), (r"\max(2, 9)", "9"),
]  # fmt: skip
DIFFERENT = [
    ("1/2", "0.51"), ("(1,2)", "(2,1)"), ("(0,1)", "[0,1]"), ("1,2", "1,2,3"), ("1,1,2", "1,2,2"), ("5 cm", "5 m"),
    ("x^2", "x^3"), ("x<2", "x>2"), ("x<2", "x<=2"), ("", "3"), ("0.5", "0.50001"), ("1/0", "1"), ("oo", "5"),
    (r"\frac{0}{0}", "0"), (r"\sqrt{-1}", "1"), ("50%", "50.5"), ("y=2x", "y=3x"), ("lambda: 0", "0"), ("nan", "0"),
    ("x.__class__", "x"), ("1" * 500, "1"), ("(" * 200 + "1" + ")" * 200, "1"), ("--" * 300 + "1", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "reference"), SAME)
def test_answers_that_mean_the_same_are_equal(answer: str, reference: str) -> None:
    assert same_answer(answer, reference, tolerance=1e-6)[0], (answer, reference)
    assert same_answer(reference, answer, tolerance=1e-6)[0], (reference, answer)


@pytest.mark.parametrize(("answer", "reference"), DIFFERENT)
def test_answers_that_mean_something_else_are_not(answer: str, reference: str) -> None:
    assert not same_answer(answer, reference, tolerance=1e-6)[0], (answer, reference)


def test_a_decimal_is_as_good_as_its_tolerance_and_exact_values_are_exact() -> None:
    assert not same_answer("0.333", "1/3", tolerance=1e-6)[0]
    assert same_answer("0.333", "1/3", tolerance=1e-2)[0]
    assert not same_answer("333/1000", "1/3", tolerance=1e-2)[0]


@given(st.text(alphabet="0123456789xyei+-*/^(){}[],.\\|!%=<> fracsqrtpi_'\"", max_size=60))
def test_reading_any_text_gives_a_tree_or_a_refusal(text: str) -> None:
    with contextlib.suppress(Unreadable):
        read(text)


@given(st.fractions(max_denominator=1000), st.fractions(max_denominator=1000))
def test_fractions_are_equal_exactly_when_they_are(left: object, right: object) -> None:
    assert same_answer(str(left), str(right), tolerance=0.0)[0] == (left == right)


@pytest.fixture
async def checker() -> AsyncIterator[Checker]:
    async with Checker(MathsConfig(cpu_s=1.0)) as made:
        yield made


async def test_an_answer_that_is_a_program_does_nothing_and_earns_nothing(checker: Checker, tmp_path: Path) -> None:
    mark = tmp_path / "P"
    for text in (
        f'__import__("os").system("touch {mark}")',
        f"open('{mark}', 'w')",
        f"().__class__.__base__.__subclasses__()[0]('{mark}')",
        f"\\boxed{{__import__('os').system('touch {mark}')}}",
    ):
        found = await checker.same(text, "4")
        assert not found.equal
    assert not mark.exists()


async def test_an_answer_that_explodes_earns_nothing_and_the_next_one_is_judged(checker: Checker) -> None:
    for text in ("9**9**9", "9^9^9^9", "(((1+1)^999)^999)^999", "1000000!", "(x+y+z+w+1)^60", r"\binom{99999}{5}"):
        assert not (await checker.same(text, "1")).equal
        assert (await checker.same("2/4", "0.5")).equal
    assert not (await checker.same("7" * 20_000, "1")).equal


async def test_a_process_that_hangs_without_computing_is_infrastructure() -> None:
    async with Checker(MathsConfig(wall_s=0.001)) as checker:
        with pytest.raises(EpisodeFailed, match=r"wall_s|did not start"):
            await checker.same("1", "1")


def test_the_last_box_counts_then_what_was_said_then_the_last_number() -> None:
    assert final_answer(r"\boxed{1} no, \boxed{\frac{1}{\sqrt{2}}}.") == r"\frac{1}{\sqrt{2}}"
    assert final_answer("The answer is **42**. Done in 3 steps.") == "42"
    assert final_answer("First 3.\n#### 17") == "17"
    assert final_answer("I get 3, then 1,234.5") == "1,234.5"
    assert final_answer("nothing") is None
    assert final_answer("it is 4", boxed_only=True) is None
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\boxed{1") is None
    assert last_boxed(r"\boxed 5") == "5"
