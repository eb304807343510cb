"""Tests of spans.text."""

import unittest

from spans import SpanSet, format_spans, parse_spans


class TestParse(unittest.TestCase):
    def test_numbers_and_ranges(self) -> None:
        self.assertEqual(list(parse_spans("1-3, 7")), [(1, 4), (7, 8)])

    def test_backwards(self) -> None:
        self.assertEqual(list(parse_spans("9-7")), [(7, 10)])

    def test_empty_parts(self) -> None:
        self.assertEqual(list(parse_spans(",4,,")), [(4, 5)])

    def test_nonsense(self) -> None:
        for text in ("a", "1-", "-3", "1-b"):
            with self.assertRaises(ValueError):
                parse_spans(text)


class TestFormat(unittest.TestCase):
    def test_single(self) -> None:
        self.assertEqual(format_spans(SpanSet([(4, 5)])), "4")

    def test_pair(self) -> None:
        self.assertEqual(format_spans(SpanSet([(4, 6)])), "4,5")

    def test_range(self) -> None:
        self.assertEqual(format_spans(SpanSet([(1, 4), (8, 9)])), "1-3,8")

    def test_round_trip(self) -> None:
        for text in ("", "1", "1,2", "1-3", "1-3,5,8,9,20-40"):
            self.assertEqual(format_spans(parse_spans(text)), text)


if __name__ == "__main__":
    unittest.main()
