"""What a sandboxed program can reach: nothing of the host's network, files, processes or privileges."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest
from sandbox_helpers import make

from tollway.errors import BadRequest
from tollway.sandboxes.local import LocalProvider, LocalSandbox

PYTHON = ("/usr/bin/python3", "-I", "-S", "-B", "-c")


async def test_services_on_the_hosts_loopback_and_the_outside_are_unreachable(sandbox: LocalSandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            pass  # the service is up for us
        code = f"""
import socket
for address in (("127.0.0.1", {port}), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, timeout=2)
        print("reached", address)
    except OSError as error:
        print(type(error).__name__)
print(sorted(name for _, name in socket.if_nameindex()))
"""
        done = await sandbox.exec([*PYTHON, code], timeout_s=20)
    refused, unreachable, interfaces = done.stdout.decode().splitlines()
    assert refused == "ConnectionRefusedError"
    assert unreachable == "OSError"
    assert interfaces == "['lo']"


async def test_host_files_are_absent(sandbox: LocalSandbox) -> None:
    done = await sandbox.exec(["ls", "-A", "/"], timeout_s=20)
    assert set(done.stdout.decode().split()) == {
        *("bin", "dev", "etc", "lib", "lib64", "proc", "sbin", "tmp", "usr", "workspace")
    }
    done = await sandbox.exec("ls -A /etc; ls -A /workspace; ls -A /tmp", timeout_s=20)
    assert done.stdout.decode().split() in ([], ["alternatives"])


async def test_no_privilege_is_left(sandbox: LocalSandbox) -> None:
    done = await sandbox.exec(["cat", "/proc/self/status"], timeout_s=20)
    status = dict(line.split(":\t", 1) for line in done.stdout.decode().splitlines() if ":\t" in line)
    for capabilities in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[capabilities], 16) == 0, capabilities
    assert status["NoNewPrivs"] == "1"
    assert status["Groups"].strip() in ("", "1000", "65534")


@pytest.mark.parametrize(
    "attempt",
    [
        "unshare -U true",
        "unshare -r true",
        "mount -t tmpfs none /tmp",
        "mknod dev b 8 0",
        "chroot /usr true",
        "hostname other",
        "date -s 2001-01-01",
        "kill -9 1 && kill -0 1 && sleep 0.2 && ! kill -0 1",
        "cat /dev/mem",
        "cat /proc/kcore",
        "ls /proc/1/root/home",
        "chown 0 /workspace",
    ],
)
async def test_privileged_actions_fail(sandbox: LocalSandbox, attempt: str) -> None:
    done = await sandbox.exec(attempt, timeout_s=20)
    assert done.exit_code not in (0, None), done


async def test_killing_every_process_hits_only_the_own_command(local: LocalProvider) -> None:
    first, second = await make(local), await make(local)
    bystander = asyncio.create_task(second.exec("sleep 1; echo alive", timeout_s=20))
    done = await first.exec("sleep 60 & kill -9 -1; wait; echo alone", timeout_s=20)
    assert done.stdout == b"alone\n"
    assert (await bystander).stdout == b"alive\n"
    assert (await first.exec(["echo", "usable"], timeout_s=20)).stdout == b"usable\n"


async def test_a_command_gets_no_descriptor_but_the_standard_three(sandbox: LocalSandbox) -> None:
    code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))"
    done = await sandbox.exec([*PYTHON, code], timeout_s=20)
    assert done.stdout == b"[0, 1, 2, 3]\n"  # 3 is the listing itself


async def test_memory_file_size_and_open_files_are_limited(local: LocalProvider) -> None:
    sandbox = await make(local, mem_mb=128)
    done = await sandbox.exec([*PYTHON, "x = bytearray(200 << 20)"], timeout_s=20)
    assert b"MemoryError" in done.stderr
    done = await sandbox.exec("head -c 80000000 /dev/zero > big; ls -s big", timeout_s=20)
    assert int(done.stdout.split()[0]) <= 64 * 1024
    code = "import os\nfds = []\ntry:\n    while True: fds.append(os.dup(0))\nexcept OSError: print(len(fds))"
    done = await sandbox.exec([*PYTHON, code], timeout_s=20)
    assert int(done.stdout) <= 256
    done = await sandbox.exec("head -c 90000000 /dev/zero > /tmp/big; ls -s /tmp/big", timeout_s=20)
    assert int(done.stdout.split()[0]) <= 64 * 1024


async def test_device_files_take_no_more_memory_than_tmp(sandbox: LocalSandbox) -> None:
    fill = "for i in 1 2 3 4; do head -c 50000000 /dev/zero > /dev/shm/f$i; done; echo x > /dev/g; du -sm /dev"
    done = await sandbox.exec(fill, timeout_s=20)
    assert int(done.stdout.split()[0]) <= 64, "sandbox.local.tmp_mb"
    assert b"Read-only" in done.stderr


async def test_a_command_line_beyond_the_systems_limit_is_the_callers_error(sandbox: LocalSandbox) -> None:
    with pytest.raises(BadRequest, match="too long"):
        await sandbox.exec(["echo", "x" * 200_000], timeout_s=20)
    done = await sandbox.exec(["wc", "-c"], stdin=b"x" * 3_000_000, timeout_s=20)
    assert done.stdout == b"3000000\n"


async def test_endless_output_is_cut_and_costs_no_memory(sandbox: LocalSandbox) -> None:
    done = await sandbox.exec("yes & yes >&2", timeout_s=1.0, max_output=5000)
    assert done.timed_out
    assert done.truncated
    assert done.stdout == b"y\n" * 2500
    assert done.stderr == b"y\n" * 2500


async def test_broken_pipes_and_interrupts_behave_as_in_a_shell(sandbox: LocalSandbox) -> None:
    done = await sandbox.exec("yes | head -n 1; kill -INT $$; echo ignored", timeout_s=20)
    assert (done.stdout, done.stderr) == (b"y\n", b"")
    assert done.exit_code == 130


async def test_a_thread_holding_the_loop_does_not_delay_a_timeout(sandbox: LocalSandbox) -> None:
    held = threading.Event()
    running = asyncio.create_task(sandbox.exec("sleep 60", timeout_s=0.5))
    await asyncio.sleep(0.2)
    held.wait(1.0)  # the owner's event loop stands still past the deadline
    done = await running
    assert done.timed_out
    assert done.duration_s < 5
