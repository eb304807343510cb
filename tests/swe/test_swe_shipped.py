"""The shipped set: fetched, every fix earns 1, nothing earns 0; the generator on a real library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tollway.cli import main
from tollway.envs.swe.catalogue import read_set

pytestmark = [pytest.mark.all, pytest.mark.slow(1800), pytest.mark.timeout(1800)]


def test_the_shipped_set_is_fetched_and_sound(swe_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = ["--set", f"env.swe.cache={swe_cache}", "--json"]
    assert main(["tasks", "fetch", "shipped", *there]) == 0
    ready = json.loads(capsys.readouterr().out)
    assert ready["failed"] == {}
    assert ready["ready"] == len(read_set("shipped")) >= 30
    assert main(["tasks", "verify", "shipped", *there]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    rewards = {
        name: {row["reward"] for row in trials if row["trial"] == name} for name in ("reference fix", "nothing changed")
    }
    assert rewards == {"reference fix": {1.0}, "nothing changed": {0.0}}
    assert len(trials) == 2 * ready["ready"]
    assert all(row["good"] for row in trials)


def test_no_attack_on_a_real_library_is_paid(swe_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = ["--set", f"env.swe.cache={swe_cache}", "--json"]
    only = ["--only", "texttable-*66c*"]
    assert main(["tasks", "fetch", "shipped", *only, *there]) == 0
    capsys.readouterr()
    assert main(["tasks", "verify", "shipped", "--attacks", *only, *there]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["trials"]) > 30
    assert found["bad"] == 0


@pytest.mark.parametrize(
    "sources",
    [["inflection==0.5.1"], ["--fixed", "xmltodict==1.0.4", "--broken", "xmltodict==0.14.2"]],
    ids=["mutation", "reversed fix"],
)
def test_tasks_are_made_and_verify(sources: list[str], swe_cache: Path, tmp_path: Path) -> None:
    there = ["--set", f"env.swe.cache={swe_cache}"]
    assert main(["tasks", "make-swe", *sources, "--count", "1", "--out", str(tmp_path), *there]) == 0
    assert len(read_set(str(tmp_path))) == 1
    assert main(["tasks", "verify", str(tmp_path), *there]) == 0
