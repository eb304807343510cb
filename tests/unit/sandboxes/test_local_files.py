"""What a local sandbox starts with and what it may hold: trees, host files, sizes, snapshots, forks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sandbox_helpers import make, open_to_all

from tollway.errors import BadImage, BadRequest, SandboxError, SandboxGone
from tollway.sandboxes.config import LocalConfig, SandboxConfig
from tollway.sandboxes.local import LocalProvider, LocalSandbox
from tollway.sandboxes.probe import bounds
from tollway.sandboxes.space import copy_tree

_BOUNDS = bounds()
mounted = pytest.mark.skipif(not _BOUNDS.mounts, reason=_BOUNDS.mounts_detail)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files of ours that nobody else may read."""
    top = tmp_path / "tree"
    (top / "package" / "deep").mkdir(parents=True)
    (top / "package" / "old.py").write_text("old = 1\n")
    (top / "package" / "deep" / "data").write_bytes(bytes(range(256)))
    (top / "run").write_text("#!/bin/sh\necho ran\n")
    (top / "run").chmod(0o700)
    (top / "package" / "old.py").chmod(0o600)
    (top / "link").symlink_to("package/old.py")
    return top


@pytest.fixture
async def plain(local: LocalProvider, tmp_path: Path) -> AsyncIterator[LocalProvider]:
    """A provider whose workspaces are directories of an ordinary file system."""
    root = tmp_path / "root"
    root.mkdir()
    open_to_all(root)
    async with LocalProvider(SandboxConfig(local=LocalConfig(root=root))) as provider:
        yield provider


def listing(top: Path) -> list[tuple[str, bytes, int, int]]:
    return [
        (str(path.relative_to(top)), path.read_bytes() if path.is_file() else b"", path.lstat().st_mode, at)
        for path in sorted(top.rglob("*"))
        for at in [path.lstat().st_mtime_ns]
    ]


EDIT = (
    "./run && echo new >> package/old.py && mkdir added && echo x > package/deep/more && rm package/deep/data && "
    "mv package moved && cat link 2>/dev/null; cat moved/old.py; ls moved/deep; echo '#' >> run && ./run"
)


@pytest.mark.parametrize("kind", ["local", "plain"])
async def test_a_tree_can_be_changed_inside_and_stays_as_it_was_outside(
    local: LocalProvider, plain: LocalProvider, tree: Path, kind: str
) -> None:
    provider = {"local": local, "plain": plain}[kind]
    before = listing(tree)
    sandbox = await make(provider, tree=tree, files={"package/extra.py": b"2", "run2": b""})
    done = await sandbox.exec(EDIT, timeout_s=20)
    assert done.stdout == b"ran\nold = 1\nnew\nmore\nran\n", done
    assert await sandbox.read("moved/extra.py") == b"2"
    assert await sandbox.read("moved/old.py") == b"old = 1\nnew\n"
    other = await make(provider, tree=tree)
    assert (await other.exec("cat link; ls", timeout_s=20)).stdout == b"old = 1\nlink\npackage\nrun\n"
    await sandbox.kill()
    assert listing(tree) == before


async def test_files_outlive_a_launcher_that_is_killed(local: LocalProvider, tree: Path) -> None:
    sandbox, empty = await make(local, tree=tree), await make(local, files={"f": b"kept"})
    await sandbox.exec("echo changed > package/old.py", timeout_s=20)
    launcher = local.launcher_pid
    assert launcher is not None
    os.kill(launcher, signal.SIGKILL)
    async with asyncio.timeout(20):
        while local.launcher_pid == launcher:
            with contextlib.suppress(SandboxError):
                await sandbox.exec(["true"], timeout_s=20)
    assert (await sandbox.exec("cat link; ls", timeout_s=20)).stdout == b"changed\nlink\npackage\nrun\n"
    assert (await empty.exec("cat f; echo more >> f", timeout_s=20)).stdout == b"kept"
    assert await empty.read("f") == b"keptmore\n"


async def test_a_tree_of_several_owners_is_copied_and_can_be_changed(local: LocalProvider, tree: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(tree / "package" / "old.py", 1234, 1234)
    sandbox = await make(local, tree=tree)
    done = await sandbox.exec(EDIT, timeout_s=20)
    assert done.stdout.endswith(b"new\nmore\nran\n"), done
    assert (tree / "package" / "old.py").read_text() == "old = 1\n"


async def test_a_file_system_that_holds_only_so_much_and_so_many(local: LocalProvider, tree: Path) -> None:
    for start in (None, tree):
        sandbox = await make(local, tree=start, disk_mb=4)
        if not isinstance(sandbox, LocalSandbox) or not sandbox.space.mounted:
            pytest.skip(_BOUNDS.mounts_detail)
        done = await sandbox.exec("for i in 1 2 3; do head -c 3000000 /dev/zero > f$i; done; du -sm .", timeout_s=20)
        assert b"No space left" in done.stderr
        assert int(done.stdout.split()[0]) <= 5
        code = "n = 0\nwhile True:\n    open(f'many{n}', 'w').close()\n    n += 1"
        done = await sandbox.exec(f"rm f?; python3 -c \"exec('''{code}''')\"; ls | wc -l", timeout_s=20)
        assert b"No space left" in done.stderr
        assert int(done.stdout) < 3000
        with pytest.raises(BadRequest, match="disk_mb=4"):
            await sandbox.write("big", bytes(5 << 20))
        await sandbox.exec("rm -f many*", timeout_s=20)
        await sandbox.write("big", bytes(1 << 20))


async def test_a_plain_directory_that_grows_too_large_ends_its_sandbox(plain: LocalProvider) -> None:
    sandbox, neighbour = await make(plain, disk_mb=4), await make(plain, disk_mb=4)
    with pytest.raises(SandboxGone, match="disk_mb=4"):
        await sandbox.exec("for i in 1 2 3; do head -c 3000000 /dev/zero > f$i; done; sleep 20", timeout_s=20)
    assert (await neighbour.exec(["echo", "fine"], timeout_s=20)).stdout == b"fine\n"


@pytest.fixture
def greeter(tmp_path: Path) -> Iterator[Path]:
    """A directory that only we can enter, with a secret and a socket that says something."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "secret").write_text("read me")
    (private / "secret").chmod(0o600)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(private / "s"))
        server.listen()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"hello")

        thread = threading.Thread(target=serve)
        thread.start()
        yield private
        if thread.is_alive():  # nobody came
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(str(private / "s"))
        thread.join()


@mounted
@pytest.mark.parametrize("mode", ["exec", "session"])
async def test_host_files_are_read_only_and_their_sockets_answer(
    local: LocalProvider, greeter: Path, mode: str
) -> None:
    mounts = {"/opt/given": greeter, "/etc/one": greeter / "secret"}
    sandbox = await make(local, mounts=mounts, options={"mode": mode})
    code = (
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('/opt/given/s')\nprint(s.recv(9).decode())\n"
        "print(open('/opt/given/secret').read(), open('/etc/one').read())"
    )
    done = await sandbox.exec(["/usr/bin/python3", "-c", code], timeout_s=20)
    assert done.stdout == b"hello\nread me read me\n", done
    done = await sandbox.exec(
        "echo x > /opt/given/secret; echo x > /opt/given/n; rm /etc/one; ls -l /opt", timeout_s=20
    )
    assert done.stderr.count(b"Read-only file system") == 3
    assert sorted(os.listdir(greeter)) == ["s", "secret"]
    assert (greeter / "secret").read_text() == "read me"


@pytest.mark.parametrize(
    "inside", ["/proc/x", "/dev/x", "/", "/workspace", "/usr/no/such/place", "relative", "/a/../b"]
)
async def test_host_files_cannot_appear_just_anywhere(local: LocalProvider, tmp_path: Path, inside: str) -> None:
    with pytest.raises(BadRequest):
        await make(local, mounts={inside: tmp_path})
    assert local.live == 0


async def test_links_at_the_root_lead_where_the_spec_says(local: LocalProvider) -> None:
    sandbox = await make(local, files={"f": b"inside"}, options={"link:/app": "/workspace", "link:/a/b": "/tmp"})
    done = await sandbox.exec("cat /app/f; echo x > /app/g; readlink /a/b; ls", timeout_s=20)
    assert done.stdout == b"inside/tmp\nf\ng\n"
    for options in ({"link:/usr/x": "/tmp"}, {"link:/x": "relative"}, {"speed": "high"}, {"mode": "turbo"}):
        with pytest.raises(BadRequest):
            await make(local, options=options)


async def test_a_snapshot_starts_others_and_a_fork_goes_its_own_way(local: LocalProvider, tree: Path) -> None:
    sandbox = await make(local, tree=tree)
    await sandbox.exec(
        "echo 1 > state; rm package/old.py; mkfifo pipe; ln -s /etc/passwd out; chmod 750 run", timeout_s=20
    )
    name = await sandbox.snapshot()
    await sandbox.exec("echo 2 > state", timeout_s=20)
    fork = await sandbox.fork()
    await fork.exec("echo 3 > state", timeout_s=20)
    restored = await make(local, image=name)
    looks = "cat state; ls package; stat -c %a run; readlink out; ls pipe; ./run"
    found = await restored.exec(looks, timeout_s=20)
    assert found.stdout == b"1\ndeep\n750\n/etc/passwd\nran\n", found
    await sandbox.kill()
    assert (await fork.exec("cat state; echo 4 > state; cat state", timeout_s=20)).stdout == b"3\n4\n"
    again = await make(local, image=name)
    assert (await again.exec("cat state", timeout_s=20)).stdout == b"1\n"
    with pytest.raises(BadRequest):
        await make(local, image=name, tree=tree)
    for wrong in ("ubuntu", "../../etc", "snapshot-nothing", f"{name}/package"):
        with pytest.raises(BadImage):
            await make(local, image=wrong)


async def test_snapshots_in_a_directory_outlive_their_provider(local: LocalProvider, tmp_path: Path) -> None:
    config = SandboxConfig(local=LocalConfig(snapshots=tmp_path / "kept"))
    async with LocalProvider(config) as first:
        sandbox = await make(first, files={"f": b"kept"})
        name = await sandbox.snapshot()
    async with LocalProvider(config) as second:
        assert await (await make(second, image=name)).read("f") == b"kept"


async def test_a_snapshot_of_sparse_files_takes_no_more_than_the_sandbox_may(local: LocalProvider) -> None:
    sandbox = await make(local, disk_mb=8)
    await sandbox.exec("for i in 1 2 3; do truncate -s 6M f$i; done", timeout_s=20)
    with pytest.raises(BadRequest, match="disk_mb"):
        await sandbox.snapshot()
    assert local.home is not None
    assert [entry.name for entry in local.home.iterdir() if entry.name.startswith("snapshot")] == []


def test_copies_take_links_as_links_and_nothing_special(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    target.mkdir()
    os.mkfifo(source / "pipe")
    (source / "out").symlink_to("/etc/passwd")
    (source / "f").write_bytes(b"x" * 10)
    fds = [os.open(path, os.O_RDONLY) for path in (source, target)]
    try:
        assert copy_tree(*fds, uid=None, most_bytes=10) == 10
    finally:
        for fd in fds:
            os.close(fd)
    assert sorted(os.listdir(target)) == ["f", "out"]
    assert os.readlink(target / "out") == "/etc/passwd"


async def test_a_paused_sandbox_stands_still_until_it_is_resumed(local: LocalProvider) -> None:
    sandbox = await make(local, options={"mode": "session"})
    await sandbox.exec("(while :; do echo x >> ticks; sleep 0.02; done) & sleep 0.1", timeout_s=20)
    await sandbox.pause()
    before = await sandbox.read("ticks")
    await asyncio.sleep(0.3)
    assert await sandbox.read("ticks") == before
    with pytest.raises(BadRequest, match="paused"):
        await sandbox.exec(["true"], timeout_s=20)
    await sandbox.resume()
    await sandbox.exec("n=$(wc -c < ticks); while [ $(wc -c < ticks) = $n ]; do sleep 0.02; done", timeout_s=20)
    await sandbox.pause()
    await sandbox.kill()
