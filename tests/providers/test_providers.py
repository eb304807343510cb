"""E2B, AgentENV, Daytona and Modal: the real SDKs against stand-ins of the services, named as such."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.all, pytest.mark.slow(1200), pytest.mark.timeout(1500)]
HERE = Path(__file__).resolve().parent
ENVIRONMENT = {"e2b": "e2b", "agentenv": "e2b", "daytona": "daytona", "modal": "modal"}


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_every_promise_is_kept_and_faults_leak_nothing(name: str, sdk_python: Callable[[str], Path]) -> None:
    done = subprocess.run(
        [sdk_python(ENVIRONMENT[name]), HERE / "provider_program.py", name],
        capture_output=True, text=True, timeout=900, check=False, cwd=HERE,
    )  # fmt: skip
    assert done.stdout, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["stand_in"], "a stand-in is named as such"
    assert len(report["checks"]) > 50
    assert {check: error for check, error in report["checks"].items() if error} == {}


def test_an_unmodified_sdk_talks_to_the_front_end(sdk_python: Callable[[str], Path]) -> None:
    done = subprocess.run(
        [sdk_python("e2b"), HERE / "e2b_sdk_program.py"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "all of it"
