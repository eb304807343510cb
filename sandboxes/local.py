"""The default provider: bubblewrap on this machine, one private workspace per sandbox.

In ``exec`` mode every command is a fresh set of namespaces around the workspace, so no process survives one; in
``session`` mode one set lives as long as the sandbox, with an agent inside. Workspaces are mounted by the
launcher with a size that the kernel holds; where this machine forbids that, they are plain directories whose
size is looked at. Depends on ``base`` and its siblings ``bwrap``, ``launcher``, ``limits``, ``space``,
``local_sandbox``, ``workspace``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import resource
import secrets
import sys
from pathlib import Path
from typing import ClassVar

from tollway.errors import BadRequest, SandboxError, SandboxUnavailable
from tollway.sandboxes.base import ExecResult, Sandbox, SandboxProvider, SandboxSpec
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.launcher import CommandCall, Launcher, LauncherSetup
from tollway.sandboxes.limits import UidPool, group_limits, own_uid_map, tasks_of_user, usable_uids
from tollway.sandboxes.local_sandbox import PYTHON, LocalSandbox, mode_of
from tollway.sandboxes.probe import remedy
from tollway.sandboxes.program import find_bwrap, staged
from tollway.sandboxes.seccomp import filter_file
from tollway.sandboxes.snapshots import Snapshots
from tollway.sandboxes.space import Space, copy_tree, one_owner, usage_bytes
from tollway.sandboxes.unsafe_process import write_program
from tollway.sandboxes.workspace import OwnerDirectory, default_root, is_memory, remove_tree

__all__ = ["LocalProvider", "LocalSandbox"]

logger = logging.getLogger(__name__)

MB = 1 << 20
_LOOK_S = 1.0
"""How often the size of workspaces is looked at that the kernel does not bound."""
_OTHER_DESCRIPTORS = 512
_INODES_PER_MB = 128
_LIMITS = frozenset({"memory_limit", "pids_limit", "disk_limit"})


class LocalProvider(SandboxProvider):
    """Bubblewrap sandboxes. Raises ``SandboxUnavailable`` with the remedy where they cannot run."""

    name: ClassVar[str] = "local"
    caps: ClassVar[frozenset[str]] = frozenset(
        {"stderr", "public_network", "host_files", "snapshot", "fork", "pause", *_LIMITS}
    )

    def __init__(self, config: SandboxConfig | None = None) -> None:
        super().__init__(config or SandboxConfig())
        self._bwrap = None if self.config.local.unsafe else find_bwrap(self.config.local)
        if self.config.local.unsafe:
            vars(self)["caps"] = self.caps - _LIMITS  # of this provider only
        self._numbers = itertools.count(1)
        self._setup = asyncio.Lock()
        self._home: OwnerDirectory | None = None
        self._launcher: Launcher | None = None
        self._facts: dict[str, object] = {}
        self._uids: UidPool | None = None
        self._own_tasks = 0
        self._seccomp: int | None = None
        self._user_namespace: int | None = None
        self._uniform: dict[tuple[str, int], bool] = {}
        self._warned: set[str] = set()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def launcher_pid(self) -> int | None:
        """Process that runs the commands; ``None`` before the first create."""
        return self._launcher.pid if self._launcher is not None else None

    @property
    def home(self) -> Path | None:
        """Directory of this provider's workspaces; ``None`` before the first create."""
        return self._home.path if self._home is not None else None

    @property
    def grouped(self) -> bool:
        """Whether control groups bound the memory of each sandbox."""
        controllers = self._facts.get("controllers")
        return isinstance(controllers, list) and "memory" in controllers

    # -- create ------------------------------------------------------------------------------------

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        await self._ready()
        if spec.image is None:
            return await self.make(spec, spec.tree)
        if spec.tree is not None:
            raise BadRequest("a sandbox starts from an image or from a tree, not from both", param="tree")
        return await self.make(spec, self.snapshots.find(spec.image))

    async def make(self, spec: SandboxSpec, tree: Path | None, *, discard: Path | None = None) -> LocalSandbox:
        """A sandbox that starts with ``tree``; ``discard`` is a directory that is deleted with it."""
        mode_of(spec, self.config.local)
        home = await self._ready()
        name = f"{next(self._numbers)}-{secrets.token_hex(4)}"
        uid = self._uids.take() if self._uids is not None else None
        try:
            space = Space(home.make(name, uid))
        except OSError as error:
            self.released(uid)
            raise SandboxUnavailable(f"cannot make a workspace in {home.path}: {error}") from error
        sandbox = LocalSandbox(self, name, spec, space=space, uid=uid, discard=discard)
        sandbox.base = tree
        try:
            await self._furnish(sandbox, tree)
            await sandbox.open()
        except BaseException:
            await sandbox.undo()
            raise
        if not space.mounted and self._watcher is None:
            self._watcher = asyncio.create_task(_watch_sizes(self))
        return sandbox

    async def _furnish(self, sandbox: LocalSandbox, tree: Path | None) -> None:
        """Mount the workspace, or make do with what this machine allows, and bring the tree in."""
        spec, space, uid = sandbox.spec, sandbox.space, sandbox.host_uid
        sources = [_owned(path) for path in spec.mounts.values()]
        head: dict[str, object] = {
            "op": "make",
            "box": sandbox.name,
            "limits": group_limits(spec, self.config.local.tmp_mb, own_uid=uid is not None),
            "mount": None,
        }
        launcher = self._running()
        if self._facts.get("mounts"):
            layered = tree if tree is not None and await self._can_layer(tree, uid) else None
            for below in dict.fromkeys((layered, None)):
                mount = {
                    "path": space.path,
                    "uid": uid,
                    "size": spec.disk_mb * MB,
                    "inodes": 1024 + spec.disk_mb * _INODES_PER_MB,
                    "tree": _owned(below) if below is not None else None,
                    # Without a uid of its own the sandbox reaches what we reach.
                    "sources": sources if uid is not None else [],
                }
                try:
                    space.adopt(_pid(self._facts), await launcher.ask({**head, "mount": mount}))
                except SandboxError as error:
                    if not launcher.alive:
                        raise
                    what = "workspaces cannot be mounted" if below is None else "trees are copied, not mounted"
                    self._warn(f"local sandboxes: {what} here ({error})")
                    continue
                if tree is not None and below is None:
                    await self._copy(tree, sandbox)
                return
        await launcher.ask(head)
        if tree is not None:
            await self._copy(tree, sandbox)

    async def _can_layer(self, tree: Path, uid: int | None) -> bool:
        """An overlay can show files of one owner as the sandbox's; others it could read but not change."""
        info = os.stat(tree)
        key = (str(tree), info.st_mtime_ns)
        if key not in self._uniform:
            self._uniform[key] = await asyncio.to_thread(one_owner, tree)
        return self._uniform[key] and (uid is not None or (info.st_uid, info.st_gid) == (os.getuid(), os.getgid()))

    async def _copy(self, tree: Path, sandbox: LocalSandbox) -> None:
        source = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            await asyncio.to_thread(
                copy_tree,
                source,
                sandbox.space.directory,
                uid=sandbox.host_uid,
                most_bytes=sandbox.spec.disk_mb * MB,
            )
        except OSError as error:
            raise BadRequest(f"cannot copy {tree} into a sandbox: {error}", param="tree") from error
        finally:
            os.close(source)

    # -- the launcher ------------------------------------------------------------------------------

    async def _ready(self) -> OwnerDirectory:
        """First use: sweep dead owners, make our directory, start the launcher. Later: restart a dead launcher."""
        if self._home is not None and self._launcher is not None and self._launcher.alive:
            return self._home
        async with self._setup:
            root = self.config.local.root or default_root()
            if self._home is None:
                if root.is_dir():
                    await asyncio.to_thread(OwnerDirectory.sweep, root)
                self._home = OwnerDirectory(root, for_other_uids=os.getuid() == 0)
                if os.getuid() == 0:
                    uid_map = own_uid_map()
                    uids = usable_uids(uid_map, self.config.local.uid_base, self.config.local.uid_count)
                    # Two owners on one machine should not share uids: each starts somewhere else.
                    first = secrets.randbelow(len(uids))
                    self._uids = UidPool([*uids[first:], *uids[:first]])
                else:
                    self._own_tasks = await asyncio.to_thread(tasks_of_user, os.getuid())
                _allow_descriptors(self.config.max_live)
                self._seccomp = filter_file()
                if self._seccomp is None:
                    self._warn(f"local sandboxes: no system call filter for {os.uname().machine}")
            if self._launcher is None or not self._launcher.alive:
                if self._launcher is not None:
                    await self._launcher.close()
                self._launcher = await self._start(self._home, mounts=self._may_mount(root))
            return self._home

    def _may_mount(self, root: Path) -> bool:
        return not self.config.local.unsafe and (self.config.local.root is None or is_memory(root))

    async def _start(self, home: OwnerDirectory, *, mounts: bool) -> Launcher:
        setup = LauncherSetup(
            mounts=mounts,
            cgroups=True,
            unsafe=self.config.local.unsafe,
            seccomp=self._seccomp,
            user_namespace=self._user_namespace,
            boxes={
                each.name: (
                    each.space.namespace,
                    group_limits(each.spec, self.config.local.tmp_mb, own_uid=each.host_uid is not None),
                )
                for each in self.local_sandboxes()
            },
        )
        launcher = await Launcher.start(self._program(home), setup)
        try:
            self._facts = await launcher.greeting()
        except BaseException:
            await launcher.close()
            raise
        if mounts and not self._facts.get("mounts"):
            self._warn(f"local sandboxes: workspaces are plain directories, {self._facts.get('forbidden')}")
        if not mounts and not self.config.local.unsafe:
            self._warn(
                f"local sandboxes: {self.config.local.root} is no memory file system, so workspaces there are plain "
                "directories: trees are copied, and disk_mb is looked at once a second"
            )
        if not self.grouped:
            self._warn(
                "local sandboxes: no writable memory control group, so mem_mb bounds each process, not their sum, "
                "and cpu is not bounded; run as root or with a delegated cgroup"
            )
        if self._facts.get("mounts") and os.getuid() != 0 and self._user_namespace is None:
            self._user_namespace = os.open(f"/proc/{_pid(self._facts)}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        return launcher

    def _program(self, home: OwnerDirectory) -> Path:
        if self._bwrap is not None:
            return staged(self._bwrap, home.path)
        self._warn(
            "local sandboxes: sandbox.local.unsafe is set: COMMANDS RUN WITHOUT ANY ISOLATION and can read, reach and "
            "disturb whatever their user can on this machine"
        )
        return write_program(home.path, PYTHON if os.access(PYTHON, os.X_OK) else sys.executable)

    def _running(self) -> Launcher:
        if self._launcher is None:
            raise SandboxUnavailable("the launcher did not start")
        return self._launcher

    async def run(self, call: CommandCall, *, inside: bool = False) -> ExecResult:
        """Run one command through the launcher."""
        await self._ready()
        try:
            return await self._running().run(call, inside=inside)
        except SandboxUnavailable as error:
            raise SandboxUnavailable(remedy(str(error))) from error

    async def ask(self, head: dict[str, object], *body: bytes) -> dict[str, object]:
        """Any other operation of the launcher."""
        await self._ready()
        try:
            return await self._running().ask(head, *body)
        except SandboxUnavailable as error:
            raise SandboxUnavailable(remedy(str(error))) from error

    async def forget_box(self, name: str) -> None:
        """End what the launcher has of a sandbox; a dead launcher has nothing."""
        if self._launcher is None or not self._launcher.alive:
            return
        try:
            await self._launcher.ask({"op": "remove", "box": name})
        except SandboxError:
            if self._launcher.alive:
                raise

    def process_limit(self, pids: int) -> int:
        """RLIMIT_NPROC for ``pids`` processes: without a uid of its own, a sandbox counts with our processes."""
        # bwrap itself is two processes of the same uid.
        return pids + 2 + (0 if self._uids is not None else self._own_tasks)

    def released(self, uid: int | None) -> None:
        """Nothing of a sandbox is left: its uid may be used again."""
        if self._uids is not None and uid is not None:
            self._uids.give_back(uid)

    # -- snapshots, sizes, end ---------------------------------------------------------------------

    @property
    def snapshots(self) -> Snapshots:
        """Where copies of workspaces are kept."""
        if self._home is None:
            raise SandboxError("the provider has no sandbox yet")
        return Snapshots(self.config.local.snapshots or self._home.path)

    def local_sandboxes(self) -> list[LocalSandbox]:
        """Those that are alive."""
        return [each for each in self._sandboxes.values() if isinstance(each, LocalSandbox) and not each.gone]

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    async def _close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
        if self._launcher is not None:
            await self._launcher.close()
            self._launcher = None
        for fd in (self._seccomp, self._user_namespace):
            if fd is not None:
                os.close(fd)
        self._seccomp = self._user_namespace = None
        if self._home is not None:
            await asyncio.to_thread(self._home.close)
            self._home = None

    async def discard(self, directory: Path) -> None:
        """Delete a snapshot that nobody can name."""
        await asyncio.to_thread(remove_tree, str(directory))


async def _watch_sizes(provider: LocalProvider) -> None:
    """Kill sandboxes whose plain directories hold more than they may."""
    while True:
        await asyncio.sleep(_LOOK_S)
        for sandbox in provider.local_sandboxes():
            if sandbox.space.mounted:
                continue
            most = sandbox.spec.disk_mb * MB
            try:
                directory = os.dup(sandbox.space.directory)
            except OSError:
                continue  # it is being removed
            try:
                used = await asyncio.to_thread(usage_bytes, directory, most)
            finally:
                os.close(directory)
            if used > most:
                logger.warning("sandbox %s holds more than disk_mb=%d and is killed", sandbox.id, most // MB)
                sandbox.mark_gone(f"held more than its disk_mb={sandbox.spec.disk_mb}")
                sandbox.begin_kill()


def _allow_descriptors(max_live: int) -> None:
    """Each live sandbox holds two of ours."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * max_live + _OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, raised), hard))
        logger.info("open files of this process: limit raised from %d to %d", soft, max(soft, raised))


def _owned(path: Path) -> tuple[str, int, int]:
    """A path of this machine with the owner of its files."""
    try:
        info = os.stat(path)
    except OSError as error:
        raise BadRequest(f"{path}, of which a sandbox was to read, cannot be read: {error}", param="mounts") from error
    return str(path.absolute()), info.st_uid, info.st_gid


def _pid(facts: dict[str, object]) -> int:
    return int(str(facts["pid"]))
