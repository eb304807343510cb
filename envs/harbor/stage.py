"""Lays out a task's files in a sandbox and runs its commands there, at the paths that the format promises.

On a machine from an image these are real directories. On the provider's own system, whose root nobody may
write, the workspace stands behind links: the working directory is the workspace, /tests, /solution and /logs lie
in its ``.harbor``. Depends on ``sandboxes.base`` and ``task``.
"""

from __future__ import annotations

import io
import posixpath
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tollway.envs.base import Machine
from tollway.envs.harbor.task import Place, tree_files
from tollway.errors import BadRequest, CapabilityMissing, EpisodeFailed
from tollway.sandboxes.base import ExecResult, Sandbox

__all__ = ["PRIVATE", "Stage", "filtered", "machine_of"]

WORKSPACE = "/workspace"
PRIVATE = ".harbor"
"""Directory in the workspace behind /tests, /solution and /logs."""
_LINKED = ("/tests", "/solution", "/logs")
_SETUP_S = 120.0


def machine_of(place: Place, pids: int) -> Machine:
    """The sandbox that a place needs."""
    links: dict[str, str] = {}
    if place.image is None:
        links = {f"link:{path}": f"{WORKSPACE}/{PRIVATE}{path}" for path in _LINKED}
        if place.workdir != WORKSPACE:
            links[f"link:{place.workdir}"] = WORKSPACE
    return Machine(
        image=place.image,
        env=place.env,
        cpu=place.cpu,
        mem_mb=place.mem_mb,
        disk_mb=place.disk_mb,
        pids=pids,
        network=place.network,
        options=links,
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """One sandbox as the place of a task."""

    sandbox: Sandbox
    place: Place
    root: str | None
    """User that may write anywhere in an image, for set-up and grading; ``None`` for the sandbox's only one."""

    def real(self, path: str) -> str:
        """Where ``path`` of the format lies: itself, or what stands for it in the workspace."""
        path = posixpath.normpath(posixpath.join(self.place.workdir, path))
        if self.place.image is not None:
            return path
        for linked in _LINKED:
            if path == linked or path.startswith(linked + "/"):
                return f"{WORKSPACE}/{PRIVATE}{path}"
        if path == self.place.workdir or path.startswith(self.place.workdir.rstrip("/") + "/"):
            return posixpath.normpath(WORKSPACE + path[len(self.place.workdir.rstrip("/")) :])
        return path

    @classmethod
    async def on(cls, sandbox: Sandbox, place: Place) -> Stage:
        """A stage that sets up as root where an image's machine lets it."""
        root = None
        if place.image is not None:
            try:
                done = await sandbox.exec(["id", "-u"], timeout_s=_SETUP_S, cwd="/", user="root")
                root = "root" if done.exit_code == 0 else None
            except CapabilityMissing:
                pass  # the machine has one user; what it cannot write, it says
        return cls(sandbox, place, root)

    async def prepare(self) -> None:
        """Directories and the task's own files."""
        work = self.real(self.place.workdir)
        logs = [self.real(f"/logs/{name}") for name in ("agent", "verifier", "artifacts")]
        await self.must(["mkdir", "-p", *logs, work], "make the task's directories")
        if self.place.files:
            await self.lay("/", pack([(path, self.real(target)) for path, target in self.place.files]))
        if self.root is not None:
            # The agent's user is not always root, and root in a sandbox may own but not give away. What belongs to
            # somebody else already, as the image has it, stays so.
            open_to_all = ["chmod", "-R", "a+rwX", work, *logs[::2]]
            await self.run(open_to_all, timeout_s=_SETUP_S, user=self.root)
            done = await self.run(["/bin/sh", "-c", '[ -w "$1" ]', "probe", work], timeout_s=_SETUP_S)
            if done.exit_code != 0:
                raise EpisodeFailed(f"the agent's user cannot write to {work}, which the image gave to another one")

    async def lay(self, folder: str, archive: bytes) -> None:
        """Unpack a tar in ``folder``, which is made."""
        command = ["/bin/sh", "-c", 'mkdir -p "$1" && exec tar -xf - --no-same-owner -C "$1"', "lay", folder]
        await self.must(command, f"unpack files in {folder}", stdin=archive)

    async def must(self, argv: Sequence[str], what: str, *, stdin: bytes = b"") -> ExecResult:
        """Run a command of ours. Raises ``EpisodeFailed`` when it fails: the machine cannot hold the task."""
        done = await self.run(argv, timeout_s=_SETUP_S, user=self.root, stdin=stdin)
        if done.exit_code != 0:
            raise EpisodeFailed(f"cannot {what}: {_words(done)}")
        return done

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes = b"",
        cwd: str = "/",
    ) -> ExecResult:
        """Run a command, by default outside of the working directory."""
        return await self.sandbox.exec(argv, timeout_s=timeout_s, cwd=cwd, env=env, user=user, stdin=stdin)

    async def take(self, source: str, number: int, limit: int, exclude: Sequence[str] = ()) -> bytes | None:
        """A tar of a file or directory as the agent left it; ``None`` when there is none, or more than ``limit``.

        ``exclude`` are tar's patterns of what of a directory stays behind.
        """
        real, packed = self.real(source), f"{PRIVATE}-artifact-{number}.tar"
        program = (
            '[ -e "$1" ] || exit 44; cd "$(dirname "$1")" && rm -rf "$2" && '
            'name=$(basename "$1") && to=$2 && shift 2 && exec tar -cf "$to" "$@" "./$name"'
        )
        target = f"{WORKSPACE}/{packed}"
        # As the agent's user: root in a sandbox may not read what only that one can.
        patterns = [f"--exclude={each}" for each in exclude]
        done = await self.run(["/bin/sh", "-c", program, "take", real, target, *patterns], timeout_s=_SETUP_S)
        if done.exit_code != 0:
            return None
        try:
            return await self.sandbox.read(packed, max_bytes=limit)
        except BadRequest:
            return None
        finally:
            await self.run(["rm", "-f", target], timeout_s=_SETUP_S)


def pack(files: Sequence[tuple[Path, str]]) -> bytes:
    """A tar of files and of the contents of directories, each at its absolute path, with their modes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for source, target in files:
            if source.is_file():
                _add(archive, source, target)
                continue
            for path in tree_files(source):
                _add(archive, path, posixpath.join(target, path.relative_to(source).as_posix()))
    return buffer.getvalue()


def filtered(archive: bytes) -> bytes:
    """An agent's tar with its plain files and directories only: nothing that leads or lies elsewhere."""
    buffer = io.BytesIO()
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as found, tarfile.open(fileobj=buffer, mode="w") as kept:
            for member in found:
                parts = member.name.split("/")
                if member.name.startswith("/") or ".." in parts or not (member.isreg() or member.isdir()):
                    continue
                plain = tarfile.TarInfo(member.name)
                plain.type, plain.size = member.type if member.isdir() else tarfile.REGTYPE, member.size
                plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                kept.addfile(plain, found.extractfile(member) if member.isreg() else None)
    except (tarfile.TarError, OSError, EOFError):
        return b""
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, source: Path, target: str) -> None:
    data = source.read_bytes()
    entry = tarfile.TarInfo(target.strip("/"))
    entry.size, entry.mode = len(data), 0o755 if source.stat().st_mode & 0o100 else 0o644
    archive.addfile(entry, io.BytesIO(data))


def _words(done: ExecResult) -> str:
    said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-300:]
    return "timed out" if done.timed_out else f"exit code {done.exit_code}: {said}"
