"""The sandbox port: what a provider offers, and everything that all providers must do alike.

Providers implement the underscored methods; callers use the public ones. The base classes own the limits
(live, spawning, running, create rate), bounded retry of creates, the reaper by TTL, output caps, uploads for
providers that take no host files, kills that never hang their caller, and the promise that a cancelled or failed
create or command leaves nothing behind, so that no provider can forget them. Depends on the kernel,
``sandboxes.config``, and the siblings ``spec``, ``owner``, ``pace``, ``deletion``, ``trees``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, TypeVar

from tollway.errors import (
    BadImage,
    CapabilityMissing,
    CapacityExceeded,
    CreateFailed,
    RateLimited,
    SandboxError,
    SandboxGone,
    SandboxUnavailable,
)
from tollway.sandboxes import trees
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.deletion import Counts, delete, tried
from tollway.sandboxes.owner import ATTEMPT, OWNER, attempt_mark, owner_mark
from tollway.sandboxes.pace import CreatePace, default_file
from tollway.sandboxes.spec import CAPABILITIES, Command, ExecResult, SandboxInfo, SandboxSpec, check

__all__ = [
    "CAPABILITIES",
    "Command",
    "Counts",
    "ExecResult",
    "Sandbox",
    "SandboxInfo",
    "SandboxProvider",
    "SandboxSpec",
]

logger = logging.getLogger(__name__)
T = TypeVar("T")
_TRANSFER_S = 300.0
_SURELY_NOT_MADE = (RateLimited, BadImage, SandboxUnavailable, CapabilityMissing)
"""Refusals of a create after which nothing exists at the provider; after others, something may."""


class Sandbox(ABC):
    """One isolated machine, leased for one episode."""

    def __init__(self, provider: SandboxProvider, sandbox_id: str, spec: SandboxSpec) -> None:
        self.id = sandbox_id
        self.spec = spec
        self._provider = provider
        self._expires_at = time.monotonic() + spec.ttl_s
        self._dead: str | None = None
        self._killing: asyncio.Task[None] | None = None

    @property
    def expires_at(self) -> float:
        """``time.monotonic()`` instant at which the reaper takes it."""
        return self._expires_at

    @property
    def gone(self) -> bool:
        """Whether it was killed or lost; its deletion may still be going on."""
        return self._dead is not None

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

        After a timeout nothing that the command started is alive; after a normal end neither, unless the
        provider lets background processes live as long as the sandbox. Raises ``SandboxGone`` when the sandbox
        was killed or its TTL has passed, ``SandboxError`` when the infrastructure failed; a command is never
        run twice. Cancelling kills the command and everything that it started before the cancellation is
        passed on.
        """
        self._check_alive()
        if user is not None and "user" not in self._provider.caps:
            raise CapabilityMissing(f"{self._provider.name} cannot choose the user of a command")
        config = self._provider.config
        command = Command(
            argv=["/bin/sh", "-c", cmd] if isinstance(cmd, str) else list(cmd),
            cwd=cwd,
            env=dict(env or {}),
            stdin=stdin,
            timeout_s=timeout_s,
            max_output=config.max_output_bytes if max_output is None else min(config.max_output_bytes, max_output),
            user=user,
        )
        async with self._provider.running_slot:
            return await self._answer(command)

    async def exec_agent(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> ExecResult:
        """``exec`` for a program that works as long as the sandbox is used.

        It takes no place among the commands of ``max_running``: its own tools and gradings wait for those.
        """
        self._check_alive()
        cap = self._provider.config.max_output_bytes
        return await self._answer(
            Command(argv=argv, cwd=".", env={}, stdin=stdin, timeout_s=timeout_s, max_output=cap, user=None)
        )

    async def _answer(self, command: Command) -> ExecResult:
        self._check_alive()
        grace_s = self._provider.config.answer_grace_s
        try:
            # The provider keeps the command's own deadline; this one ends a wait for a provider that hangs.
            async with asyncio.timeout(command.timeout_s + grace_s) as backstop:
                done = await self._exec(command)
        except TimeoutError as error:
            if not backstop.expired():
                raise
            raise SandboxError(
                f"{self._provider.name} said nothing of a command {grace_s:.0f} s after its timeout"
            ) from error
        except SandboxError:
            self._check_alive()  # whatever a machine that is being deleted answers
            raise
        return _capped(done, command.max_output)

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

    async def put_tree(self, source: Path, dest: str = ".", *, timeout_s: float = _TRANSFER_S) -> None:
        """Copy a directory of this machine into directory ``dest`` (or one file to path ``dest``), modes kept.

        Raises ``BadRequest`` for what is no file, directory or link that stays inside, ``SandboxError`` when the
        sandbox cannot take it. Memory stays bounded whatever the size.
        """
        self._check_alive()
        await trees.put_tree(self, source, dest, timeout_s=timeout_s)

    async def get_tree(
        self,
        path: str,
        target: Path,
        *,
        max_bytes: int = 256 << 20,
        max_files: int = 100_000,
        timeout_s: float = _TRANSFER_S,
    ) -> int:
        """Copy directory ``path`` of the sandbox to ``target`` on this machine, empty or absent; returns its entries.

        Raises ``BadRequest``, and leaves nothing, when it holds links out of it, devices, or more than was allowed.
        """
        self._check_alive()
        return await trees.get_tree(self, path, target, max_bytes=max_bytes, max_files=max_files, timeout_s=timeout_s)

    async def extend(self, ttl_s: float) -> None:
        """Heartbeat: live for ``ttl_s`` seconds from now, unless that would be sooner than planned."""
        self._check_alive()
        await self._extend(ttl_s)
        self._expires_at = max(self._expires_at, time.monotonic() + ttl_s)

    async def kill(self) -> None:
        """End it and everything in it. Safe to call twice, from several tasks and after ``SandboxGone``.

        Never hangs and never raises: a deletion that fails or takes longer than ``sandbox.kill_timeout_s`` goes
        on in the background, is logged, and counts as ``counts.stuck``. A cancelled caller does not stop it, and
        ``SandboxProvider.aclose`` waits for it.
        """
        await asyncio.wait([self.begin_kill()], timeout=self._provider.config.kill_timeout_s)

    def begin_kill(self) -> asyncio.Task[None]:
        """Like ``kill`` without waiting: the task that ends it, already running."""
        if self._killing is None:
            self._dead = self._dead or "was killed"
            self._killing = self._provider.own(self._release(), kill=True)
        return self._killing

    async def snapshot(self) -> str:
        """Name of a copy of its state, to be used as ``SandboxSpec.image``. Capability ``snapshot``."""
        self._can("snapshot")
        return await self._snapshot()

    async def pause(self) -> None:
        """Freeze it. Capability ``pause``."""
        self._can("pause")
        await self._pause()

    async def resume(self) -> None:
        """Undo ``pause``. Capability ``pause``."""
        self._can("pause")
        await self._resume()

    async def fork(self) -> Sandbox:
        """A second sandbox that starts from this one's state, with the same spec. Capability ``fork``."""
        self._can("fork")
        return await self._provider.admit(self.spec, self._fork)

    def mark_gone(self, reason: str) -> None:
        """For providers: from now on every call raises ``SandboxGone`` with ``reason``."""
        self._dead = self._dead or reason

    def _can(self, capability: str) -> None:
        if capability not in self._provider.caps:
            raise CapabilityMissing(f"provider {self._provider.name} has no capability {capability!r}")
        self._check_alive()

    def _check_alive(self) -> None:
        if self._dead is None and time.monotonic() >= self._expires_at:
            self._dead = f"outlived its ttl of {self.spec.ttl_s} s"
        if self._dead is not None:
            raise SandboxGone(f"sandbox {self.id} {self._dead}; create another one")

    async def _release(self) -> None:
        provider = self._provider
        try:
            await delete(self.id, self._kill, provider.config, provider.counts)
        finally:
            provider.forget(self)

    @abstractmethod
    async def _exec(self, command: Command) -> ExecResult: ...

    @abstractmethod
    async def _read(self, path: str, max_bytes: int) -> bytes: ...

    @abstractmethod
    async def _write(self, path: str, data: bytes, mode: int) -> None: ...

    @abstractmethod
    async def _kill(self) -> None:
        """Destroy the machine; nothing of it may be left when it returns. ``SandboxGone`` counts as done.

        When it raises, or takes longer than ``sandbox.kill_timeout_s`` and is cancelled, it is called again.
        """

    async def _extend(self, ttl_s: float) -> None:  # noqa: B027 - providers with a clock of their own override it
        """Tell the provider's own clock, if it has one."""

    async def _snapshot(self) -> str:
        raise NotImplementedError

    async def _pause(self) -> None:
        raise NotImplementedError

    async def _resume(self) -> None:
        raise NotImplementedError

    async def _fork(self, spec: SandboxSpec) -> Sandbox:
        """Like ``SandboxProvider._create``, with this sandbox's state; ``spec`` carries the new one's labels."""
        raise NotImplementedError


class SandboxProvider(ABC):
    """Creates sandboxes. Use as ``async with``; leaving it kills every sandbox that it still has."""

    name: ClassVar[str]
    caps: ClassVar[frozenset[str]] = frozenset({"stderr"})

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.owner = owner_mark()
        """Value of the label ``tollway-owner`` on every sandbox that this object makes."""
        self.counts = Counts()
        self.running_slot = asyncio.Semaphore(config.max_running)
        self._live = asyncio.Semaphore(config.max_live)
        self._pace = CreatePace(
            at_once=config.max_spawning,
            per_s=config.creates_per_s,
            file=lambda: config.pace_file or default_file(self.name),
        )
        self._sandboxes: dict[str, Sandbox] = {}
        self._owned: set[asyncio.Task[object]] = set()
        self._kills: set[asyncio.Task[object]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._reaper_wake = asyncio.Event()
        self._reap_at = math.inf
        self._closed = False
        self._unsure = False

    async def __aenter__(self) -> SandboxProvider:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def stand_in(self) -> str:
        """What it is instead of the real thing, for reports; empty for the real one."""
        return ""

    @property
    def live(self) -> int:
        """Sandboxes that exist now."""
        return len(self._sandboxes)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A fresh sandbox with ``spec.tree``, ``spec.mounts`` and ``spec.files`` in it.

        Waits for a free place. Retryable failures are tried again ``create_attempts`` times in all. After
        ``create_timeout_s`` raises ``CapacityExceeded`` when no place came free, else ``CreateFailed``;
        ``BadImage`` and ``SandboxUnavailable`` at once. A call that is cancelled or out of time leaves
        nothing: a create that cannot be stopped is finished in the background and killed.
        """
        check(spec, self.name, self.caps)
        return await self.admit(spec, self._create, setup=self._set_up)

    async def admit(
        self,
        spec: SandboxSpec,
        make: Callable[[SandboxSpec], Awaitable[Sandbox]],
        setup: Callable[[Sandbox], Awaitable[None]] | None = None,
    ) -> Sandbox:
        """Make a sandbox by ``make`` under every limit and promise of ``create``."""
        if self._closed:
            raise SandboxError(f"provider {self.name} is closed")
        deadline = time.monotonic() + self.config.create_timeout_s
        await self._acquire_place(deadline)
        making = self.own(self._make(spec, deadline, make, setup))
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
        """The live sandbox of that id, or ``SandboxGone``.

        With the capability ``attach`` also one that another process made: it can be used, extended and killed,
        and closing this provider leaves it alone.
        """
        found = self._sandboxes.get(sandbox_id)
        if found is not None and not found.gone:
            return found
        if found is None and "attach" in self.caps:
            return await self._attach(sandbox_id)
        raise SandboxGone(f"provider {self.name} has no sandbox {sandbox_id}")

    async def list(self, labels: Mapping[str, str] | None = None) -> tuple[SandboxInfo, ...]:
        """The live sandboxes that carry all of ``labels``; with the capability ``attach``, of all processes."""
        wanted = dict(labels or {})
        found = {info.id: info for info in await self._remote_list(wanted)} if "attach" in self.caps else {}
        for own in self._sandboxes.values():
            if own.gone:
                found.pop(own.id, None)
            else:
                left_s = max(0.0, own.expires_at - time.monotonic())
                found[own.id] = SandboxInfo(id=own.id, labels=own.spec.labels, expires_in_s=left_s)
        return tuple(info for info in found.values() if wanted.items() <= dict(info.labels).items())

    async def aclose(self) -> None:
        """Kill what is left, wait for creates and kills in the background, release the provider. Idempotent.

        Waits at most ``close_timeout_s`` for creates and ``kill_timeout_s`` for kills; what is left then is
        named in the log, and counted as abandoned.
        """
        self._closed = True
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)
            self._reaper = None
        end = time.monotonic() + self.config.close_timeout_s
        kills_end = math.inf
        while self._sandboxes or self._owned:
            for sandbox in list(self._sandboxes.values()):
                sandbox.begin_kill()
            limit = end
            if not self._owned - self._kills:
                limit = kills_end = min(kills_end, time.monotonic() + self.config.kill_timeout_s)
            if time.monotonic() >= limit:
                break
            await asyncio.wait(self._owned, timeout=limit - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
        await self._give_up()
        if self._unsure:
            await tried(self._sweep({OWNER: self.owner}), self.config.kill_timeout_s)
            await self._give_up()
        await self._close()

    # -- for Sandbox and subclasses ----------------------------------------------------------------

    def own(self, work: Coroutine[object, object, T], *, kill: bool = False) -> asyncio.Task[T]:
        """Run ``work`` as a task that outlives a cancelled caller; ``aclose`` waits for it, less long for a kill."""
        task = asyncio.create_task(work)
        for tasks in (self._owned, self._kills) if kill else (self._owned,):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return task

    def forget(self, sandbox: Sandbox) -> None:
        """A sandbox is gone for good, or given up: free its place."""
        if self._sandboxes.pop(sandbox.id, None) is not None:
            self._live.release()

    @abstractmethod
    async def _create(self, spec: SandboxSpec) -> Sandbox:
        """Make one. When it raises, nothing of it may be left. It may be slow; it is never cancelled.

        The labels of ``spec`` name the owner and this very call, so that what a lost answer left can be found.
        """

    async def _close(self) -> None:  # noqa: B027 - not every provider holds something
        """Release what the provider itself holds."""

    async def _remote_list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """Everything alive at the provider that carries ``labels``, whoever made it. Capability ``attach``."""
        raise NotImplementedError

    async def _attach(self, sandbox_id: str) -> Sandbox:
        """A sandbox of another process, its spec as far as the provider knows it. Capability ``attach``."""
        raise NotImplementedError

    # -- create ------------------------------------------------------------------------------------

    async def _acquire_place(self, deadline: float) -> None:
        if not self._live.locked():  # the common case needs no timer
            await self._live.acquire()
            return
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._live.acquire()
        except TimeoutError:
            stuck = f" ({self.counts.stuck} of them are being deleted)" if self.counts.stuck else ""
            raise CapacityExceeded(
                f"{self.config.max_live} sandboxes are alive{stuck} and none ended within "
                f"{self.config.create_timeout_s} s; raise sandbox.max_live or run fewer episodes at once"
            ) from None

    async def _make(
        self,
        spec: SandboxSpec,
        deadline: float,
        make: Callable[[SandboxSpec], Awaitable[Sandbox]],
        setup: Callable[[Sandbox], Awaitable[None]] | None,
    ) -> Sandbox:
        """With a place in ``_live`` held; gives it back unless a sandbox comes out."""
        try:
            sandbox = await self._make_retrying(spec, deadline, make)
            self._sandboxes[sandbox.id] = sandbox
        except BaseException:
            self._live.release()
            raise
        self.counts.created += 1
        self._watch(sandbox)
        if setup is not None:
            try:
                await setup(sandbox)
            except BaseException:
                await sandbox.kill()
                raise
        return sandbox

    async def _make_retrying(
        self, spec: SandboxSpec, deadline: float, make: Callable[[SandboxSpec], Awaitable[Sandbox]]
    ) -> Sandbox:
        for attempt in range(1, self.config.create_attempts + 1):
            marks = {OWNER: self.owner, ATTEMPT: attempt_mark()}
            begun = False
            try:
                async with self._pace.turn(deadline):
                    begun = True
                    return await make(replace(spec, labels={**spec.labels, **marks}))
            except SandboxError as error:
                self.counts.create_failures += begun
                if begun and not isinstance(error, _SURELY_NOT_MADE):
                    self._search(marks)
                # After a refusal for the rate, the turnstile does the waiting, for everybody.
                delay_s = 0.0 if isinstance(error, RateLimited) else 0.2 * 2**attempt
                last = attempt == self.config.create_attempts or time.monotonic() + delay_s > deadline
                if last or not begun or not error.retryable:
                    raise
                logger.info("create failed, attempt %d: %s", attempt, error)
                await asyncio.sleep(delay_s)
            except BaseException:
                if begun:
                    self._search(marks)
                raise
        raise CreateFailed("no attempt was made")  # create_attempts is at least 1

    async def _set_up(self, sandbox: Sandbox) -> None:
        spec = sandbox.spec
        if "host_files" not in self.caps:
            if spec.tree is not None:
                await sandbox.put_tree(spec.tree)
            for inside, source in spec.mounts.items():
                await sandbox.put_tree(source, inside)
                await sandbox.exec(["chmod", "-R", "a-w", inside], timeout_s=_TRANSFER_S)
        for path, data in spec.files.items():
            await sandbox.write(path, data)

    def _search(self, marks: Mapping[str, str]) -> None:
        """A create failed without saying whether it made something: look for it, kill what is found."""
        if "attach" in self.caps:
            self._unsure = True
            self.own(self._sweep(marks))

    async def _sweep(self, labels: Mapping[str, str]) -> None:
        try:
            for info in await self._remote_list(labels):
                if info.id not in self._sandboxes and labels.items() <= dict(info.labels).items():
                    logger.warning("sandbox %s is there although its create failed; it is deleted", info.id)
                    sandbox = await self._attach(info.id)
                    await sandbox.kill()
                    self.counts.swept += 1
        except Exception as error:  # a look that fails must not hide the failure that it follows
            logger.warning("%s: cannot look for what a failed create left: %s", self.name, error)

    async def _discard(self, making: asyncio.Task[Sandbox]) -> None:
        """A create whose caller went away: let it finish, then kill what it made."""
        await asyncio.wait([making])
        if not making.cancelled() and making.exception() is None:
            await making.result().kill()

    async def _give_up(self) -> None:
        """Stop what is still going on in the background."""
        left = set(self._owned)
        for task in left:
            task.cancel()
        for result in await asyncio.gather(*left, return_exceptions=True):
            if isinstance(result, Exception):
                logger.warning("closing %s: %s", self.name, result)

    # -- reaper ------------------------------------------------------------------------------------

    def _watch(self, sandbox: Sandbox) -> None:
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap())
        if sandbox.expires_at < self._reap_at:
            self._reaper_wake.set()

    async def _reap(self) -> None:
        while True:
            self._reaper_wake.clear()
            now = time.monotonic()
            for sandbox in [s for s in self._sandboxes.values() if s.expires_at <= now and not s.gone]:
                logger.info("sandbox %s outlived its ttl of %s s", sandbox.id, sandbox.spec.ttl_s)
                sandbox.mark_gone(f"outlived its ttl of {sandbox.spec.ttl_s} s")
                sandbox.begin_kill()
            # A sandbox that is extended meanwhile is looked at too early, which costs nothing.
            self._reap_at = min(
                (s.expires_at for s in self._sandboxes.values() if s.expires_at > now), default=math.inf
            )
            try:
                async with asyncio.timeout(None if math.isinf(self._reap_at) else self._reap_at - now):
                    await self._reaper_wake.wait()
            except TimeoutError:
                continue


def _capped(done: ExecResult, most: int) -> ExecResult:
    """Whatever a provider lets through."""
    if len(done.stdout) <= most and len(done.stderr) <= most:
        return done
    return replace(done, stdout=done.stdout[:most], stderr=done.stderr[:most], truncated=True)
