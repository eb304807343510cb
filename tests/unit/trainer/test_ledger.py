"""Every prompt has exactly one fate, whatever is killed in between."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tollway.errors import ComponentLost, Conflict
from tollway.trainer.ledger import Ledger


def test_a_prompt_goes_from_issued_to_one_fate_and_stays_there(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert [ledger.issue(index) for index in range(4)] == [1, 1, 1, 1]
        for index in (0, 1, 2):
            ledger.finish(index)
        ledger.settle([0], [(1, "zero_variance")], step=1)
        ledger.drop(2, "stale", step=1)
        ledger.drop(3, "aborted", step=1)
        assert ledger.counts() == {"trained": 1, "dropped:zero_variance": 1, "dropped:stale": 1, "dropped:aborted": 1}
        for change in (
            lambda: ledger.issue(0),
            lambda: ledger.finish(0),
            lambda: ledger.drop(0, "stale", step=2),
            lambda: ledger.settle([1], [], step=2),
            lambda: ledger.finish(99),
        ):
            with pytest.raises(Conflict, match="prompt"):
                change()
        assert ledger.next_index() == 4


def test_the_fates_of_a_step_are_decided_together_or_not_at_all(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for index in range(3):
            ledger.issue(index)
        ledger.finish(0)
        ledger.finish(1)
        with pytest.raises(Conflict):
            ledger.settle([0, 1, 2], [], step=1)
        assert ledger.counts() == {"finished": 2, "issued": 1}


def test_training_after_the_checkpoint_is_taken_back(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for index in range(3):
            ledger.issue(index)
            ledger.finish(index)
            ledger.settle([index], [], step=index + 1)
        ledger.take_back(1)
        assert ledger.open() == ([], [1, 2])
        assert ledger.trained_step(0) == 1
        assert ledger.trained_step(1) is None
        ledger.reissue(1)
        assert ledger.issue(1) == 2


def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tollway.trainer.ledger import Ledger\n"
        "ledger = Ledger(Path(sys.argv[1])).__enter__()\n"
        "for index in range(5): ledger.issue(index)\n"
        "for index in range(3): ledger.finish(index)\n"
        "ledger.settle([0], [(1, 'zero_variance')], step=1)\n"
        "ledger._db.execute('BEGIN')\n"
        "ledger._move(2, 'trained', ('finished',), step=2)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, check=False).returncode == -9
    with Ledger(path) as ledger:
        assert ledger.counts() == {"trained": 1, "dropped:zero_variance": 1, "finished": 1, "issued": 2}
        assert ledger.open() == ([3, 4], [2])


def test_a_file_that_is_no_ledger_stops_the_run(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(ComponentLost, match="move it away"):
        Ledger(path)


def test_a_ledger_that_breaks_during_the_run_stops_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.issue(0)
        other = sqlite3.connect(path)
        other.execute("DROP TABLE prompts")
        other.close()
        calls = (lambda: ledger.issue(1), lambda: ledger.settle([0], [], step=1), ledger.counts, ledger.next_index)
        for broken in calls:
            with pytest.raises(ComponentLost, match="ledger"):
                broken()
