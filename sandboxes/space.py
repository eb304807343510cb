"""One local sandbox's files as its owner sees them: a descriptor of the workspace, copies, and its size.

The workspace may be mounted where only the sandbox can look, so it is reached by descriptor, never by path.
Nothing here follows a link or opens anything but regular files and directories. Depends on the standard
library, ``workspace`` and ``errors``.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from tollway.errors import BadRequest, SandboxError
from tollway.sandboxes.workspace import remove_tree

__all__ = ["Space", "copy_tree", "one_owner", "usage_bytes"]

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MOST_DEPTH = 200
_CHUNK = 1 << 20
_SMALL, _FEW = 4 << 20, 1000


class Space:
    """Where one sandbox's files are."""

    def __init__(self, path: str) -> None:
        """A plain directory, until ``mounted``."""
        self.path = path
        """The sandbox's own directory on this machine: the workspace itself, or only where it is mounted."""
        self.workspace = path
        """What bwrap binds, a path in the sandbox's mount namespace."""
        self.binds: Sequence[str] = ()
        self.namespace = -1
        self.directory = os.open(path, _DIR)

    @property
    def mounted(self) -> bool:
        """Whether the kernel bounds its size."""
        return self.namespace >= 0

    def adopt(self, pid: int, answer: Mapping[str, object]) -> None:
        """Take over what the launcher, process ``pid``, has mounted; its descriptors are opened for us too."""
        directory = _same(pid, answer["directory"], _DIR & ~os.O_NOFOLLOW)
        try:
            self.namespace = _same(pid, answer["namespace"], os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(directory)
            raise
        os.close(self.directory)
        self.directory = directory
        binds = answer["binds"]
        self.workspace = str(answer["workspace"])
        self.binds = [str(bind) for bind in binds] if isinstance(binds, list) else []

    @property
    def small(self) -> bool:
        """Whether removing it takes no noticeable time: it is mounted and holds little."""
        if not self.mounted:
            return False
        info = os.fstatvfs(self.directory)
        return (info.f_blocks - info.f_bfree) * info.f_frsize < _SMALL and info.f_files - info.f_ffree < _FEW

    def remove(self) -> None:
        """Let go of the mounts and delete the directory. May be called again when it failed."""
        for fd in (self.directory, self.namespace):
            if fd >= 0:
                os.close(fd)
        self.directory = self.namespace = -1
        remove_tree(self.path)


def _same(pid: int, place: object, flags: int) -> int:
    """Our own descriptor for what ``place`` (number, device, inode) is in process ``pid``."""
    if not isinstance(place, list) or len(place) != 3:
        raise SandboxError(f"the sandbox launcher sent {place!r} instead of a descriptor")
    number, device, inode = place
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", flags)
    except OSError as error:
        raise SandboxError(f"cannot reach a workspace of the sandbox launcher: {error}") from error
    info = os.fstat(fd)
    if (info.st_dev, info.st_ino) != (device, inode):
        os.close(fd)
        raise SandboxError("the sandbox launcher process is gone")
    return fd


def one_owner(tree: Path) -> bool:
    """Whether all of a tree belongs to the owner and the group of its top directory."""
    top = os.stat(tree)
    for _, directories, files, at in os.fwalk(tree, onerror=_refuse):
        for name in (*directories, *files):
            info = os.stat(name, dir_fd=at, follow_symlinks=False)
            if (info.st_uid, info.st_gid) != (top.st_uid, top.st_gid):
                return False
    return True


def _refuse(error: OSError) -> None:
    raise BadRequest(f"cannot read the tree: {error}", param="tree") from error


def usage_bytes(directory: int, enough: int) -> int:
    """Disk space below an open directory; stops counting beyond ``enough``. Too deep to count is too much."""
    total = 0
    try:
        for _, directories, files, at in os.fwalk(".", dir_fd=directory):
            for name in (*directories, *files):
                with contextlib.suppress(OSError):
                    # Empty files take room too.
                    total += 512 + 512 * os.stat(name, dir_fd=at, follow_symlinks=False).st_blocks
            if total > enough:
                break
    except RecursionError:
        return enough + 1
    except OSError:
        pass  # it changes while we look
    return total


def copy_tree(source: int, target: int, *, uid: int | None, most_bytes: int) -> int:
    """Copy what is below an open directory into another one: directories, regular files, links as links.

    Everything else is left out. ``uid`` is the owner of the copies, ``None`` for ours. Returns the bytes copied.
    Raises ``BadRequest`` beyond ``most_bytes`` or when directories nest too deeply.
    """
    return _Copy(uid, most_bytes).directory(source, target, 0)


class _Copy:
    def __init__(self, uid: int | None, most_bytes: int) -> None:
        self._uid, self._most, self._done = uid, most_bytes, 0

    def directory(self, source: int, target: int, depth: int) -> int:
        if depth > _MOST_DEPTH:
            raise BadRequest(f"directories nest more than {_MOST_DEPTH} levels deep")
        for name in os.listdir(source):
            info = os.stat(name, dir_fd=source, follow_symlinks=False)
            if stat.S_ISLNK(info.st_mode):
                os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
                if self._uid is not None:
                    os.chown(name, self._uid, self._uid, dir_fd=target, follow_symlinks=False)
            elif stat.S_ISDIR(info.st_mode):
                self._below(name, source, target, depth)
            elif stat.S_ISREG(info.st_mode):
                self._file(name, source, target)
        return self._done

    def _below(self, name: str, source: int, target: int, depth: int) -> None:
        os.mkdir(name, 0o700, dir_fd=target)
        inner = os.open(name, _DIR, dir_fd=source)
        try:
            made = os.open(name, _DIR, dir_fd=target)
            try:
                self.directory(inner, made, depth + 1)
                self._finish(made, os.fstat(inner))
            finally:
                os.close(made)
        finally:
            os.close(inner)

    def _file(self, name: str, source: int, target: int) -> None:
        fd = os.open(name, _FILE, dir_fd=source)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                return  # swapped while we looked
            made = os.open(
                name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=target
            )
            try:
                while chunk := os.read(fd, _CHUNK):
                    self._done += len(chunk)
                    if self._done > self._most:
                        raise BadRequest(f"the files hold more than {self._most >> 20} MB; raise disk_mb")
                    view = memoryview(chunk)
                    while view:
                        view = view[os.write(made, view) :]
                self._finish(made, info)
            finally:
                os.close(made)
        finally:
            os.close(fd)

    def _finish(self, fd: int, info: os.stat_result) -> None:
        if self._uid is not None:
            os.fchown(fd, self._uid, self._uid)
        os.fchmod(fd, stat.S_IMODE(info.st_mode) & 0o777)
        os.utime(fd, ns=(info.st_atime_ns, info.st_mtime_ns))
