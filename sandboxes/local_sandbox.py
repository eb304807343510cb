"""One sandbox of the local provider: its options, commands, files, snapshots, and its end.

Depends on ``base``, ``bwrap``, ``launcher``, ``limits``, ``space`` and ``workspace``.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from tollway.errors import BadRequest, SandboxError, SandboxGone, SandboxUnavailable
from tollway.sandboxes.base import Command, ExecResult, Sandbox, SandboxSpec
from tollway.sandboxes.bwrap import WORKSPACE, base_options, command_options, encode
from tollway.sandboxes.config import LocalConfig
from tollway.sandboxes.launcher import CommandCall
from tollway.sandboxes.limits import rlimits
from tollway.sandboxes.space import Space, copy_tree, usage_bytes
from tollway.sandboxes.workspace import parts_of, read_file, write_file

if TYPE_CHECKING:
    from tollway.sandboxes.local import LocalProvider

__all__ = ["PYTHON", "LocalSandbox", "mode_of"]

MB = 1 << 20
PYTHON = "/usr/bin/python3"
_OPEN_S = 30.0
_LONGEST_WORD = 128 << 10
_LONGEST_COMMAND = 1536 << 10
_ALL = 1 << 62
_LINK = "link:"
_TAKEN = {"/", "/proc", "/dev", "/tmp", "/usr", WORKSPACE}  # noqa: S108 - the sandbox's own


def mode_of(spec: SandboxSpec, config: LocalConfig) -> str:
    """``exec`` or ``session``; ``BadRequest`` for options that this provider does not know."""
    unknown = {name for name in spec.options if name != "mode" and not name.startswith(_LINK)}
    mode = spec.options.get("mode", config.mode)
    if unknown or mode not in ("exec", "session"):
        raise BadRequest(
            f"the local provider knows the options mode=exec|session and link:PATH=TARGET, got {dict(spec.options)}",
            param="options",
        )
    bound = [each for each in spec.mounts if config.unsafe and str(spec.mounts[each]) != each]
    if config.unsafe and (mode == "session" or bound or _links(spec)):
        raise BadRequest(
            "without isolation (sandbox.local.unsafe) there is neither session mode nor host files or links at other "
            "places"
        )
    return mode


class LocalSandbox(Sandbox):
    """A workspace and the bwrap options around it."""

    def __init__(
        self,
        provider: LocalProvider,
        name: str,
        spec: SandboxSpec,
        *,
        space: Space,
        uid: int | None,
        discard: Path | None = None,
    ) -> None:
        super().__init__(provider, f"local-{name}", spec)
        self.name = name
        """What the launcher knows it by."""
        self.space = space
        self._local = provider
        self._uid = uid
        self._discard = discard
        self.base: Path | None = None
        """Directory whose contents it started with."""
        self._running: set[asyncio.Task[ExecResult]] = set()
        self._session = mode_of(spec, provider.config.local) == "session"
        self._paused = False
        self._options = b""

    @property
    def host_uid(self) -> int | None:
        """The uid that its processes have outside; ``None`` when it is the owner's."""
        return self._uid

    @property
    def host_path(self) -> Path:
        """Its directory on the host, where the workspace is or is mounted for it alone. Read by ``read``, not here."""
        return Path(self.space.path)

    async def open(self) -> None:
        """The workspace is there: get ready for commands."""
        settings = self._local.config.local
        places = [str(path.absolute()) for path in self.spec.mounts.values()]
        options = base_options(
            self.space.workspace,
            network=self.spec.network == "public",
            tmp_bytes=settings.tmp_mb * MB,
            ro_binds=settings.extra_ro_binds,
            mounts=list(zip(self.space.binds or places, map(_inside, self.spec.mounts), strict=True)),
            links=_links(self.spec),
            env=self.spec.env,
        )
        self._options = encode(options)
        if self._session:
            await self._open_session()

    async def _open_session(self) -> None:
        if not os.access(PYTHON, os.X_OK):
            raise SandboxUnavailable(
                f"session mode runs an agent with {PYTHON}, which is missing: install the system package python3"
            )
        options = self._options + encode(["--as-pid-1", *command_options(WORKSPACE, {})])
        head: dict[str, object] = {
            "op": "session",
            "box": self.name,
            "rlimits": self._rlimits(None),
            "uid": self._uid,
        }
        try:
            async with asyncio.timeout(_OPEN_S):
                await self._local.ask(head, options)
        except TimeoutError:
            raise SandboxError(f"the agent in the sandbox was not ready within {_OPEN_S} s") from None

    def _rlimits(self, cpu_s: float | None) -> list[tuple[int, int]]:
        settings = self._local.config.local
        return rlimits(
            mem_mb=self.spec.mem_mb,
            pids=self._local.process_limit(self.spec.pids),
            file_mb=settings.file_mb,
            open_files=settings.open_files,
            cpu_s=cpu_s,
            grouped=self._local.grouped,
        )

    async def _exec(self, command: Command) -> ExecResult:
        if self._paused:
            raise BadRequest(f"sandbox {self.id} is paused; resume it first")
        inside = command.cwd if command.cwd.startswith("/") else f"{WORKSPACE}/{command.cwd}"
        call = CommandCall(
            options=_words(inside, command) if self._session else self._options + _options(inside, command.env),
            argv=command.argv,
            stdin=command.stdin,
            timeout_s=command.timeout_s,
            max_output=command.max_output,
            rlimits=self._rlimits(command.timeout_s),
            uid=self._uid,
            box=self.name,
        )
        task = asyncio.create_task(self._local.run(call, inside=self._session))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._dead is not None and not (current is not None and current.cancelling()):
                self._check_alive()
            raise
        except SandboxGone:
            self.mark_gone("lost the agent that runs its commands")
            self._check_alive()
            raise

    async def _read(self, path: str, max_bytes: int) -> bytes:
        return read_file(self.space.directory, path, max_bytes)

    async def _write(self, path: str, data: bytes, mode: int) -> None:
        parts_of(path)
        if len(data) > self._local.config.local.file_mb * MB:
            raise BadRequest(f"{path!r} would hold more than sandbox.local.file_mb", param="path")
        try:
            write_file(self.space.directory, path, data, mode=mode, uid=self._uid)
        except SandboxError as error:
            full = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ENOSPC
            if full and self.space.mounted:
                raise BadRequest(f"{path!r} does not fit into disk_mb={self.spec.disk_mb}", param="path") from error
            raise

    # -- states ------------------------------------------------------------------------------------

    async def _snapshot(self) -> str:
        return (await self._copied()).name

    async def _copied(self) -> Path:
        place = self._local.snapshots.new()
        target = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            most = self.spec.disk_mb * MB + await asyncio.to_thread(_size, self.base)
            await asyncio.to_thread(copy_tree, self.space.directory, target, uid=None, most_bytes=most)
        except BaseException as error:
            await self._local.discard(place)
            if isinstance(error, OSError):
                raise SandboxError(f"cannot copy the workspace of {self.id}: {error}") from error
            raise
        finally:
            os.close(target)
        return place

    async def _fork(self, spec: SandboxSpec) -> Sandbox:
        place = await self._copied()
        try:
            return await self._local.make(spec, place, discard=place)
        except BaseException:
            await self._local.discard(place)
            raise

    async def _pause(self) -> None:
        await self._local.ask({"op": "signal", "box": self.name, "signal": int(signal.SIGSTOP)})
        self._paused = True

    async def _resume(self) -> None:
        await self._local.ask({"op": "signal", "box": self.name, "signal": int(signal.SIGCONT)})
        self._paused = False

    # -- end ---------------------------------------------------------------------------------------

    async def _kill(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.undo()

    async def undo(self) -> None:
        """Remove what was made: processes, mounts, files. ``SandboxError`` when something is left."""
        await self._local.forget_box(self.name)
        try:
            if self.space.small:
                self.space.remove()
            else:
                await asyncio.to_thread(self.space.remove)
            if self._discard is not None:
                await self._local.discard(self._discard)
                self._discard = None
        except OSError as error:
            # Its uid stays taken: the files that are left belong to it.
            raise SandboxError(f"cannot remove the workspace {self.space.path}: {error}") from error
        self._local.released(self._uid)
        self._uid = None


def _options(directory: str, env: Mapping[str, str]) -> bytes:
    return encode(command_options(directory, env))


def _words(directory: str, command: Command) -> bytes:
    """A command as the agent reads it."""
    pairs = [f"{name}={value}" for name, value in command.env.items()]
    words = [word.encode() for word in (*command.argv, *pairs)]
    # The agent could say only that it failed, in words that a command can print too.
    if any(len(word) >= _LONGEST_WORD for word in words) or sum(map(len, words)) > _LONGEST_COMMAND:
        raise BadRequest("the command line is too long for the system; pass data by stdin or by a file")
    return b"\0".join([directory.encode(), str(len(command.argv)).encode(), *words])


def _inside(path: str) -> str:
    """Where a host file appears, checked."""
    pure = PurePosixPath(path)
    reserved = str(pure) in _TAKEN or pure.parts[1:2] in (("proc",), ("dev",), ("sys",))
    if not pure.is_absolute() or ".." in pure.parts or "\0" in path or reserved:
        raise BadRequest(f"{path!r} is no place where host files can appear in a sandbox", param="mounts")
    if pure.parts[1] == "usr" and not Path(path).exists():
        raise BadRequest(f"{path!r} cannot be made: /usr is read-only in a sandbox; use /opt", param="mounts")
    return str(pure)


def _links(spec: SandboxSpec) -> list[tuple[str, str]]:
    """Links that the options ``link:PATH`` ask for, as target and path."""
    found = []
    for name, target in spec.options.items():
        if name.startswith(_LINK):
            path = PurePosixPath(name.removeprefix(_LINK))
            own = path.parts[1:2] in [(each,) for each in ("usr", "proc", "dev", "etc", "tmp", "workspace", "sys")]
            if not path.is_absolute() or len(path.parts) < 2 or ".." in path.parts or own or not target.startswith("/"):
                raise BadRequest(f"no link {path} to {target!r} can be made in a sandbox", param="options")
            found.append((target, str(path)))
    return found


def _size(tree: Path | None) -> int:
    if tree is None:
        return 0
    directory = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return usage_bytes(directory, _ALL)
    finally:
        os.close(directory)
