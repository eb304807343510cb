"""Directories as tar, both ways, without trusting what is in them.

Packing reads a directory of this machine and takes regular files, directories and links that stay inside, in
pieces of bounded size. Extraction reads what a sandbox packed and refuses links out, absolute paths, devices and
bombs; nothing is ever written through a link. Must not know sandboxes. Depends on ``errors``.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

from tollway.errors import BadRequest, SandboxError

__all__ = ["BigFile", "Pieces", "Tar", "extract", "stays_inside"]

_DEPTH = 256
"""Most directories above each other that are taken over."""


@dataclass(frozen=True, slots=True)
class Tar:
    """A whole archive of some entries, to be unpacked at the destination."""

    data: bytes


@dataclass(frozen=True, slots=True)
class BigFile:
    """One slice of a file that is too large for a piece: append it to the file of that name."""

    name: str
    data: bytes
    mode: int


def stays_inside(link: PurePosixPath, target: str) -> bool:
    """Whether a link at this relative path leads to a place inside, whatever other such links there are.

    >>> stays_inside(PurePosixPath("a/b"), "../c"), stays_inside(PurePosixPath("a/b"), "../../c")
    (True, False)
    """
    pure = PurePosixPath(target)
    if pure.is_absolute() or not target:
        return False
    ups = 0
    while ups < len(pure.parts) and pure.parts[ups] == "..":
        ups += 1
    # A ".." after a name could follow another link first and then leave from there.
    return ".." not in pure.parts[ups:] and ups <= len(link.parts) - 1


@dataclass(slots=True)
class Pieces:
    """Iterates over what a directory, or a single file, is made of. ``directory_modes`` fills while it does.

    Directories are packed writable, so that what comes later can be put into them; their real modes are set last.
    """

    source: Path
    piece_bytes: int
    name: str = ""
    """Name that a single file gets."""
    directory_modes: dict[str, int] = field(default_factory=dict)
    """Modes of directories that are not writable for their owner, by path."""

    def __iter__(self) -> Iterator[Tar | BigFile]:
        buffer, archive = self._fresh()
        entries = 0
        for name, path in self._walk():
            info = path.lstat()
            if stat.S_ISREG(info.st_mode) and info.st_size > self.piece_bytes:
                yield from self._slices(name, path, stat.S_IMODE(info.st_mode))
                continue
            self._add(archive, name, path, info)
            entries += 1
            if buffer.tell() >= self.piece_bytes:
                archive.close()
                yield Tar(buffer.getvalue())
                buffer, archive = self._fresh()
                entries = 0
        archive.close()
        if entries:
            yield Tar(buffer.getvalue())

    def _fresh(self) -> tuple[io.BytesIO, tarfile.TarFile]:
        buffer = io.BytesIO()
        return buffer, tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT)

    def _walk(self) -> Iterator[tuple[str, Path]]:
        if not self.source.is_dir():
            yield self.name, self.source
            return
        waiting = [("", self.source)]
        while waiting:
            above, directory = waiting.pop()
            for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
                name = f"{above}{entry.name}"
                yield name, Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((f"{name}/", Path(entry.path)))

    def _add(self, archive: tarfile.TarFile, name: str, path: Path, info: os.stat_result) -> None:
        member = tarfile.TarInfo(name)
        member.mtime, member.mode = int(info.st_mtime), stat.S_IMODE(info.st_mode)
        if stat.S_ISDIR(info.st_mode):
            member.type = tarfile.DIRTYPE
            if member.mode & 0o700 != 0o700:
                self.directory_modes[name] = member.mode
                member.mode |= 0o700
            archive.addfile(member)
        elif stat.S_ISLNK(info.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
            if not stays_inside(PurePosixPath(name), member.linkname):
                raise BadRequest(
                    f"{path} links to {member.linkname}, outside the directory that is uploaded; make it a relative "
                    "link to something inside, or a copy"
                )
            archive.addfile(member)
        elif stat.S_ISREG(info.st_mode):
            with _opened(path) as file:
                data = file.read(self.piece_bytes + 1)
            if len(data) > self.piece_bytes:
                raise BadRequest(f"{path} grows while it is uploaded")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        else:
            raise BadRequest(f"{path} is neither a file nor a directory nor a link; only those can be uploaded")

    def _slices(self, name: str, path: Path, mode: int) -> Iterator[BigFile]:
        with _opened(path) as file:
            while data := file.read(self.piece_bytes):
                yield BigFile(name, data, mode)


def _opened(path: Path) -> IO[bytes]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadRequest(f"{path} is no regular file any more")
    return os.fdopen(fd, "rb")


def extract(file: IO[bytes], target: Path, *, max_bytes: int, max_files: int) -> int:
    """Unpack a sandbox's archive into ``target``, which must be empty or absent; returns the number of entries.

    Raises ``BadRequest`` for an entry that must not come out and for too much of anything, ``SandboxError`` for
    an archive that is cut or damaged. Then nothing is left of it.
    """
    made = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise BadRequest(f"{target} is not empty; a directory is fetched into an empty one")
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            return _Extraction(archive, target, max_bytes, max_files).run()
    except BaseException as error:
        for child in target.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            else:
                child.unlink()
        if made:
            target.rmdir()
        if isinstance(error, tarfile.TarError | EOFError | ValueError | OverflowError):
            raise SandboxError(f"the archive out of the sandbox is damaged: {error}") from error
        raise


@dataclass(slots=True)
class _Extraction:
    archive: tarfile.TarFile
    target: Path
    max_bytes: int
    max_files: int
    bytes_out: int = 0
    files: dict[str, tarfile.TarInfo] = field(default_factory=dict)
    links: dict[Path, str] = field(default_factory=dict)
    modes: dict[Path, int] = field(default_factory=dict)

    def run(self) -> int:
        count = 0
        for member in self.archive:
            count += 1
            if count > self.max_files:
                raise BadRequest(f"more than {self.max_files} entries come out of the sandbox")
            self._take(member)
        # Links come last: nothing above was written through one.
        for link, target in self.links.items():
            if any(above in self.links for above in link.parents):
                # It would be made where that link leads, and from there its own way could lead out.
                raise BadRequest(f"an entry of the sandbox's archive lies below the link {link.parent.name!r}")
            try:
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(target)
            except OSError as error:
                raise BadRequest(f"two entries of the archive are {link.name!r}: {error.strerror}") from error
        for directory in sorted(self.modes, key=lambda path: len(path.parts), reverse=True):
            directory.chmod(self.modes[directory], follow_symlinks=True)
        return count

    def _take(self, member: tarfile.TarInfo) -> None:
        name = PurePosixPath(member.name)
        if name.is_absolute() or ".." in name.parts or len(name.parts) > _DEPTH:
            raise BadRequest(f"the sandbox's archive names {member.name[:200]!r}, which is outside or too deep")
        path = self.target.joinpath(*name.parts)
        try:
            if member.isdir():
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                if name.parts:
                    self.modes[path] = member.mode & 0o777 | 0o700
            elif member.issym():
                if not stays_inside(name, member.linkname):
                    raise BadRequest(f"{member.name!r} in the sandbox links to {member.linkname!r}, which is outside")
                self.links[path] = member.linkname
            elif member.isreg() and not member.issparse():
                self._write(member, path, member.mode)
                self.files[member.name] = member
            elif member.islnk():
                self._write(self._original(member), path, member.mode)
            else:
                raise BadRequest(f"{member.name!r} in the sandbox is no file, directory or link; it is not fetched")
        except OSError as error:
            raise BadRequest(f"{member.name[:200]!r} cannot be fetched: {error.strerror}") from error

    def _original(self, member: tarfile.TarInfo) -> tarfile.TarInfo:
        """The file that a hard link repeats: an earlier entry of the same archive, never a file of this machine."""
        earlier = self.files.get(member.linkname)
        if earlier is not None:
            return earlier
        raise BadRequest(f"{member.name!r} in the sandbox is a hard link to {member.linkname!r}, which is not in it")

    def _write(self, member: tarfile.TarInfo, path: Path, mode: int) -> None:
        self.bytes_out += member.size
        if not 0 <= member.size <= self.max_bytes or self.bytes_out > self.max_bytes:
            raise BadRequest(f"more than {self.max_bytes} bytes come out of the sandbox")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        source = self.archive.extractfile(member)
        if source is None:
            raise BadRequest(f"{member.name!r} in the sandbox is no file")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb") as out:
            shutil.copyfileobj(source, out)
            if out.tell() != member.size:
                raise SandboxError("the archive out of the sandbox is cut off")
            os.fchmod(out.fileno(), mode & 0o777 | 0o600)
