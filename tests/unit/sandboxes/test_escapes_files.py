"""Attempts on files: full disks, links, FIFOs, archives, other sandboxes' files. The effect is looked for outside."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from escape_helpers import Mode, another, both_modes, boxed, python, works
from sandbox_helpers import open_to_all

from tollway.errors import BadRequest, SandboxError
from tollway.sandboxes.local import LocalSandbox


def _free(sandbox: LocalSandbox) -> int:
    """Free bytes of the host's file system under the workspaces."""
    return shutil.disk_usage(sandbox.host_path.parent).free


@both_modes
async def test_a_full_workspace_is_full_for_itself_alone(mode: Mode) -> None:
    async with boxed(mode, disk_mb=32) as (provider, sandbox):
        other = await another(provider)
        before = _free(sandbox)
        fill = "for i in $(seq 12); do head -c 50000000 /dev/zero > fill$i 2>/dev/null; done; du -sm . | cut -f1"
        done = await sandbox.exec(fill, timeout_s=30)
        assert before - _free(sandbox) < 200 << 20, "a sandbox of 32 MB took the host's disk"
        assert int(done.stdout or b"0") <= 64 + 32, done
        assert await works(other)
        await sandbox.exec("rm -f fill*", timeout_s=30)


@both_modes
async def test_a_workspace_without_inodes_is_so_for_itself_alone(mode: Mode) -> None:
    async with boxed(mode, disk_mb=32) as (provider, sandbox):
        other = await another(provider)
        code = """
made = 0
try:
    for made in range(60000):
        open(f"f{made}", "w").close()
except OSError as error:
    print(error.errno, made)
else:
    print("none", made)
"""
        done = await python(sandbox, code)
        number, made = done.stdout.split()
        assert number == b"28", f"60000 files fit into 32 MB: {done}"
        assert int(made) < 60000
        assert await works(other)
        await sandbox.kill()
        assert not sandbox.host_path.exists()


@both_modes
async def test_links_and_hard_links_lead_nowhere(mode: Mode, tmp_path: Path) -> None:
    open_to_all(tmp_path)
    secret = tmp_path / "secret"
    secret.write_bytes(b"of the host")
    before = Path("/etc/passwd").stat()
    async with boxed(mode) as (_, sandbox):
        for make, path in (
            (f"ln -s {secret} leak", "leak"),
            (f"ln -s {tmp_path} w", "w/secret"),
            ("ln -s /proc/self/root root", f"root{secret}"),
            ("ln -s /proc/1/cwd cwd", "cwd/leak"),
            ("ln -s ../../../../../.. up", f"up{secret}"),
        ):
            await sandbox.exec(make, timeout_s=30)
            with pytest.raises(BadRequest):
                await sandbox.read(path)
            with pytest.raises(BadRequest):
                await sandbox.write(path, b"overwritten")
        done = await sandbox.exec("ln /usr/bin/env hard; ln /etc/passwd hard2; cat leak w/secret", timeout_s=30)
        assert done.exit_code != 0
        assert b"of the host" not in done.stdout
        assert secret.read_bytes() == b"of the host"
        assert Path("/etc/passwd").stat().st_nlink == before.st_nlink
        assert Path("/usr/bin/env").stat().st_nlink == 1


@both_modes
async def test_special_files_block_nobody(mode: Mode, tmp_path: Path) -> None:
    async with boxed(mode) as (_, sandbox):
        make = "mkfifo pipe && mkdir d && mkfifo d/pipe && ln -s /dev/zero zero && ln -s /dev/stdin in"
        assert (await sandbox.exec(make, timeout_s=30)).exit_code == 0
        async with asyncio.timeout(20):
            for path in ("pipe", "zero", "in", "d/pipe", "d"):
                with pytest.raises(BadRequest):
                    await sandbox.read(path)
                with pytest.raises(BadRequest):
                    await sandbox.write(path, b"x")
            with pytest.raises(BadRequest):
                await sandbox.get_tree("d", tmp_path / "out")
        assert not (tmp_path / "out").exists()


@both_modes
async def test_what_is_fetched_or_put_as_a_directory_stays_where_it_belongs(mode: Mode, tmp_path: Path) -> None:
    open_to_all(tmp_path)
    (tmp_path / "host").mkdir()
    (tmp_path / "host").chmod(0o777)
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "f").write_bytes(b"given")
    async with boxed(mode) as (_, sandbox):
        for number, make in enumerate(
            (
                "ln -s /etc/passwd {d}/leak",
                f"ln -s {tmp_path}/host {{d}}/out",
                "ln -s ../../../../etc {d}/far",
                "mkfifo {d}/pipe",
                "mkdir {d}/a && ln -s a/../../.. {d}/sly",
            )
        ):
            place = f"d{number}"
            done = await sandbox.exec(f"mkdir {place} && {make.format(d=place)}", timeout_s=30)
            assert done.exit_code == 0, done
            with pytest.raises(BadRequest):
                await sandbox.get_tree(place, tmp_path / "out")
            assert not (tmp_path / "out").exists()
        await sandbox.exec(f"ln -s {tmp_path}/host there; ln -s /usr usr", timeout_s=30)
        for dest in ("there", "usr", "../../host"):
            with pytest.raises((SandboxError, BadRequest)):
                await sandbox.put_tree(tmp_path / "given", dest)
        await sandbox.put_tree(tmp_path / "given", f"{tmp_path}/host")  # that is in a /tmp of its own
        assert list((tmp_path / "host").iterdir()) == []
        assert not Path("/usr/f").exists()


@both_modes
async def test_a_directory_that_changes_while_it_is_fetched_shows_nothing_of_the_host(
    mode: Mode, tmp_path: Path
) -> None:
    async with boxed(mode) as (_, sandbox):
        await sandbox.write("d/passwd", b"ours")
        swap = "ln -s /etc link; while :; do mv d real; mv link d; mv d link; mv real d; done"
        swapping = asyncio.create_task(sandbox.exec(swap, timeout_s=1.0))
        for number in range(4):
            try:
                await sandbox.get_tree("d", tmp_path / f"out{number}")
            except (BadRequest, SandboxError):
                continue
            host = Path("/etc/passwd").read_bytes()
            assert [path for path in (tmp_path / f"out{number}").rglob("*") if path.read_bytes() == host] == []
        await swapping


@both_modes
async def test_deep_and_odd_directories_are_removed(mode: Mode, tmp_path: Path) -> None:
    async with boxed(mode) as (_, sandbox):
        code = r"""
import os
for name in (b"new\nline", b"\xff\xfe", b" ", b"-rf", b"*", "grüße".encode(), b"x" * 255):
    open(os.path.join(b"/workspace", name), "w").close()
for _ in range(1500):
    os.mkdir("d"); os.chdir("d")
os.chmod(".", 0)
os.chmod("/workspace/d", 0)
"""
        assert (await python(sandbox, code)).exit_code == 0
        with pytest.raises((BadRequest, SandboxError)):
            await sandbox.get_tree(".", tmp_path / "out")
        await sandbox.kill()
        assert not sandbox.host_path.exists()
        assert not (tmp_path / "out").exists()


@both_modes
async def test_files_of_other_sandboxes_and_of_the_host_cannot_be_found(mode: Mode, tmp_path: Path) -> None:
    open_to_all(tmp_path)
    (tmp_path / "host").write_bytes(b"secret of the host 815")
    async with boxed(mode) as (provider, sandbox):
        other = await another(provider)
        await other.write("mine", b"secret of the other 815")
        code = f"""
import os
tried = [{str(other.host_path)!r} + "/mine", {str(tmp_path)!r} + "/host", {str(provider.home)!r}, "/dev/shm", "/root",
         "/home", "/etc/shadow", "/var", "/run", "/sys", "/boot", "/mnt"]
tried += [f"/proc/{{pid}}/root{{path}}" for pid in ("1", "self") for path in tried[:3]]
print([path for path in tried if os.path.exists(path) and path != "/dev/shm"])
found = []
for top, dirs, files in os.walk("/"):
    dirs[:] = [name for name in dirs if os.path.join(top, name) not in ("/proc", "/usr", "/sys")]
    for name in files:
        if not os.path.isfile(os.path.join(top, name)):
            continue
        try:
            if b"815" in open(os.path.join(top, name), "rb").read(100): found.append(os.path.join(top, name))
        except OSError: pass
print(found)
"""
        done = await python(sandbox, code)
        assert done.stdout == b"[]\n[]\n", done
        assert await other.read("mine") == b"secret of the other 815"


@both_modes
async def test_mounts_and_trees_are_never_written(mode: Mode, tmp_path: Path) -> None:
    open_to_all(tmp_path)
    for name in ("tree", "mount"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_bytes(b"original")
        (tmp_path / name / "f").chmod(0o666)
        (tmp_path / name).chmod(0o777)
    async with boxed(mode, tree=tmp_path / "tree", mounts={"/opt/m": tmp_path / "mount"}) as (_, sandbox):
        code = """
import os
for path in ("/workspace/f", "/opt/m/f", "/opt/m/new", "/opt/new"):
    for act in (lambda: open(path, "w").write("changed"), lambda: os.chmod(path, 0o777), lambda: os.unlink(path),
                lambda: os.utime(path, (1, 1)), lambda: os.setxattr(path, "user.x", b"1")):
        try: act()
        except OSError: pass
"""
        await python(sandbox, code)
    for name in ("tree", "mount"):
        assert [path.name for path in (tmp_path / name).iterdir()] == ["f"]
        info = (tmp_path / name / "f").stat()
        assert (tmp_path / name / "f").read_bytes() == b"original"
        assert info.st_mode & 0o777 == 0o666
        assert info.st_mtime > 1000
        assert os.listxattr(tmp_path / name / "f") == []
