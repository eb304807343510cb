"""Session fixtures: the released SGLang on this machine, for tests marked ``all``.

``real_sglang_url`` serves a small dense model and ``real_sglang_moe_url`` a mixture of experts; each starts on
first use and ends with the test session. ``TOLLWAY_SGLANG_URL`` and ``TOLLWAY_SGLANG_MOE_URL`` point them at a
server that runs already. A machine that cannot have SGLang skips, with the reason; a set-up or a server that
fails otherwise is an error. Imported by ``tests/contract/conftest.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tollway.free_ports import free_ports
from tollway.fresh_model import ModelShape, write_fresh_model

HERE = Path(__file__).resolve().parent
UNSUPPORTED = 3
"""Exit status of ``setup`` on a machine that cannot have the environment."""
SETUP_S, START_S, STOP_S = 600.0, 240.0, 30.0
START_UP_S = SETUP_S + START_S + STOP_S
"""Time limit of a test that may be the first to need the server."""
GIVEN_S = 60.0
"""The same where the server was given: nothing is set up or started."""
VOCAB_SIZE, CONTEXT = 512, 2048
FIXTURES = {"real_sglang_url": "TOLLWAY_SGLANG_URL", "real_sglang_moe_url": "TOLLWAY_SGLANG_MOE_URL"}
"""And the variable that gives each of them a server that runs already."""

DENSE = ModelShape(vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT)
# SGLang ignores tied embeddings of mixture-of-experts models.
MOE = ModelShape(
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=CONTEXT,
    num_experts=4,
    num_experts_per_tok=2,
    tie_word_embeddings=False,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that starts the server may wait for it: the usual limit is for the test alone."""
    for item in items:
        wanted = FIXTURES.keys() & {*getattr(item, "fixturenames", ()), *_parameters(item)}
        if wanted:
            given = all(os.environ.get(FIXTURES[name]) for name in wanted)
            item.add_marker(pytest.mark.timeout(GIVEN_S if given else START_UP_S), append=False)


def _parameters(item: pytest.Item) -> list[str]:
    """Fixtures that a test names in its parameters."""
    call = getattr(item, "callspec", None)
    return [value for value in call.params.values() if isinstance(value, str)] if call is not None else []


@pytest.fixture(scope="session")
def real_sglang_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a released SGLang that serves the dense model."""
    with _server(FIXTURES["real_sglang_url"], DENSE, tmp_path_factory.mktemp("sglang-dense")) as url:
        yield url


@pytest.fixture(scope="session")
def real_sglang_moe_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a released SGLang that serves the mixture of experts."""
    with _server(FIXTURES["real_sglang_moe_url"], MOE, tmp_path_factory.mktemp("sglang-moe")) as url:
        yield url


@contextmanager
def _server(variable: str, shape: ModelShape, where: Path) -> Iterator[str]:
    if url := os.environ.get(variable):
        yield url
        return
    set_up()
    model = where / "model"
    write_fresh_model(model, shape, seed=1, std=0.2)
    with serving(model, where / "server.log") as url:
        yield url


def set_up() -> None:
    """Make the server's environment, or skip the test on a machine that cannot have it."""
    done = subprocess.run([HERE / "setup"], stderr=subprocess.PIPE, text=True, timeout=SETUP_S, check=False)
    if done.returncode == UNSUPPORTED:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise RuntimeError(f"{HERE / 'setup'} exited with {done.returncode}:\n{done.stderr}")


@contextmanager
def serving(model: Path, log: Path) -> Iterator[str]:
    """Serve ``model`` on a free port and yield the URL once a token was generated; SGLang's output is in ``log``."""
    (port,) = free_ports()
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, HERE / "serve.py", "--with-parent", model, str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_healthy(process, url, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its server is set to die with it
            process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"SGLang ended before it served:\n{_tail(log)}")
        try:
            # Runs one token through the model, so that a stand-in called by mistake shows here.
            with urllib.request.urlopen(f"{url}/health", timeout=30):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise RuntimeError(f"SGLang did not serve within {START_S:.0f} s:\n{_tail(log)}") from None
            time.sleep(0.25)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])
