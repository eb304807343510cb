"""Daytona's sandboxes, through its own SDK.

The service returns merged text and counts in minutes: exact separate bytes and seconds are ``remote_program``'s.
Its idle clock ignores what goes through the toolbox proxy, so it is switched off and the absolute time to live
is used, which heartbeats move. Depends on ``remote`` and, lazily, on ``daytona``.
"""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
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
    from daytona import AsyncDaytona, AsyncSandbox

__all__ = ["DaytonaProvider", "DaytonaSandbox"]

_CALL_S = 60
_OVER = ("destroyed", "destroying", "error", "build_failed")
_LANGUAGE = "code-toolbox-language"
"""A label that the SDK adds."""


class DaytonaProvider(SandboxProvider):
    """Sandboxes of Daytona. The key comes from DAYTONA_API_KEY."""

    name: ClassVar[str] = "daytona"
    caps: ClassVar[frozenset[str]] = frozenset({"stderr", "attach", "public_network", "network_hosts"})

    def __init__(self, config: SandboxConfig | None = None) -> None:
        super().__init__(config or SandboxConfig())
        self._client: AsyncDaytona | None = None
        try:
            import daytona  # noqa: F401 - whether it can be imported is the question
        except ImportError as error:
            raise SandboxUnavailable("provider daytona needs its extra: pip install 'tollway[daytona]'") from error
        if not os.environ.get("DAYTONA_API_KEY"):
            raise SandboxUnavailable("provider daytona needs a key; set DAYTONA_API_KEY")

    @property
    def stand_in(self) -> str:
        other = self.config.daytona.api_url or os.environ.get("DAYTONA_API_URL", "")
        return f"a Daytona-compatible service at {other}" if other and ".daytona.io/" not in f"{other}/" else ""

    def client(self) -> AsyncDaytona:
        """The connection to the service, made at first use."""
        if self._client is None:
            from daytona import AsyncDaytona, DaytonaConfig

            settings = self.config.daytona
            self._client = AsyncDaytona(DaytonaConfig(api_url=settings.api_url, target=settings.target))
        return self._client

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        async with translated("creating a sandbox", creating=True):
            machine = await self.client().create(self._params(spec), timeout=self.config.create_timeout_s)
        sandbox = DaytonaSandbox(self, machine, spec)
        await sandbox.prepare()
        return sandbox

    def _params(self, spec: SandboxSpec) -> object:
        from daytona import CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams, Resources

        common = {
            "env_vars": dict(spec.env),
            "labels": marks_of(spec),
            "ttl_minutes": minutes(spec.ttl_s),
            "auto_stop_interval": 0,
            "auto_delete_interval": 0,
            "network_block_all": spec.network == "none",
            "domain_allow_list": ",".join(spec.network) if isinstance(spec.network, tuple) else None,
            "os_user": spec.options.get("os_user"),
        }
        if spec.image is None or spec.image.startswith("snapshot:"):
            name = spec.image.removeprefix("snapshot:") if spec.image else self.config.daytona.snapshot
            return CreateSandboxFromSnapshotParams(snapshot=name, **common)
        resources = Resources(
            cpu=None if spec.cpu is None else max(1, math.ceil(spec.cpu)),
            memory=max(1, math.ceil(spec.mem_mb / 1024)),
            disk=max(1, math.ceil(spec.disk_mb / 1024)),
        )
        return CreateSandboxFromImageParams(image=spec.image, resources=resources, **common)

    async def _remote_list(self, labels: Mapping[str, str]) -> list[SandboxInfo]:
        from daytona import ListSandboxesQuery

        async with translated("listing sandboxes"):
            found = [
                machine async for machine in self.client().list(ListSandboxesQuery(labels=dict(wanted_marks(labels))))
            ]
        return [
            SandboxInfo(id=machine.id, labels=own_labels(machine), expires_in_s=left_s(machine))
            for machine in found
            if state_of(machine) not in _OVER
        ]

    async def _attach(self, sandbox_id: str) -> Sandbox:
        async with translated(f"attaching to {sandbox_id}"):
            machine = await self.client().get(sandbox_id)
        if state_of(machine) in _OVER:
            raise SandboxGone(f"sandbox {sandbox_id} is {state_of(machine)}")
        return DaytonaSandbox(self, machine, restored_spec(own_labels(machine), left_s(machine)))

    async def _close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


class DaytonaSandbox(RemoteSandbox):
    """One machine of Daytona."""

    def __init__(self, provider: DaytonaProvider, machine: AsyncSandbox, spec: SandboxSpec) -> None:
        super().__init__(provider, machine.id, spec)
        self._daytona = provider
        self._machine = machine

    async def _program(self, program: str, *, timeout_s: float, user: str | None) -> Reply:
        # The service picks zsh or bash where there is one, and zsh does not split words as sh does.
        line = f"exec /bin/sh -c {shlex.quote(program)}"
        async with translated(f"running a command in {self.id}"):
            done = await self._machine.process.exec(line, cwd="/", timeout=math.ceil(timeout_s))
        return Reply((done.result or "").encode("utf-8", "replace"), done.exit_code if done.exit_code >= 0 else 137)

    async def _upload(self, path: str, data: bytes) -> None:
        async with translated(f"sending a file to {self.id}"):
            await self._machine.fs.upload_file(data, path, timeout=_CALL_S)

    async def _extend(self, ttl_s: float) -> None:
        async with translated(f"extending {self.id}"):
            await self._machine.set_ttl(minutes(max(ttl_s, self.expires_at - time.monotonic())))

    async def _destroy(self) -> None:
        try:
            async with translated(f"deleting {self.id}"):
                await self._machine.delete(timeout=_CALL_S)
                # The service answers before it deletes; the caller's deadline bounds this.
                while state_of(await self._daytona.client().get(self.id)) != "destroyed":  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.5)
        except SandboxGone:
            return


def minutes(ttl_s: float) -> int:
    """The service's unit. Its clock is the safety net: ours ends a sandbox to the second."""
    return max(1, math.ceil(ttl_s / 60))


def own_labels(machine: AsyncSandbox) -> dict[str, str]:
    """The owner's labels."""
    return {name: value for name, value in labels_of(machine.labels).items() if name != _LANGUAGE}


def state_of(machine: AsyncSandbox) -> str:
    """Lower-case name of the state."""
    return str(getattr(machine.state, "value", machine.state)).lower()


def left_s(machine: AsyncSandbox) -> float:
    """Seconds until the service destroys it."""
    at = getattr(machine, "auto_destroy_at", None)
    if not at:
        return expires_in(machine.labels)
    return max(0.0, datetime.fromisoformat(str(at).replace("Z", "+00:00")).timestamp() - time.time())


@asynccontextmanager
async def translated(what: str, *, creating: bool = False) -> AsyncIterator[None]:
    """The SDK's errors in our tree, once."""
    import daytona
    import pydantic

    try:
        yield
    except TollwayError:
        raise
    except (daytona.DaytonaAuthenticationError, daytona.DaytonaForbiddenError) as error:
        raise SandboxUnavailable(f"{what}: the service refuses the key in DAYTONA_API_KEY: {error}") from error
    except daytona.DaytonaRateLimitError as error:
        raise RateLimited(f"{what}: {error}", retry_after_s=retry_after_s(error.headers)) from error
    except daytona.DaytonaNotFoundError as error:
        raise (BadImage if creating else SandboxGone)(f"{what}: {error}") from error
    except daytona.DaytonaError as error:
        raise _other(what, error, creating=creating) from error
    except (OSError, pydantic.ValidationError) as error:
        text = f"{what}: cannot reach the service: {type(error).__name__}: {error}"
        raise (CreateFailed if creating else SandboxError)(text) from error
    except Exception as error:  # the SDK lets its HTTP client's errors through; all are the service's failure
        raise (CreateFailed if creating else SandboxError)(f"{what}: {type(error).__name__}: {error}") from error


def _other(what: str, error: object, *, creating: bool) -> TollwayError:
    status, text = getattr(error, "status_code", None), f"{what}: {error}"
    if status == 410:
        return SandboxGone(text)
    if creating and ("quota" in text.lower() or "limit exceeded" in text.lower()):
        return CapacityExceeded(text)
    if creating and (status in (400, 422) or "build failed" in text.lower()):
        return BadImage(text)
    if status in (400, 422):
        return BadRequest(text)
    return (CreateFailed if creating else SandboxError)(text)


def retry_after_s(headers: Mapping[str, object]) -> float:
    """What the service asks for, in seconds."""
    found = {name.lower(): str(value) for name, value in headers.items()}.get("retry-after", "")
    return float(found) if found.isdecimal() else 2.0
