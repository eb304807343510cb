"""Mounts of local sandboxes: a size-bounded tmpfs each, an overlay over a given tree, host files to read.

Every sandbox has a mount namespace of its own that only descriptors keep alive: the launcher's and its
owner's. When both have ended, in whatever way, the kernel unmounts everything; nothing is ever mounted where
the rest of the machine can see it. Runs inside the launcher process: standard library only, no tollway
imports, nothing that waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import struct
from collections.abc import Iterator, Sequence

__all__ = ["Mounts", "MountsForbidden", "Space", "join", "trial"]

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID, MS_NODEV, MS_REC, MS_SLAVE = 0x2, 0x4, 0x4000, 0x80000
AT_FDCWD, AT_EMPTY_PATH = -100, 0x1000
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = 0x1, 0x4
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_IDMAP = 0x1, 0x2, 0x4, 0x00100000
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
"""The same on all architectures."""
_ALL_UIDS = "0 0 4294967295"
_libc = ctypes.CDLL(None, use_errno=True)


class MountsForbidden(OSError):
    """This machine does not let us mount; plain directories are left."""


class Space:
    """What one sandbox has mounted."""

    def __init__(self, namespace: int, directory: int = -1, workspace: str = "", binds: Sequence[str] = ()) -> None:
        """Descriptors of the namespace and of the workspace (-1 when an earlier launcher made it), paths in it."""
        self.namespace, self.directory = namespace, directory
        self.workspace, self.binds = workspace, tuple(binds)

    def close(self) -> None:
        """Let go of it; the kernel unmounts when nobody else holds it."""
        for fd in (self.directory, self.namespace):
            if fd >= 0:
                os.close(fd)
        self.directory = self.namespace = -1


class Mounts:
    """The launcher's own mount namespace, from which those of sandboxes are made."""

    def __init__(self, user_namespace: int | None) -> None:
        """Enter it. ``user_namespace`` is that of an earlier launcher, whose spaces this one is to use."""
        try:
            if os.getuid() != 0:
                if user_namespace is not None:
                    _check(_libc.setns(user_namespace, CLONE_NEWUSER), "setns")
                else:
                    _own_user_namespace()
            _check(_libc.unshare(CLONE_NEWNS), "unshare")
            # What the machine mounts and unmounts later is followed; nothing goes the other way.
            _mount(None, "/", None, MS_REC | MS_SLAVE, None)
        except OSError as error:
            raise MountsForbidden(error.errno, f"cannot make a mount namespace: {error.strerror}") from error
        self._base = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        with open("/proc/self/uid_map", encoding="ascii") as file:
            self._initial = " ".join(file.read().split()) == _ALL_UIDS

    def make(
        self,
        path: str,
        *,
        uid: int | None,
        size: int,
        inodes: int,
        tree: tuple[str, int, int] | None,
        sources: list[tuple[str, int, int]],
    ) -> Space:
        """Mount at ``path`` in a new namespace. ``tree`` and ``sources`` are paths with the uid and gid of their files.

        Raises ``OSError``; nothing is left of it then.
        """
        _check(_libc.unshare(CLONE_NEWNS), "unshare")
        try:
            simple = tree is None and not sources
            owner = f",uid={uid},gid={uid}" if simple and uid is not None else ""
            mode = "0700" if simple else "0711"
            options = f"size={size},nr_inodes={inodes},mode={mode}{owner}"
            _mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, options)
            workspace, binds = path, []
            if not simple:
                with _idmaps(uid) as idmap:
                    workspace = self._workspace(path, uid, tree, idmap)
                    for number, source in enumerate(sources):
                        binds.append(_bind(source, f"{path}/b{number}", idmap))
            directory = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            _check(_libc.setns(self._base, CLONE_NEWNS), "setns")
        return Space(namespace, directory, workspace, binds)

    def _workspace(self, path: str, uid: int | None, tree: tuple[str, int, int] | None, idmap: _Idmaps) -> str:
        workspace = f"{path}/workspace"
        os.mkdir(workspace, 0o700)
        if tree is None:
            if uid is not None:
                os.chown(workspace, uid, uid)
            return workspace
        for name in ("upper", "work", "lower"):
            os.mkdir(f"{path}/{name}", 0o700)
        if uid is not None:
            os.chown(f"{path}/upper", uid, uid)
        _attach(tree[0], f"{path}/lower", ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, idmap.get(tree[1], tree[2]))
        os.chdir(path)  # paths with commas and colons would need escapes
        try:
            kind = "redirect_dir=on" if self._initial else "userxattr"
            layers = f"lowerdir=lower,upperdir=upper,workdir=work,{kind}"
            _mount("overlay", workspace, "overlay", MS_NOSUID | MS_NODEV, layers)
        finally:
            os.chdir("/")
        return workspace


def trial(place: str, tree: str, uid: int | None) -> str:
    """What this machine allows: ``overlay``, ``tmpfs`` or the reason why nothing. For a process of its own."""
    try:
        mounts = Mounts(None)
        for below, word in (((tree, os.stat(tree).st_uid, os.stat(tree).st_gid), "overlay"), (None, "tmpfs")):
            try:
                mounts.make(place, uid=uid, size=1 << 20, inodes=100, tree=below, sources=[])
            except OSError as error:
                reason = str(error)
            else:
                return word
    except OSError as error:
        reason = str(error)
    return reason


def join(namespace: int) -> None:
    """Enter a sandbox's mount namespace, for good: for a forked child that becomes bwrap."""
    _check(_libc.setns(namespace, CLONE_NEWNS), "setns")


class _Idmaps:
    """User namespaces that present files of one owner as those of the sandbox's uid."""

    def __init__(self, uid: int | None) -> None:
        self._uid = uid
        self._made: dict[tuple[int, int], int] = {}

    def get(self, uid: int, gid: int) -> int | None:
        """Descriptor of the namespace for files of ``uid:gid``; ``None`` when none is needed."""
        if self._uid is None or self._uid == uid == gid:
            return None
        if (uid, gid) not in self._made:
            self._made[uid, gid] = _mapped_user_namespace((uid, gid), self._uid)
        return self._made[uid, gid]

    def close(self) -> None:
        for fd in self._made.values():
            os.close(fd)


@contextlib.contextmanager
def _idmaps(uid: int | None) -> Iterator[_Idmaps]:
    idmap = _Idmaps(uid)
    try:
        yield idmap
    finally:
        idmap.close()


def _bind(source: tuple[str, int, int], target: str, idmap: _Idmaps) -> str:
    """Show a host file or directory read-only at ``target``, readable for the sandbox's uid if that can be done."""
    path, uid, gid = source
    if stat.S_ISDIR(os.stat(path).st_mode):
        os.mkdir(target, 0o755)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    attributes = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV
    try:
        _attach(path, target, attributes, idmap.get(uid, gid))
    except OSError:
        # Some file systems cannot present their files as somebody else's: they are as readable as they are.
        _attach(path, target, attributes, None)
    return target


def _attach(source: str, target: str, attributes: int, idmap: int | None) -> None:
    tree = _check(_syscall(SYS_OPEN_TREE, AT_FDCWD, source.encode(), OPEN_TREE_CLONE | os.O_CLOEXEC), source)
    try:
        mapped = ATTR_IDMAP if idmap is not None else 0
        settings = struct.pack("=QQQQ", attributes | mapped, 0, 0, idmap or 0)
        _check(_syscall(SYS_MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, settings, len(settings)), source)
        _check(_syscall(SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH), source)
    finally:
        os.close(tree)


def _mapped_user_namespace(inside: tuple[int, int], outside: int) -> int:
    """Descriptor of a user namespace in which ``inside`` is ``outside``; only a process can make one."""
    ready, made = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            if _libc.unshare(CLONE_NEWUSER) == 0:
                os.write(made, b"1")
                signal.pause()
        finally:
            os._exit(1)
    try:
        os.close(made)
        if os.read(ready, 1) != b"1":
            raise OSError(1, "user namespaces are forbidden")
        for name, number in zip(("uid_map", "gid_map"), inside, strict=True):
            with open(f"/proc/{child}/{name}", "w", encoding="ascii") as file:
                file.write(f"{number} {outside} 1")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _own_user_namespace() -> None:
    uid, gid = os.getuid(), os.getgid()
    _check(_libc.unshare(CLONE_NEWUSER), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None) -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind, options)]
    done = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(done, f"mount {kind or 'flags'} at {target}")


def _syscall(number: int, *arguments: int | bytes) -> int:
    return int(_libc.syscall(number, *arguments))


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
