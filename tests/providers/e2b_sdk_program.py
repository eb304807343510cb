# ruff: noqa: PT017, PT018, T201 - a program of its own, not a test under pytest
"""The E2B SDK as its users call it, sync and async, against ``tollway sandbox serve-e2b``. Run in its environment."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import e2b
from e2b import AsyncSandbox, Sandbox, SandboxQuery


@contextmanager
def server() -> Iterator[None]:
    tollway = Path(sys.executable).with_name("tollway")
    os.environ["TOLLWAY_E2B_KEY"] = os.environ["E2B_API_KEY"] = "e2b_" + "0" * 40
    process = subprocess.Popen([tollway, "sandbox", "serve-e2b", "--port", "0"], stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    url = line.split(" at ")[1].split(";")[0]
    os.environ["E2B_API_URL"] = os.environ["E2B_SANDBOX_URL"] = url
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


async def asynchronous() -> None:
    sandbox = await AsyncSandbox.create(timeout=120, metadata={"run": "a b"}, envs={"X": "1"})
    said: list[tuple[str, float]] = []
    started = time.monotonic()
    handle = await sandbox.commands.run(
        "for i in 1 2; do echo $i$X; sleep 1; done; echo err >&2; exit 3",
        background=True,
        on_stdout=lambda text: said.append((text, time.monotonic() - started)),
    )
    try:
        await handle.wait()
        raise AssertionError("a non-zero exit raises in this SDK")
    except e2b.CommandExitException as ended:
        assert (ended.exit_code, ended.stdout, ended.stderr) == (3, "11\n21\n", "err\n")
    assert said[-1][1] - said[0][1] > 0.5, "output came at the end only"

    cat = await sandbox.commands.run("cat; echo over", background=True, stdin=True)
    await sandbox.commands.send_stdin(cat.pid, "a\n")
    await sandbox.commands.send_stdin(cat.pid, "b\n")
    await sandbox.commands.close_stdin(cat.pid)
    assert (await cat.wait()).stdout == "a\nb\nover\n"

    service = await sandbox.commands.run("cd /workspace && echo hi >x && python3 -m http.server 8123", background=True)
    fetch = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8123/x').read())"
    look = f'for i in 1 2 3 4 5 6; do python3 -c "{fetch}" && break; sleep 1; done'
    assert "hi" in (await sandbox.commands.run(look)).stdout
    assert [process.pid for process in await sandbox.commands.list()] == [service.pid]
    again = await sandbox.commands.connect(service.pid)
    assert await service.kill()
    assert not await service.kill()
    try:
        await again.wait()
    except e2b.CommandExitException as ended:
        assert ended.exit_code == 137

    try:
        await sandbox.commands.run("sleep 60", timeout=1)
        raise AssertionError("it ran on")
    except e2b.TimeoutException:
        assert await sandbox.commands.list() == []

    other = await AsyncSandbox.connect(sandbox.sandbox_id)
    assert (await other.commands.run("cat x")).stdout == "hi\n"
    pages = AsyncSandbox.list(query=SandboxQuery(metadata={"run": "a b"}))
    assert [info.sandbox_id for info in await pages.next_items()] == [sandbox.sandbox_id]
    assert await sandbox.pause()
    resumed = await AsyncSandbox.connect(sandbox.sandbox_id)
    saved = await resumed.create_snapshot()
    copy = await AsyncSandbox.create(saved.snapshot_id, timeout=60)
    assert await copy.files.read("/workspace/x") == "hi\n"
    await copy.kill()
    assert await sandbox.kill()
    assert not await sandbox.kill()
    assert not await sandbox.is_running()
    try:
        await sandbox.commands.run("true")
        raise AssertionError("a killed sandbox answers")
    except e2b.TimeoutException:
        pass


def synchronous() -> None:
    with Sandbox.create(timeout=60) as sandbox:
        assert sandbox.commands.run("printf '%s' \"$0\"").stderr == ""
        sandbox.files.write("a/b.bin", b"\x00\xff")
        assert bytes(sandbox.files.read("/home/user/a/b.bin", format="bytes")) == b"\x00\xff"
        assert [entry.path for entry in sandbox.files.list("/workspace", depth=2)] == [
            "/workspace/a",
            "/workspace/a/b.bin",
        ]
        assert sandbox.files.make_dir("d") and not sandbox.files.make_dir("d")
        sandbox.files.rename("a/b.bin", "d/c")
        info = sandbox.files.get_info("d/c")
        assert (info.size, info.permissions) == (2, "-rw-r--r--")
        sandbox.files.remove("d")
        assert not sandbox.files.exists("d/c")
        try:
            sandbox.files.read("nowhere")
            raise AssertionError("read what is not there")
        except e2b.FileNotFoundException:
            pass


if __name__ == "__main__":
    with server():
        asyncio.run(asynchronous())
        synchronous()
        os.environ["E2B_API_KEY"] = "wrong"
        try:
            Sandbox.create()
            raise AssertionError("a wrong key opens")
        except e2b.AuthenticationException:
            pass
    print("all of it")
