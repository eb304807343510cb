"""The session server in front of engines on one device: exports are what they saw, also when one of them dies.

The figures of the benchmark, which runs here at small sizes, are for ``scripts/bench_rollout.py`` itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from loop_runs import ON_CPU, device_sets, needs_device, note

pytestmark = [pytest.mark.gpu, needs_device]

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LIMIT_S = 300.0
SESSIONS, TURNS = (8, 3) if ON_CPU else (32, 6)
# Two engines share one device; neither may take it all.
BESIDE = ("engine.sglang.mem-fraction-static=0.3", "engine.sglang.max-total-tokens=200000")
ENGINES = ("--shape", "tiny") if ON_CPU else ("-c", str(SCRIPTS / "rollout_h200.toml"), "--shape", "small")


@pytest.mark.timeout(LIMIT_S + 30)
def test_exports_are_what_the_engines_saw_through_load_and_the_loss_of_one() -> None:
    sets = ["engine.count=2", *device_sets(), *(() if ON_CPU else BESIDE)]
    sizes = {"concurrent": SESSIONS, "turns": TURNS, "prompt": 128, "new": 48, "tool": 32, "pairs": 1}
    command = [sys.executable, str(SCRIPTS / "bench_rollout.py"), *ENGINES, "--kill-one", "--exact-sessions"]
    command += [str(SESSIONS), *(word for each in sets for word in ("--set", each))]
    command += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["differences"], line["unknown"], line["failed_calls"]) == (0, 0, 0), done.stdout
    assert line["exact_sessions"] == SESSIONS
    assert line["moved_sessions"] > 0
    assert set(line["moved_tokens"]) <= {"engine_lost"}
    note("gateway", line)
