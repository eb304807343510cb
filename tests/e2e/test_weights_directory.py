"""Where a run writes its weights for engines to read: for it alone, and found unusable before anything is started."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from demo_runs import wait_until_gone

from tollway.errors import ConfigError
from tollway.notes import locked

DISK = "trainer.refit_transport=disk"


def to(weights: Path) -> tuple[str, str]:
    return DISK, f"trainer.weights_dir={str(weights)!r}"


def test_a_directory_is_held_once_and_nothing_stays_in_it(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    for _ in range(2):
        with (
            locked(weights, key="trainer.weights_dir"),
            pytest.raises(ConfigError, match=r"another process is running in .*--set trainer\.weights_dir="),
            locked(weights, key="trainer.weights_dir"),
        ):
            pytest.fail("two have it")
        assert list(weights.iterdir()) == []
    with locked(weights), locked(weights, key="trainer.weights_dir"):
        """A run may keep its weights beside the rest."""


@pytest.mark.timeout(120)
def test_weights_that_cannot_be_written_are_no_configuration(tmp_path: Path, tiny) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").touch()
    run = tiny("train", *to(tmp_path / "file"))
    assert run.wait(60) == 2, run.output
    assert "trainer.weights_dir: cannot use" in run.output
    assert not list((run.run_dir / "logs").glob("engine*")), "engines were started"


@pytest.mark.timeout(240)
def test_two_runs_do_not_write_over_each_other(tmp_path: Path, tiny) -> None:  # type: ignore[no-untyped-def]
    weights = tmp_path / "weights"
    first = tiny("train", "trainer.steps=500", *to(weights))
    first.wait_for("demonstrations")
    other = tiny("train", f"run.dir={tmp_path / 'other'}", *to(weights))
    assert other.wait(60) == 2, other.output
    assert f"another process is running in {weights}" in other.output
    first.process.send_signal(signal.SIGINT)
    assert first.wait(60) == 130, first.output
    assert wait_until_gone(first.run_dir) == []
