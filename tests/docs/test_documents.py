"""What the documents say exists, exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tollway.settings import Settings, load_settings
from tollway.telemetry import METRICS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_source_file_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(
        r"`((?:src/tollway|session_server|router|engine|sandboxes|envs|trainer|scripts)/[\w./-]+)`", text
    )
    assert [name for name in named if not (ROOT / name).exists() and "*" not in name] == []


def test_the_readmes_two_commands_are_there_and_ci_runs_the_second() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in ("scripts/demo", "scripts/test"):
        assert f"\n{command} " in readme
        assert os.access(ROOT / command, os.X_OK)
    assert "\nscripts/test\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_command_that_the_readme_calls_exists() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "tollway", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for command in set(re.findall(r"tollway (\w[\w-]*) ", (ROOT / "README.md").read_text(encoding="utf-8"))):
        assert re.search(rf"^    {command}\b", shown, re.MULTILINE), command


def test_every_example_configuration_is_valid_and_differs_from_the_defaults() -> None:
    found = sorted((ROOT / "examples").glob("*/tollway.toml"))
    assert found
    for path in found:
        assert load_settings(path) != Settings()


def test_every_metric_of_a_run_is_declared_with_unit_and_meaning() -> None:
    import tollway.session_server.metrics
    import tollway.trainer.metrics  # noqa: F401  # declares on import

    assert {"rollout/raw_reward", "train/train_rollout_logprob_abs_diff"} <= set(METRICS)
    assert all(spec.unit and spec.meaning for spec in METRICS.values())
