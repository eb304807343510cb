"""Attempts on the machine: memory, kernel settings, clock, devices, network, namespaces, privileges, IPC, terminals.

The effect is looked for outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from escape_helpers import SYSCALLS, Mode, another, as_root, both_modes, boxed, processes_of, python, watched, works

from tollway.sandboxes.local import LocalProvider


@as_root
@both_modes
async def test_memory_beyond_the_limit_is_not_to_be_had(mode: Mode) -> None:
    async with boxed(mode, mem_mb=128) as (provider, sandbox):
        bystander = await another(provider)
        uid = sandbox.host_uid
        assert uid is not None
        code = """
kept = []
while True:
    kept.append(bytearray(8 << 20))
"""
        running = asyncio.create_task(python(sandbox, code, timeout_s=10))
        done, most_kb = await watched(running, lambda: sum(processes_of(uid).values()))
        assert done.exit_code not in (0, None), done
        assert most_kb < 180 * 1024
        assert await works(bystander)
        assert await works(sandbox)


@as_root
@both_modes
async def test_memory_cannot_be_had_by_many_processes_either(mode: Mode) -> None:
    async with boxed(mode, mem_mb=96, disk_mb=16, pids=30) as (provider, sandbox):
        if not _grouped(provider):
            pytest.skip("control groups cannot be written here: memory is limited by process")
        uid = sandbox.host_uid
        assert uid is not None
        code = """
import os, time
for _ in range(12):
    if os.fork() == 0:
        kept = bytearray(60 << 20)
        time.sleep(1)
        os._exit(0)
time.sleep(1)
"""
        running = asyncio.create_task(python(sandbox, code, timeout_s=6))
        _, most_kb = await watched(running, lambda: sum(processes_of(uid).values()))
        # Files in memory count as memory, and pages that processes share count here for each.
        assert most_kb < 350 * 1024
        assert await works(await another(provider))


def _grouped(provider: LocalProvider) -> bool:
    return provider.grouped


@both_modes
async def test_huge_binary_and_endless_output_costs_no_memory(mode: Mode) -> None:
    async with boxed(mode) as (_, sandbox):
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        done = await sandbox.exec("head -c 200000000 /dev/zero", timeout_s=30)
        assert done.stdout == bytes(1 << 20)
        assert done.truncated
        done = await sandbox.exec("yes & yes >&2 & cat /dev/zero", timeout_s=0.7)
        assert done.timed_out
        assert done.truncated
        done = await sandbox.exec(r"printf '\033]0;title\007\033[2J\377\376'", timeout_s=30)
        assert done.stdout == b"\033]0;title\007\033[2J\xff\xfe"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 100 * 1024
        assert await works(sandbox)


_SETTINGS = (
    "/proc/sys/kernel/panic",
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/fs/file-max",
)


@both_modes
async def test_kernel_settings_cannot_be_written(mode: Mode) -> None:
    before = {path: Path(path).read_bytes() for path in _SETTINGS if Path(path).exists()}
    async with boxed(mode) as (_, sandbox):
        code = f"""
import os
written = []
for path in {(*_SETTINGS, "/proc/sysrq-trigger", "/proc/1/oom_score_adj", "/proc/irq/default_smp_affinity")!r}:
    try:
        value = open(path).read() if "sysrq" not in path else "x"
        with open(path, "w") as file: file.write(value)
        written.append(path)
    except OSError:
        pass
print([path for path in written if path not in ("/proc/1/oom_score_adj",)])
"""
        done = await python(sandbox, code)
        # The network namespace of a sandbox has settings of its own; the file belongs to it.
        assert done.stdout in (b"[]\n", b"['/proc/sys/net/ipv4/ip_forward']\n"), done
    assert {path: Path(path).read_bytes() for path in before} == before


@both_modes
async def test_the_clock_cannot_be_set(mode: Mode) -> None:
    async with boxed(mode) as (_, sandbox):
        offset = time.time() - time.monotonic()
        code = f"""{SYSCALLS}
import time
set = []
for clock in (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC):
    try: time.clock_settime(clock, 1000.0); set.append(clock)
    except OSError: pass
buffer = ctypes.create_string_buffer(b"\\1\\0\\0\\0" + bytes(204))
if call(159, buffer)[0] >= 0: set.append("adjtimex")
if call(164, ctypes.create_string_buffer(16), 0)[0] == 0: set.append("settimeofday")
print(set)
"""
        done = await python(sandbox, code)
        assert done.stdout == b"[]\n", done
        assert (await sandbox.exec("date -s 2001-01-01", timeout_s=30)).exit_code != 0
        assert abs(time.time() - time.monotonic() - offset) < 5


@both_modes
async def test_devices_cannot_be_made_or_reached(mode: Mode) -> None:
    async with boxed(mode) as (_, sandbox):
        code = """
import os, stat
made = []
for kind, name in ((stat.S_IFBLK, "b"), (stat.S_IFCHR, "c")):
    for place in ("/workspace", "/tmp", "/dev"):
        try: os.mknod(f"{place}/{name}", kind | 0o666, os.makedev(8 if name == "b" else 1, 1)); made.append(place)
        except OSError: pass
print(made)
known = {"console", "full", "null", "ptmx", "random", "tty", "urandom", "zero", "fd", "core", "stdin", "stdout",
         "stderr", "pts", "shm", "mqueue"}
print(sorted(set(os.listdir("/dev")) - known))
opened = []
for name in ("/dev/mem", "/dev/kmem", "/dev/port", "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/loop0", "/dev/fuse",
             "/dev/kvm", "/dev/net/tun", "/dev/nvidia0", "/dev/tty", "/dev/console", "/proc/kcore", "/proc/kmsg"):
    try: os.close(os.open(name, os.O_RDWR)); opened.append(name)
    except OSError: pass
    try:
        if os.read(os.open(name, os.O_RDONLY | os.O_NONBLOCK), 1): opened.append(name)
    except OSError: pass
print(opened)
"""
        done = await python(sandbox, code)
        assert done.stdout == b"[]\n[]\n[]\n", done


# Numbers of x86-64.
_CALLS = {
    "unshare user": "call(272, 0x10000000)",
    "unshare mount": "call(272, 0x00020000)",
    "unshare network": "call(272, 0x40000000)",
    "unshare pid": "call(272, 0x20000000)",
    "clone user": "call(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone3 user": "call(435, ctypes.create_string_buffer((0x10000000).to_bytes(8, 'little') + bytes(80)), 64)",
    "setns": "call(308, os.open('/proc/1/ns/mnt', os.O_RDONLY), 0)",
    "mount tmpfs": "call(165, b'none', b'/tmp', b'tmpfs', 0, 0)",
    "remount": "call(165, b'none', b'/', b'', 32, 0)",
    "bind": "call(165, b'/proc', b'/tmp', b'', 4096, 0)",
    "umount": "call(166, b'/proc', 2)",
    "fsopen": "call(430, b'tmpfs', 0)",
    "open_tree": "call(428, -100, b'/', 1)",
    "pivot_root": "call(155, b'/tmp', b'/tmp')",
    "chroot": "call(161, b'/usr')",
    "sethostname": "call(170, b'evil', 4)",
    "reboot": "call(169, 0xfee1dead, 672274793, 0, 0)",
    "swapon": "call(167, b'/workspace/x', 0)",
    "acct": "call(163, b'/workspace/x')",
    "init_module": "call(175, b'', 0, b'')",
    "finit_module": "call(313, 0, b'', 0)",
    "kexec_load": "call(246, 0, 0, 0, 0)",
    "bpf": "call(321, 0, ctypes.create_string_buffer(b'\\1\\0\\0\\0\\4\\0\\0\\0\\4\\0\\0\\0\\1' + bytes(115)), 128)",
    "perf_event_open": "call(298, ctypes.create_string_buffer(b'\\1\\0\\0\\0\\x80' + bytes(123)), 0, -1, -1, 0)",
    "iopl": "call(172, 3)",
    "ioperm": "call(173, 0x80, 1, 1)",
    "syslog": "call(103, 3, ctypes.create_string_buffer(100), 100)",
    "quotactl": "call(179, 0x80000100, b'/dev/sda', 0, 0)",
    "open_by_handle_at": "call(304, -100, ctypes.create_string_buffer(b'\\x08\\0\\0\\0\\1\\0\\0\\0' + bytes(16)), 0)",
    "setuid": "call(105, 0)",
    "setresuid": "call(117, 0, 0, 0)",
    "setgroups": "call(116, 1, ctypes.create_string_buffer(4))",
    "capset": "call(126, ctypes.create_string_buffer(b'\\x22\\x05\\x08\\x20' + bytes(4)), "
    "ctypes.create_string_buffer(b'\\xff' * 24))",
    "raw socket": "call(41, 2, 3, 1)",
    "packet socket": "call(41, 17, 3, 768)",
    "vsock": "call(41, 40, 1, 0)",
    "personality": "call(135, 0x0040000)",
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="system calls by number of x86-64")
@both_modes
async def test_privileged_system_calls_are_refused(mode: Mode) -> None:
    hostname = socket.gethostname()
    async with boxed(mode) as (_, sandbox):
        # Each in a process of its own: one that succeeds must not change what the next one can do.
        tries = "\n".join(
            f"""
if (pid := os.fork()) == 0:
    try: done, number = {expression}
    except OSError as error: done, number = -1, error.errno
    os._exit(77 if done >= 0 else 0)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
if code == 77: allowed.append({name!r})
"""
            for name, expression in _CALLS.items()
        )
        done = await python(sandbox, f"{SYSCALLS}\nallowed = []\n{tries}\nprint(allowed)")
        # Address-space randomisation of one's own process is one's own affair; so is an unconnected vsock.
        allowed = set(eval(done.stdout)) - {"personality", "vsock"}  # a list that the line above printed
        assert allowed == set(), done
        assert await works(sandbox)
    assert socket.gethostname() == hostname


@both_modes
async def test_setuid_programs_give_nothing(mode: Mode, tmp_path: Path) -> None:
    async with boxed(mode) as (_, sandbox):
        code = r"""
import glob, os, stat, subprocess
programs = [path for path in glob.glob("/usr/bin/*") + glob.glob("/usr/sbin/*") + glob.glob("/usr/lib/*/*helper*")
            if os.path.isfile(path) and os.stat(path).st_mode & (stat.S_ISUID | stat.S_ISGID)]
for line in (["su", "-c", "id -u"], ["sudo", "-n", "id", "-u"], ["newgrp", "root"], ["pkexec", "id", "-u"],
             ["mount", "-t", "tmpfs", "none", "/tmp"], ["umount", "/proc"]):
    try: done = subprocess.run(line, input=b"\n", capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired): continue
    print(line[0], done.returncode == 0, done.stdout.strip() == b"0")
os.system("cp /usr/bin/id own; chmod 6755 own; ./own -u")
"""
        done = await python(sandbox, code)
        assert b"True" not in done.stdout, done
        assert b"1000" in done.stdout.splitlines(), done
        status = await sandbox.exec("grep -E 'NoNewPrivs|CapEff' /proc/self/status", timeout_s=30)
        assert status.stdout.split() == [b"CapEff:", b"0000000000000000", b"NoNewPrivs:", b"1"]


@both_modes
async def test_services_of_the_host_hear_nothing(mode: Mode, tmp_path: Path) -> None:
    open_to_all_path = tmp_path / "s.sock"
    async with boxed(mode) as (_, sandbox):
        with contextlib.ExitStack() as stack:
            tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            udp.bind(("127.0.0.1", 0))
            abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
            abstract.bind(f"\0tollway-test-{os.getpid()}")
            abstract.listen()
            named = stack.enter_context(socket.socket(socket.AF_UNIX))
            named.bind(str(open_to_all_path))
            named.listen()
            for listener in (tcp, udp, abstract, named):
                listener.setblocking(False)
            code = f"""
import socket
reached = []
for name, family, kind, address in (
    ("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", {tcp.getsockname()[1]})),
    ("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", {udp.getsockname()[1]})),
    ("abstract", socket.AF_UNIX, socket.SOCK_STREAM, "\\0tollway-test-{os.getpid()}"),
    ("named", socket.AF_UNIX, socket.SOCK_STREAM, {str(open_to_all_path)!r}),
    ("outside", socket.AF_INET, socket.SOCK_STREAM, ("192.0.2.1", 80)),
    ("metadata", socket.AF_INET, socket.SOCK_STREAM, ("169.254.169.254", 80)),
    ("dns", socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.53", 53)),
):
    try:
        with socket.socket(family, kind) as client:
            client.settimeout(3)
            client.connect(address)
            client.send(b"hello")
            if name != "udp": reached.append(name)
    except OSError:
        pass
try: reached.append(socket.getaddrinfo("example.org", 80))
except OSError: pass
print(reached, sorted(name for _, name in socket.if_nameindex()))
"""
            done = await python(sandbox, code)
            assert done.stdout == b"[] ['lo']\n", done
            for listener in (tcp, abstract, named):
                with pytest.raises(BlockingIOError):
                    listener.accept()
            with pytest.raises(BlockingIOError):
                udp.recv(100)


@both_modes
async def test_shared_memory_and_queues_are_ones_own(mode: Mode) -> None:
    before = Path("/proc/sysvipc/shm").read_text().count("\n") if Path("/proc/sysvipc/shm").exists() else 0
    async with boxed(mode) as (provider, sandbox):
        other = await another(provider)
        make = f"{SYSCALLS}\nprint(call(29, 0x7011, 4096, 0o1666)[0] >= 0)"  # shmget, create
        find = f"{SYSCALLS}\nprint(call(29, 0x7011, 4096, 0)[0] >= 0)"
        await python(sandbox, make)
        assert (await python(other, find)).stdout == b"False\n"
        found = subprocess.run([sys.executable, "-c", find], capture_output=True, check=True).stdout
        assert found == b"False\n"
        await sandbox.exec("echo x > /dev/shm/shared; echo x > /tmp/shared", timeout_s=30)
        assert (await other.exec("cat /dev/shm/shared /tmp/shared", timeout_s=30)).stdout == b""
        assert not Path("/dev/shm/shared").exists()
        assert not Path("/tmp/shared").exists()
    after = Path("/proc/sysvipc/shm").read_text().count("\n") if Path("/proc/sysvipc/shm").exists() else 0
    assert after <= before


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="system calls by number of x86-64")
@both_modes
async def test_the_keyring_of_the_host_is_out_of_reach(mode: Mode) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    session_ring, user_ring = -3, -4
    payload = b"secret-in-the-keyring"
    keys = [libc.syscall(248, b"user", b"tollway-test", payload, 21, ring) for ring in (session_ring, user_ring)]

    def readable(key: int) -> bool:
        buffer = ctypes.create_string_buffer(100)
        return key > 0 and libc.syscall(250, 11, key, buffer, 100) == 21 and buffer.raw[:21] == payload

    own = [key for key in keys if readable(key)]
    try:
        async with boxed(mode) as (_, sandbox):
            code = f"""{SYSCALLS}
buffer = ctypes.create_string_buffer(100)
for ring in (-1, -2, -3, -4, -5):
    found = call(250, 10, ring, b"user", b"tollway-test", 0)[0]   # search
    if found > 0 and call(250, 11, found, buffer, 100)[0] > 0: print("read", ring)
for key in {keys}:
    if key > 0 and call(250, 11, key, buffer, 100)[0] > 0: print("read by number")
    if key > 0 and call(250, 3, key)[0] == 0: print("revoked")
    if key > 0 and call(250, 2, key, b"changed", 7)[0] == 0: print("changed")
print("end")
"""
            done = await python(sandbox, code)
            assert done.stdout == b"end\n", done
        assert [key for key in keys if readable(key)] == own
    finally:
        for key in keys:
            libc.syscall(250, 3, key)


_ON_A_TERMINAL = """
import asyncio, sys
from tollway.sandboxes.base import SandboxSpec
from tollway.sandboxes.config import LocalConfig, SandboxConfig
from tollway.sandboxes.local import LocalProvider

CODE = '''
import fcntl, os, termios
pushed = []
for name in (0, 1, 2, "/dev/tty", "/dev/console", "/dev/pts/0", "/proc/1/fd/0"):
    try:
        fd = name if isinstance(name, int) else os.open(name, os.O_RDWR | os.O_NONBLOCK)
        for byte in b"evil":
            fcntl.ioctl(fd, termios.TIOCSTI, bytes([byte]))
        pushed.append(name)
    except OSError:
        pass
print(pushed)
'''

async def main():
    async with LocalProvider(SandboxConfig(local=LocalConfig(mode=sys.argv[1]))) as provider:
        sandbox = await provider.create(SandboxSpec(ttl_s=60, labels={"o": "x"}))
        done = await sandbox.exec(["/usr/bin/python3", "-I", "-S", "-c", CODE], timeout_s=30)
        print("PUSHED", done.stdout, flush=True)

asyncio.run(main())
"""


@both_modes
async def test_nothing_can_be_typed_into_the_terminal_of_the_owner(mode: Mode) -> None:
    async with boxed(mode):
        pass  # skips where there are no sandboxes
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", _ON_A_TERMINAL, mode])
    said = b""
    with contextlib.suppress(OSError):  # EIO at the end of the other side
        while b"\n" not in said.partition(b"PUSHED")[2] and (data := await asyncio.to_thread(os.read, terminal, 1000)):
            said += data
    await asyncio.to_thread(os.waitpid, pid, 0)
    os.close(terminal)
    assert b"PUSHED b'[]\\n'" in said, said
    assert b"evil" not in said.replace(b"PUSHED", b"")
