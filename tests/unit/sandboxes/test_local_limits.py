"""What bounds a local sandbox: control groups where they can be made, the system call filter, and nothing silently."""

from __future__ import annotations

import errno
import logging
import os
import struct
from pathlib import Path

import pytest
from sandbox_helpers import gone, make, marker, processes_with

from tollway.errors import BadRequest
from tollway.sandboxes import cgroups, seccomp
from tollway.sandboxes.config import LocalConfig, SandboxConfig
from tollway.sandboxes.limits import group_limits, rlimits
from tollway.sandboxes.local import LocalProvider
from tollway.sandboxes.spec import SandboxSpec

PYTHON = ("/usr/bin/python3", "-I", "-S", "-B", "-c")
_CONTROLLERS = {name for place in cgroups.find() for name in place.controllers}


def machine(root: Path, groups: str, mounts: dict[str, str], files: dict[str, str]) -> str:
    """A fake root with what is read of /proc and the given hierarchies, all of them writable."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    lines = [
        f"30 24 0:{at} {where.partition(':')[2] or '/'} {where.partition(':')[0]} rw - {kind}"
        for at, (where, kind) in enumerate(mounts.items())
    ]
    (root / "proc/self/mountinfo").write_text("\n".join(["24 1 8:1 / / rw - ext4 /dev/sda rw", *lines]) + "\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


def found(root: str) -> list[tuple[str, int, tuple[str, ...]]]:
    return [(place.path.removeprefix(root), place.version, place.controllers) for place in cgroups.find(root)]


def test_first_version_hierarchies_are_used_below_our_own_group(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "9:memory:/jobs/7\n8:pids:/\n5:cpu,cpuacct:/jobs\n1:name=systemd:/x\n0::/\n",
        {
            "/cg/memory": "cgroup cgroup rw,memory",
            "/cg/pids": "cgroup cgroup rw,pids",
            "/cg/cpu": "cgroup cgroup rw,cpu,cpuacct",
            "/cg/systemd": "cgroup cgroup rw,name=systemd",
        },
        dict.fromkeys(("cg/memory/jobs/7/cgroup.procs", "cg/pids/cgroup.procs", "cg/cpu/jobs/cgroup.procs"), ""),
    )
    assert found(root) == [
        ("/cg/memory/jobs/7", 1, ("memory",)),
        ("/cg/pids", 1, ("pids",)),
        ("/cg/cpu/jobs", 1, ("cpu",)),
    ]


def test_a_container_sees_the_part_of_the_hierarchy_that_is_mounted(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "9:memory:/docker/abc\n",
        {"/cg/memory:/docker/abc": "cgroup cgroup rw,memory"},
        {"cg/memory/cgroup.procs": ""},
    )
    assert found(root) == [("/cg/memory", 1, ("memory",))]


def test_the_second_version_needs_a_group_that_passes_controllers_on(tmp_path: Path) -> None:
    files = {
        "cg/user/session/cgroup.procs": "1",
        "cg/user/session/cgroup.type": "domain",
        "cg/user/session/cgroup.controllers": "memory pids",
        "cg/user/session/cgroup.subtree_control": "",
        "cg/user/cgroup.procs": "",
        "cg/user/cgroup.type": "domain",
        "cg/user/cgroup.controllers": "cpu memory pids",
        "cg/user/cgroup.subtree_control": "memory pids",
    }
    root = machine(tmp_path, "0::/user/session\n", {"/cg": "cgroup2 cgroup2 rw"}, files)
    assert found(root) == [("/cg/user", 2, ("memory", "pids"))]


def test_the_top_of_the_second_version_is_asked_to_pass_on_what_it_offers(tmp_path: Path) -> None:
    files = {
        "cg/cgroup.procs": "1",
        "cg/cgroup.controllers": "cpu memory pids hugetlb",
        "cg/cgroup.subtree_control": "",
    }
    root = machine(tmp_path, "0::/\n", {"/cg": "cgroup2 cgroup2 rw"}, files)
    cgroups.find(root)
    assert (tmp_path / "cg/cgroup.subtree_control").read_text() == "+cpu +memory +pids"


@pytest.mark.parametrize("files", [{}, {"cg/cgroup.procs": "", "cg/cgroup.controllers": "hugetlb"}])
def test_nothing_is_found_where_nothing_is_offered(tmp_path: Path, files: dict[str, str]) -> None:
    assert found(machine(tmp_path, "0::/\n", {"/cg": "cgroup2 cgroup2 rw"}, files)) == []
    assert found(machine(tmp_path / "bare", "", {}, {})) == []


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        (
            1,
            {
                "memory.limit_in_bytes": "1000",
                "memory.memsw.limit_in_bytes": "1000",
                "pids.max": "7",
                "cpu.cfs_period_us": "100000",
                "cpu.cfs_quota_us": "150000",
            },
        ),
        (2, {"memory.max": "1000", "memory.swap.max": "0", "pids.max": "7", "cpu.max": "150000 100000"}),
    ],
)
def test_each_version_is_told_its_limits_in_its_own_words(version: int, wanted: dict[str, str]) -> None:
    place = cgroups.Place("/x", version, cgroups.CONTROLLERS)
    assert dict(cgroups.settings(place, cgroups.GroupLimits(1000, 7, 1.5))) == wanted
    assert cgroups.settings(cgroups.Place("/x", version, ("cpu", "pids")), cgroups.GroupLimits(1000, None, None)) == []


def test_limits_of_a_process_leave_address_space_to_runtimes_where_a_group_bounds_memory() -> None:
    import resource

    settings = {"mem_mb": 8, "pids": 3, "file_mb": 1, "open_files": 16}
    alone = dict(rlimits(**settings, cpu_s=2.0))  # type: ignore[arg-type]
    grouped = dict(rlimits(**settings, cpu_s=None, grouped=True))  # type: ignore[arg-type]
    assert alone[resource.RLIMIT_AS] == grouped[resource.RLIMIT_DATA] == 8 << 20
    assert resource.RLIMIT_AS not in grouped
    assert resource.RLIMIT_CPU not in grouped
    spec = SandboxSpec(ttl_s=1, labels={"a": "b"}, mem_mb=10, disk_mb=20, pids=5, cpu=0.5)
    assert group_limits(spec, 1, own_uid=True) == [32 << 20, None, 0.5]
    assert group_limits(spec, 1, own_uid=False) == [32 << 20, 7, 0.5]


@pytest.mark.skipif("memory" not in _CONTROLLERS, reason="no writable memory control group on this machine")
@pytest.mark.parametrize("mode", ["exec", "session"])
async def test_the_memory_of_all_processes_together_is_bounded_and_said_so(local: LocalProvider, mode: str) -> None:
    sandbox = await make(local, mem_mb=64, disk_mb=16, options={"mode": mode})
    hold = f"{' '.join(PYTHON)} 'x = b\"x\" * (40 << 20); import time; time.sleep(1)'"
    done = await sandbox.exec(f"for i in 1 2 3 4 5 6 7 8; do {hold} & done; wait", timeout_s=20)
    assert done.oom
    shared = "import mmap\nm = mmap.mmap(-1, 400 << 20)\nfor at in range(0, 400 << 20, 4096): m[at] = 1"
    done = await sandbox.exec([*PYTHON, shared], timeout_s=20)
    assert (done.exit_code, done.oom) == (137, True)
    done = await sandbox.exec([*PYTHON, "x = bytearray(100 << 20)"], timeout_s=20)
    assert b"MemoryError" in done.stderr
    done = await sandbox.exec(["echo", "usable"], timeout_s=20)
    assert (done.stdout, done.oom) == (b"usable\n", False)


@pytest.mark.skipif("cpu" not in _CONTROLLERS, reason="no writable cpu control group on this machine")
async def test_a_share_of_a_core_is_no_more(local: LocalProvider) -> None:
    sandbox = await make(local, cpu=0.2)
    done = await sandbox.exec("while :; do :; done & while :; do :; done", timeout_s=1.5)
    assert done.timed_out
    assert done.cpu_s is not None
    assert done.cpu_s < 0.9


@pytest.mark.skipif("memory" not in _CONTROLLERS, reason="no writable memory control group on this machine")
async def test_all_sandboxes_of_an_owner_together_leave_the_machine_some_memory(local: LocalProvider) -> None:
    sandbox = await make(local)
    await sandbox.exec(["true"], timeout_s=20)
    (place,) = (place for place in cgroups.find() if "memory" in place.controllers)
    name = "memory.max" if place.version == 2 else "memory.limit_in_bytes"
    owner = Path(place.path) / f"tollway-{os.getuid()}-{local._facts['pid']}"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0.7 * total < int((owner / name).read_text()) < 0.9 * total


async def test_groups_are_gone_when_sandboxes_and_provider_are(local: LocalProvider) -> None:
    async with LocalProvider() as provider:
        sandbox = await make(provider, cpu=1.0)
        await sandbox.exec(["true"], timeout_s=20)
        owner = f"tollway-{os.getuid()}-{provider._facts['pid']}"
        places = [Path(place.path) / owner for place in cgroups.find()]
        assert [len([entry for entry in place.iterdir() if entry.is_dir()]) for place in places if place.exists()] in (
            [],
            [1] * len([place for place in places if place.exists()]),
        )
        await sandbox.kill()
        assert [entry for place in places if place.exists() for entry in place.iterdir() if entry.is_dir()] == []
    assert not any(place.exists() for place in places)


# -- the system call filter ------------------------------------------------------------------------


def decide(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """What the kernel does with a call: the program's answer, run as it would."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    code = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    at, loaded = 0, 0
    while True:
        what, true, false, operand = code[at]
        at += 1
        match what:
            case 0x20:
                (loaded,) = struct.unpack_from("<I", data, operand)
            case 0x06:
                return int(operand)
            case _:
                holds = {0x15: loaded == operand, 0x35: loaded >= operand, 0x45: bool(loaded & operand)}[what]
                at += true if holds else false


ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x50000
NUMBERS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@pytest.mark.parametrize("name", NUMBERS)
def test_the_filter_lets_ordinary_calls_through_and_no_others(name: str) -> None:
    program, own = seccomp.filter_program(name), NUMBERS[name]
    assert program is not None
    column = 0 if name == "x86_64" else 1
    clone, unshare, socket, ioctl, clone3 = [(56, 272, 41, 16, 435), (220, 97, 198, 29, 435)][column]
    assert decide(program, 0x40000003, 1) == KILL
    assert decide(program, next(each for each in NUMBERS.values() if each != own), 1) == KILL
    for numbers in seccomp.DENIED.values():
        if numbers[column] is not None:
            assert decide(program, own, int(numbers[column] or 0)) == ERRNO | errno.EPERM
    # A thread, a process, and a process in namespaces of its own.
    assert decide(program, own, clone, 0x3D0F00) == ALLOW
    assert decide(program, own, clone, 17) == ALLOW
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(program, own, clone, flag | 17) == ERRNO | errno.EPERM
        assert decide(program, own, unshare, flag) == ERRNO | errno.EPERM
    assert decide(program, own, unshare, 0x80) == ERRNO | errno.EPERM
    assert decide(program, own, unshare, 0x400) == ALLOW
    assert decide(program, own, clone3) == ERRNO | errno.ENOSYS
    for family in (1, 2, 10):
        assert decide(program, own, socket, family, 1, 0) == ALLOW
    assert decide(program, own, socket, 16, 3, 0) == ALLOW
    assert decide(program, own, socket, 16, 3, 12) == ERRNO | errno.EPROTONOSUPPORT
    for family in (17, 31, 38, 40, 44):
        assert decide(program, own, socket, family, 1, 0) == ERRNO | errno.EAFNOSUPPORT
    prlimit, setpriority, ioprio_set, setscheduler = [(302, 141, 251, 144), (261, 140, 30, 119)][column]
    assert [decide(program, own, prlimit, pid, 7) for pid in (0, 1, 77)] == [ALLOW, *[ERRNO | errno.EPERM] * 2]
    assert [decide(program, own, setscheduler, pid) for pid in (0, 1, 77)] == [ALLOW, ERRNO | errno.EPERM, ALLOW]
    for call, one in ((setpriority, 0), (ioprio_set, 1)):
        assert [decide(program, own, call, one, pid) for pid in (0, 1, 77)] == [ALLOW, ERRNO | errno.EPERM, ALLOW]
        assert decide(program, own, call, one + 1, 0) == decide(program, own, call, 2, 0) == ERRNO | errno.EPERM
    assert decide(program, own, ioctl, 0, 0x5412) == ERRNO | errno.EPERM
    assert decide(program, own, ioctl, 0, 0x5412 | 1 << 32) == ERRNO | errno.EPERM
    assert decide(program, own, ioctl, 0, 0x5401) == ALLOW
    if name == "x86_64":
        assert decide(program, own, 0x40000000 | 1) == ERRNO | errno.ENOSYS


def test_machines_whose_numbers_are_unknown_have_no_filter() -> None:
    assert seccomp.filter_program("riscv64") is None


@pytest.mark.skipif(seccomp.filter_program(os.uname().machine) is None, reason="no filter for this architecture")
@pytest.mark.parametrize("mode", ["exec", "session"])
async def test_filtered_calls_fail_inside_and_compilers_and_runtimes_work(local: LocalProvider, mode: str) -> None:
    sandbox = await make(local, options={"mode": mode})
    keyctl = seccomp.DENIED["keyctl"][0 if os.uname().machine == "x86_64" else 1]
    code = f"""
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
for name, call in {{
    "ptrace": lambda: libc.ptrace(16, os.getppid(), 0, 0),
    "unshare": lambda: libc.unshare(0x10000000),
    "keyctl": lambda: libc.syscall({keyctl}, 0, 0, 0, 0),
    "personality": lambda: libc.personality(0x0040000),
}}.items():
    print(name, call(), ctypes.get_errno())
try:
    socket.socket(40, socket.SOCK_STREAM)
except OSError as error:
    print(error.errno)
"""
    done = await sandbox.exec([*PYTHON, code], timeout_s=20)
    assert done.stdout.decode().split() == [
        *("ptrace", "-1", "1", "unshare", "-1", "1", "keyctl", "-1", "1", "personality", "-1", "1", "97")
    ], done
    done = await sandbox.exec(
        "python3 -c 'import threading as t; x = t.Thread(target=print, args=(1,)); x.start(); x.join()'", timeout_s=20
    )
    assert done.stdout == b"1\n", done


# -- without isolation -----------------------------------------------------------------------------


async def test_without_isolation_only_on_request_loudly_and_leaving_nothing(
    local: LocalProvider, caplog: pytest.LogCaptureFixture
) -> None:
    mark = marker()
    with caplog.at_level(logging.WARNING):
        async with LocalProvider(SandboxConfig(local=LocalConfig(unsafe=True))) as provider:
            sandbox = await make(provider, files={"f": b"here"}, env={"A": "1"})
            assert "WITHOUT ANY ISOLATION" in caplog.text
            done = await sandbox.exec("cat f; echo $A; pwd", timeout_s=20)
            assert done.stdout.startswith(b"here1\n/"), done
            done = await sandbox.exec(f"setsid nohup sleep {mark} & (sleep {mark} &); exit 5", timeout_s=20)
            assert done.exit_code == 5
            assert processes_with(mark) == []
            done = await sandbox.exec(f"setsid sleep {mark} & (setsid sleep {mark} &); sleep {mark}", timeout_s=1.0)
            assert done.timed_out
            await gone(mark)
            for settings in ({"options": {"mode": "session"}}, {"mounts": {"/opt/x": Path("/usr")}}):
                with pytest.raises(BadRequest, match="isolation"):
                    await make(provider, **settings)
    caplog.clear()
    await (await make(local)).exec(["true"], timeout_s=20)
    assert "ISOLATION" not in caplog.text
