"""Tests of stockroom.stock."""

import unittest

from stockroom import Stock


class TestStock(unittest.TestCase):
    def setUp(self) -> None:
        self.stock = Stock()
        self.stock.put("milk", 4, until=9)
        self.stock.put("milk", 2, until=5)
        self.stock.put("salt", 3)

    def test_count(self) -> None:
        self.assertEqual(self.stock.count("milk"), 6)

    def test_count_of_nothing(self) -> None:
        self.assertEqual(self.stock.count("rice"), 0)

    def test_good_on_the_last_day(self) -> None:
        self.assertEqual(self.stock.count("milk", day=5), 6)

    def test_not_good_after_it(self) -> None:
        self.assertEqual(self.stock.count("milk", day=6), 4)

    def test_for_ever(self) -> None:
        self.assertEqual(self.stock.count("salt", day=10**6), 3)

    def test_oldest_first(self) -> None:
        self.assertEqual(self.stock.take("milk", 3), [(5, 2), (9, 1)])
        self.assertEqual(self.stock.count("milk"), 3)

    def test_for_ever_is_last(self) -> None:
        self.stock.put("salt", 1, until=2)
        self.assertEqual(self.stock.take("salt", 2), [(2, 1), (None, 1)])

    def test_all_or_nothing(self) -> None:
        with self.assertRaises(LookupError):
            self.stock.take("milk", 7)
        self.assertEqual(self.stock.count("milk"), 6)

    def test_takes_only_good_ones(self) -> None:
        self.assertEqual(self.stock.take("milk", 4, day=6), [(9, 4)])

    def test_joins(self) -> None:
        self.stock.put("milk", 1, until=5)
        self.assertEqual(self.stock.take("milk", 3), [(5, 3)])

    def test_nothing_is_refused(self) -> None:
        with self.assertRaises(ValueError):
            self.stock.put("milk", 0)

    def test_spoiled(self) -> None:
        self.assertEqual(self.stock.spoiled(6), {"milk": 2})
        self.assertEqual(self.stock.count("milk"), 4)

    def test_spoiled_adds_up(self) -> None:
        self.assertEqual(self.stock.spoiled(10), {"milk": 6})

    def test_nothing_spoiled(self) -> None:
        self.assertEqual(self.stock.spoiled(5), {})

    def test_items(self) -> None:
        self.assertEqual(self.stock.items(), ["milk", "salt"])
        self.stock.take("salt", 3)
        self.assertEqual(self.stock.items(), ["milk"])


if __name__ == "__main__":
    unittest.main()
