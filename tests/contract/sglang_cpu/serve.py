#!/usr/bin/env python3
"""Serve one model directory with the released SGLang on the CPU until SIGTERM or SIGINT.

    serve.py [--with-parent] MODEL_DIR PORT [more flags of sglang.launch_server]

Owns the flags under which SGLang runs without an accelerator, and the end of every process that it starts.
Needs the environment that ``setup`` makes; itself it is standard library only. SGLang logs to standard output
and error. Exits 0 when told to stop, 1 when the server ended by itself, 2 for a wrong call.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
PYTHON = REPOSITORY / ".venv-sglang" / "bin" / "python"

FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--skip-tokenizer-init", "--skip-server-warmup", "--disable-overlap-schedule", "--disable-cuda-graph"),
    *("--mem-fraction-static", "0.1", "--max-total-tokens", "16384", "--max-running-requests", "32"),
    *("--enable-metrics", "--enable-cache-report"),
    "--sleep-on-idle",  # otherwise its scheduler spins on a whole core between requests
)
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    # More threads than free cores make single steps many times slower.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
GRACE_S = 5.0
"""How long the group may take over SIGTERM: SGLang waits for running requests, which a pause keeps for ever."""

_PR_SET_PDEATHSIG = 1


class _Stop(BaseException):
    """SIGTERM or SIGINT arrived."""


def command(model: Path, port: int, extra: Sequence[str] = ()) -> list[str]:
    """Command line for ``model``; one with experts also records which of them each token took."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    routes = ["--enable-return-routed-experts"] if config.get("num_experts") else []
    where = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
    return [str(PYTHON), "-m", "sglang.launch_server", *where, *FLAGS, *routes, *extra]


def serve(arguments: list[str]) -> int:
    """Run the server to its end; see the module docstring for the exit status."""
    child = subprocess.Popen(
        arguments,
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: _die_with_parent(signal.SIGKILL),  # noqa: PLW1509 - this process has one thread
    )
    try:
        # A signal before these lines ends this process, and with it the child.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _raise_stop)
        status = child.wait()
        _say(f"serve.py: the server ended by itself with status {status}")
        return 1
    except _Stop:
        return 0
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        _end_group(child)


def _raise_stop(_number: int, _frame: object) -> None:
    raise _Stop


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _die_with_parent(number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End every process of the child's group, those that outlived the child included."""
    _signal_group(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while _group_lives(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal_group(child.pid, signal.SIGKILL)
    child.wait()


def _group_lives(child: subprocess.Popen[bytes]) -> bool:
    child.poll()  # a zombie still counts as a member of its group
    return _signal_group(child.pid, 0)


def _signal_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def main(argv: Sequence[str]) -> int:
    """Read the command line and serve."""
    words = list(argv)
    if words[:1] == ["--with-parent"]:
        words.pop(0)
        _die_with_parent(signal.SIGTERM)
    if len(words) < 2 or not words[1].isdigit():
        _say(f"usage: {Path(__file__).name} [--with-parent] MODEL_DIR PORT [flags]")
        return 2
    model = Path(words[0]).resolve()
    if not (model / "config.json").is_file():
        _say(f"serve.py: {model} has no config.json")
        return 2
    if not PYTHON.is_file():
        _say(f"serve.py: {PYTHON} is missing; run {Path(__file__).with_name('setup')}")
        return 2
    return serve(command(model, int(words[1]), words[2:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
