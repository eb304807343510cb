"""The reference server's own set-up: stand-ins never compute, and nothing outlives a stopped server."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from sglang_cpu.fixture import DENSE, START_UP_S, serving, set_up

from tollway.fresh_model import write_fresh_model

HERE = Path(__file__).resolve().parent
SERVE = HERE / "serve.py"


def _python(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` where the hooks can be imported; they change the import system of their process for good."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE, timeout=30, check=False
    )


def test_a_kernel_stand_in_can_be_imported_and_raises_when_called() -> None:
    done = _python(
        "import cpu_hooks\n"
        "from sgl_kernel.kvcacheio import transfer_kv_direct\n"
        "import sgl_kernel; sgl_kernel.scalar_type.uint4b8\n"
        "transfer_kv_direct(1)\n"
    )
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith("RuntimeError: sgl_kernel.kvcacheio.transfer_kv_direct has no CPU build")
    )


def test_hooks_leave_other_missing_modules_missing() -> None:
    done = _python("import cpu_hooks\nimport sgl_kernels_of_another_name\n")
    assert "ModuleNotFoundError: No module named 'sgl_kernels_of_another_name'" in done.stderr


@pytest.mark.parametrize("words", [[], ["model"], ["model", "x"], ["/nonexistent", "1"]])
def test_serve_refuses_a_wrong_call_with_status_2(words: list[str]) -> None:
    done = subprocess.run([sys.executable, SERVE, *words], capture_output=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr


def _running() -> set[int]:
    """Processes that run SGLang on this machine; one that only waits to be collected runs no more."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and b"sglang" in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
    return found - {os.getpid()}


@pytest.mark.all
@pytest.mark.timeout(START_UP_S)
def test_sigterm_ends_every_process_of_a_server_that_is_paused_with_work(tmp_path: Path) -> None:
    set_up()
    write_fresh_model(tmp_path / "model", DENSE, seed=1)
    others = _running()
    with serving(tmp_path / "model", tmp_path / "log") as url:
        started = _running() - others
        assert len(started) >= 3, "serve.py, the server and its scheduler"
        assert httpx.post(f"{url}/pause_generation", json={"mode": "retract"}).status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/generate", json={"input_ids": [1], "sampling_params": {}}, timeout=0.5)
    deadline = time.monotonic() + 10
    while (left := started & _running()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
