"""Tests of stockroom.orders and stockroom.prices."""

import unittest

from stockroom import Discount, Line, Order, Shortage, Stock, fulfil, total

PRICES = {"pen": 150, "ink": 999, "pad": 25}


class TestTotal(unittest.TestCase):
    def test_sum(self) -> None:
        self.assertEqual(total({"pen": 2, "pad": 1}, PRICES), 325)

    def test_nothing(self) -> None:
        self.assertEqual(total({}, PRICES), 0)

    def test_unknown(self) -> None:
        with self.assertRaises(KeyError):
            total({"cap": 1}, PRICES)

    def test_discount_from_the_least_on(self) -> None:
        offer = [Discount("pen", 10, 10)]
        self.assertEqual([total({"pen": count}, PRICES, offer) for count in (9, 10)], [1350, 1350])

    def test_best_discount(self) -> None:
        offers = [Discount("pen", 2, 50), Discount("pen", 1, 10), Discount("ink", 1, 90)]
        self.assertEqual(total({"pen": 2}, PRICES, offers), 150)

    def test_rounds_up(self) -> None:
        self.assertEqual(total({"pad": 1}, PRICES, [Discount("pad", 1, 50)]), 13)

    def test_percent_has_bounds(self) -> None:
        for percent in (-1, 101):
            with self.assertRaises(ValueError):
                Discount("pen", 1, percent)


class TestFulfil(unittest.TestCase):
    def setUp(self) -> None:
        self.stock = Stock()
        self.stock.put("pen", 5)
        self.stock.put("ink", 1)

    def test_counts(self) -> None:
        self.assertEqual(Order("ann", [Line("pen", 1), Line("pen", 2)]).counts(), {"pen": 3})

    def test_all_there(self) -> None:
        found = fulfil([Order("ann", [Line("pen", 2)])], self.stock)
        self.assertEqual(found, ({"ann": {"pen": 2}}, []))
        self.assertEqual(self.stock.count("pen"), 3)

    def test_part(self) -> None:
        found = fulfil([Order("ann", [Line("pen", 7)])], self.stock)
        self.assertEqual(found, ({"ann": {"pen": 5}}, [Shortage("ann", "pen", 2)]))

    def test_whole_or_nothing(self) -> None:
        found = fulfil([Order("ann", [Line("pen", 1), Line("ink", 2)], whole=True)], self.stock)
        self.assertEqual(found, ({}, [Shortage("ann", "ink", 1)]))
        self.assertEqual(self.stock.count("pen"), 5)

    def test_urgent_first(self) -> None:
        orders = [Order("ann", [Line("ink", 1)]), Order("bob", [Line("ink", 1)], urgent=True)]
        self.assertEqual(fulfil(orders, self.stock), ({"bob": {"ink": 1}}, [Shortage("ann", "ink", 1)]))

    def test_otherwise_in_order(self) -> None:
        orders = [Order("ann", [Line("ink", 1)]), Order("bob", [Line("ink", 1)])]
        self.assertEqual(fulfil(orders, self.stock)[0], {"ann": {"ink": 1}})

    def test_two_orders_of_one_customer(self) -> None:
        orders = [Order("ann", [Line("pen", 1)]), Order("ann", [Line("pen", 2)])]
        self.assertEqual(fulfil(orders, self.stock)[0], {"ann": {"pen": 3}})

    def test_nothing_there(self) -> None:
        self.assertEqual(fulfil([Order("ann", [Line("cap", 1)])], self.stock), ({}, [Shortage("ann", "cap", 1)]))


if __name__ == "__main__":
    unittest.main()
