"""An in-memory provider for tests and dry runs: no processes, no files on disk, faults on request.

It obeys the whole protocol, so what runs on it runs on real providers; nothing is isolated. Behind it stands a
``FakeCloud``, which keeps the machines like a remote service does: they outlive a provider object, other provider
objects can list and attach to them, and what leaked is counted there. ``fake_programs`` says which commands it
knows; callers hand in others. Depends on ``base`` and ``fake_programs``.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal
from weakref import WeakValueDictionary

from tollway.errors import BadImage, BadRequest, RateLimited, SandboxError, SandboxGone
from tollway.sandboxes.base import Command, ExecResult, Sandbox, SandboxInfo, SandboxProvider, SandboxSpec
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake_programs import PROGRAMS, Machine, Process, Program, run_program
from tollway.sandboxes.workspace import parts_of

__all__ = ["NO_IMAGE", "FakeCloud", "FakeProvider", "FakeSandbox", "Faults", "Process", "Program", "run_program"]

NO_IMAGE = "no-such-image"
"""Images whose name starts like this do not exist; all others do, and are empty."""
_Operation = Literal["create", "lost_create", "exec", "read", "write", "extend", "kill", "list"]


@dataclass(slots=True)
class Faults:
    """Errors to raise, oldest first, and delays; tests fill them."""

    create: deque[Exception] = field(default_factory=deque)
    """Nothing is made."""
    lost_create: deque[Exception] = field(default_factory=deque)
    """The machine is made, and its answer is lost."""
    exec: deque[Exception] = field(default_factory=deque)
    read: deque[Exception] = field(default_factory=deque)
    write: deque[Exception] = field(default_factory=deque)
    extend: deque[Exception] = field(default_factory=deque)
    kill: deque[Exception] = field(default_factory=deque)
    list: deque[Exception] = field(default_factory=deque)
    create_delay_s: float = 0.0
    kill_delay_s: float = 0.0
    stuck_kills: int = 0
    """So many of the next kills are never answered, and delete nothing."""
    unreachable: bool = False
    """Every call fails."""

    def strike(self, where: _Operation) -> None:
        """Raise the next planned error of this operation, if there is one."""
        if self.unreachable:
            raise SandboxError("the provider is unreachable")
        planned: deque[Exception] = getattr(self, where)
        if planned:
            raise planned.popleft()


@dataclass(slots=True)
class _Rented:
    machine: Machine
    spec: SandboxSpec
    expires_at: float
    paused: bool = False


@dataclass(slots=True, weakref_slot=True)
class FakeCloud:
    """The service behind fake providers. What is in ``rented`` at the end of a test has leaked."""

    rented: dict[str, _Rented] = field(default_factory=dict)
    snapshots: dict[str, Machine] = field(default_factory=dict)
    creates_per_s: float | None = None
    """Creates above this rate are refused with ``RateLimited``."""
    retry_after_s: float = 0.05
    """What a refusal says."""
    calls: int = 0
    """Creates that arrived, refused ones included."""
    refused: int = 0
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _accepted_at: float = -1e9

    def admit(self) -> None:
        """Count a create, and refuse it when the last one is too recent."""
        self.calls += 1
        now = time.monotonic()
        if self.creates_per_s is not None and now < self._accepted_at + 1 / self.creates_per_s:
            self.refused += 1
            raise RateLimited("429: too many creates", retry_after_s=self.retry_after_s)
        self._accepted_at = now

    def rent(self, spec: SandboxSpec, machine: Machine) -> str:
        """A new machine in this state; its id."""
        sandbox_id = f"fake-{next(self._numbers)}"
        self.rented[sandbox_id] = _Rented(machine, spec, time.monotonic() + spec.ttl_s)
        return sandbox_id

    def get(self, sandbox_id: str) -> _Rented:
        """The machine of that id; ``SandboxGone`` when its time has passed or it was deleted."""
        self.expire()
        found = self.rented.get(sandbox_id)
        if found is None:
            raise SandboxGone(f"sandbox {sandbox_id} does not exist (any more)")
        return found

    def expire(self) -> None:
        """End what has outlived its ttl, whether or not its owner lives."""
        now = time.monotonic()
        self.rented = {name: rented for name, rented in self.rented.items() if rented.expires_at > now}


_CLOUDS: WeakValueDictionary[int, FakeCloud] = WeakValueDictionary()


class FakeProvider(SandboxProvider):
    """Sandboxes that are dictionaries. ``made`` and ``killed`` count what a leak test needs."""

    name: ClassVar[str] = "fake"
    caps: ClassVar[frozenset[str]] = frozenset({"stderr", "snapshot", "fork", "pause", "attach"})

    def __init__(
        self,
        config: SandboxConfig | None = None,
        programs: Mapping[str, Program] | None = None,
        cloud: FakeCloud | None = None,
    ) -> None:
        super().__init__(config or SandboxConfig())
        self.programs: dict[str, Program] = {**PROGRAMS, **(programs or {})}
        self.faults = Faults()
        self.made = self.killed = 0
        self.specs: list[SandboxSpec] = []
        # Providers of one configuration object use one service, as they would outside tests.
        self.cloud = cloud if cloud is not None else _CLOUDS.setdefault(id(self.config), FakeCloud())

    @property
    def stand_in(self) -> str:
        return "an in-memory fake: it runs nothing and isolates nothing"

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        if spec.image is not None and spec.image.startswith(NO_IMAGE):
            raise BadImage(f"there is no image {spec.image!r}")
        state = self.cloud.snapshots.get(spec.image or "", Machine())
        return await self.rent(spec, state)

    async def rent(self, spec: SandboxSpec, state: Machine) -> Sandbox:
        """A new machine that starts in ``state``."""
        await asyncio.sleep(self.faults.create_delay_s)
        self.faults.strike("create")
        self.cloud.admit()
        self.made += 1
        self.specs.append(spec)
        sandbox_id = self.cloud.rent(spec, state.copy())
        self.faults.strike("lost_create")
        return FakeSandbox(self, sandbox_id, spec)

    async def _remote_list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        self.faults.strike("list")
        self.cloud.expire()
        now = time.monotonic()
        return [
            SandboxInfo(id=name, labels=rented.spec.labels, expires_in_s=rented.expires_at - now)
            for name, rented in self.cloud.rented.items()
            if labels.items() <= rented.spec.labels.items()
        ]

    async def _attach(self, sandbox_id: str) -> Sandbox:
        self.faults.strike("list")
        return FakeSandbox(self, sandbox_id, self.cloud.get(sandbox_id).spec)


class FakeSandbox(Sandbox):
    """Files by path, and commands that are coroutines."""

    def __init__(self, provider: FakeProvider, sandbox_id: str, spec: SandboxSpec) -> None:
        super().__init__(provider, sandbox_id, spec)
        self._fake = provider
        self.machine = provider.cloud.get(sandbox_id).machine
        self.programs = provider.programs
        self._running: set[asyncio.Task[int]] = set()

    @property
    def files(self) -> dict[tuple[str, ...], bytes]:
        """Contents by path, relative to the workspace."""
        return self.machine.files

    async def _exec(self, command: Command) -> ExecResult:
        self._fake.faults.strike("exec")
        if self._fake.cloud.get(self.id).paused:
            raise SandboxError(f"sandbox {self.id} is paused; resume it first")
        inside = () if command.cwd in (".", "/workspace") else parts_of(command.cwd)
        if not self.machine.is_directory(inside):
            raise BadRequest(f"no directory {command.cwd!r} in the sandbox", param="cwd")
        process = Process(self, command.argv, inside, {**self.spec.env, **command.env}, command.stdin)
        work = asyncio.create_task(run_program(process))
        self._running.add(work)
        try:
            done, _ = await asyncio.wait([work], timeout=command.timeout_s)
        finally:
            for task in (work, *process.children):
                task.cancel()
            await asyncio.gather(work, *process.children, return_exceptions=True)
            self._running.discard(work)
        self._check_alive()
        return ExecResult(
            exit_code=work.result() if done else None,
            stdout=bytes(process.stdout[: command.max_output]),
            stderr=bytes(process.stderr[: command.max_output]),
            timed_out=not done,
            truncated=max(len(process.stdout), len(process.stderr)) > command.max_output,
        )

    async def _read(self, path: str, max_bytes: int) -> bytes:
        self._fake.faults.strike("read")
        self._fake.cloud.get(self.id)
        parts = parts_of(path)
        if any(parts[:depth] in self.machine.links for depth in range(1, len(parts) + 1)):
            raise BadRequest(f"{path!r} goes through a link", param="path")
        if parts not in self.machine.files:
            raise BadRequest(f"{path!r} does not exist", param="path")
        data = self.machine.files[parts]
        if len(data) > max_bytes:
            raise BadRequest(f"{path!r} holds more than {max_bytes} bytes", param="path")
        return data

    async def _write(self, path: str, data: bytes, mode: int) -> None:
        self._fake.faults.strike("write")
        self._fake.cloud.get(self.id)
        parts = parts_of(path)
        if any(parts[:depth] in self.machine.links for depth in range(1, len(parts) + 1)):
            raise BadRequest(f"{path!r} goes through a link", param="path")
        self.machine.files[parts] = bytes(data)
        self.machine.modes[parts] = mode

    async def _extend(self, ttl_s: float) -> None:
        self._fake.faults.strike("extend")
        rented = self._fake.cloud.get(self.id)
        rented.expires_at = max(rented.expires_at, time.monotonic() + ttl_s)

    async def _snapshot(self) -> str:
        name = f"fake-snapshot-{len(self._fake.cloud.snapshots) + 1}"
        self._fake.cloud.snapshots[name] = self.machine.copy()
        return name

    async def _pause(self) -> None:
        self._fake.cloud.get(self.id).paused = True

    async def _resume(self) -> None:
        self._fake.cloud.get(self.id).paused = False

    async def _fork(self, spec: SandboxSpec) -> Sandbox:
        return await self._fake.rent(spec, self.machine)

    async def _kill(self) -> None:
        for work in list(self._running):
            work.cancel()
        await asyncio.sleep(self._fake.faults.kill_delay_s)
        if self._fake.faults.stuck_kills:
            self._fake.faults.stuck_kills -= 1
            await asyncio.Event().wait()
        self._fake.faults.strike("kill")
        if self._fake.cloud.rented.pop(self.id, None) is not None:
            self._fake.killed += 1
