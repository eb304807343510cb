"""Downloads are what their hash says, archives stay in their directory, directories are whole or absent."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from swe_helpers import LIBRARY, shapes, shapes_fields, write_files

from tollway.envs.swe import patches
from tollway.envs.swe.cache import Cache, _last_words, head_of, unpack
from tollway.envs.swe.prepared import prepare
from tollway.envs.swe.site import PYTEST, packages_for, requirements
from tollway.envs.swe.task import Checkout, Package, Sdist, parse_task
from tollway.errors import BadRequest, ConfigError


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as opened:
        for info, data in members:
            info.size = len(data)
            opened.addfile(info, io.BytesIO(data))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, 0o4777
    return info


@pytest.mark.parametrize(
    "bad",
    [
        member("../out.py"),
        member("/tmp/out.py"),
        member("a/../../out.py"),
        member("a/link", tarfile.SYMTYPE, "/etc/passwd"),
        member("a/link", tarfile.SYMTYPE, "../../x"),
        member("a/hard", tarfile.LNKTYPE, "../x"),
        member("a/device", tarfile.CHRTYPE),
        member("b/second_top.py"),
    ],
    ids=lambda info: info.name,
)
def test_an_archive_that_reaches_out_is_refused(bad: tarfile.TarInfo, tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar.gz", (member("a/ok.py"), b"x = 1\n"), (bad, b""))
    place = tmp_path / "deep" / "place"
    place.mkdir(parents=True)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(BadRequest):
        unpack(path, place)
    assert set(tmp_path.rglob("*")) == before


def test_links_inside_stay_behind_and_modes_are_plain(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "a.tar.gz", (member("a/ok.py"), b"x = 1\n"), (member("a/l", tarfile.SYMTYPE, "ok.py"), b"")
    )
    place = tmp_path / "deep" / "place"
    place.mkdir(parents=True)
    unpack(path, place)
    assert [one.name for one in place.iterdir()] == ["ok.py"]
    assert not (place / "ok.py").stat().st_mode & 0o7000


def test_zip_archives_and_broken_ones(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "place"
    place.mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as opened:
        opened.writestr("a/ok.py", "x = 1\n")
    unpack(tmp_path / "a.zip", place)
    assert (place / "ok.py").read_text() == "x = 1\n"
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as opened:
        opened.writestr("../out.py", "x = 1\n")
    (tmp_path / "c.tar.gz").write_bytes(b"no archive")
    for name in ("b.zip", "c.tar.gz"):
        with pytest.raises(BadRequest):
            unpack(tmp_path / name, place)


def test_only_the_file_with_the_right_hash_is_used(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    made = archive(tmp_path / "a-1.tar.gz", *((member(f"a-1/{name}"), text.encode()) for name, text in LIBRARY.items()))
    data = made.read_bytes()
    source = Sdist(kind="sdist", name="a", version="1", sha256=hashlib.sha256(data).hexdigest())
    with pytest.raises(ConfigError, match="tollway tasks fetch"):
        cache.base(source)
    folder = cache.root / "sdists" / source.sha256
    folder.mkdir(parents=True)
    (folder / "a-1.tar.gz").write_bytes(data + b"x")
    with pytest.raises(ConfigError, match="tollway tasks fetch"):
        cache.base(source)
    (folder / "a-1.tar.gz").write_bytes(data)
    assert (cache.base(source) / "shapes" / "area.py").read_text() == LIBRARY["shapes/area.py"]
    assert not [one for one in cache.root.rglob("*") if one.name.startswith(".making")]


def test_a_task_tree_is_made_once_and_has_the_bug(tmp_path: Path) -> None:
    directory = write_files(tmp_path / "repository", LIBRARY)
    fields = shapes_fields(directory)
    text = LIBRARY["shapes/area.py"]
    bug = patches.make("shapes/area.py", text, text.replace("value // 2", "value // 3"))
    task = parse_task(json.dumps({**fields, "bug_patch": bug, "fix_patch": ""}), source="it")
    cache = Cache(tmp_path / "cache")
    tree = cache.tree(task)
    assert "value // 3" in (tree / "shapes/area.py").read_text()
    assert "value // 3" not in (directory / "shapes/area.py").read_text()
    assert cache.tree(task) == tree
    (directory / "README").write_text("new")
    assert cache.tree(task) != tree


def test_the_commit_of_a_checkout_is_checked_and_its_history_left_behind(tmp_path: Path) -> None:
    task = shapes(tmp_path)
    assert isinstance(task.source, Checkout)
    git = Path(task.source.directory) / ".git"
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "refs/heads/main").write_text("a" * 40 + "\n")
    assert head_of(git.parent) == "a" * 40
    with pytest.raises(BadRequest, match="stands at aaaaaaaaaaaa"):
        Cache(tmp_path / "cache").tree(task)
    (git / "refs/heads/main").unlink()
    (git / "packed-refs").write_text("# pack\n" + "0" * 40 + " refs/heads/main\n")
    tree = Cache(tmp_path / "cache").tree(task)
    assert not (tree / ".git").exists()
    assert (tree / "shapes/area.py").is_file()


def test_an_installed_copy_of_the_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = shapes(tmp_path)
    site = tmp_path / "site"
    (site / "shapes").mkdir(parents=True)
    found: Callable[..., Path] = lambda *_, **__: site  # noqa: E731 - stands for a cache with that package in it
    monkeypatch.setattr(Cache, "packages", found)
    with pytest.raises(BadRequest, match="installed copy"):
        prepare(Cache(tmp_path / "cache"), task)


def test_a_cache_that_cannot_be_written_says_which_key_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"env\.swe\.cache"):
        Cache(tmp_path / "file" / "cache").tree(shapes(tmp_path))


def test_pins_of_a_task_win_over_ours() -> None:
    other = Package(name="Pluggy", version="9.9", sha256="0" * 64)
    chosen = packages_for([other])
    assert [one.version for one in chosen if one.name.lower() == "pluggy"] == ["9.9"]
    assert len(chosen) == len(PYTEST)
    assert requirements(chosen).count("--hash=sha256:") == len(PYTEST)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Cache().root == tmp_path / "tollway" / "swe"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert Cache().root == Path(os.path.expanduser("~")) / ".cache" / "tollway" / "swe"


def test_pips_last_words_are_the_same_whenever_the_same_went_wrong() -> None:
    said = [
        f"WARNING: Retrying (total={left}) after '<pip.Connection object at 0x7f{left}>: refused'" for left in (1, 0)
    ]
    words = _last_words("\n".join([*said, "ERROR: No matching distribution found for x==1"]))
    assert words == "WARNING: Retrying (total=0) after 'refused'\nERROR: No matching distribution found for x==1"
