#!/usr/bin/env python3
"""Cost of a local sandbox against bare bwrap with the identical option list, in one run.

Both sides run the same command in a workspace of the same kind; the bare side forks from a small process, drops
the uid and executes bwrap with the same options and the same system call filter, nothing else. CPU is that of all
processes involved, waited for. Reported too: session mode (time until ready, ``exec_ms_p50`` of a command), one
micro-SWE episode's worth of commands (two checks, one edit, one grading sandbox), memory of live idle sandboxes
without and with an agent, and processes left after SIGKILL of an owner. The last line is JSON.

    scripts/bench_sandbox.py [--rounds N] [--live N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tollway.envs.base import Work
from tollway.envs.config import EnvConfig
from tollway.envs.grading import PYTHON
from tollway.envs.micro_swe.environment import CHECK_COMMAND, MicroSwe
from tollway.envs.micro_swe.rules import RULES, edit_command
from tollway.sandboxes.base import Sandbox, SandboxSpec
from tollway.sandboxes.bwrap import base_options, command_options, encode
from tollway.sandboxes.config import LocalConfig, SandboxConfig
from tollway.sandboxes.launcher_command import walk
from tollway.sandboxes.local import LocalProvider, LocalSandbox
from tollway.sandboxes.program import find_bwrap
from tollway.sandboxes.seccomp import filter_program

EXEC = [*PYTHON, "-c", "pass"]
FILES = {"calc.py": b"x = 1\n", "check.py": b"print('ok')\n"}

BARE = """
import os, resource, sys, time
bwrap, uid, rounds, workspace, options = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
seccomp, command = bytes.fromhex(sys.argv[6]), sys.argv[7:]
data = bytes.fromhex(options)
libc = __import__("ctypes").CDLL(None)
libc.prctl(36, 1, 0, 0, 0)  # subreaper: what bwrap leaves is waited for and counted
wall = []
for _ in range(rounds):
    started = time.perf_counter()
    fd = os.memfd_create("a", 0)
    os.write(fd, data)
    filters = []
    if seccomp:
        filters.append(os.memfd_create("s", 0))
        os.write(filters[0], seccomp)
        os.lseek(filters[0], 0, 0)
        os.write(fd, b"--seccomp\\0%d\\0" % filters[0])
    os.lseek(fd, 0, 0)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if uid:
            os.setgroups([]); os.setgid(uid); os.setuid(uid)
        os.execve(bwrap, ["bwrap", "--args", str(fd), "--", *command], {})
    for each in (fd, *filters):
        os.close(each)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    wall.append(time.perf_counter() - started)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
own = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, own.ru_utime + own.ru_stime, *wall)
"""

OWNER = """
import asyncio
from tollway.sandboxes.base import SandboxSpec
from tollway.sandboxes.local import LocalProvider
async def main():
    provider = LocalProvider()
    boxes = [await provider.create(SandboxSpec(ttl_s=600, labels={"o": "x"})) for _ in range(8)]
    runs = [asyncio.create_task(b.exec("setsid nohup sleep 86399 & exec sleep 86399", timeout_s=600)) for b in boxes]
    await asyncio.sleep(3)
    print("ready", flush=True)
    await asyncio.gather(*runs)
asyncio.run(main())
"""


def bare(bwrap: Path, sandbox: LocalSandbox, rounds: int, command: list[str]) -> tuple[float, list[float]]:
    """CPU milliseconds per run and wall milliseconds of each, of bwrap without us."""
    options = encode(
        [*base_options(str(sandbox.host_path), network=False, tmp_bytes=64 << 20), *command_options("/workspace", {})]
    )
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            BARE,
            str(bwrap),
            str(sandbox.host_uid or 0),
            str(rounds),
            str(sandbox.host_path),
            options.hex(),
            (filter_program(os.uname().machine) or b"").hex(),
            *command,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    children, _, *wall = (float(word) for word in done.stdout.split())
    return 1000 * children / rounds, [1000 * value for value in wall]


def cpu_ms(pid: int) -> float:
    """CPU of a process, of its children that are alive, and of all that they have waited for."""
    total = 0.0
    for one in (pid, *children(pid)):
        fields = Path(f"/proc/{one}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        total += sum(int(field) for field in fields[11:15]) * 1000 / os.sysconf("SC_CLK_TCK")
    return total


def children(pid: int) -> list[int]:
    """The launcher has two halves: the one that is known, and its child that starts the sandboxes."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def own_ms() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return 1000 * (used.ru_utime + used.ru_stime)


class Meter:
    """CPU of this process and of everything under the launcher between two moments."""

    def __init__(self, provider: LocalProvider) -> None:
        self.provider = provider
        self.start = self.read()

    def read(self) -> tuple[float, float]:
        pid = self.provider.launcher_pid
        return own_ms(), cpu_ms(pid) if pid is not None else 0.0

    def per(self, count: int) -> tuple[float, float]:
        now = self.read()
        return (now[0] - self.start[0]) / count, (now[1] - self.start[1]) / count


async def measure(args: argparse.Namespace) -> dict[str, object]:
    bwrap = find_bwrap(LocalConfig())
    report: dict[str, object] = {}
    async with LocalProvider(SandboxConfig(max_live=args.live + 8, max_running=args.live + 8)) as provider:
        spec = SandboxSpec(ttl_s=600, labels={"bench": "sandbox"}, files=FILES)
        sandbox = await provider.create(spec)
        assert isinstance(sandbox, LocalSandbox)
        await sandbox.exec(EXEC, timeout_s=30)

        ratios, ours_all, bare_all, cpu_all, bare_cpu_all = [], [], [], [], []
        for _ in range(4):  # alternate, so that both see the same machine
            rounds = max(5, args.rounds // 4)
            bare_cpu, bare_wall = bare(bwrap, sandbox, rounds, EXEC)
            meter, wall = Meter(provider), []
            for _ in range(rounds):
                started = time.perf_counter()
                one = await provider.create(spec)
                done = await one.exec(EXEC, timeout_s=30)
                await one.kill()
                wall.append(1000 * (time.perf_counter() - started))
                assert done.exit_code == 0, done
            controller, launcher = meter.per(rounds)
            ours_all += wall
            bare_all += bare_wall
            cpu_all.append(controller + launcher)
            bare_cpu_all.append(bare_cpu)
            ratios.append(statistics.median(wall) / statistics.median(bare_wall))
            print(
                f"create+exec+kill: {statistics.median(wall):6.2f} ms, cpu {controller + launcher:6.2f} "
                f"(controller {controller:.2f}); bare bwrap {statistics.median(bare_wall):6.2f} ms, cpu {bare_cpu:6.2f}"
            )
        report["create_ratio"] = round(statistics.median(ratios), 3)
        report["create_exec_kill_ms_p50"] = round(statistics.median(ours_all), 2)
        report["bare_ms_p50"] = round(statistics.median(bare_all), 2)
        report["cpu_ms"] = round(statistics.median(cpu_all), 2)
        report["bare_cpu_ms"] = round(statistics.median(bare_cpu_all), 2)

        report["exec_fresh_ms_p50"] = await exec_ms(sandbox, args.rounds)
        report |= await session(provider, args.rounds)
        report["episode_cpu_ms"] = round(await episode(provider, args.rounds), 2)
        report |= await idle(provider, args.live)
        report |= await idle_sessions(provider, args.live)
    report["survivors"] = survivors()
    return report


async def exec_ms(sandbox: Sandbox, rounds: int) -> float:
    """Median wall milliseconds of a command that does nothing."""
    wall = []
    for _ in range(rounds):
        started = time.perf_counter()
        await sandbox.exec(["/usr/bin/true"], timeout_s=30)
        wall.append(1000 * (time.perf_counter() - started))
    return round(statistics.median(wall), 2)


async def session(provider: LocalProvider, rounds: int) -> dict[str, object]:
    """Session mode: milliseconds until a sandbox is ready, and of a command in it."""
    spec = SandboxSpec(ttl_s=600, labels={"bench": "session"}, options={"mode": "session"})
    ready = []
    for _ in range(max(5, rounds // 4)):
        started = time.perf_counter()
        sandbox = await provider.create(spec)
        ready.append(1000 * (time.perf_counter() - started))
        await sandbox.kill()
    sandbox = await provider.create(spec)
    await exec_ms(sandbox, 5)
    found = {"session_ready_ms_p50": round(statistics.median(ready), 2), "exec_ms_p50": await exec_ms(sandbox, rounds)}
    await sandbox.kill()
    return dict(found)


async def idle_sessions(provider: LocalProvider, count: int) -> dict[str, object]:
    """``count`` sandboxes in session mode that wait for commands: memory of all that each needs."""
    spec = SandboxSpec(ttl_s=600, labels={"bench": "idle"}, options={"mode": "session"})
    boxes = [await provider.create(spec) for _ in range(count)]
    answers = [await box.exec(["/usr/bin/true"], timeout_s=30) for box in boxes]
    assert provider.launcher_pid is not None
    launcher = [provider.launcher_pid, *children(provider.launcher_pid)]
    pss = sum(memory_kib(pid) for pid in walk(launcher[:1]) if pid not in launcher)
    await asyncio.gather(*(box.kill() for box in boxes))
    alive = sum(answer.exit_code == 0 for answer in answers)
    return {"live_sessions": alive, "mib_each_session": round(pss / 1024 / max(1, count), 2)}


async def episode(provider: LocalProvider, rounds: int) -> float:
    """CPU of what one micro-SWE episode asks of its sandboxes: run, edit, run, and a grade."""
    environment = MicroSwe(EnvConfig())
    meter = Meter(provider)

    async def one(index: int) -> None:
        task, project = environment.task(index), environment.project(index)
        sandbox = await provider.create(SandboxSpec(ttl_s=60, labels={"bench": "episode"}, files=task.files))
        for command in (CHECK_COMMAND, edit_command(RULES[project.rule], project.path), CHECK_COMMAND):
            await sandbox.exec(list(command), timeout_s=30)
        submission = {path: await sandbox.read(path) for path in task.sources}
        await sandbox.kill()
        verdict = await environment.grader(task).grade(task, Work(submission=submission, provider=provider))
        assert verdict.reward == 1.0

    for start in range(0, rounds, 8):
        await asyncio.gather(*(one(index) for index in range(start, min(start + 8, rounds))))
    return sum(meter.per(rounds))


async def idle(provider: LocalProvider, count: int) -> dict[str, object]:
    """``count`` sandboxes with a sleeping command each: memory and how fast they end."""
    boxes = [await provider.create(SandboxSpec(ttl_s=600, labels={"bench": "idle"})) for _ in range(count)]
    runs = [asyncio.create_task(box.exec(["sleep", "86397"], timeout_s=600)) for box in boxes]
    for _ in range(300):
        found, commands = sleeping("86397")
        if commands == count:
            break
        await asyncio.sleep(0.2)
    pss = sum(memory_kib(pid) for pid in found)
    for run in runs:
        run.cancel()
    await asyncio.gather(*runs, return_exceptions=True)
    await asyncio.gather(*(box.kill() for box in boxes))
    return {"live": commands, "mib_each": round(pss / 1024 / max(1, count), 2)}


def sleeping(marker: str) -> tuple[list[int], int]:
    """Processes whose command line names ``marker`` (bwrap's two and the command), and how many are commands."""
    found, commands = [], 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if marker.encode() in words:
                found.append(int(entry.name))
                commands += words[0] == b"sleep"
    return found, commands


def memory_kib(pid: int) -> int:
    """Proportional set size of a process."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def survivors() -> int:
    """Processes that are left when an owner with eight busy sandboxes is killed outright."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    owner.stdout.readline()
    if sleeping("86399")[1] != 16:
        raise RuntimeError("the owner did not start its commands")
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 5
    while sleeping("86399")[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    return len(sleeping("86399")[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--live", type=int, default=300)
    args = parser.parse_args()
    report = asyncio.run(measure(args))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
