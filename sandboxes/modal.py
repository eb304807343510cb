"""Modal's sandboxes, through its own SDK.

A sandbox's longest life is fixed when it is made, so its end on the service's side is its idle clock, which every
command and heartbeat starts again; ours ends it to the second. Arguments of a command hold 64 KiB in all, so more
travels by standard input. Depends on ``remote`` and, lazily, on ``modal``.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

from tollway.errors import (
    BadImage,
    BadRequest,
    CapacityExceeded,
    CreateFailed,
    RateLimited,
    SandboxError,
    SandboxGone,
    SandboxUnavailable,
    TollwayError,
)
from tollway.sandboxes.base import Sandbox, SandboxProvider
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.remote import RemoteSandbox, expires_in, labels_of, marks_of, restored_spec, wanted_marks
from tollway.sandboxes.remote_program import Reply
from tollway.sandboxes.spec import SandboxInfo, SandboxSpec

if TYPE_CHECKING:
    import modal

__all__ = ["ModalProvider", "ModalSandbox"]

_LONGEST_S = 24 * 3600
_LEAST_IDLE_S = 60
_CALL_S = 60.0
_RATE_WAIT_S = 2.0
"""The service allows about five creates a second and names no time to wait."""
_PIECE_BYTES = 1 << 20
_ASLEEP = ("/bin/sh", "-c", "while :; do sleep 3600; done")


class ModalProvider(SandboxProvider):
    """Sandboxes of Modal. Tokens come from MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or from ``modal setup``."""

    name: ClassVar[str] = "modal"
    caps: ClassVar[frozenset[str]] = frozenset({"stderr", "attach", "snapshot", "public_network", "network_hosts"})

    def __init__(self, config: SandboxConfig | None = None) -> None:
        super().__init__(config or SandboxConfig())
        self._app: modal.App | None = None
        try:
            import modal  # noqa: F401 - whether it can be imported is the question
        except ImportError as error:
            raise SandboxUnavailable("provider modal needs its extra: pip install 'tollway[modal]'") from error

    @property
    def stand_in(self) -> str:
        other = os.environ.get("MODAL_SERVER_URL", "")
        return f"a service that speaks Modal's protocol at {other}" if other and ".modal.com" not in other else ""

    async def app(self) -> modal.App:
        """The app that all sandboxes belong to."""
        if self._app is None:
            import modal

            async with translated("looking up the app"):
                self._app = await modal.App.lookup.aio(self.config.modal.app, create_if_missing=True)
        return self._app

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        import modal

        app, name = await self.app(), spec.image or self.config.modal.image
        image = modal.Image.from_id(name) if name.startswith("im-") else modal.Image.from_registry(name)
        async with translated(f"creating a sandbox of {name}", creating=True):
            machine = await modal.Sandbox.create.aio(
                *_ASLEEP,
                app=app,
                image=image,
                tags=marks_of(spec),
                timeout=_LONGEST_S,
                idle_timeout=max(_LEAST_IDLE_S, math.ceil(spec.ttl_s)),
                cpu=spec.cpu,
                memory=spec.mem_mb,
                region=self.config.modal.region,
                block_network=spec.network == "none",
                outbound_domain_allowlist=list(spec.network) if isinstance(spec.network, tuple) else None,
            )
        sandbox = ModalSandbox(self, machine, spec)
        await sandbox.prepare()
        return sandbox

    async def _remote_list(self, labels: Mapping[str, str]) -> list[SandboxInfo]:
        import modal

        app, found = await self.app(), []
        async with translated("listing sandboxes"):
            async for machine in modal.Sandbox.list.aio(app_id=app.app_id, tags=wanted_marks(labels)):
                marks = await machine.get_tags.aio()
                found.append(SandboxInfo(id=machine.object_id, labels=labels_of(marks), expires_in_s=expires_in(marks)))
        return found

    async def _attach(self, sandbox_id: str) -> Sandbox:
        import modal

        async with translated(f"attaching to {sandbox_id}"):
            machine = await modal.Sandbox.from_id.aio(sandbox_id)
            if await machine.poll.aio() is not None:
                raise SandboxGone(f"sandbox {sandbox_id} has ended")
            marks = await machine.get_tags.aio()
        return ModalSandbox(self, machine, restored_spec(marks, expires_in(marks)))


class ModalSandbox(RemoteSandbox):
    """One machine of Modal."""

    inline_bytes: ClassVar[int] = 16_000

    def __init__(self, provider: ModalProvider, machine: modal.Sandbox, spec: SandboxSpec) -> None:
        super().__init__(provider, machine.object_id, spec)
        self._machine = machine

    async def _program(self, program: str, *, timeout_s: float, user: str | None) -> Reply:
        from modal.stream_type import StreamType

        async with translated(f"running a command in {self.id}"):
            process = await self._machine.exec.aio(
                "/bin/sh", "-c", program, text=False, timeout=math.ceil(timeout_s), stderr=StreamType.DEVNULL
            )
            output = await process.stdout.read.aio()
            return Reply(output, await process.wait.aio())

    async def _upload(self, path: str, data: bytes) -> None:
        async with translated(f"sending a file to {self.id}"):
            process = await self._machine.exec.aio("/bin/sh", "-c", 'cat >"$1"', "sh", path, text=False)
            for at in range(0, len(data), _PIECE_BYTES):
                process.stdin.write(data[at : at + _PIECE_BYTES])
                await process.stdin.drain.aio()
            process.stdin.write_eof()
            await process.stdin.drain.aio()
            if await process.wait.aio() != 0:
                raise SandboxError(f"cannot write {path} in {self.id}; is its disk full?")

    async def _extend(self, ttl_s: float) -> None:
        # Any command starts the idle clock again.
        await self._bounded(":", _CALL_S, None)

    async def _destroy(self) -> None:
        try:
            async with translated(f"deleting {self.id}"):
                await self._machine.terminate.aio()
        except SandboxGone:
            return

    async def _snapshot(self) -> str:
        async with translated(f"saving {self.id}"):
            return str((await self._machine.snapshot_filesystem.aio()).object_id)


@asynccontextmanager
async def translated(what: str, *, creating: bool = False) -> AsyncIterator[None]:
    """The SDK's errors in our tree, once."""
    from modal import exception as errors

    try:
        yield
    except TollwayError:
        raise
    except (errors.AuthError, errors.PermissionDeniedError) as error:
        raise SandboxUnavailable(
            f"{what}: the service refuses the tokens; set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET: {error}"
        ) from error
    except errors.ResourceExhaustedError as error:
        text = f"{what}: {error}"
        if "capacity" in text.lower():
            raise CapacityExceeded(text) from error
        raise RateLimited(text, retry_after_s=_RATE_WAIT_S) from error
    except errors.ImageBuildError as error:
        raise BadImage(f"{what}: {error}") from error
    except (errors.NotFoundError, errors.SandboxTerminatedError, errors.SandboxTimeoutError) as error:
        raise (BadImage if creating else SandboxGone)(f"{what}: {error}") from error
    except errors.ConflictError as error:  # the task of a sandbox that has ended
        raise (CreateFailed if creating else SandboxGone)(f"{what}: {error}") from error
    except errors.InvalidError as error:
        raise (BadImage if creating else BadRequest)(f"{what}: {error}") from error
    except Exception as error:  # the rest of the SDK's tree and what its channels raise: the service's failure
        raise (CreateFailed if creating else SandboxError)(f"{what}: {type(error).__name__}: {error}") from error
