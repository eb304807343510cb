"""Sandboxes out of what every Linux has: ``unshare``, ``mount`` and ``chroot`` of util-linux and coreutils.

Each command gets fresh user, mount, process, network, IPC and host-name namespaces around one directory. Useful
where bubblewrap cannot be installed; without its seccomp filter and limits, so not for code that wants out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
import time
from asyncio.subprocess import PIPE
from pathlib import Path

from tollway.errors import BadImage, SandboxUnavailable
from tollway.sandboxes.base import Command, ExecResult, Sandbox, SandboxProvider, SandboxSpec
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.workspace import read_file, remove_tree, write_file

__all__ = ["UnshareProvider"]

NOBODY = 65534
UNSHARE = ("unshare", "--user", "--map-root-user", "-mpniu", "--fork", "--kill-child")
# $1 the empty directory that becomes the root, $2 the workspace, $3 where to start; then the command.
INSIDE = """
set -e
mount -t tmpfs -o size=64m,mode=755 none "$1"
cd "$1"
mkdir usr etc proc dev tmp workspace
chmod 1777 tmp
mount --rbind /usr usr
mount -o remount,ro,bind usr
for name in bin sbin lib lib64; do [ ! -e "/$name" ] || ln -s "usr/$name" "$name"; done
mkdir etc/alternatives && mount --bind /etc/alternatives etc/alternatives
for name in null zero full random urandom; do : > dev/$name; mount --bind /dev/$name dev/$name; done
ln -s /proc/self/fd dev/fd
mount -t proc none proc
mount --bind "$2" workspace
mount -o remount,ro,bind .
exec chroot . /bin/sh -c 'cd "$1" || exit 126; shift; exec "$@"' sh "$3" "${@:4}"
"""


class UnshareProvider(SandboxProvider):
    """One directory per sandbox; namespaces per command."""

    name = "unshare"
    caps = frozenset({"stderr"})

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self._numbers = itertools.count(1)
        self._home: Path | None = None

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        if spec.image is not None:
            raise BadImage(f"provider unshare has no images (asked for {spec.image!r})")
        if self._home is None:
            self._home = Path(tempfile.mkdtemp(prefix="tollway-unshare-"))
            self._home.chmod(0o711)
        home = self._home / str(next(self._numbers))
        for directory in (home, home / "root", home / "workspace"):
            directory.mkdir(mode=0o711 if directory == home else 0o700)
            if os.getuid() == 0 and directory != home:
                os.chown(directory, NOBODY, NOBODY)  # root inside must not be root outside
        return UnshareSandbox(self, f"unshare-{self._home.name}-{home.name}", spec, home)

    async def _close(self) -> None:
        if self._home is not None:
            await asyncio.to_thread(remove_tree, str(self._home))


class UnshareSandbox(Sandbox):
    """The directory, and the commands that run in it now."""

    def __init__(self, provider: SandboxProvider, sandbox_id: str, spec: SandboxSpec, home: Path) -> None:
        super().__init__(provider, sandbox_id, spec)
        self._home = home
        self._running: set[asyncio.subprocess.Process] = set()

    async def _exec(self, command: Command) -> ExecResult:
        started = time.monotonic()
        drop = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups") if os.getuid() == 0 else ()
        places = (str(self._home / "root"), str(self._home / "workspace"), os.path.join("/workspace", command.cwd))
        env = {"PATH": "/usr/bin:/usr/sbin:/bin", "HOME": "/workspace", **self.spec.env, **command.env}
        argv = (*drop, *UNSHARE, "bash", "-c", INSIDE, "bash", *places, *command.argv)
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env, cwd="/", start_new_session=True
            )
        except OSError as error:
            raise SandboxUnavailable(f"provider unshare needs setpriv, unshare and bash: {error}") from error
        self._running.add(process)
        talking = asyncio.ensure_future(_talk(process, command.stdin, command.max_output + 1))
        try:
            await asyncio.wait([talking], timeout=command.timeout_s)
        finally:
            timed_out = not talking.done()
            if process.returncode is None:
                process.kill()  # --kill-child takes the namespace, and everything in it, along
            outputs = await asyncio.shield(talking)
            self._running.discard(process)
        self._check_alive()
        code = process.returncode
        return ExecResult(
            exit_code=None if timed_out else code if code >= 0 else 128 - code,
            stdout=outputs[0][: command.max_output],
            stderr=outputs[1][: command.max_output],
            timed_out=timed_out,
            truncated=any(len(output) > command.max_output for output in outputs),
            duration_s=time.monotonic() - started,
        )

    async def _read(self, path: str, max_bytes: int) -> bytes:
        return await asyncio.to_thread(read_file, str(self._home / "workspace"), path, max_bytes)

    async def _write(self, path: str, data: bytes, mode: int) -> None:
        uid = NOBODY if os.getuid() == 0 else None
        await asyncio.to_thread(write_file, str(self._home / "workspace"), path, data, mode=mode, uid=uid)

    async def _kill(self) -> None:
        running = [process for process in self._running if process.returncode is None]
        for process in running:
            process.kill()
        await asyncio.gather(*(process.wait() for process in running))
        await asyncio.to_thread(remove_tree, str(self._home))


async def _talk(process: asyncio.subprocess.Process, stdin: bytes, most: int) -> tuple[bytes, bytes]:
    """Feed a process and read it to its end; bytes beyond ``most`` of each stream are dropped."""

    async def read(stream: asyncio.StreamReader) -> bytes:
        kept = bytearray()
        while data := await stream.read(1 << 16):
            kept += data[: most - len(kept)]
        return bytes(kept)

    async def write(stream: asyncio.StreamWriter) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read
            stream.write(stdin)
            await stream.drain()
        stream.close()

    streams = read(process.stdout), read(process.stderr), write(process.stdin), process.wait()
    return tuple((await asyncio.gather(*streams))[:2])
