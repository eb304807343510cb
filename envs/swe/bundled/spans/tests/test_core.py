"""Tests of spans.core."""

import unittest

from spans import Span, SpanSet


class TestSpan(unittest.TestCase):
    def test_touches_side_by_side(self) -> None:
        self.assertTrue(Span(1, 3).touches(Span(3, 5)))

    def test_touches_apart(self) -> None:
        self.assertFalse(Span(1, 3).touches(Span(4, 5)))

    def test_overlap(self) -> None:
        self.assertEqual(Span(1, 5).overlap(Span(3, 9)), Span(3, 5))

    def test_no_overlap(self) -> None:
        self.assertIsNone(Span(1, 3).overlap(Span(3, 9)))


class TestAdd(unittest.TestCase):
    def test_keeps_order(self) -> None:
        self.assertEqual(list(SpanSet([(7, 9), (1, 2)])), [(1, 2), (7, 9)])

    def test_joins_neighbours(self) -> None:
        self.assertEqual(list(SpanSet([(1, 3), (3, 5)])), [(1, 5)])

    def test_joins_many(self) -> None:
        spans = SpanSet([(1, 2), (4, 5), (7, 8), (20, 21)])
        spans.add(2, 7)
        self.assertEqual(list(spans), [(1, 8), (20, 21)])

    def test_inside(self) -> None:
        self.assertEqual(list(SpanSet([(1, 9), (3, 4)])), [(1, 9)])

    def test_empty_span_is_nothing(self) -> None:
        self.assertEqual(list(SpanSet([(4, 4)])), [])

    def test_backwards_is_refused(self) -> None:
        with self.assertRaises(ValueError):
            SpanSet([(5, 4)])


class TestRemove(unittest.TestCase):
    def test_from_the_middle(self) -> None:
        spans = SpanSet([(1, 9)])
        spans.remove(3, 5)
        self.assertEqual(list(spans), [(1, 3), (5, 9)])

    def test_left_end(self) -> None:
        spans = SpanSet([(1, 9)])
        spans.remove(0, 5)
        self.assertEqual(list(spans), [(5, 9)])

    def test_right_end(self) -> None:
        spans = SpanSet([(1, 9)])
        spans.remove(5, 20)
        self.assertEqual(list(spans), [(1, 5)])

    def test_over_several(self) -> None:
        spans = SpanSet([(1, 3), (5, 7), (9, 11)])
        spans.remove(2, 10)
        self.assertEqual(list(spans), [(1, 2), (10, 11)])

    def test_nothing_there(self) -> None:
        spans = SpanSet([(1, 3)])
        spans.remove(3, 5)
        self.assertEqual(list(spans), [(1, 3)])


class TestQuestions(unittest.TestCase):
    def setUp(self) -> None:
        self.spans = SpanSet([(1, 3), (5, 7), (10, 20)])

    def test_contains(self) -> None:
        found = [number for number in range(25) if number in self.spans]
        self.assertEqual(found, [1, 2, 5, 6, *range(10, 20)])

    def test_length(self) -> None:
        self.assertEqual(len(self.spans), 14)

    def test_truth(self) -> None:
        self.assertTrue(self.spans)
        self.assertFalse(SpanSet())

    def test_equal(self) -> None:
        self.assertEqual(self.spans, SpanSet([(10, 20), (5, 7), (1, 3)]))
        self.assertNotEqual(self.spans, SpanSet([(1, 3)]))

    def test_union(self) -> None:
        self.assertEqual(list(self.spans.union(SpanSet([(3, 5)]))), [(1, 7), (10, 20)])

    def test_intersection(self) -> None:
        self.assertEqual(list(self.spans.intersection(SpanSet([(2, 6), (15, 30)]))), [(2, 3), (5, 6), (15, 20)])

    def test_intersection_with_nothing(self) -> None:
        self.assertEqual(list(self.spans.intersection(SpanSet())), [])

    def test_gaps(self) -> None:
        self.assertEqual(list(self.spans.gaps(0, 12)), [(0, 1), (3, 5), (7, 10)])

    def test_gaps_of_nothing(self) -> None:
        self.assertEqual(list(SpanSet().gaps(2, 4)), [(2, 4)])

    def test_nearest(self) -> None:
        self.assertEqual([self.spans.nearest(number) for number in (0, 2, 8, 9, 30)], [1, 2, 6, 10, 19])

    def test_nearest_takes_the_smaller(self) -> None:
        self.assertEqual(SpanSet([(1, 2), (5, 6)]).nearest(3), 1)

    def test_nearest_of_nothing(self) -> None:
        with self.assertRaises(ValueError):
            SpanSet().nearest(1)


if __name__ == "__main__":
    unittest.main()
