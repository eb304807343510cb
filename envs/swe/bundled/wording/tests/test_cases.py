"""Tests of wording.cases."""

import unittest

from wording import camel, snake, title


class TestSnake(unittest.TestCase):
    def test_camel(self) -> None:
        self.assertEqual(snake("someName"), "some_name")

    def test_initials(self) -> None:
        self.assertEqual(snake("HTTPServer"), "http_server")

    def test_initials_at_the_end(self) -> None:
        self.assertEqual(snake("serveHTTP"), "serve_http")

    def test_separators(self) -> None:
        self.assertEqual(snake("a-b c__d"), "a_b_c_d")

    def test_digits(self) -> None:
        self.assertEqual(snake("part2Name"), "part2_name")

    def test_nothing(self) -> None:
        self.assertEqual(snake("--"), "")


class TestCamel(unittest.TestCase):
    def test_snake(self) -> None:
        self.assertEqual(camel("http_server"), "HttpServer")

    def test_first_small(self) -> None:
        self.assertEqual(camel("http_server", first=False), "httpServer")

    def test_one_word(self) -> None:
        self.assertEqual(camel("x", first=False), "x")

    def test_nothing(self) -> None:
        self.assertEqual(camel("", first=False), "")


class TestTitle(unittest.TestCase):
    def test_small_words(self) -> None:
        self.assertEqual(title("the lord of the rings"), "The Lord of the Rings")

    def test_small_word_at_the_end(self) -> None:
        self.assertEqual(title("what to look to"), "What to Look To")

    def test_keeps_capitals(self) -> None:
        self.assertEqual(title("an iPhone user"), "An IPhone User")

    def test_loud_small_words(self) -> None:
        self.assertEqual(title("war AND peace"), "War and Peace")


if __name__ == "__main__":
    unittest.main()
