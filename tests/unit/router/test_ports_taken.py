"""Whether a start that failed found its port taken: what its log says, and no other start's."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tollway.router.launch import _LOG_BYTES, _port_was_taken

TAKEN = f"[Errno 98] error while attempting to bind on address: {os.strerror(errno.EADDRINUSE).lower()}\n"
CHATTER = "loading weights\n" * (_LOG_BYTES // 8)


@pytest.mark.parametrize(
    ("earlier", "said", "taken"),
    [
        ("", TAKEN, True),
        ("", CHATTER + TAKEN, True),
        (CHATTER, CHATTER + TAKEN, True),
        (TAKEN, "CUDA out of memory\n", False),
        (TAKEN, CHATTER, False),
        ("", "", False),
    ],
    ids=["at once", "after long words", "of several starts", "an earlier start", "an earlier start, long ago", "mute"],
)
def test_the_end_of_its_own_words_says_whether_a_port_was_taken(
    tmp_path: Path, earlier: str, said: str, taken: bool
) -> None:
    log = tmp_path / "engine.log"
    log.write_text(earlier)
    began = log.stat().st_size
    with log.open("a") as file:
        file.write(said)
    assert _port_was_taken(log, began) is taken


def test_a_log_that_is_gone_says_nothing(tmp_path: Path) -> None:
    assert _port_was_taken(tmp_path / "engine.log", 0) is False
