"""The default provider: bubblewrap on this machine, one private workspace per sandbox, one bwrap run per command.

Creating a sandbox makes a directory; every ``exec`` is a fresh set of namespaces around it, so no process
survives a command. Limits are rlimits (address space, processes, file size, open files, CPU seconds);
cgroup limits and a long-lived session inside the sandbox are not part of this provider yet, and total disk
use is bounded only by the file system under ``sandbox.local.root``. Depends on ``base`` and its siblings
``bwrap``, ``launcher``, ``limits``, ``workspace``.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from pathlib import Path
from typing import ClassVar

from tollway.errors import BadImage, BadRequest, SandboxError, SandboxUnavailable
from tollway.sandboxes.base import Command, ExecResult, Sandbox, SandboxProvider, SandboxSpec
from tollway.sandboxes.bwrap import WORKSPACE, base_options, command_options, encode
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.launcher import CommandCall, Launcher
from tollway.sandboxes.limits import UidPool, own_uid_map, rlimits, tasks_of_user, usable_uids
from tollway.sandboxes.probe import remedy
from tollway.sandboxes.program import find_bwrap, staged
from tollway.sandboxes.workspace import OwnerDirectory, default_root, parts_of, read_file, remove_tree, write_file

__all__ = ["LocalProvider", "LocalSandbox"]

MB = 1 << 20


class LocalProvider(SandboxProvider):
    """Bubblewrap sandboxes. Raises ``SandboxUnavailable`` with the remedy where they cannot run."""

    name: ClassVar[str] = "local"
    caps: ClassVar[frozenset[str]] = frozenset({"stderr", "public_network"})

    def __init__(self, config: SandboxConfig | None = None) -> None:
        super().__init__(config or SandboxConfig())
        self._bwrap = find_bwrap(self.config.local)
        self._numbers = itertools.count(1)
        self._setup = asyncio.Lock()
        self._home: OwnerDirectory | None = None
        self._launcher: Launcher | None = None
        self._uids: UidPool | None = None
        self._own_tasks = 0

    @property
    def launcher_pid(self) -> int | None:
        """Process that runs the commands; ``None`` before the first create."""
        return self._launcher.pid if self._launcher is not None else None

    @property
    def home(self) -> Path | None:
        """Directory of this provider's workspaces; ``None`` before the first create."""
        return self._home.path if self._home is not None else None

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        if spec.image is not None:
            raise BadImage(f"the local provider has no images (asked for {spec.image!r}); its system is this machine's")
        home = await self._ready()
        name = f"{next(self._numbers)}-{secrets.token_hex(4)}"
        uid = self._uids.take() if self._uids is not None else None
        try:
            workspace = home.make(name, uid)
        except OSError as error:
            if self._uids is not None and uid is not None:
                self._uids.give_back(uid)
            raise SandboxUnavailable(f"cannot make a workspace in {home.path}: {error}") from error
        return LocalSandbox(self, f"local-{name}", spec, workspace=workspace, uid=uid)

    async def _ready(self) -> OwnerDirectory:
        """First use: sweep dead owners, make our directory, start the launcher. Later: restart a dead launcher."""
        if self._home is not None and self._launcher is not None and self._launcher.alive:
            return self._home
        async with self._setup:
            if self._home is None:
                root = self.config.local.root or default_root()
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
            if self._launcher is None or not self._launcher.alive:
                if self._launcher is not None:
                    await self._launcher.close()
                self._launcher = await Launcher.start(staged(self._bwrap, self._home.path))
            return self._home

    async def run(self, sandbox: LocalSandbox, call: CommandCall) -> ExecResult:
        """Run one command of ``sandbox`` through the launcher."""
        await self._ready()
        if self._launcher is None:
            raise SandboxUnavailable("the launcher did not start")
        try:
            return await self._launcher.run(call)
        except SandboxUnavailable as error:
            raise SandboxUnavailable(remedy(str(error))) from error

    def process_limit(self, pids: int) -> int:
        """RLIMIT_NPROC for ``pids`` processes: without a uid of its own, a sandbox counts with our processes."""
        # bwrap itself is two processes of the same uid.
        return pids + 2 + (0 if self._uids is not None else self._own_tasks)

    def released(self, uid: int | None) -> None:
        """Nothing of a sandbox is left: its uid may be used again."""
        if self._uids is not None and uid is not None:
            self._uids.give_back(uid)

    async def _close(self) -> None:
        if self._launcher is not None:
            await self._launcher.close()
            self._launcher = None
        if self._home is not None:
            await asyncio.to_thread(self._home.close)
            self._home = None


class LocalSandbox(Sandbox):
    """A workspace directory and the bwrap options around it."""

    def __init__(
        self, provider: LocalProvider, sandbox_id: str, spec: SandboxSpec, *, workspace: str, uid: int | None
    ) -> None:
        super().__init__(provider, sandbox_id, spec)
        self._local = provider
        self._workspace = workspace
        self._uid = uid
        self._running: set[asyncio.Task[ExecResult]] = set()
        settings = provider.config.local
        self._options = encode(
            base_options(
                workspace,
                network=spec.network == "public",
                tmp_bytes=settings.tmp_mb * MB,
                ro_binds=settings.extra_ro_binds,
                env=spec.env,
            )
        )

    @property
    def host_uid(self) -> int | None:
        """The uid that its processes have outside; ``None`` when it is the owner's."""
        return self._uid

    @property
    def host_path(self) -> Path:
        """The workspace on the host. Never follow paths below it: use ``read``."""
        return Path(self._workspace)

    async def _exec(self, command: Command) -> ExecResult:
        settings = self._local.config.local
        inside = command.cwd if command.cwd.startswith("/") else f"{WORKSPACE}/{command.cwd}"
        call = CommandCall(
            options=self._options + encode(command_options(inside, command.env)),
            argv=command.argv,
            stdin=command.stdin,
            timeout_s=command.timeout_s,
            max_output=command.max_output,
            rlimits=rlimits(
                mem_mb=self.spec.mem_mb,
                pids=self._local.process_limit(self.spec.pids),
                file_mb=settings.file_mb,
                open_files=settings.open_files,
                cpu_s=command.timeout_s,
            ),
            uid=self._uid,
        )
        task = asyncio.create_task(self._local.run(self, call))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._dead is not None and not (current is not None and current.cancelling()):
                self._check_alive()
            raise

    async def _read(self, path: str, max_bytes: int) -> bytes:
        return read_file(self._workspace, path, max_bytes)

    async def _write(self, path: str, data: bytes, mode: int) -> None:
        parts_of(path)
        if len(data) > self._local.config.local.file_mb * MB:
            raise BadRequest(f"{path!r} would hold more than sandbox.local.file_mb", param="path")
        write_file(self._workspace, path, data, mode=mode, uid=self._uid)

    async def _kill(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        try:
            await asyncio.to_thread(remove_tree, self._workspace)
        except OSError as error:
            # Its uid stays taken: the files that are left belong to it.
            raise SandboxError(f"cannot remove the workspace {self._workspace}: {error}") from error
        self._local.released(self._uid)
