"""scripts/gpu_check.py itself, on a machine without a GPU: what it starts, what it says, and what it leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.py"


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)


def _left(text: str) -> list[str]:
    """Command lines of processes that name ``text``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


@pytest.mark.all
@pytest.mark.slow(limit_s=180)
@pytest.mark.timeout(180)
def test_a_step_that_fails_keeps_no_other_from_running_and_no_server_stays(tmp_path: Path) -> None:
    # Of tests/gpu nothing has that name, and a step that runs no test has failed.
    done = gpu_check("--cpu", "--only", "tests,contract", "--select", "reply_has_ids", "--out", str(tmp_path))
    assert done.returncode == 1, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line == json.loads((tmp_path / "summary.json").read_text("utf-8"))
    assert line["steps"]["tests"]["outcome"] == "failed"
    for name in ("contract-dense", "contract-moe"):
        row = line["steps"][name]
        assert (row["outcome"], row["passed"], row["failed"]) == ("passed", 1, 0), done.stdout
        assert f"\n{name} " in done.stdout
    assert not _left("tollway-gpu-models-")


def test_what_cannot_be_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    unknown = gpu_check("--cpu", "--only", "contract,nothing", "--out", str(tmp_path))
    assert (unknown.returncode, "steps are contract, tests" in unknown.stderr) == (2, True)
    missing = gpu_check("--sglang", str(tmp_path / "sglang"), "--out", str(tmp_path))
    assert (missing.returncode, "give --sglang PATH/bin/sglang" in missing.stderr) == (1, True)


def test_no_step_is_begun_without_the_time_for_it(tmp_path: Path) -> None:
    done = gpu_check("--cpu", "--only", "train", "--budget-s", "5", "--out", str(tmp_path))
    row = json.loads(done.stdout.splitlines()[-1])["steps"]["train"]
    assert (row["outcome"], row["seconds"]) == ("skipped", 0.0)
    assert not (tmp_path / "train.log").exists()
