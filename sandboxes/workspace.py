"""Directories of local sandboxes on the host: made, read, written and removed without trusting what is in them.

A sandbox may fill its workspace with links, FIFOs, unreadable or bottomless directories; nothing here
follows a link, opens anything but a regular file, or waits. Each owner process has one directory, locked
with flock for as long as it lives, so that a later owner can tell a dead one's leftovers from a live
one's. Depends on the standard library and ``errors``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tollway.errors import BadRequest, ConfigError, SandboxError
from tollway.sandboxes.program import can_be_entered, forbids_execution

__all__ = ["OwnerDirectory", "default_root", "is_memory", "parts_of", "read_file", "remove_tree", "write_file"]

logger = logging.getLogger(__name__)

_LOCK = "owner.lock"
_OWNER = re.compile(r"tollway-(\d+)-(\d+)-[a-z0-9_]{8}")
_MAKING_S = 60.0
"""An owner directory without a lock file is younger than this while its owner is still making it."""
_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_INFRASTRUCTURE = {errno.ENOSPC, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EROFS, errno.EDQUOT}
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def default_root() -> Path:
    """The shared-memory tmpfs where it is usable (workspaces never touch a disk), else the temporary directory."""
    shm = Path("/dev/shm")  # noqa: S108 - only private directories are made in it
    if shm.is_dir() and os.access(shm, os.W_OK | os.X_OK) and not forbids_execution(shm):
        return shm
    return Path(tempfile.gettempdir())


def is_memory(path: Path) -> bool:
    """Whether a directory lies on a file system in memory."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0] in ("tmpfs", "ramfs")
    return False


class OwnerDirectory:
    """This process's private directory under ``root``, holding one directory per sandbox."""

    def __init__(self, root: Path, *, for_other_uids: bool = False) -> None:
        try:
            # A random name: a fixed one could be made beforehand by somebody else.
            self.path = Path(tempfile.mkdtemp(prefix=f"tollway-{os.getuid()}-{os.getpid()}-", dir=root))
        except OSError as error:
            raise ConfigError(f"cannot make sandbox workspaces in {root}: {error}; set sandbox.local.root") from error
        if for_other_uids and not can_be_entered(root):
            self.path.rmdir()
            raise ConfigError(
                f"sandboxes run under uids of their own and cannot enter {root}; make it and the directories above "
                "it executable for all (chmod o+x), or set sandbox.local.root to another place"
            )
        # Sandboxes run under uids of their own and must pass through; they cannot list it.
        self.path.chmod(0o711)
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def make(self, name: str, uid: int | None) -> str:
        """A private workspace (0700) that belongs to ``uid``; ``None`` for our own."""
        path = str(self.path / name)
        os.mkdir(path, 0o700)
        if uid is not None:
            os.chown(path, uid, uid)
        return path

    def close(self) -> None:
        """Remove everything and let go of the lock. Idempotent."""
        if self._lock >= 0:
            remove_tree(str(self.path))
            os.close(self._lock)
            self._lock = -1

    @staticmethod
    def sweep(root: Path) -> int:
        """Remove the directories of dead owners of this user; returns how many. Live ones are never touched."""
        removed = 0
        for entry in os.scandir(root):
            match = _OWNER.fullmatch(entry.name)
            if match is None or int(match[1]) != os.getuid():
                continue
            with contextlib.suppress(OSError):
                if _abandoned(entry):
                    remove_tree(entry.path)
                    removed += 1
        if removed:
            logger.info("removed the workspaces of %d dead owners from %s", removed, root)
        return removed


def _abandoned(entry: os.DirEntry[str]) -> bool:
    info = entry.stat(follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        return False
    try:
        lock = os.open(os.path.join(entry.path, _LOCK), os.O_RDWR | _FILE)
    except FileNotFoundError:
        return time.time() - info.st_mtime > _MAKING_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def parts_of(path: str) -> tuple[str, ...]:
    """Components of a path inside the workspace; absolute ones must start with ``/workspace``.

    >>> parts_of("/workspace/pkg/./core.py")
    ('pkg', 'core.py')
    """
    pure = PurePosixPath(path)
    if pure.is_absolute():
        if pure.parts[1:2] != ("workspace",):
            raise BadRequest(f"{path!r} is outside the workspace", param="path")
        pure = PurePosixPath(*pure.parts[2:])
    if ".." in pure.parts or "\0" in path or not pure.parts:
        raise BadRequest(f"{path!r} is not a file path inside the workspace", param="path")
    return pure.parts


def read_file(workspace: str | int, path: str, max_bytes: int) -> bytes:
    """Bytes of a regular file; every component is opened without following links, and no open can block."""
    with _refusals(path), _parent(workspace, parts_of(path), make_for=None) as (parent, name):
        fd = os.open(name, os.O_RDONLY | _FILE, dir_fd=parent)
        with os.fdopen(fd, "rb", buffering=0) as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise BadRequest(f"{path!r} is not a regular file", param="path")
            data = b""
            while len(data) <= max_bytes and (chunk := file.read(max_bytes + 1 - len(data))):
                data += chunk
            if len(data) > max_bytes:
                raise BadRequest(f"{path!r} holds more than {max_bytes} bytes", param="path")
            return data


def write_file(workspace: str | int, path: str, data: bytes, *, mode: int, uid: int | None) -> None:
    """Create or replace a regular file that belongs to ``uid``; links and special files are refused."""
    with _refusals(path), _parent(workspace, parts_of(path), make_for=(uid,)) as (parent, name):
        # Without O_TRUNC: nothing is changed before we know that it is a regular file.
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | _FILE, mode, dir_fd=parent)
        with os.fdopen(fd, "wb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise BadRequest(f"{path!r} is not a regular file", param="path")
            os.ftruncate(fd, 0)
            if uid is not None:
                os.fchown(fd, uid, uid)
            os.fchmod(fd, mode)
            view = memoryview(data)
            while view:
                view = view[file.write(view) or 0 :]


def remove_tree(path: str) -> None:
    """Delete a directory whatever a sandbox made of it: no link is followed, depth and modes do not matter."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        _remove_flattening(path)


@contextlib.contextmanager
def _refusals(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _INFRASTRUCTURE:
            raise SandboxError(f"cannot reach {path!r} in the workspace: {error.strerror}") from error
        raise BadRequest(f"{path!r} in the workspace: {error.strerror}", param="path") from error


@contextlib.contextmanager
def _parent(
    workspace: str | int, parts: tuple[str, ...], *, make_for: tuple[int | None] | None
) -> Iterator[tuple[int, str]]:
    """Descriptor of the directory above the file, and the file's name; ``make_for`` makes what is missing."""
    at = os.open(".", _DIR, dir_fd=workspace) if isinstance(workspace, int) else os.open(workspace, _DIR)
    try:
        for part in parts[:-1]:
            try:
                below = os.open(part, _DIR, dir_fd=at)
            except FileNotFoundError:
                if make_for is None:
                    raise
                os.mkdir(part, 0o755, dir_fd=at)
                below = os.open(part, _DIR, dir_fd=at)
                if make_for[0] is not None:
                    os.fchown(below, make_for[0], make_for[0])
            os.close(at)
            at = below
        yield at, parts[-1]
    finally:
        os.close(at)


def _remove_flattening(path: str) -> None:
    """Empty each directory into the top one, so that neither recursion nor path length grows with depth."""
    top = os.open(path, _DIR)
    try:
        os.fchmod(top, 0o700)
        fresh = itertools.count()
        while names := os.listdir(top):
            for name in names:
                if _unlink(name, top):
                    continue
                directory = os.open(name, _DIR, dir_fd=top)
                try:
                    for child in os.listdir(directory):
                        if not _unlink(child, directory):
                            moved = f"{os.urandom(8).hex()}-{next(fresh)}"
                            os.rename(child, moved, src_dir_fd=directory, dst_dir_fd=top)
                finally:
                    os.close(directory)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(path)


def _unlink(name: str, parent: int) -> bool:
    """Remove a file; a directory is made usable instead, and the answer is False."""
    info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode):
        os.unlink(name, dir_fd=parent)
        return True
    os.chmod(name, 0o700, dir_fd=parent)
    return False
