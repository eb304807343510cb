"""Session mode: one set of namespaces as long as the sandbox lives, and an agent that nothing inside can turn."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from sandbox_helpers import appeared, gone, make, marker, open_to_all, processes_with

from tollway.errors import BadRequest, SandboxGone
from tollway.sandboxes import agent_process, session
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.launcher_command import walk
from tollway.sandboxes.local import LocalProvider, LocalSandbox

PYTHON = ("/usr/bin/python3", "-I", "-S", "-B", "-c")
DETACHED = "trap '' TERM HUP INT; setsid nohup sleep {0} >/dev/null 2>&1 & (sleep {0} &) ; echo started; "


@pytest.fixture
async def long(local: LocalProvider) -> LocalSandbox:
    made = await make(local, options={"mode": "session"})
    assert isinstance(made, LocalSandbox)
    return made


async def agent_of(local: LocalProvider) -> int:
    """Process id of the only agent."""
    assert local.launcher_pid is not None
    found = [pid for pid in walk([local.launcher_pid]) if b"exec(compile" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return max(found)  # bwrap, its parent, has the same words


async def test_servers_files_and_the_network_live_on_between_commands(long: LocalSandbox) -> None:
    await long.write("page", b"served")
    done = await long.exec("python3 -m http.server 8000 2>/dev/null & echo $! > /tmp/pid; echo up", timeout_s=20)
    assert done.stdout == b"up\n"
    code = (
        "import time, urllib.request as u\nfor _ in range(200):\n    try: print(u.urlopen('http://127.0.0.1:8000/page').read());"
        " break\n    except OSError: time.sleep(0.05)"
    )
    assert (await long.exec(["python3", "-c", code], timeout_s=20)).stdout == b"b'served'\n"
    assert (await long.exec("kill $(cat /tmp/pid)", timeout_s=20)).exit_code == 0


async def test_what_is_left_behind_may_go_on_writing_and_is_not_heard(long: LocalSandbox) -> None:
    done = await long.exec("(sleep 0.2; echo late; echo late >&2; echo alive > f) & echo first", timeout_s=20)
    assert (done.stdout, done.exit_code) == (b"first\n", 0)
    done = await long.exec("while [ ! -s f ]; do sleep 0.02; done; cat f", timeout_s=20)
    assert (done.stdout, done.stderr) == (b"alive\n", b"")


@pytest.mark.parametrize("how", ["timeout", "cancel"])
async def test_an_ended_command_takes_its_descendants_along_and_nobody_elses(long: LocalSandbox, how: str) -> None:
    other, mark = marker(), marker()
    await long.exec(f"sleep {other} > /dev/null 2>&1 &", timeout_s=20)
    running = asyncio.create_task(
        long.exec(DETACHED.format(mark) + f"sleep {mark}", timeout_s=2.0 if how == "timeout" else 60)
    )
    await appeared(mark, 3)
    if how == "cancel":
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    else:
        done = await running
        assert (done.timed_out, done.stdout) == (True, b"started\n")
    assert processes_with(f"sleep\0{mark}") == []
    assert len(processes_with(f"sleep\0{other}")) == 1
    await long.kill()
    assert processes_with(other) == []


async def test_a_command_that_forks_without_end_is_ended(local: LocalProvider) -> None:
    long = await make(local, options={"mode": "session"}, pids=20)
    done = await long.exec("f() { f | f & }; f; while :; do :; done", timeout_s=0.5)
    assert done.timed_out
    assert (await long.exec(["echo", "usable"], timeout_s=20)).stdout == b"usable\n"


ATTACKS = {
    "signals": "kill -9 1; kill -9 -1; kill -INT 1; kill -STOP 1; kill -SEGV 1; true",
    "memory": "cat /proc/1/mem; echo x > /proc/1/mem; cat /proc/1/maps; true",
    "descriptors": "ls /proc/1/fd; for i in 3 4 5 6 7 8 9; do echo junk > /proc/1/fd/$i; echo junk >&$i; done; true",
    "limits": 'python3 -c "import resource as r; r.prlimit(1, r.RLIMIT_NOFILE, (3, 3))"; prlimit --pid 1 --cpu=1; true',
    "priorities": "renice -n 19 -p 1; renice -n 19 -u 1000; renice -n 19 -g 1; chrt -i -p 0 1; taskset -p 1 1; true",
    "flood": "head -c 5000000 /dev/urandom; head -c 5000000 /dev/zero >&2",
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_nothing_inside_can_reach_the_agent(long: LocalSandbox, attack: str) -> None:
    done = await long.exec(ATTACKS[attack], timeout_s=20)
    if attack in ("memory", "descriptors"):
        assert b"ermission denied" in done.stderr
    if attack in ("limits", "priorities"):
        assert b"not permitted" in done.stderr
    done = await long.exec("echo out; echo err >&2; exit 3", timeout_s=20)
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"out\n", b"err\n")


async def test_memory_that_runs_out_ends_a_command_and_not_the_agent(local: LocalProvider) -> None:
    long = await make(local, options={"mode": "session"}, mem_mb=128, disk_mb=16)
    if not local.grouped:
        pytest.skip("control groups cannot be written here: nothing bounds the memory of files without a name")
    hoard = (
        "import os\nfds = []\nwhile True:\n    fds.append(os.memfd_create('x'))\n    os.write(fds[-1], bytes(1 << 24))"
    )
    done = await long.exec(["python3", "-c", hoard], timeout_s=30)
    assert (done.exit_code, done.oom) == (137, True)
    assert (await long.exec(["cat", "/proc/self/oom_score_adj"], timeout_s=20)).stdout == b"500\n"


async def test_pipes_that_are_held_for_ever_leave_the_agent_descriptors(local: LocalProvider) -> None:
    long = await make(local, options={"mode": "session"})
    keep = (
        "import os, socket, time\nend = socket.socket(socket.AF_UNIX)\nend.bind('/tmp/keeper')\nend.listen(99)\n"
        "kept = []\nprint('ready', flush=True)\nos.close(1)\nos.close(2)\n"
        "while True:\n    one = end.accept()[0]\n    kept.append(socket.recv_fds(one, 9, 2)[1])\n    one.send(b'x')\n"
    )
    give = (
        "import socket\nend = socket.socket(socket.AF_UNIX)\nend.connect('/tmp/keeper')\n"
        "socket.send_fds(end, [b'x'], [1, 2])\nend.recv(1)\n"
    )
    await long.write("keep.py", keep.encode())
    await long.write("give.py", give.encode())
    await long.exec("python3 -S keep.py & while [ ! -S /tmp/keeper ]; do sleep 0.01; done", timeout_s=20)
    for _ in range(124):
        done = await long.exec(["python3", "-I", "-S", "give.py"], timeout_s=20)
        assert done.exit_code == 0, done.stderr
    assert local.config.local.open_files <= 2 * 124 + 8
    assert (await long.exec(["echo", "usable"], timeout_s=20)).stdout == b"usable\n"


async def test_a_dead_agent_is_a_sandbox_that_is_gone_and_no_other_one(local: LocalProvider) -> None:
    long = await make(local, options={"mode": "session"})
    agent = await agent_of(local)
    neighbour = await make(local, options={"mode": "session"})
    mark = marker()
    running = [asyncio.create_task(long.exec(["sleep", mark], timeout_s=60)) for _ in range(3)]
    await appeared(mark, 3)
    os.kill(agent, signal.SIGKILL)
    for each in running:
        with pytest.raises(SandboxGone):
            await each
    await gone(mark)
    with pytest.raises(SandboxGone):
        await long.exec(["true"], timeout_s=20)
    assert (await neighbour.exec(["echo", "here"], timeout_s=20)).stdout == b"here\n"
    await long.kill()


LIES = {
    "an answer that nobody asked for": session.REPLY.pack(77, 0, 0, 0, 0, 0.0, 0.0),
    "more output than was to be kept": session.REPLY.pack(1, 1 << 30, 0, 0, 0, 0.0, 0.0),
    "readiness twice": session.REPLY.pack(0, 0, 0, 0, 0, 0.0, 0.0) * 2,
    "noise": b"\xff" * 4096,
    "silence": b"",
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lying_agent_ends_its_sandbox_only(
    local: LocalProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    """The agent of a second provider is a program that answers the first command with a lie."""
    folder = tmp_path / "sandboxes"
    folder.mkdir()
    for file in Path(session.__file__).parent.glob("*.py"):
        (folder / file.name).symlink_to(file.resolve())
    for name in ("agent_process.py", "session.py"):
        (folder / name).unlink()
    patient = Path(session.__file__).read_text()
    assert "CALL_GRACE_S = 8.0" in patient
    (folder / "session.py").write_text(patient.replace("CALL_GRACE_S = 8.0", "CALL_GRACE_S = 0.5"))
    (folder / "agent_process.py").write_text(
        f"import os, time\nos.write(0, {session.REPLY.pack(0, 0, 0, 0, 0, 0.0, 0.0)!r})\n"
        f"os.read(0, 9)\nos.write(0, {LIES[lie]!r})\ntime.sleep(60)\n"
    )
    monkeypatch.setattr("tollway.sandboxes.launcher.__file__", str(folder / "launcher.py"))
    async with LocalProvider(SandboxConfig()) as provider:
        liar = await make(provider, options={"mode": "session"})
        with pytest.raises(SandboxGone):
            await liar.exec(["true"], timeout_s=0.5 if lie == "silence" else 20)
        honest = await make(provider)
        assert (await honest.exec(["echo", "fine"], timeout_s=20)).stdout == b"fine\n"


async def test_standard_input_variables_directories_and_refusals(long: LocalSandbox) -> None:
    done = await long.exec(["wc", "-c"], stdin=bytes(3_000_000), timeout_s=20)
    assert done.stdout == b"3000000\n"
    done = await long.exec("pwd; echo $A; ls /proc/self/fd", cwd="/tmp", env={"A": "x=\u00e4\n"}, timeout_s=20)
    assert done.stdout.decode() == "/tmp\nx=\u00e4\n0\n1\n2\n3\n"
    assert (await long.exec(["nonexistent"], timeout_s=20)).exit_code == 127
    assert (await long.exec(["/usr"], timeout_s=20)).exit_code == 126
    assert (await long.exec(["true"], cwd="missing", timeout_s=20)).exit_code == 127
    assert (await long.exec("kill -TERM $$", timeout_s=20)).exit_code == 128 + signal.SIGTERM
    with pytest.raises(BadRequest, match="too long"):
        await long.exec(["echo", "x" * 200_000], timeout_s=20)
    done = await long.exec("yes & yes >&2", timeout_s=0.5, max_output=5000)
    assert done.truncated
    assert len(done.stdout) <= 5000
    many = await asyncio.gather(*(long.exec(f"echo {at}; sleep 0.05; echo {at}", timeout_s=20) for at in range(12)))
    assert [done.stdout for done in many] == [f"{at}\n{at}\n".encode() for at in range(12)]


def test_both_ends_agree_about_the_frames() -> None:
    assert agent_process.REQUEST.format == session.REQUEST.format
    assert agent_process.REPLY.format == session.REPLY.format
    assert struct.calcsize(session.REPLY.format) == session.REPLY.size


_OWNER = """
    import asyncio, sys
    from tollway.sandboxes.base import SandboxSpec
    from tollway.sandboxes.config import LocalConfig, SandboxConfig
    from tollway.sandboxes.local import LocalProvider

    async def main():
        provider = LocalProvider(SandboxConfig(local=LocalConfig(mode="session")))
        for _ in range(3):
            box = await provider.create(SandboxSpec(ttl_s=600, labels={"o": "x"}))
            await box.exec(f"setsid nohup sleep {sys.argv[1]} > /dev/null 2>&1 &", timeout_s=20)
        print(provider._facts["pid"], flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["owner", "guard", "launcher", "owner and guard"])
async def test_nothing_is_left_of_sessions_whoever_is_killed(local: LocalProvider, tmp_path: Path, victim: str) -> None:
    open_to_all(tmp_path)
    mark = marker()
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(_OWNER), mark], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    launcher = int(owner.stdout.readline())
    guard = int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1])
    mark = f"sleep\0{mark}"  # the owner's command line has the number alone
    await appeared(mark, 3)
    victims = {"owner": [owner.pid], "guard": [guard], "launcher": [launcher], "owner and guard": [owner.pid, guard]}
    for pid in victims[victim]:
        os.kill(pid, signal.SIGKILL)
    await gone(mark)
    owner.kill()
    owner.wait(10)
    owner.stdout.close()
    while Path(f"/proc/{launcher}").exists():
        await asyncio.sleep(0.02)
    groups = list(Path("/sys/fs/cgroup").glob(f"**/tollway-{os.getuid()}-{launcher}"))
    end = 100
    while groups and end:
        await asyncio.sleep(0.05)
        groups, end = [group for group in groups if group.exists()], end - 1
    assert groups == []
