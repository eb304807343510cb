"""Orders against a stock of goods."""

from stockroom.orders import Line, Order, Shortage, fulfil
from stockroom.prices import Discount, total
from stockroom.stock import Batch, Stock

__all__ = ["Batch", "Discount", "Line", "Order", "Shortage", "Stock", "fulfil", "total"]
