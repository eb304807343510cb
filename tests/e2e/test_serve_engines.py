"""``tollway serve --start-engines``: one command is a server with engines, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from demo_runs import processes_of, wait_until_gone

KEY = "a-key-for-this-test-only"
SETS = (
    *("model.fresh.vocab_size=272", "model.fresh.hidden_size=48", "model.fresh.head_dim=16"),
    *("model.fresh.intermediate_size=64", "model.fresh.max_position_embeddings=512"),
    *("server.family='compact-bytes'", "server.port=0", "router.probe_interval_s=0.2"),
)


@pytest.mark.timeout(180)
def test_a_server_starts_its_engines_replaces_a_dead_one_and_ends_all_of_them(tmp_path: Path) -> None:
    sets = [*SETS, f"run.dir={str(tmp_path / 'run')!r}", f"server.journal={str(tmp_path / 'journal.sqlite')!r}"]
    tollway = [sys.executable, "-P", "-m", "tollway"]
    environment = os.environ | {"TOLLWAY_ADMIN_KEY": KEY, "TOLLWAY_TEST_RUN": str(tmp_path)}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [*tollway, "serve", "--start-engines", "2", *(part for each in sets for part in ("--set", each))],
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
        )
    try:
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        assert len(set(ready["engines"])) == 2

        def states() -> dict[str, str]:
            done = subprocess.run(
                [*tollway, "engines", "list", "--json", "--url", ready["url"]],
                stdout=subprocess.PIPE,
                check=True,
                timeout=60,
                env=environment,
            )
            return {row["url"]: row["state"] for row in json.loads(done.stdout)["engines"]}

        assert states() == dict.fromkeys(ready["engines"], "serving")
        victim = min(pid for pid, command in processes_of(tmp_path) if " engine " in command)
        os.kill(victim, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while (now := states()).keys() == set(ready["engines"]) or list(now.values()) != ["serving"] * 2:
            assert time.monotonic() < deadline, (now, (tmp_path / "log").read_text())
        assert len(now.keys() & set(ready["engines"])) == 1, "the other one was left alone"
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0, (tmp_path / "log").read_text()
        assert wait_until_gone(tmp_path) == []
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
        if server.stdout is not None:
            server.stdout.close()
