"""Starts of engines that go wrong in ways that are no other start's business: slow ones, and ones without a log."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from pathlib import Path

import pytest

from tollway.errors import ComponentLost
from tollway.router.launch import EngineLauncher, EnginePlan, RestartRule

pytestmark = pytest.mark.slow(limit_s=60)


def launcher(logs: Path, code: str, ready_timeout_s: float = 30.0) -> EngineLauncher:
    argv = (sys.executable, "-c", textwrap.dedent(code), "{port}")
    plan = EnginePlan(argv=argv, says_ready=False, ready_timeout_s=ready_timeout_s)
    return EngineLauncher(plan, count=1, logs=logs, rule=RestartRule())


async def test_a_program_that_lives_on_after_it_found_some_port_taken_is_not_waited_for_again(tmp_path: Path) -> None:
    said = "Address already in use: the port of metrics"
    starter = launcher(tmp_path, f"import time; print({said!r}, flush=True); time.sleep(3600)", ready_timeout_s=1.0)
    with pytest.raises(ComponentLost, match="generated nothing within 1 s"):
        await starter.start()
    assert (tmp_path / "engine.log").read_text().count(said) == 1


async def test_a_program_that_finds_its_port_taken_each_time_is_started_three_times(tmp_path: Path) -> None:
    starter = launcher(tmp_path, "import sys; sys.exit('OSError: [Errno 98] Address already in use')")
    with pytest.raises(ComponentLost, match=r"ended with status 1[\s\S]*Address already in use"):
        await asyncio.wait_for(starter.start(), 30)
    assert (tmp_path / "engine.log").read_text().count("in use") == 3


@pytest.mark.parametrize("name", [".", "engine.log"])
async def test_an_engine_whose_log_cannot_be_written_is_not_started_and_the_file_is_named(
    tmp_path: Path, name: str
) -> None:
    logs = tmp_path / "logs"
    if name == ".":
        logs.touch()
    else:
        (logs / name).mkdir(parents=True)
    with pytest.raises(ComponentLost, match=r"engine was not started: its log .*engine\.log cannot be written: "):
        await launcher(logs, "raise SystemExit(3)").start()
