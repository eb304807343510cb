"""The pages about the prefix cache name every figure and every cause that the server answers with."""

from __future__ import annotations

import re
from pathlib import Path

from tollway.router.cache_ledger import CacheLedger
from tollway.router.causes import BEYOND, CAUSES, MOVES

DOCS = Path(__file__).resolve().parents[2] / "docs"


def section(page: str, title: str) -> str:
    """One section of a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def in_code(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def test_every_key_of_the_answer_is_described() -> None:
    told = in_code(section("http.md", "Cache figures"))
    assert set(CacheLedger().summary(sessions=1)) <= told
    assert {*CAUSES, *BEYOND, *MOVES} <= told


def test_every_cause_says_what_to_do() -> None:
    wasted = section("cache.md", "Why tokens were wasted, and what to do")
    beyond = section("cache.md", "Why tokens could not have been cached")
    for text, causes in ((wasted, CAUSES), (beyond, BEYOND)):
        rows = [row.split("|") for row in text.splitlines() if row.startswith("| `")]
        assert [row[1].strip().strip("`") for row in rows] == list(causes), "in the order in which they are tried"
        assert all(len(row) == 5 and row[2].strip() and row[3].strip() for row in rows)
    assert set(MOVES) - {"server_restarted"} <= in_code(wasted)
