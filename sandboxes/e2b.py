"""E2B and services that speak its protocol, through E2B's own SDK.

The SDK retries nothing here, since the base class does; text, caps and timeouts are ``remote_program``'s. Two names:
``e2b`` for E2B itself and ``agentenv`` for an AgentENV or another compatible service at ``sandbox.e2b.api_url``,
of which less is expected. Depends on ``remote`` and, lazily, on ``e2b``.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, ClassVar

from tollway.errors import (
    BadImage,
    BadRequest,
    CreateFailed,
    RateLimited,
    SandboxError,
    SandboxGone,
    SandboxUnavailable,
    TollwayError,
)
from tollway.sandboxes.base import Sandbox, SandboxProvider
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.owner import ATTEMPT
from tollway.sandboxes.remote import RemoteSandbox, labels_of, marks_of, restored_spec, wanted_marks
from tollway.sandboxes.remote_program import Reply
from tollway.sandboxes.spec import SandboxInfo, SandboxSpec

if TYPE_CHECKING:
    from e2b import AsyncSandbox

__all__ = ["AgentEnvProvider", "E2BProvider", "E2BSandbox"]

_RATE_WAIT_S = 2.0
"""The SDK does not pass the service's Retry-After on."""
_CALL_S = 60.0
_LOST_KILL_S = 5.0


class E2BProvider(SandboxProvider):
    """Sandboxes of E2B's cloud, or of a self-hosted one. The key comes from E2B_API_KEY."""

    name: ClassVar[str] = "e2b"
    caps: ClassVar[frozenset[str]] = frozenset(
        {"stderr", "user", "attach", "snapshot", "pause", "fork", "public_network", "network_hosts"}
    )

    def __init__(self, config: SandboxConfig | None = None) -> None:
        super().__init__(config or SandboxConfig())
        self._check()
        if self.stand_in:
            # Users to choose from and lists of hosts are E2B's own; of another service they are not known.
            self.caps = self.caps - {"user", "network_hosts"}  # type: ignore[misc]  # of this object only

    @property
    def stand_in(self) -> str:
        other = self.config.e2b.api_url or os.environ.get("E2B_API_URL")
        return f"an E2B-compatible service at {other}" if other else ""

    def _check(self) -> None:
        try:
            import e2b  # noqa: F401 - whether it can be imported is the question
        except ImportError as error:
            raise SandboxUnavailable(f"provider {self.name} needs its extra: pip install 'tollway[e2b]'") from error
        if not os.environ.get("E2B_API_KEY"):
            raise SandboxUnavailable(f"provider {self.name} needs a key; set E2B_API_KEY")

    def params(self) -> dict[str, object]:
        """What every call of the SDK is given."""
        settings = self.config.e2b
        given = {"api_url": settings.api_url, "sandbox_url": settings.sandbox_url, "domain": settings.domain}
        return {"retries": 0, "request_timeout": _CALL_S, **{name: value for name, value in given.items() if value}}

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        from e2b import AsyncSandbox

        network: dict[str, object] = {"allow_internet_access": spec.network != "none"}
        if isinstance(spec.network, tuple):
            network = {"network": {"allow_out": list(spec.network), "deny_out": ["0.0.0.0/0"]}}
        async with translated("creating a sandbox", creating=True):
            machine = await AsyncSandbox.create(
                spec.image or self.config.e2b.template,
                timeout=math.ceil(spec.ttl_s),
                metadata=marks_of(spec),
                envs=dict(spec.env),
                idempotency_key=spec.labels.get(ATTEMPT),
                **network,
                **self.params(),
            )
        sandbox = E2BSandbox(self, machine, spec)
        await sandbox.prepare()
        return sandbox

    async def _remote_list(self, labels: Mapping[str, str]) -> list[SandboxInfo]:
        from e2b import AsyncSandbox, SandboxQuery

        found = []
        async with translated("listing sandboxes"):
            pages = AsyncSandbox.list(query=SandboxQuery(metadata=wanted_marks(labels)), **self.params())
            while pages.has_next:
                found.extend(await pages.next_items())
        now = time.time()
        return [
            SandboxInfo(
                id=info.sandbox_id,
                labels=labels_of(info.metadata),
                expires_in_s=max(0.0, info.end_at.timestamp() - now),
            )
            for info in found
        ]

    async def _attach(self, sandbox_id: str) -> Sandbox:
        from e2b import AsyncSandbox

        async with translated(f"attaching to {sandbox_id}"):
            info = await AsyncSandbox.get_info(sandbox_id, **self.params())
            left_s = max(1.0, info.end_at.timestamp() - time.time())
            # Without the time that is left, connecting would set the service's default.
            machine = await AsyncSandbox.connect(sandbox_id, timeout=math.ceil(left_s), **self.params())
        return E2BSandbox(self, machine, restored_spec(info.metadata, left_s))


class AgentEnvProvider(E2BProvider):
    """AgentENV, or any other service that speaks E2B's protocol, at ``sandbox.e2b.api_url``."""

    name: ClassVar[str] = "agentenv"
    caps: ClassVar[frozenset[str]] = frozenset({"stderr", "attach", "public_network"})

    def _check(self) -> None:
        if not self.config.e2b.api_url:
            raise SandboxUnavailable("provider agentenv needs the service's address; set sandbox.e2b.api_url")
        super()._check()

    def params(self) -> dict[str, object]:
        settings = self.config.e2b
        return {**super().params(), "sandbox_url": settings.sandbox_url or settings.api_url}


class E2BSandbox(RemoteSandbox):
    """One machine of E2B."""

    def __init__(self, provider: E2BProvider, machine: AsyncSandbox, spec: SandboxSpec) -> None:
        super().__init__(provider, machine.sandbox_id, spec)
        self._e2b = provider
        self._machine = machine

    async def _program(self, program: str, *, timeout_s: float, user: str | None) -> Reply:
        from e2b import CommandExitException

        handle = None
        async with translated(f"running a command in {self.id}"):
            try:
                handle = await self._machine.commands.run(
                    program,
                    background=True,
                    cwd="/",
                    user=user or self._e2b.config.e2b.user,
                    timeout=timeout_s,
                    request_timeout=min(_CALL_S, timeout_s),
                )
                return Reply((await handle.wait()).stdout.encode())
            except CommandExitException as ended:
                return Reply((ended.stdout or "").encode(), ended.exit_code % 256)
            except BaseException:
                # The service lets a command run on when nobody listens.
                if handle is not None:
                    await asyncio.shield(self._e2b.own(_killed(handle)))
                raise

    async def _upload(self, path: str, data: bytes) -> None:
        async with translated(f"sending a file to {self.id}"):
            await self._machine.files.write(path, data, user=self._e2b.config.e2b.user)

    async def _extend(self, ttl_s: float) -> None:
        left_s = self.expires_at - time.monotonic()
        async with translated(f"extending {self.id}"):
            await self._machine.set_timeout(math.ceil(max(ttl_s, left_s)))

    async def _destroy(self) -> None:
        try:
            async with translated(f"deleting {self.id}"):
                await self._machine.kill()
        except ValueError:
            return  # an empty body of a 404, which the SDK takes for JSON

    async def _snapshot(self) -> str:
        async with translated(f"saving {self.id}"):
            return str((await self._machine.create_snapshot()).snapshot_id)

    async def _pause(self) -> None:
        async with translated(f"pausing {self.id}"):
            await self._machine.pause()

    async def _resume(self) -> None:
        left_s = max(1.0, self.expires_at - time.monotonic())
        async with translated(f"resuming {self.id}"):
            await self._machine.connect(timeout=math.ceil(left_s))

    async def _fork(self, spec: SandboxSpec) -> Sandbox:
        async with translated(f"forking {self.id}", creating=True):
            made = (await self._machine.fork(timeout=math.ceil(spec.ttl_s), count=1))[0]
            if isinstance(made, Exception):
                raise made
        return E2BSandbox(self._e2b, made, spec)


async def _killed(handle: object) -> None:
    with suppress(Exception):  # the sandbox may be gone; its end is the command's
        async with asyncio.timeout(_LOST_KILL_S):
            await handle.kill()  # type: ignore[attr-defined]  # the SDK has no types here


@asynccontextmanager
async def translated(what: str, *, creating: bool = False) -> AsyncIterator[None]:
    """The SDK's errors in our tree, once."""
    import e2b
    import httpx

    try:
        yield
    except (TollwayError, ValueError, AssertionError):
        raise
    except e2b.AuthenticationException as error:
        raise SandboxUnavailable(f"{what}: the service refuses the key in E2B_API_KEY: {error}") from error
    except e2b.RateLimitException as error:
        raise RateLimited(f"{what}: {error}", retry_after_s=_RATE_WAIT_S) from error
    except (e2b.NotFoundException, e2b.TemplateException) as error:
        raise (BadImage if creating else SandboxGone)(f"{what}: {error}") from error
    except e2b.SandboxNotRunningException as error:
        raise SandboxGone(f"{what}: {error}") from error
    except e2b.InvalidArgumentException as error:
        raise BadRequest(f"{what}: {error}") from error
    except e2b.SandboxException as error:
        if creating and error.status_code in (400, 403, 404):
            raise BadImage(f"{what}: {error}") from error
        raise (CreateFailed if creating else SandboxError)(f"{what}: {error}") from error
    except (httpx.HTTPError, OSError) as error:
        text = f"{what}: cannot reach the service: {type(error).__name__}: {error}"
        raise (CreateFailed if creating else SandboxError)(text) from error
    except Exception as error:  # the SDK also raises bare exceptions; to the caller all are the service's failure
        raise (CreateFailed if creating else SandboxError)(f"{what}: {type(error).__name__}: {error}") from error
