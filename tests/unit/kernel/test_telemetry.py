"""Log lines go where they were sent, once, with their session and without anything else's handlers harmed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tollway import telemetry


def test_a_file_gets_everything_and_the_terminal_only_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "logs" / "train.log"
    for _ in range(2):  # a second call replaces the first
        telemetry.configure("INFO", component="train", file=path)
    token = telemetry.session_id.set("0123456789abcdef")
    logging.getLogger("tollway.x").info("quiet %d", 1)
    logging.getLogger("tollway.x").warning("loud %d", 2)
    telemetry.session_id.reset(token)
    lines = path.read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO train tollway.x [01234567] quiet 1",
        "WARNING train tollway.x [01234567] loud 2",
    ]
    shown = capsys.readouterr().err
    assert "loud 2" in shown
    assert "quiet" not in shown


def test_a_metric_is_declared_once() -> None:
    telemetry.declare("test/only", "1", "For this test")
    with pytest.raises(ValueError, match="declared twice"):
        telemetry.declare("test/only", "1", "For this test")
    del telemetry.METRICS["test/only"]
