"""Attempts on processes: bombs, signals, tracing, daemons, secrets of others. The effect is looked for outside."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from escape_helpers import (
    SYSCALLS,
    Mode,
    another,
    as_root,
    both_modes,
    boxed,
    nobody_left,
    processes_of,
    python,
    victim,
    watched,
    works,
)
from sandbox_helpers import gone, marker, processes_with

from tollway.errors import SandboxError

FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


@as_root
@both_modes
async def test_a_fork_bomb_stays_within_its_processes_and_disturbs_nobody(mode: Mode) -> None:
    async with boxed(mode, pids=30) as (provider, sandbox):
        bystander = await another(provider)
        uid = sandbox.host_uid
        assert uid is not None
        running = asyncio.create_task(python(sandbox, FORK_BOMB, timeout_s=1.0))
        done, most = await watched(running, lambda: len(processes_of(uid)))
        assert done.timed_out
        assert 5 <= most <= 30 + 6, "bwrap's own processes and the agent come on top"
        assert await works(bystander)
        assert await works(sandbox), "its processes are gone, its places are free"
        await sandbox.kill()
        await nobody_left(uid)


@both_modes
async def test_killing_everything_hits_only_itself(mode: Mode) -> None:
    async with boxed(mode) as (provider, sandbox):
        bystander = await another(provider)
        waiting = asyncio.create_task(bystander.exec("sleep 1; echo alive", timeout_s=30))
        with victim(sandbox.host_uid) as process:
            code = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for number in (signal.SIGTERM, signal.SIGKILL):
    for pid in [*range(2, 70000), -1]:
        if pid != os.getpid():
            try: os.kill(pid, number)
            except OSError: pass
print("done")
"""
            await python(sandbox, code)
            assert process.poll() is None, "a process of the host under the same uid was killed"
        assert (await waiting).stdout == b"alive\n"
        assert await works(bystander)
        assert os.getppid() > 0


@both_modes
async def test_no_process_outside_can_be_seen_traced_read_or_stopped(mode: Mode) -> None:
    async with boxed(mode) as (provider, sandbox):
        other = await another(provider)
        mark = marker()
        running = asyncio.create_task(other.exec(["sleep", mark], timeout_s=60))
        while not processes_with(mark):
            await asyncio.sleep(0.02)
        with victim(sandbox.host_uid) as process:
            code = f"""{SYSCALLS}
import signal
seen = []
for name in os.listdir("/proc"):
    if name.isdigit():
        try: seen.append(open(f"/proc/{{name}}/cmdline", "rb").read())
        except OSError: pass
print(any(line.startswith(b"sleep\\0{mark}") for line in seen), len(seen) < 12)
reached = 0
for pid in ({process.pid}, {os.getpid()}, {processes_with(mark)[0]}):
    reached += call(101, 16, pid, 0, 0)[0] == 0          # ptrace attach
    reached += call(101, 0x4206, pid, 0, 0)[0] == 0      # ptrace seize
    reached += call(434, pid, 0)[0] >= 0                 # pidfd_open
    reached += os.path.exists(f"/proc/{{pid}}/environ")
    try:
        os.kill(pid, signal.SIGSTOP)
        reached += 1
    except OSError:
        pass
print(reached)
"""
            done = await python(sandbox, code)
            assert done.stdout.split() == [b"False", b"True", b"0"], done
            status = Path(f"/proc/{process.pid}/status").read_text()
            assert "TracerPid:\t0" in status
            assert "State:\tT" not in status
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@both_modes
async def test_secrets_of_the_owner_are_nowhere(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLLWAY_ADMIN_KEY", "secret-of-the-owner")
    async with boxed(mode, env={"OWN": "from-the-spec"}) as (provider, sandbox):
        other = await another(provider, env={"OTHERS": "secret-of-another"})
        holding = asyncio.create_task(other.exec(["sleep", "60"], env={"CALL": "secret-of-a-call"}, timeout_s=60))
        await asyncio.sleep(0.2)
        code = """
import os
for name in os.listdir("/proc"):
    for leaf in ("environ", "cmdline", "mountinfo", "cgroup", "cwd", "root", "exe"):
        path = f"/proc/{name}/{leaf}"
        try: print(os.readlink(path) if os.path.islink(path) else open(path, "rb").read())
        except OSError: pass
"""
        done = await python(sandbox, code)
        assert b"from-the-spec" in done.stdout
        for secret in (b"secret-of-the-owner", b"secret-of-another", b"secret-of-a-call"):
            assert secret not in done.stdout
        assert str(sandbox.host_path).encode() not in b"".join(
            line for line in done.stdout.splitlines() if b"bwrap" in line
        )
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)


@both_modes
async def test_secrets_of_a_call_are_in_no_command_line_of_the_host(mode: Mode) -> None:
    async with boxed(mode, env={"SPEC": "secretspec4711"}) as (_, sandbox):
        running = asyncio.create_task(sandbox.exec(["sleep", "60"], env={"CALL": "secretcall4711"}, timeout_s=60))
        await asyncio.sleep(0.5)
        assert processes_with("secretspec4711") == []
        assert processes_with("secretcall4711") == []
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@both_modes
async def test_daemons_that_fork_twice_end_at_the_latest_with_the_sandbox(mode: Mode) -> None:
    async with boxed(mode) as (_, sandbox):
        mark = marker()
        code = f"""
import os, signal
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir("/")
        os.closerange(0, 64)
        os.execv("/bin/sleep", ["sleep", "{mark}"])
    os._exit(0)
"""
        done = await python(sandbox, code)
        assert done.exit_code == 0, done
        if mode == "exec":
            await gone(mark)
        await sandbox.kill()
        assert processes_with(mark) == []


@both_modes
async def test_a_command_that_stops_itself_is_ended_by_its_timeout(mode: Mode) -> None:
    async with boxed(mode) as (_, sandbox):
        mark = marker()
        done = await sandbox.exec(f"sleep {mark} & kill -STOP $$", timeout_s=0.5)
        assert done.timed_out
        await gone(mark)
        assert await works(sandbox)


@both_modes
async def test_only_the_standard_descriptors_are_inherited(mode: Mode) -> None:
    async with boxed(mode) as (_, sandbox):
        code = """
import os
links = {}
for name in sorted(os.listdir("/proc/self/fd"), key=int):
    try: links[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    except OSError: pass
print(sorted(links))
print([link for link in links.values() if not link.startswith(("pipe:", "/dev/null", "socket:", "/proc"))])
"""
        done = await python(sandbox, code)
        assert done.stdout.splitlines()[0] in (b"[0, 1, 2]", b"[0, 1, 2, 3]"), done
        assert done.stdout.splitlines()[1] == b"[]"


@both_modes
async def test_limits_and_priorities_cannot_be_raised(mode: Mode) -> None:
    async with boxed(mode) as (_, sandbox):
        code = f"""{SYSCALLS}
import resource
raised = []
for name in ("RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_CORE", "RLIMIT_MEMLOCK"):
    soft, hard = resource.getrlimit(getattr(resource, name))
    if hard == resource.RLIM_INFINITY:
        continue
    try:
        resource.setrlimit(getattr(resource, name), (hard + 1, hard + 1))
        raised.append(name)
    except (ValueError, OSError):
        pass
try: os.nice(-5); raised.append("nice")
except OSError: pass
try: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); raised.append("fifo")
except OSError: pass
try: os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"-900"); raised.append("oom")
except OSError: pass
if call(251, 1, 0, 1 << 13)[0] == 0: raised.append("ioprio")
print(raised, resource.getrlimit(resource.RLIMIT_CORE))
"""
        done = await python(sandbox, code)
        assert done.stdout.startswith(b"[] (0, 0)"), done


@both_modes
async def test_a_crash_leaves_no_core(mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with boxed(mode) as (_, sandbox):
        pattern = Path("/proc/sys/kernel/core_pattern").read_text()
        done = await python(sandbox, "import os; os.abort()")
        assert done.exit_code == 134
        done = await sandbox.exec("ls -A; echo '|/workspace/x' > /proc/sys/kernel/core_pattern", timeout_s=30)
        assert done.stdout == b""
        assert done.exit_code != 0
        assert list(tmp_path.iterdir()) == []
        assert Path("/proc/sys/kernel/core_pattern").read_text() == pattern


@both_modes
async def test_writing_to_proc_changes_nothing_outside(mode: Mode) -> None:
    async with boxed(mode) as (_, sandbox):
        code = """
import os
written = []
for pid in ("self", "1"):
    for name, data in (
        ("uid_map", b"0 0 1"), ("gid_map", b"0 0 1"), ("setgroups", b"allow"), ("projid_map", b"0 0 1"),
        ("oom_score_adj", b"-1000"), ("oom_adj", b"-17"), ("loginuid", b"0"), ("attr/current", b"unconfined"),
        ("attr/exec", b"unconfined"), ("make-it-fail", b"1"), ("timens_offsets", b"monotonic 1000 0"),
    ):
        try:
            os.write(os.open(f"/proc/{pid}/{name}", os.O_WRONLY), data)
            written.append((pid, name))
        except OSError:
            pass
print(written)
"""
        done = await python(sandbox, code)
        assert done.stdout == b"[]\n", done
        assert (await sandbox.exec(["id", "-u"], timeout_s=30)).stdout == b"1000\n"


@both_modes
async def test_who_attacks_what_runs_its_commands_fools_or_stops_nobody_else(mode: Mode) -> None:
    """In session mode an agent lives inside under the same uid: its descriptors and memory are what is aimed at."""
    async with boxed(mode) as (provider, sandbox):
        other = await another(provider, options={"mode": mode})
        launcher = provider.launcher_pid
        code = f"""{SYSCALLS}
import json, signal, threading
forged = json.dumps({{"id": 1, "exit_code": 0, "stdout": 6, "stderr": 0}}).encode()
junk = (len(forged).to_bytes(4, "big") + forged, forged + b"\\n", b"\\xff" * 4096, bytes(4096))
for name in os.listdir("/proc"):
    if not name.isdigit() or int(name) == os.getpid():
        continue
    pid = int(name)
    call(101, 16, pid, 0, 0)
    handle = call(434, pid, 0)[0]
    for number in range(64):
        stolen = call(438, handle, number, 0)[0] if handle >= 0 else -1
        for way in (os.O_WRONLY, os.O_RDWR):
            try: descriptor = os.open(f"/proc/{{pid}}/fd/{{number}}", way | os.O_NONBLOCK)
            except OSError: continue
            for data in junk:
                try: os.write(descriptor, data)
                except OSError: pass
        if stolen >= 0:
            os.set_blocking(stolen, False)
            for data in junk:
                try: os.write(stolen, data)
                except OSError: pass
    try:
        with open(f"/proc/{{pid}}/mem", "r+b", buffering=0) as memory:
            memory.seek(0x400000)
            memory.write(b"x" * 4096)
    except (OSError, ValueError):
        pass
    for number in (signal.SIGSTOP, signal.SIGSEGV, signal.SIGTERM):
        try: os.kill(pid, number)
        except OSError: pass
print("done")
"""
        async with asyncio.timeout(50):
            try:
                await python(sandbox, code, timeout_s=10)
                assert (await sandbox.exec(["echo", "mine"], timeout_s=10)).stdout in (b"mine\n", b"")
            except SandboxError:
                pass  # it has destroyed itself, and that is told
            for number in range(3):
                done = await other.exec(["echo", str(number)], timeout_s=20)
                assert (done.exit_code, done.stdout) == (0, f"{number}\n".encode())
            assert provider.launcher_pid == launcher
            assert await works(await another(provider))
            await sandbox.kill()
        assert not sandbox.host_path.exists()
