"""Containers of a Docker daemon: no capabilities, no new privileges, no network unless asked, one uid inside.

The first process of a container only keeps its time: it ends when the TTL has passed, and the daemon then
removes the container, whether its owner still lives or not. Commands are the daemon's execs of ``remote_program``
under the unprivileged user; mounts are read-only binds, the tree is copied. Disk use is bounded per file, and
in total only where the daemon's storage has quotas. Depends on ``remote`` and, lazily, on ``aiodocker``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import IO, TYPE_CHECKING, ClassVar, TypeVar

from tollway.errors import BadImage, CreateFailed, SandboxError, SandboxGone, SandboxUnavailable
from tollway.sandboxes.base import Sandbox, SandboxProvider
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.docker_settings import LEASE, WORKSPACE, archive_of, container_settings, workspace_archive
from tollway.sandboxes.remote import MARK, RemoteSandbox, expires_in, labels_of, restored_spec, wanted_marks
from tollway.sandboxes.remote_program import Reply
from tollway.sandboxes.spec import Command, ExecResult, SandboxInfo, SandboxSpec

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer
    from aiodocker.exceptions import DockerError

__all__ = ["DockerProvider", "DockerSandbox"]

logger = logging.getLogger(__name__)
T = TypeVar("T")
MB = 1 << 20
_REMEDY = "start it, or name it by sandbox.docker.url or DOCKER_HOST; your user must be allowed to use its socket"
_OOM_KILLS = "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null; :"


class DockerProvider(SandboxProvider):
    """Containers of the daemon that ``sandbox.docker.url`` or ``DOCKER_HOST`` names."""

    name: ClassVar[str] = "docker"
    caps: ClassVar[frozenset[str]] = frozenset(
        {"stderr", "public_network", "user", "attach", "snapshot", "pause", "host_files"}
    )

    def __init__(self, config: SandboxConfig | None = None) -> None:
        super().__init__(config or SandboxConfig())
        self._docker: Docker | None = None
        self._answered = False

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        docker = self.client()
        image = spec.image or self.config.docker.image
        name = f"tollway-{secrets.token_hex(8)}"
        container = await self._made(docker, image, name, spec)
        sandbox = DockerSandbox(self, name, spec, container=container)
        try:
            await sandbox.begin()
        except BaseException:
            await sandbox.discard()
            raise
        return sandbox

    async def _made(self, docker: Docker, image: str, name: str, spec: SandboxSpec) -> DockerContainer:
        from aiodocker.exceptions import DockerError

        settings = container_settings(spec, self.config.docker, image, at_home=self._at_home)
        try:
            try:
                container = await docker.containers.create(settings, name=name)
            except DockerError as error:
                if error.status != 404 or self.config.docker.pull == "never":
                    raise
                await docker.images.pull(image)
                container = await docker.containers.create(settings, name=name)
        except DockerError as error:
            raise self.translated(error, f"creating a container of {image}", creating=True) from error
        self._answered = True
        return container

    @property
    def _at_home(self) -> bool:
        """Whether the daemon sees this machine's files."""
        return str(self.client().docker_host or "").startswith(("unix:", "npipe:"))

    def client(self) -> Docker:
        """The connection to the daemon, made at first use."""
        if self._docker is None:
            try:
                import aiodocker
            except ImportError as error:
                raise SandboxUnavailable(
                    "the docker provider needs its extra: pip install 'tollway[docker]'"
                ) from error
            try:
                self._docker = aiodocker.Docker(url=self.config.docker.url)
            except Exception as error:  # whatever a broken context file or address raises
                told = str(error) or "no socket where a daemon usually has one"
                raise SandboxUnavailable(f"cannot use the Docker daemon: {told}; {_REMEDY}") from error
        return self._docker

    def translated(self, error: DockerError, what: str, *, creating: bool = False) -> SandboxError:
        """The daemon's error in our tree."""
        text = f"{what}: {error.message}"
        if error.status == 900:
            if creating and not self._answered:
                return SandboxUnavailable(f"{error.message}; {_REMEDY}")
            return SandboxError(text)
        if creating:
            bad_image = error.status in (400, 404) or "no such file or directory" in error.message
            return BadImage(text) if bad_image else CreateFailed(text)
        gone = error.status in (404, 409) and "paused" not in error.message
        return SandboxGone(text) if gone else SandboxError(text)

    async def _remote_list(self, labels: Mapping[str, str]) -> list[SandboxInfo]:
        from aiodocker.exceptions import DockerError

        wanted = [f"{key}={value}" for key, value in wanted_marks(labels).items()]
        try:
            found = await self.client().containers.list(all=True, filters=json.dumps({"label": wanted}))
        except DockerError as error:
            raise self.translated(error, "listing containers", creating=True) from error
        return [
            SandboxInfo(
                id=container["Names"][0].lstrip("/"),
                labels=labels_of(container["Labels"]),
                expires_in_s=expires_in(container["Labels"]),
            )
            for container in found
            if container["State"] in ("created", "running", "paused")
        ]

    async def _attach(self, sandbox_id: str) -> Sandbox:
        from aiodocker.exceptions import DockerError

        try:
            container = await self.client().containers.get(sandbox_id)
        except DockerError as error:
            raise self.translated(error, f"attaching to {sandbox_id}") from error
        marks = container["Config"]["Labels"]
        if MARK not in marks:
            raise SandboxGone(f"container {sandbox_id} is no sandbox")
        return DockerSandbox(self, sandbox_id, restored_spec(marks, expires_in(marks)), container=container)

    async def _close(self) -> None:
        if self._docker is not None:
            await self._docker.close()
            self._docker = None


class DockerSandbox(RemoteSandbox):
    """One container."""

    sweeps: ClassVar[bool] = True

    def __init__(self, provider: DockerProvider, name: str, spec: SandboxSpec, *, container: DockerContainer) -> None:
        super().__init__(provider, name, spec, workspace=WORKSPACE)
        self._daemon = provider
        self._container = container
        self._user = provider.config.docker.user
        self._oom_kills = 0
        self._leases = 0

    async def begin(self) -> None:
        """Fill the workspace and start the keeper."""
        try:
            archive = await asyncio.to_thread(workspace_archive, self.spec.tree, self._user)
        except OSError as error:
            raise BadImage(f"cannot read the tree {self.spec.tree}: {error}") from error
        with archive:
            await self._put("/", archive)
        await self._lease(self.spec.ttl_s)
        await self._ask(self._container.start(), f"starting {self.id}", creating=True)

    async def _program(self, program: str, *, timeout_s: float, user: str | None) -> Reply:
        from aiodocker.exceptions import DockerError

        output = bytearray()
        try:
            started = await self._container.exec(
                ["/bin/sh", "-c", program], user=user or self._user, workdir="/", stderr=False
            )
            async with started.start(detach=False) as stream:
                while (message := await stream.read_out()) is not None:
                    output += message.data
        except DockerError as error:
            raise self._daemon.translated(error, f"running a command in {self.id}") from error
        except OSError as error:
            raise SandboxError(f"lost the Docker daemon while a command ran in {self.id}: {error}") from error
        status = (await self._ask(started.inspect(), f"looking at a command in {self.id}"))["ExitCode"]
        if status and not (await self._ask(self._container.show(), f"looking at {self.id}"))["State"]["Running"]:
            raise SandboxGone(f"container {self.id} ended while a command ran in it")
        return Reply(bytes(output), -1 if status is None else status)

    async def _exec(self, command: Command) -> ExecResult:
        result = await super()._exec(command)
        if result.exit_code != 137:
            return result
        reply = await self._program(_OOM_KILLS, timeout_s=10, user=None)
        kills = sum(int(count) for count in re.findall(rb"^oom_kill (\d+)", reply.output, re.MULTILINE))
        known, self._oom_kills = self._oom_kills, kills
        return replace(result, oom=True) if kills > known else result

    async def _upload(self, path: str, data: bytes) -> None:
        directory, _, name = path.rpartition("/")
        await self._put(directory, archive_of(name, data, self._user))

    async def _put(self, directory: str, archive: IO[bytes]) -> None:
        await self._ask(
            self._container.put_archive(directory, _pieces(archive)),  # type: ignore[no-untyped-call]  # aiodocker's gap
            f"sending files to {self.id}",
        )

    async def _lease(self, ttl_s: float) -> None:
        self._leases += 1
        data = f"{self._leases}-{secrets.token_hex(4)} {int(ttl_s) + 2}\n".encode()
        await self._put("/", archive_of(LEASE, data))

    async def _ask(self, call: Awaitable[T], what: str, *, creating: bool = False) -> T:
        """One call of the daemon, its errors translated."""
        from aiodocker.exceptions import DockerError

        try:
            return await call
        except DockerError as error:
            raise self._daemon.translated(error, what, creating=creating) from error

    async def _extend(self, ttl_s: float) -> None:
        # A heartbeat never shortens a life.
        await self._lease(max(ttl_s, self.expires_at - time.monotonic()))

    async def _snapshot(self) -> str:
        tag = secrets.token_hex(8)
        await self._ask(
            self._container.commit(repository="tollway-snapshot", tag=tag, changes=["LABEL tollway=snapshot"]),
            f"saving {self.id}",
        )
        return f"tollway-snapshot:{tag}"

    async def _pause(self) -> None:
        await self._ask(self._container.pause(), f"pausing {self.id}")

    async def _resume(self) -> None:
        await self._ask(self._container.unpause(), f"resuming {self.id}")

    async def _destroy(self) -> None:
        from aiodocker.exceptions import DockerError

        try:
            await self._container.delete(force=True, v=True)
        except DockerError as error:
            if error.status == 404:
                return
            if error.status != 409:
                raise self._daemon.translated(error, f"removing {self.id}") from error
        with suppress(DockerError):
            while True:  # the daemon is removing it already; the caller's deadline bounds this
                await self._container.show()
                await asyncio.sleep(0.1)


async def _pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, MB):
        yield piece
