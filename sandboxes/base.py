"""The sandbox port: what a provider offers, and everything that all providers must do alike.

Providers implement the underscored methods; callers use the public ones. The base classes own the limits
(live, spawning, running, create rate), bounded retry of creates, the reaper by TTL, output caps and the
promise that a cancelled create or command leaves nothing behind, so that no provider can forget them.
Depends on the kernel and ``sandboxes.config``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from tollway.errors import (
    BadRequest,
    CapabilityMissing,
    CapacityExceeded,
    CreateFailed,
    RateLimited,
    SandboxError,
    SandboxGone,
)
from tollway.sandboxes.config import SandboxConfig

__all__ = [
    "CAPABILITIES",
    "Command",
    "ExecResult",
    "Sandbox",
    "SandboxInfo",
    "SandboxProvider",
    "SandboxSpec",
]

logger = logging.getLogger(__name__)
T = TypeVar("T")

CAPABILITIES = frozenset(
    {"snapshot", "pause", "fork", "public_network", "network_hosts", "stderr", "user", "attach", "host_files"}
)
"""Names that ``SandboxProvider.caps`` may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What to create. ``ttl_s`` and ``labels`` are required: nothing lives for ever or without an owner."""

    ttl_s: float
    """Seconds until the sandbox is destroyed unless it is extended."""
    labels: Mapping[str, str]
    """Owner's marks, at least one; ``list`` finds sandboxes by them."""
    image: str | None = None
    """Image, template or snapshot name as the provider understands it; ``None`` for its default."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files to write at once, by path relative to the workspace."""
    tree: Path | None = None
    """Directory of this machine whose contents the workspace starts with, below ``files``; it is never written."""
    mounts: Mapping[str, Path] = field(default_factory=dict)
    """Files and directories of this machine to read inside, by absolute path inside."""
    env: Mapping[str, str] = field(default_factory=dict)
    cpu: float | None = None
    """Cores; ``None`` for the provider's default. Providers without CPU limits ignore it."""
    mem_mb: int = 512
    disk_mb: int = 512
    """Most that the workspace may hold."""
    pids: int = 64
    """Processes at once."""
    network: Literal["none", "public"] | tuple[str, ...] = "none"
    """No network, the open one, or only the named hosts."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Provider-specific settings."""

    def __post_init__(self) -> None:
        if not 0 < self.ttl_s < float("inf"):
            raise BadRequest(f"a sandbox needs a finite ttl_s above 0, got {self.ttl_s}", param="ttl_s")
        if not self.labels:
            raise BadRequest("a sandbox needs at least one label that names its owner", param="labels")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """One entry of ``list``."""

    id: str
    labels: Mapping[str, str]
    expires_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a command ended. Exit codes and timeouts are results, never errors."""

    exit_code: int | None
    """128 + signal for a killed program, ``None`` when the command timed out."""
    stdout: bytes
    stderr: bytes = b""
    """Empty for providers that merge it into stdout (no ``stderr`` in ``caps``)."""
    timed_out: bool = False
    oom: bool = False
    truncated: bool = False
    """Some output was dropped beyond the cap."""
    duration_s: float = 0.0
    cpu_s: float | None = None
    """CPU seconds of the command and the sandbox around it; ``None`` when the provider cannot say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a provider is to run, as ``Sandbox.exec`` passes it on.

    Refuses what no machine could run: it is the caller's text, not infrastructure, that is wrong.
    """

    argv: Sequence[str]
    cwd: str
    """Relative to the workspace, or absolute inside the sandbox."""
    env: Mapping[str, str]
    """On top of the spec's."""
    stdin: bytes
    timeout_s: float
    max_output: int
    """Bytes to keep of each stream."""
    user: str | None
    """Only for providers with the capability ``user``."""

    def __post_init__(self) -> None:
        if not self.argv or not self.timeout_s > 0:
            raise BadRequest("a command needs a program and a timeout above 0")
        if any(not name or "=" in name for name in self.env):
            raise BadRequest("names of environment variables are not empty and hold no '='", param="env")
        try:
            text = "".join((*self.argv, self.cwd, *self.env, *self.env.values())).encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"a command is UTF-8 text: {error}") from error
        if b"\0" in text:
            raise BadRequest("a command holds no NUL bytes; pass them by stdin")


class Sandbox(ABC):
    """One isolated machine, leased for one episode."""

    def __init__(self, provider: SandboxProvider, sandbox_id: str, spec: SandboxSpec) -> None:
        self.id = sandbox_id
        self.spec = spec
        self._provider = provider
        self._expires_at = time.monotonic() + spec.ttl_s
        self._dead: str | None = None
        self._killing: asyncio.Future[None] | None = None

    @property
    def expires_at(self) -> float:
        """``time.monotonic()`` instant at which the reaper takes it."""
        return self._expires_at

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_s: float,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        max_output: int | None = None,
        user: str | None = None,
    ) -> ExecResult:
        """Run a command to its end; a string goes through ``/bin/sh -c``. ``cwd`` is relative to the workspace.

        When it returns, nothing that the command started is alive. Raises ``SandboxGone`` when the sandbox
        was killed or its TTL has passed, ``SandboxError`` when the infrastructure failed. Cancelling kills
        the command and everything that it started before the cancellation is passed on.
        """
        self._check_alive()
        if user is not None and "user" not in self._provider.caps:
            raise CapabilityMissing(f"{self._provider.name} cannot choose the user of a command")
        cap = self._provider.config.max_output_bytes
        command = Command(
            argv=["/bin/sh", "-c", cmd] if isinstance(cmd, str) else list(cmd),
            cwd=cwd,
            env=dict(env or {}),
            stdin=stdin,
            timeout_s=timeout_s,
            max_output=cap if max_output is None else min(cap, max_output),
            user=user,
        )
        async with self._provider.running_slot:
            self._check_alive()
            return await self._exec(command)

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """Contents of a regular file in the workspace, never through a link out of it.

        Raises ``BadRequest`` for anything else (missing, link, FIFO, directory, larger than ``max_bytes``).
        """
        self._check_alive()
        return await self._read(path, max_bytes)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Create or replace a regular file in the workspace, with the directories above it."""
        self._check_alive()
        await self._write(path, data, mode)

    async def extend(self, ttl_s: float) -> None:
        """Heartbeat: live for ``ttl_s`` seconds from now, unless that would be sooner than planned."""
        self._check_alive()
        await self._extend(ttl_s)
        self._expires_at = max(self._expires_at, time.monotonic() + ttl_s)

    async def kill(self) -> None:
        """End it and everything in it. Safe to call twice, from several tasks and after ``SandboxGone``.

        A cancelled caller does not stop the release: it goes on, and ``SandboxProvider.aclose`` waits for it.
        """
        if self._killing is None:
            self._dead = self._dead or "was killed"
            self._killing = self._provider.own(self._release())
        await asyncio.shield(self._killing)

    async def snapshot(self) -> str:
        """Name of a copy of its state, to be used as ``SandboxSpec.image``. Capability ``snapshot``."""
        raise CapabilityMissing(f"{self._provider.name} has no snapshots")

    async def pause(self) -> None:
        """Freeze it. Capability ``pause``."""
        raise CapabilityMissing(f"{self._provider.name} cannot pause")

    async def resume(self) -> None:
        """Undo ``pause``. Capability ``pause``."""
        raise CapabilityMissing(f"{self._provider.name} cannot resume")

    async def fork(self) -> Sandbox:
        """A second sandbox that starts from this one's state. Capability ``fork``."""
        raise CapabilityMissing(f"{self._provider.name} cannot fork")

    def mark_gone(self, reason: str) -> None:
        """For providers: from now on every call raises ``SandboxGone`` with ``reason``."""
        self._dead = self._dead or reason

    def _check_alive(self) -> None:
        if self._dead is None and time.monotonic() >= self._expires_at:
            self._dead = f"outlived its ttl of {self.spec.ttl_s} s"
        if self._dead is not None:
            raise SandboxGone(f"sandbox {self.id} {self._dead}; create another one")

    async def _release(self) -> None:
        try:
            await self._kill()
        finally:
            self._provider.forget(self)

    @abstractmethod
    async def _exec(self, command: Command) -> ExecResult: ...

    @abstractmethod
    async def _read(self, path: str, max_bytes: int) -> bytes: ...

    @abstractmethod
    async def _write(self, path: str, data: bytes, mode: int) -> None: ...

    @abstractmethod
    async def _kill(self) -> None:
        """Destroy the machine. Called once. Nothing of it may be left when it returns."""

    async def _extend(self, ttl_s: float) -> None:  # noqa: B027 - providers with a clock of their own override it
        """Tell the provider's own clock, if it has one."""


class SandboxProvider(ABC):
    """Creates sandboxes. Use as ``async with``; leaving it kills every sandbox that it still has."""

    name: ClassVar[str]
    caps: ClassVar[frozenset[str]] = frozenset({"stderr"})

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.running_slot = asyncio.Semaphore(config.max_running)
        self._live = asyncio.Semaphore(config.max_live)
        self._spawning = asyncio.Semaphore(config.max_spawning)
        self._next_create = 0.0
        self._sandboxes: dict[str, Sandbox] = {}
        self._owned: set[asyncio.Task[object]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._reaper_wake = asyncio.Event()
        self._reap_at = math.inf
        self._closed = False

    async def __aenter__(self) -> SandboxProvider:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def live(self) -> int:
        """Sandboxes that exist now."""
        return len(self._sandboxes)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A fresh sandbox with ``spec.files`` in it.

        Waits for a free place. Retryable failures are tried again ``create_attempts`` times in all. After
        ``create_timeout_s`` raises ``CapacityExceeded`` when no place came free, else ``CreateFailed``;
        ``BadImage`` and ``SandboxUnavailable`` at once. A call that is cancelled or out of time leaves
        nothing: a create that cannot be stopped is finished in the background and killed.
        """
        if self._closed:
            raise SandboxError(f"provider {self.name} is closed")
        self._check_network(spec)
        deadline = time.monotonic() + self.config.create_timeout_s
        await self._acquire_place(deadline)
        making = self.own(self._create_retrying(spec, deadline))
        try:
            await asyncio.wait([making], timeout=deadline - time.monotonic())
        except asyncio.CancelledError:
            self.own(self._discard(making))
            raise
        if not making.done():
            self.own(self._discard(making))
            raise CreateFailed(
                f"provider {self.name} made no sandbox within {self.config.create_timeout_s} s; raise "
                "sandbox.create_timeout_s if it is only slow"
            )
        return making.result()

    async def attach(self, sandbox_id: str) -> Sandbox:
        """The live sandbox of that id, or ``SandboxGone``."""
        found = self._sandboxes.get(sandbox_id)
        if found is None:
            raise SandboxGone(f"provider {self.name} has no sandbox {sandbox_id}")
        return found

    async def list(self, labels: Mapping[str, str] | None = None) -> tuple[SandboxInfo, ...]:
        """The live sandboxes that carry all of ``labels``."""
        wanted = dict(labels or {}).items()
        return tuple(
            SandboxInfo(id=s.id, labels=s.spec.labels, expires_in_s=max(0.0, s.expires_at - time.monotonic()))
            for s in self._sandboxes.values()
            if wanted <= dict(s.spec.labels).items()
        )

    async def aclose(self) -> None:
        """Kill what is left, wait for creates and kills in the background, release the provider. Idempotent."""
        self._closed = True
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)
            self._reaper = None
        while self._sandboxes or self._owned:
            kills = [sandbox.kill() for sandbox in list(self._sandboxes.values())]
            results = await asyncio.gather(*kills, *list(self._owned), return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    logger.warning("closing %s: %s", self.name, result)
        await self._close()

    # -- for Sandbox and subclasses ----------------------------------------------------------------

    def own(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Run ``work`` as a task that outlives a cancelled caller; ``aclose`` waits for it."""
        task = asyncio.create_task(work)
        self._owned.add(task)
        task.add_done_callback(self._owned.discard)
        return task

    def forget(self, sandbox: Sandbox) -> None:
        """A sandbox is gone for good: free its place."""
        if self._sandboxes.pop(sandbox.id, None) is not None:
            self._live.release()

    @abstractmethod
    async def _create(self, spec: SandboxSpec) -> Sandbox:
        """Make one. When it raises, nothing of it may be left. It may be slow; it is never cancelled."""

    async def _close(self) -> None:  # noqa: B027 - not every provider holds something
        """Release what the provider itself holds."""

    # -- create ------------------------------------------------------------------------------------

    def _check_network(self, spec: SandboxSpec) -> None:
        if spec.network == "none":
            return
        needed = "public_network" if spec.network == "public" else "network_hosts"
        if needed not in self.caps:
            raise CapabilityMissing(f"{self.name} does not offer network={spec.network!r} (capability {needed})")

    async def _acquire_place(self, deadline: float) -> None:
        if not self._live.locked():  # the common case needs no timer
            await self._live.acquire()
            return
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._live.acquire()
        except TimeoutError:
            raise CapacityExceeded(
                f"{self.config.max_live} sandboxes are alive and none ended within "
                f"{self.config.create_timeout_s} s; raise sandbox.max_live or run fewer episodes at once"
            ) from None

    async def _create_retrying(self, spec: SandboxSpec, deadline: float) -> Sandbox:
        """With a place in ``_live`` held; gives it back unless a sandbox comes out."""
        try:
            for attempt in range(1, self.config.create_attempts + 1):
                try:
                    async with self._spawning:
                        await self._pace()
                        if time.monotonic() > deadline:
                            raise CreateFailed("nobody waits for this sandbox any more")
                        sandbox = await self._create(spec)
                    break
                except SandboxError as error:
                    delay = error.retry_after_s if isinstance(error, RateLimited) else 0.2 * 2**attempt
                    last = attempt == self.config.create_attempts or time.monotonic() + delay > deadline
                    if last or not error.retryable:
                        raise
                    logger.info("create failed, attempt %d: %s", attempt, error)
                    await asyncio.sleep(delay)
            self._sandboxes[sandbox.id] = sandbox
        except BaseException:
            self._live.release()
            raise
        self._watch(sandbox)
        try:
            for path, data in spec.files.items():
                await sandbox.write(path, data)
        except BaseException:
            await sandbox.kill()
            raise
        return sandbox

    async def _pace(self) -> None:
        if self.config.creates_per_s is None:
            return
        now = time.monotonic()
        at = max(now, self._next_create)
        self._next_create = at + 1.0 / self.config.creates_per_s
        await asyncio.sleep(at - now)

    async def _discard(self, making: asyncio.Future[Sandbox]) -> None:
        """A create whose caller went away: let it finish, then kill what it made."""
        try:
            sandbox = await making
        except SandboxError:
            return
        await sandbox.kill()

    def _watch(self, sandbox: Sandbox) -> None:
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap())
        if sandbox.expires_at < self._reap_at:
            self._reaper_wake.set()

    async def _reap(self) -> None:
        while True:
            self._reaper_wake.clear()
            now = time.monotonic()
            for sandbox in [s for s in self._sandboxes.values() if s.expires_at <= now]:
                logger.info("sandbox %s outlived its ttl of %s s", sandbox.id, sandbox.spec.ttl_s)
                sandbox.mark_gone(f"outlived its ttl of {sandbox.spec.ttl_s} s")
                self.own(sandbox.kill())
            # A sandbox that is extended meanwhile is looked at too early, which costs nothing.
            self._reap_at = min(
                (s.expires_at for s in self._sandboxes.values() if s.expires_at > now), default=math.inf
            )
            try:
                async with asyncio.timeout(None if math.isinf(self._reap_at) else self._reap_at - now):
                    await self._reaper_wake.wait()
            except TimeoutError:
                continue
