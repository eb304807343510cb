"""The page about sandboxes shows what runs, and names settings, capabilities and commands that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tollway.sandboxes.base import CAPABILITIES
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import Faults

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "sandboxes.md").read_text(encoding="utf-8")
SAID = (
    "0 b'6 * 7\\n' False\n3 b'42\\n'\nNone True\n0\n",
    "exit_codes_are_results broken\ncapabilities_are_known kept\n",
    "2 b'7 passed\\n'\nunreachable\n{}\n",
)


@pytest.mark.parametrize("number", range(len(SAID)))
def test_the_examples_run_as_printed(number: int) -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(snippets) == len(SAID)
    command = [sys.executable, "-W", "error", "-c", snippets[number]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, SAID[number]), done.stderr


def test_every_setting_is_there_with_its_default() -> None:
    config = SandboxConfig().model_dump()
    rows = dict(re.findall(r"^\| `sandbox\.(\w+)` \| `?([^|`]+)`? \|", PAGE, re.MULTILINE))
    sections = {name for name, value in config.items() if isinstance(value, dict)}
    assert set(rows) == set(config) - sections
    for name, said in rows.items():
        default = config[name]
        if isinstance(default, int | float):
            assert float(said) == default, name
        elif name != "pace_file":
            assert said.strip() == ("none" if default is None else default), name


def test_every_capability_is_explained() -> None:
    table = PAGE.partition("## Capabilities")[2].partition("## Limits")[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == CAPABILITIES


def test_every_command_that_is_shown_is_understood() -> None:
    from tollway.cli import _parser

    lines = re.findall(r"^tollway (sandbox .*)$", PAGE, re.MULTILINE)
    assert len(lines) >= 8
    for line in lines:
        arguments = _parser().parse_args(shlex.split(line))
        assert callable(arguments.act)


def test_the_faults_that_are_named_exist() -> None:
    last = PAGE.rpartition("`faults` also has")[2]
    for name in re.findall(r"`(\w+)`", last):
        assert name in Faults.__slots__ or name == "FakeCloud", name
