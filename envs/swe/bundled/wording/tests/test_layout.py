"""Tests of wording.layout."""

import unittest

from wording import columns, indent, wrap


class TestWrap(unittest.TestCase):
    def test_fits(self) -> None:
        self.assertEqual(wrap("one two", 7), ["one two"])

    def test_breaks(self) -> None:
        self.assertEqual(wrap("one two three", 7), ["one two", "three"])

    def test_one_short(self) -> None:
        self.assertEqual(wrap("one two", 6), ["one", "two"])

    def test_long_word(self) -> None:
        self.assertEqual(wrap("a abcdefgh b", 3), ["a", "abc", "def", "gh", "b"])

    def test_nothing(self) -> None:
        self.assertEqual(wrap("  ", 3), [])

    def test_no_width(self) -> None:
        with self.assertRaises(ValueError):
            wrap("a", 0)


class TestIndent(unittest.TestCase):
    def test_every_line(self) -> None:
        self.assertEqual(indent("a\nb", "> "), "> a\n> b")

    def test_empty_lines(self) -> None:
        self.assertEqual(indent("a\n\nb", "  "), "  a\n\n  b")

    def test_first(self) -> None:
        self.assertEqual(indent("a\nb", "  ", first="* "), "* a\n  b")


class TestColumns(unittest.TestCase):
    def test_widths(self) -> None:
        self.assertEqual(columns([["a", "b"], ["long", "c"]]), "a     b\nlong  c")

    def test_short_rows(self) -> None:
        self.assertEqual(columns([["a"], ["bb", "c"]], gap=1), "a\nbb c")

    def test_nothing(self) -> None:
        self.assertEqual(columns([]), "")


if __name__ == "__main__":
    unittest.main()
