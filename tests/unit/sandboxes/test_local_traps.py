"""The known ways in which a bubblewrap sandbox leaks, each closed. Every test here fails without its fix."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from sandbox_helpers import appeared, make, marker, open_to_all, processes_with

from tollway.errors import BadRequest
from tollway.sandboxes.local import LocalProvider, LocalSandbox

PYTHON = ("/usr/bin/python3", "-I", "-S", "-B", "-c")


async def test_root_inside_is_not_root_outside_so_kernel_settings_cannot_be_written(sandbox: LocalSandbox) -> None:
    done = await sandbox.exec("id -u; cat /proc/sys/kernel/panic > /proc/sys/kernel/panic", timeout_s=20)
    assert done.stdout == b"1000\n"
    assert done.exit_code != 0
    assert b"ermission denied" in done.stderr
    mark = marker()
    running = asyncio.create_task(sandbox.exec(["sleep", mark], timeout_s=20))
    await appeared(mark)
    assert {os.stat(f"/proc/{pid}").st_uid for pid in processes_with(mark)} == {sandbox.host_uid or os.getuid()}
    assert (sandbox.host_uid or os.getuid()) != 0
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give each sandbox a uid of its own")
async def test_live_sandboxes_run_under_different_uids_and_cannot_list_each_other(local: LocalProvider) -> None:
    first, second = await make(local), await make(local)
    assert isinstance(first, LocalSandbox)
    assert isinstance(second, LocalSandbox)
    assert first.host_uid != second.host_uid
    assert {first.host_uid, second.host_uid}.isdisjoint({0, None})
    assert first.host_path.stat().st_mode & 0o077 == 0
    assert first.host_path.stat().st_uid == first.host_uid


async def test_the_process_limit_binds(local: LocalProvider) -> None:
    sandbox = await make(local, pids=12)
    code = """
import os, time
made = 0
try:
    for _ in range(300):
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        made += 1
except BlockingIOError:
    pass
print(made)
"""
    done = await sandbox.exec([*PYTHON, code], timeout_s=20)
    assert done.exit_code == 0
    assert 5 <= int(done.stdout) <= 12


async def test_the_owners_environment_is_nowhere_in_the_sandbox(
    local: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOLLWAY_ADMIN_KEY", "secret-of-the-owner")
    sandbox = await make(local, env={"OWN": "set by the spec"})
    done = await sandbox.exec("cat /proc/[0-9]*/environ; echo; printenv", timeout_s=20)
    assert b"OWN=set by the spec" in done.stdout
    assert b"secret-of-the-owner" not in done.stdout
    done = await sandbox.exec(["cat", "/proc/1/environ"], timeout_s=20)
    assert done.exit_code == 0
    assert done.stdout == b""


async def test_nothing_can_be_written_outside_the_workspace_and_the_private_tmp(sandbox: LocalSandbox) -> None:
    code = """
import os
from pathlib import Path
for top, dirs, files in os.walk("/"):
    dirs[:] = [name for name in dirs if os.path.join(top, name) not in ("/proc", "/usr")]
    try:
        open(os.path.join(top, "probe"), "w").close()
        print(top)
    except OSError:
        pass
for path in ("/usr/probe", "/proc/probe", "/etc/alternatives/probe"):
    try:
        open(path, "w").close()
        print(path)
    except OSError:
        pass
"""
    done = await sandbox.exec([*PYTHON, code], timeout_s=20)
    assert done.exit_code == 0, done
    assert set(done.stdout.decode().split()) <= {"/tmp", "/dev", "/dev/shm", "/workspace"}
    assert "/workspace" in done.stdout.decode()
    done = await sandbox.exec(["ls", "/tmp", "/dev/shm"], timeout_s=20)
    assert b"probe" not in done.stdout, "each command has a /tmp and a /dev of its own"


async def test_host_paths_are_not_readable_from_the_first_process(sandbox: LocalSandbox) -> None:
    done = await sandbox.exec(["cat", "/proc/1/cmdline"], timeout_s=20)
    assert b"bwrap" in done.stdout
    assert str(sandbox.host_path).encode() not in done.stdout
    assert b"ro-bind" not in done.stdout


@pytest.mark.parametrize(
    ("prepare", "path"),
    [
        ("ln -s {host}/secret leak", "leak"),
        ("ln -s {host} w", "w/secret"),
        ("ln -s / root", "root{host}/secret"),
        ("ln -s ../../../../../../../..{host} up", "up/secret"),
        ("mkdir d; ln -s ../real d/link; echo x > real", "d/link"),
        ("true", "../../../../../..{host}/secret"),
        ("mkdir a", "a/../../../../../../..{host}/secret"),
        ("true", "{host}/secret"),
        ("mkfifo pipe", "pipe"),
        ("mkdir dir", "dir"),
        ("ln -s /proc/self/mem mem", "mem"),
    ],
)
async def test_host_reads_and_writes_follow_nothing_out_and_never_wait(
    sandbox: LocalSandbox, tmp_path: Path, prepare: str, path: str
) -> None:
    open_to_all(tmp_path)
    secret = tmp_path / "secret"
    secret.write_bytes(b"of the host")
    assert (await sandbox.exec(prepare.format(host=tmp_path), timeout_s=20)).exit_code == 0
    async with asyncio.timeout(10):
        with pytest.raises(BadRequest):
            await sandbox.read(path.format(host=tmp_path))
        with pytest.raises(BadRequest):
            await sandbox.write(path.format(host=tmp_path), b"overwritten")
    assert secret.read_bytes() == b"of the host"


async def test_a_file_that_is_swapped_for_a_link_while_we_read_never_shows_the_host(sandbox: LocalSandbox) -> None:
    await sandbox.write("d/passwd", b"ours")
    swap = "ln -s /etc link; while :; do mv d real; mv link d; mv d link; mv real d; done"
    swapping = asyncio.create_task(sandbox.exec(swap, timeout_s=1.5))
    seen = set()
    while not swapping.done():
        try:
            seen.add(await sandbox.read("d/passwd"))
        except BadRequest:
            seen.add(b"")
        await asyncio.sleep(0)
    assert (await swapping).timed_out
    assert seen <= {b"ours", b""}
    assert b"ours" in seen
