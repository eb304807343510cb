"""Tests of wording.speech."""

import unittest

from wording import duration, join, plural


class TestPlural(unittest.TestCase):
    def test_one(self) -> None:
        self.assertEqual(plural(1, "box"), "1 box")
        self.assertEqual(plural(-1, "box"), "-1 box")

    def test_none(self) -> None:
        self.assertEqual(plural(0, "cat"), "0 cats")

    def test_endings(self) -> None:
        found = [plural(2, noun) for noun in ("box", "bus", "church", "city", "day", "cat")]
        self.assertEqual(found, ["2 boxes", "2 buses", "2 churches", "2 cities", "2 days", "2 cats"])

    def test_irregular(self) -> None:
        self.assertEqual(plural(3, "mouse"), "3 mice")


class TestJoin(unittest.TestCase):
    def test_lengths(self) -> None:
        self.assertEqual([join("abc"[:count]) for count in range(4)], ["", "a", "a and b", "a, b and c"])

    def test_other_word(self) -> None:
        self.assertEqual(join(["x", "y"], last="or"), "x or y")

    def test_too_many(self) -> None:
        self.assertEqual(join("abcde", most=2), "a, b and 3 others")

    def test_just_enough(self) -> None:
        self.assertEqual(join("ab", most=2), "a and b")


class TestDuration(unittest.TestCase):
    def test_units(self) -> None:
        found = [duration(seconds) for seconds in (0, 1, 59, 60, 61, 3600, 86400)]
        wanted = ["0 seconds", "1 second", "59 seconds", "1 minute", "1 minute and 1 second", "1 hour", "1 day"]
        self.assertEqual(found, wanted)

    def test_cut(self) -> None:
        self.assertEqual(duration(86400 + 7200 + 59), "1 day and 2 hours")

    def test_hole(self) -> None:
        self.assertEqual(duration(86400 + 59), "1 day")

    def test_more_parts(self) -> None:
        self.assertEqual(duration(3661, parts=3), "1 hour, 1 minute and 1 second")

    def test_negative(self) -> None:
        self.assertEqual(duration(-61), "-1 minute and 1 second")


if __name__ == "__main__":
    unittest.main()
