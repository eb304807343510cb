"""The page about running the server shows what runs, and names settings that exist with their defaults."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tollway.settings import Settings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


def test_the_example_runs_as_printed() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "four 1.0 5\n"), done.stderr


def test_every_setting_that_is_named_exists() -> None:
    settings = Settings().model_dump()
    named = re.findall(r"`(server|router)\.(\w+)", PAGE.partition("## A server in your own tests")[0])
    assert len(set(named)) > 10
    for section, field in named:
        assert field in settings[section], f"{section}.{field}"


def test_the_limits_are_the_defaults() -> None:
    server = Settings().server
    for name, said in (
        ("capacity", "4096 open sessions per worker"),
        ("max_concurrent_turns", "128 per session"),
        ("max_nodes", "4096 calls"),
    ):
        assert said.startswith(str(getattr(server, name)))
        assert re.search(rf"`server\.{name}`.*{re.escape(said)}", PAGE), name
    assert (server.max_body_bytes, server.ttl_s, server.idle_ttl_s) == (64 << 20, 86400.0, 7200.0)
    assert server.unload_after_s == 300.0
