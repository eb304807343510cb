"""The training process: its death is noticed and explained, and it never outlives the controller."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
from trainer_helpers import model_dir, random_batch

from tollway.errors import ConfigError, TrainerLost
from tollway.trainer.backends.base import BackendSpec
from tollway.trainer.backends.proxy import BackendProxy


def spec(tmp_path: Path) -> BackendSpec:
    return BackendSpec(kind="torch", model_dir=str(model_dir(tmp_path / "model")))


def gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True


async def test_a_killed_process_is_a_lost_trainer_with_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    async with BackendProxy(spec(tmp_path), log_path=log) as backend:
        with log.open("a") as file:
            file.write("CUDA out of memory\n")
        os.kill(backend.pid, signal.SIGKILL)
        with pytest.raises(TrainerLost, match=r"died during score \(SIGKILL\)") as caught:
            await backend.score(random_batch(1))
        assert "CUDA out of memory" in str(caught.value)
        with pytest.raises(TrainerLost):
            await backend.score(random_batch(1))


async def test_death_in_the_middle_of_a_step_ends_the_wait(tmp_path: Path) -> None:
    async with BackendProxy(spec(tmp_path), log_path=tmp_path / "log") as backend:
        os.kill(backend.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(backend.step(random_batch(2), lr=0.1))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        os.kill(backend.pid, signal.SIGKILL)
        with pytest.raises(TrainerLost, match="died during step"):
            await asyncio.wait_for(waiting, 10)


async def test_silence_beyond_the_deadline_is_a_lost_trainer(tmp_path: Path) -> None:
    async with BackendProxy(spec(tmp_path), log_path=tmp_path / "log", timeout_s=20) as backend:
        pid = backend.pid
        backend._timeout_s = 0.2
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TrainerLost, match="backend_timeout_s"):
            await backend.score(random_batch(1))
    assert gone(pid)


async def test_a_failure_inside_the_process_is_named_and_the_process_is_ended_at_close(tmp_path: Path) -> None:
    async with BackendProxy(spec(tmp_path), log_path=tmp_path / "log") as backend:
        pid = backend.pid
        with pytest.raises(TrainerLost, match="load failed in the training process: FileNotFoundError"):
            await backend.load(tmp_path / "nowhere")
        assert len(await backend.score(random_batch(3))) == 3
    assert gone(pid)


async def test_a_full_disk_is_named_with_its_room_and_without_a_traceback(tmp_path: Path) -> None:
    full = tmp_path / "checkpoint"
    full.mkdir()
    (full / "state.pt").symlink_to("/dev/full")
    async with BackendProxy(spec(tmp_path), log_path=tmp_path / "log") as backend:
        for call, where in ((backend.save, full), (backend.export, tmp_path / "log" / "no_folder")):
            words = rf"cannot write {where}, with \d+ MiB free there.*make room"
            with pytest.raises(TrainerLost, match=words) as caught:
                await call(where)
            assert "Traceback" not in str(caught.value)
        assert len(await backend.score(random_batch(3))) == 3
    assert "Traceback" in (tmp_path / "log").read_text()


class Unreadable:
    """Pickles well and cannot be read back."""

    def __reduce__(self) -> tuple[object, ...]:
        return (int, ("not a number",))


@pytest.mark.parametrize("answer", [pickle.dumps(("ok", Unreadable())), b"\x80\x05garbage", b"", pickle.dumps(7)])
async def test_an_answer_that_cannot_be_read_is_a_lost_trainer(tmp_path: Path, answer: bytes) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.seek(1 << 40)  # its end is read, not its whole
        file.write(b"the last line\n")
    ours, theirs = Pipe()
    proxy = BackendProxy(spec(tmp_path), log_path=log)
    proxy._pipe = ours
    proxy._process = subprocess.Popen(["sleep", "60"])
    try:
        theirs.send_bytes(answer)
        with pytest.raises(TrainerLost, match=r"(?s)cannot be read.*the last line"):
            await proxy.cpu_seconds()
    finally:
        proxy._process.kill()
        await proxy.aclose()
        theirs.close()


async def test_a_bad_model_directory_is_a_configuration_error_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    proxy = BackendProxy(BackendSpec(kind="torch", model_dir=str(tmp_path / "empty")), log_path=tmp_path / "log")
    with pytest.raises(ConfigError, match=r"config\.json"):
        async with proxy:
            pass
    with pytest.raises(TrainerLost, match="not running"):
        _ = proxy.pid


async def test_closing_during_a_call_does_not_wait_for_it(tmp_path: Path) -> None:
    async with BackendProxy(spec(tmp_path), log_path=tmp_path / "log") as backend:
        pid = backend.pid
        os.kill(pid, signal.SIGSTOP)
        call = asyncio.create_task(backend.score(random_batch(1)))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert gone(pid)


def test_the_process_dies_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    model_dir(tmp_path / "model")
    script = tmp_path / "controller.py"
    script.write_text(
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tollway.trainer.backends.base import BackendSpec\n"
        "from tollway.trainer.backends.proxy import BackendProxy\n"
        "async def main():\n"
        f"    spec = BackendSpec(kind='torch', model_dir={str(tmp_path / 'model')!r})\n"
        f"    async with BackendProxy(spec, log_path=Path({str(tmp_path / 'log')!r})) as backend:\n"
        "        print(backend.pid, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as controller:
        pid = int(controller.stdout.readline())  # type: ignore[union-attr]
        assert not gone(pid)
        controller.kill()
        controller.wait()
    deadline = time.monotonic() + 10
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(pid)
