"""``tollway sandbox serve-e2b`` as a command: what it prints, how it ends, what it refuses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from tollway import cli

COMMAND = [sys.executable, "-m", "tollway", "sandbox", "serve-e2b", "--provider", "fake", "--port", "0"]


def test_it_serves_until_it_is_stopped_and_ends_its_sandboxes() -> None:
    environment = {**os.environ, "TOLLWAY_E2B_KEY": "secret-key"}
    with subprocess.Popen(
        COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said = [process.stdout.readline() for _ in range(3)]
        url = said[0].split(" at ")[1].split(";")[0]
        assert url.startswith("http://127.0.0.1:")
        assert "secret-key" not in "".join(said)
        wrong = httpx.get(f"{url}/v2/sandboxes")
        made = httpx.post(f"{url}/v2/sandboxes", json={"templateID": "base"}, headers={"X-API-Key": "secret-key"})
        assert (wrong.status_code, made.status_code) == (401, 201)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "ending all sandboxes" in process.stderr.read()


def test_beyond_loopback_it_wants_a_key_of_your_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOLLWAY_E2B_KEY", raising=False)
    assert cli.main(["sandbox", "serve-e2b", "--provider", "fake", "--host", "0.0.0.0"]) == 2
    assert "TOLLWAY_E2B_KEY" in capsys.readouterr().err


def test_a_port_that_is_taken_is_told_with_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["sandbox", "serve-e2b", "--provider", "fake", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port" in said
