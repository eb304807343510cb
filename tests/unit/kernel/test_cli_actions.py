"""What commands with subcommands share: lines that fit a terminal and are whole elsewhere."""

from __future__ import annotations

import sys

import pytest

from tollway.cli_actions import cut_line


def test_a_line_is_cut_to_a_terminal_and_whole_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    text = "ok  a promise that is\nlonger than the line"
    assert cut_line(text) == "ok  a promise that is longer than the line"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert cut_line(text) == "ok  a promise that …"
    assert cut_line("ok  short") == "ok  short"
