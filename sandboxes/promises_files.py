"""Checks of files: single ones, unusual ones, large ones, whole directories, mounts. Depends on ``promises``."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tollway.errors import BadRequest, SandboxError
from tollway.sandboxes.base import SandboxProvider
from tollway.sandboxes.promises import EXEC_S, Check, opened, refuses, want

__all__ = ["CHECKS"]

_ODD_NAMES = (
    "with space",
    "-dash",
    "grüße-файл-文",
    "qu\"ote's",
    "new\nline",
    "$(id)",
    "back\\slash",
    "a" * 200,
    "deep/" * 20 + "x",
)


async def files_go_in_and_out(provider: SandboxProvider) -> None:
    """Files of the spec, written files and a command's files are the same files."""
    async with opened(provider, files={"a/b.bin": b"\x00\xff"}) as sandbox:
        want(await sandbox.read("a/b.bin") == b"\x00\xff", "files of the spec are there")
        await sandbox.write("new/dir/c", b"one")
        await sandbox.write("new/dir/c", b"2")
        done = await sandbox.exec(["cat", "new/dir/c"], timeout_s=EXEC_S)
        want(done.stdout == b"2", "a command reads what was written last", done)
        await sandbox.exec("echo made > made", timeout_s=EXEC_S)
        want(await sandbox.read("made") == b"made\n", "a command's file can be read")
        await sandbox.write("empty", b"")
        want(await sandbox.read("empty") == b"", "an empty file is a file")


async def the_mode_of_a_written_file_holds(provider: SandboxProvider) -> None:
    """A script can be made executable, and is not so by itself."""
    async with opened(provider) as sandbox:
        await sandbox.write("run", b"#!/bin/sh\necho ran\n", mode=0o755)
        await sandbox.write("plain", b"x")
        done = await sandbox.exec(["test", "-x", "run"], timeout_s=EXEC_S)
        want(done.exit_code == 0, "mode=0o755 makes a file executable", done)
        done = await sandbox.exec(["test", "-x", "plain"], timeout_s=EXEC_S)
        want(done.exit_code == 1, "files are not executable unless asked for", done)


async def names_may_be_unusual(provider: SandboxProvider) -> None:
    """Blanks, dashes, quotes, newlines, other scripts and length in file names."""
    async with opened(provider) as sandbox:
        for name in _ODD_NAMES:
            await sandbox.write(name, name.encode())
            done = await sandbox.exec(["cat", "--", name], timeout_s=EXEC_S)
            want(done.stdout == name.encode(), f"a command finds the file {name!r}", done)
            want(await sandbox.read(name) == name.encode(), f"the file {name!r} can be read")


async def large_files_are_exact(provider: SandboxProvider) -> None:
    """Eight mebibytes of random bytes, there and back; a limit of exactly the size is enough."""
    data = random.Random(7).randbytes(8 << 20)
    async with opened(provider) as sandbox:
        await sandbox.write("big.bin", data)
        done = await sandbox.exec(["wc", "-c", "big.bin"], timeout_s=EXEC_S)
        want(done.stdout.split()[:1] == [b"8388608"], "a large file arrives whole", done)
        want(await sandbox.read("big.bin", max_bytes=len(data)) == data, "a large file comes back unchanged")
        call = sandbox.read("big.bin", max_bytes=len(data) - 1)
        await refuses(call, BadRequest, "a file above max_bytes is BadRequest")


async def reads_stay_inside(provider: SandboxProvider) -> None:
    """Missing files, parents, links out and directories are refused as the caller's error."""
    async with opened(provider, files={"big": b"12345", "dir/f": b""}) as sandbox:
        await sandbox.exec(["ln", "-s", "/etc", "w"], timeout_s=EXEC_S)
        for path in ("missing", "../../etc/passwd", "w/passwd", "/etc/passwd", "dir", ""):
            await refuses(sandbox.read(path), BadRequest, f"reading {path!r} is BadRequest")
        await refuses(sandbox.read("big", max_bytes=4), BadRequest, "a file above max_bytes is BadRequest")
        for path in ("../x", "w/x", "/etc/x"):
            await refuses(sandbox.write(path, b"x"), BadRequest, f"writing {path!r} is BadRequest")


async def sandboxes_do_not_share_files(provider: SandboxProvider) -> None:
    """Two live sandboxes are two machines."""
    async with opened(provider, files={"mine": b"1"}) as first, opened(provider) as second:
        want(first.id != second.id, "ids are unique", first.id)
        done = await second.exec(["cat", "mine"], timeout_s=EXEC_S)
        want(done.exit_code != 0, "another sandbox's file is not there", done)


@contextmanager
def _tree() -> Iterator[Path]:
    """A directory of this machine with what is usual in one."""
    with tempfile.TemporaryDirectory(prefix="tollway-suite-") as name:
        top = Path(name)
        (top / "pkg" / "sub").mkdir(parents=True)
        (top / "empty").mkdir()
        (top / "pkg" / "core.py").write_bytes(b"print('core')\n")
        (top / "pkg" / "run").write_bytes(b"#!/bin/sh\nexit 0\n")
        (top / "pkg" / "run").chmod(0o755)
        (top / "pkg" / "sub" / "odd name\n").write_bytes(b"\x00odd")
        (top / "big").write_bytes(random.Random(3).randbytes(5 << 20))
        (top / "link").symlink_to("pkg/core.py")
        for path in (top, *top.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or (os.access(path, os.X_OK) and path.name == "run") else 0o644)
        yield top


async def a_tree_is_what_the_workspace_starts_with(provider: SandboxProvider) -> None:
    """Contents, modes, links and empty directories; ``files`` lie above it; the original is never written."""
    with _tree() as top:
        async with opened(provider, tree=top, files={"pkg/core.py": b"above", "own": b"o"}) as sandbox:
            for path, content in (("pkg/core.py", b"above"), ("pkg/sub/odd name\n", b"\x00odd"), ("own", b"o")):
                want(await sandbox.read(path) == content, f"{path!r} is there, files above the tree")
            want(await sandbox.read("big", max_bytes=6 << 20) == (top / "big").read_bytes(), "large files are whole")
            for cmd in (["test", "-x", "pkg/run"], ["test", "-d", "empty"], ["test", "-f", "link"]):
                done = await sandbox.exec(cmd, timeout_s=EXEC_S)
                want(done.exit_code == 0, f"modes, empty directories and links are kept: {cmd}", done)
            done = await sandbox.exec("echo changed > pkg/run && rm big && echo new > pkg/new", timeout_s=EXEC_S)
            want(done.exit_code == 0, "the workspace is writable", done)
            want(await sandbox.read("pkg/run") == b"changed\n", "a file of the tree can be replaced")
        want((top / "pkg" / "run").read_bytes() == b"#!/bin/sh\nexit 0\n", "the tree itself is never written")
        want((top / "big").exists() and not (top / "pkg" / "new").exists(), "the tree itself is never written")


async def two_sandboxes_of_one_tree_are_apart(provider: SandboxProvider) -> None:
    """What one changes the other does not see."""
    with _tree() as top:
        async with opened(provider, tree=top) as first, opened(provider, tree=top) as second:
            await first.exec("echo changed > pkg/core.py", timeout_s=EXEC_S)
            want(await second.read("pkg/core.py") == b"print('core')\n", "the other one's file is unchanged")


async def mounts_are_read_only(provider: SandboxProvider) -> None:
    """A directory and a file of this machine at absolute paths; the original is never written."""
    with _tree() as top:
        mounts = {"/opt/suite-tree": top / "pkg", "/opt/suite-file": top / "pkg" / "core.py"}
        try:
            async with opened(provider, mounts=mounts) as sandbox:
                for path in ("/opt/suite-tree/core.py", "/opt/suite-file"):
                    done = await sandbox.exec(["cat", path], timeout_s=EXEC_S)
                    want(done.stdout == b"print('core')\n", f"{path} shows the file of this machine", done)
                done = await sandbox.exec("echo x > /opt/suite-tree/core.py", timeout_s=EXEC_S)
                want("host_files" not in provider.caps or done.exit_code != 0, "a mount cannot be written", done)
        except SandboxError as error:
            # Without the capability the files are copied in, which takes a user who may write there.
            want("host_files" not in provider.caps, "mounts work where host_files is claimed", error)
        want((top / "pkg" / "core.py").read_bytes() == b"print('core')\n", "a mount is never written")


async def directories_go_in_and_out(provider: SandboxProvider) -> None:
    """``put_tree`` and ``get_tree`` keep contents, modes and links."""
    with _tree() as top, tempfile.TemporaryDirectory(prefix="tollway-suite-") as back:
        async with opened(provider) as sandbox:
            await sandbox.put_tree(top, "given")
            await sandbox.exec("echo made > given/pkg/made", timeout_s=EXEC_S)
            out = Path(back) / "out"
            await sandbox.get_tree("given", out)
            for name in ("pkg/core.py", "big", "pkg/sub/odd name\n"):
                want((out / name).read_bytes() == (top / name).read_bytes(), f"{name!r} comes back unchanged")
            want((out / "pkg" / "made").read_bytes() == b"made\n", "a command's file comes out")
            want(os.access(out / "pkg" / "run", os.X_OK), "modes are kept")
            want((out / "link").readlink() == Path("pkg/core.py"), "links inside are kept")
            want((out / "empty").is_dir(), "empty directories are kept")


async def fetched_directories_hold_no_links_out(provider: SandboxProvider) -> None:
    """A link out of a directory, and too much in it, is refused, and leaves nothing on this machine."""
    with tempfile.TemporaryDirectory(prefix="tollway-suite-") as back:
        out = Path(back) / "out"
        async with opened(provider, files={"bad/f": b"x", "far/f": b"x", "big/f": b"x" * 2000}) as sandbox:
            await sandbox.exec(["ln", "-s", "/etc/passwd", "bad/leak"], timeout_s=EXEC_S)
            await sandbox.exec(["ln", "-s", "../../../../etc", "far/leak"], timeout_s=EXEC_S)
            for path, limits in (("bad", {}), ("far", {}), ("big", {"max_bytes": 1000}), ("missing", {})):
                await refuses(sandbox.get_tree(path, out, **limits), BadRequest, f"fetching {path!r} is BadRequest")
                want(not out.exists(), "a refused directory leaves nothing")


CHECKS: tuple[Check, ...] = (
    files_go_in_and_out,
    the_mode_of_a_written_file_holds,
    names_may_be_unusual,
    large_files_are_exact,
    reads_stay_inside,
    sandboxes_do_not_share_files,
    a_tree_is_what_the_workspace_starts_with,
    two_sandboxes_of_one_tree_are_apart,
    mounts_are_read_only,
    directories_go_in_and_out,
    fetched_directories_hold_no_links_out,
)
