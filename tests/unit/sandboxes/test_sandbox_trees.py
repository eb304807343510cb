"""Directories into and out of sandboxes: everything that is a file arrives, nothing gets out that should not."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import socket
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sandbox_helpers import make

from tollway.errors import BadRequest, SandboxError
from tollway.sandboxes import trees
from tollway.sandboxes.archive import Pieces, Tar, extract, stays_inside
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider


def _archive(fill: Callable[[tarfile.TarFile], None], **options: object) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as archive:  # type: ignore[call-overload]
        fill(archive)
    buffer.seek(0)
    return buffer


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"") -> Callable[..., None]:
    def add(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname, member.size = kind, link, len(data)
        archive.addfile(member, io.BytesIO(data))

    return add


def _several(*members: Callable[..., None]) -> Callable[[tarfile.TarFile], None]:
    def add(archive: tarfile.TarFile) -> None:
        for member in members:
            member(archive)

    return add


@pytest.mark.parametrize(
    "fill",
    [
        _member("/etc/evil", data=b"x"),
        _member("../evil", data=b"x"),
        _member("a/../../evil", data=b"x"),
        _member("leak", tarfile.SYMTYPE, "/etc/passwd"),
        _member("leak", tarfile.SYMTYPE, "../outside"),
        _member("d/leak", tarfile.SYMTYPE, "../../outside"),
        _member("leak", tarfile.SYMTYPE, "d/../../outside"),
        _member("leak", tarfile.LNKTYPE, "/etc/passwd"),
        _member("leak", tarfile.LNKTYPE, "../outside"),
        _member("leak", tarfile.LNKTYPE, "not-in-it"),
        _member("dev", tarfile.CHRTYPE),
        _member("dev", tarfile.BLKTYPE),
        _member("pipe", tarfile.FIFOTYPE),
        _member("odd", b"Z"),
        _several(_member("d", tarfile.SYMTYPE, "other"), _member("d/evil", data=b"x")),
        _several(_member("d", tarfile.SYMTYPE, "."), _member("d", data=b"x")),
        _several(_member("f", data=b"x"), _member("f", data=b"y")),
        _several(_member("f", data=b"x"), _member("f/g", data=b"y")),
        _member("/".join(["d"] * 300), data=b"x"),
        _member("n" * 300, data=b"x"),
        _member("big", data=b"x" * 1001),
        _several(_member("a", data=b"x" * 600), _member("b", tarfile.LNKTYPE, "a")),
        _several(*(_member(f"f{n}") for n in range(21))),
    ],
)
def test_what_must_not_come_out_is_refused_and_leaves_nothing(
    tmp_path: Path, fill: Callable[[tarfile.TarFile], None]
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"of the host")
    for target in (tmp_path / "out", tmp_path / "made"):
        if target.name == "made":
            target.mkdir()
        with pytest.raises(BadRequest):
            extract(_archive(fill), target, max_bytes=1000, max_files=20)
        assert not target.exists() or not any(target.iterdir())
    assert outside.read_bytes() == b"of the host"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "outside"]


def test_a_sparse_bomb_is_refused(tmp_path: Path) -> None:
    # One block that claims to be 8 GiB, GNU's old way.
    member = tarfile.TarInfo("bomb")
    member.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[386:398] = header[398:410] = b"00000000000\0"
    header[482] = 0
    header[483:495] = b"100000000000"
    header[148:156] = b"        "
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    with pytest.raises((BadRequest, SandboxError)):
        extract(io.BytesIO(bytes(header) + bytes(1024)), tmp_path / "out", max_bytes=1000, max_files=20)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", [b"", b"no archive at all" * 100, b"\0" * 100])
def test_a_damaged_archive_is_the_infrastructures_fault(tmp_path: Path, damage: bytes) -> None:
    with pytest.raises(SandboxError):
        extract(io.BytesIO(damage), tmp_path / "out", max_bytes=1000, max_files=20)
    cut = _archive(_member("f", data=b"x" * 900)).getvalue()[:1000]
    with pytest.raises(SandboxError):
        extract(io.BytesIO(cut), tmp_path / "out", max_bytes=1000, max_files=20)
    assert not (tmp_path / "out").exists()


def test_what_is_usual_comes_out(tmp_path: Path) -> None:
    fill = _several(
        _member("./d", tarfile.DIRTYPE),
        _member("./d/f", data=b"1"),
        _member("./d/hard", tarfile.LNKTYPE, "./d/f"),
        _member("./d/up", tarfile.SYMTYPE, "../top"),
        _member("./top", data=b"2"),
    )
    assert extract(_archive(fill), tmp_path / "out", max_bytes=1000, max_files=20) == 5
    assert (tmp_path / "out/d/hard").read_bytes() == b"1"
    assert (tmp_path / "out/d/up").read_bytes() == b"2"
    assert (tmp_path / "out/d/f").stat().st_nlink == 1
    with pytest.raises(BadRequest, match="not empty"):
        extract(_archive(fill), tmp_path / "out", max_bytes=1000, max_files=20)


def test_setuid_and_modes_without_access_do_not_come_out(tmp_path: Path) -> None:
    def fill(archive: tarfile.TarFile) -> None:
        for name, kind, mode in (("f", tarfile.REGTYPE, 0o6755), ("d", tarfile.DIRTYPE, 0), ("g", tarfile.REGTYPE, 0)):
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.uid = kind, mode, 12345
            archive.addfile(member)

    extract(_archive(fill), tmp_path / "out", max_bytes=1000, max_files=20)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (tmp_path / "out").iterdir()}
    assert modes == {"f": 0o755, "d": 0o700, "g": 0o600}
    assert (tmp_path / "out/f").stat().st_uid == os.getuid()


_parts = st.lists(st.sampled_from(["..", ".", "a", "b", "l"]), min_size=1, max_size=6)


@given(_parts, st.integers(1, 4))
def test_links_that_are_let_through_stay_inside_whatever_else_is_there(target: list[str], depth: int) -> None:
    link = PurePosixPath(*["x"] * (depth - 1), "link")
    if not stays_inside(link, "/".join(target)):
        return
    with tempfile.TemporaryDirectory() as name:
        top = Path(name).resolve() / "top"
        (top / link).parent.mkdir(parents=True)
        (top / link).symlink_to("/".join(target))
        # Another accepted link, as far up as one may point.
        other = top.joinpath(*["x"] * (depth - 1), "l")
        if not other.exists():
            other.symlink_to("../" * (depth - 1) + ".")
        assert Path(os.path.realpath(top / link)).is_relative_to(top)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda top: (top / "leak").symlink_to("/etc/passwd"),
        lambda top: (top / "leak").symlink_to("../outside"),
        lambda top: os.mkfifo(top / "pipe"),
        lambda top: socket.socket(socket.AF_UNIX).bind(str(top / "socket")),
    ],
)
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
async def test_what_is_no_file_directory_or_inner_link_is_not_uploaded(
    tmp_path: Path, spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "top").mkdir()
    spoil(tmp_path / "top")
    async with FakeProvider(SandboxConfig()) as provider:
        with pytest.raises(BadRequest):
            await make(provider, tree=tmp_path / "top")
        assert (provider.made, provider.killed) == (1, 1)


def test_pieces_are_bounded_whatever_the_directory_holds(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(1000_000))
    for n in range(100):
        (tmp_path / f"f{n}").write_bytes(os.urandom(10_000))
    pieces = list(Pieces(tmp_path, 100_000))
    assert max(len(piece.data) for piece in pieces) < 250_000
    big = b"".join(piece.data for piece in pieces if not isinstance(piece, Tar))
    assert big == (tmp_path / "big").read_bytes()
    names = [
        member.name
        for piece in pieces
        if isinstance(piece, Tar)
        for member in tarfile.open(fileobj=io.BytesIO(piece.data))  # noqa: SIM115 - in memory
    ]
    assert sorted(names) == sorted(f"f{n}" for n in range(100))


async def test_a_directory_travels_there_and_back_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "PIECE_BYTES", 50_000)
    top = tmp_path / "top"
    (top / "sub" / "locked").mkdir(parents=True)
    (top / "sub" / "locked" / "f").write_bytes(b"in a directory that is not writable")
    (top / "sub" / "big").write_bytes(os.urandom(200_000))
    (top / "sub" / "big").chmod(0o755)
    (top / "link").symlink_to("sub/big")
    for n in range(30):
        (top / f"f{n}").write_bytes(os.urandom(9_000))
    (top / "sub" / "locked").chmod(0o555)
    async with FakeProvider(SandboxConfig()) as provider:
        sandbox = await make(provider)
        await sandbox.put_tree(top, "there")
        assert provider.cloud.rented[sandbox.id].machine.modes["there", "sub", "locked"] == 0o555
        entries = await sandbox.get_tree("there", tmp_path / "back")
        assert entries == sum(1 for _ in top.rglob("*"))
        assert not [path for path in provider.cloud.rented[sandbox.id].machine.files if path[0].startswith(".tollway")]
    for path in top.rglob("*"):
        twin = tmp_path / "back" / path.relative_to(top)
        assert twin.is_symlink() == path.is_symlink()
        if path.is_file():
            assert twin.read_bytes() == path.read_bytes()
    assert os.access(tmp_path / "back" / "sub" / "big", os.X_OK)


async def test_a_transfer_that_fails_half_way_leaves_nothing_here(tmp_path: Path) -> None:
    async with FakeProvider(SandboxConfig()) as provider:
        sandbox = await make(provider, files={"d/f": b"x" * 2_000_000})
        provider.faults.read.extend([SandboxError("connection reset")])
        with pytest.raises(SandboxError, match="connection reset"):
            await sandbox.get_tree("d", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        with pytest.raises(BadRequest):
            await sandbox.get_tree("d", tmp_path / "out", max_bytes=1000)
        with pytest.raises(BadRequest):
            await sandbox.get_tree("none", tmp_path / "out")
        provider.faults.write.append(SandboxError("disk full"))
        (tmp_path / "f").write_bytes(b"x")
        with pytest.raises(SandboxError, match="disk full"):
            await sandbox.put_tree(tmp_path / "f", "there")
        with pytest.raises(SandboxError, match="longer than"):
            await sandbox.put_tree(tmp_path, "there", timeout_s=1e-9)


_names = st.lists(st.sampled_from(["..", ".", "a", "b", "p", ""]), min_size=1, max_size=4).map("/".join)
_members = st.lists(
    st.tuples(
        _names,
        st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]),
        _names,
    ),
    max_size=6,
)


@settings(max_examples=100, deadline=None)
@given(_members)
@example([("a", tarfile.SYMTYPE, "a//.")])
@example(
    [("p/a/b", tarfile.SYMTYPE, "../../b"), ("b", tarfile.DIRTYPE, ""), ("p/a/b/a", tarfile.SYMTYPE, "../../../a")]
)
def test_whatever_an_archive_holds_everything_that_comes_out_is_inside(
    members: list[tuple[str, bytes, str]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        top = Path(name).resolve()
        (top / "a").write_bytes(b"of the host")
        target = top / "x" / "out"
        adds = [_member(path, kind, link, b"x" if kind == tarfile.REGTYPE else b"") for path, kind, link in members]
        with contextlib.suppress(BadRequest, SandboxError):
            extract(_archive(_several(*adds)), target, max_bytes=1000, max_files=20)
        assert (top / "a").read_bytes() == b"of the host"
        assert {path.name for path in top.iterdir()} <= {"a", "x"}
        assert {path.name for path in (top / "x").iterdir()} <= {"out"} if (top / "x").exists() else True
        for path in target.rglob("*") if target.exists() else ():
            assert _leads_nowhere(path) or Path(os.path.realpath(path)).is_relative_to(target), path


def _leads_nowhere(path: Path) -> bool:
    """Whether this is a link in a circle. ``os.path.realpath`` answers "/" for one such as ``a -> a//.``."""
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False
