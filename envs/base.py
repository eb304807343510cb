"""The ports of an environment: task, tools, harness, grader.

An environment makes tasks and says how they are worked on and judged; the runner (``envs.runner``) gives it
a session and sandboxes. Nothing here opens or closes anything. Depends on the kernel, ``sandboxes.base`` and
the record types of ``session_server.client``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from tollway.errors import BadRequest, CapabilityMissing, NotFound
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.records import Sampling, Trajectory
from tollway.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from tollway.session_server.client import ChatReply, Session, SessionOptions

__all__ = [
    "AgentRun",
    "Desk",
    "Environment",
    "Grader",
    "Harness",
    "Limits",
    "Machine",
    "Model",
    "Outfit",
    "Sessions",
    "Task",
    "ToolAnswer",
    "Toolset",
    "Verdict",
    "Work",
    "collect",
]

MAX_SOURCE_BYTES = 1 << 20
"""Largest file that is collected for grading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a task's sandbox is like, beyond its files. Field by field as in ``SandboxSpec``."""

    tree: Path | None = None
    mounts: Mapping[str, Path] = field(default_factory=dict)
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cpu: float | None = None
    mem_mb: int = 512
    disk_mb: int = 512
    pids: int = 64
    network: Literal["none", "public"] | tuple[str, ...] = "none"
    options: Mapping[str, str] = field(default_factory=dict)

    def spec(self, *, ttl_s: float, labels: Mapping[str, str], files: Mapping[str, bytes] | None = None) -> SandboxSpec:
        """A sandbox like this, with these files on top of ``tree``."""
        return SandboxSpec(
            ttl_s=ttl_s,
            labels=labels,
            image=self.image,
            files=files or {},
            tree=self.tree,
            mounts=self.mounts,
            env=self.env,
            cpu=self.cpu,
            mem_mb=self.mem_mb,
            disk_mb=self.disk_mb,
            pids=self.pids,
            network=self.network,
            options=self.options,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Deadlines of one task's phases in seconds; ``None`` takes the configured one."""

    agent_s: float | None = None
    grade_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem. Immutable and reproducible from its environment's seed and its index."""

    task_id: str
    messages: tuple[Message, ...]
    """What the agent is told, before its first call. The last one is the instruction for command harnesses."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files that the agent's sandbox starts with, by path, on top of ``machine.tree``."""
    sources: tuple[str, ...] = ()
    """Paths that grading takes from the agent's sandbox; everything else there is ignored."""
    machine: Machine | None = Machine()
    """``None`` for a task that needs no sandbox."""
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a tool call shows the model, and whether it ends the episode."""

    text: str
    ends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRun:
    """What happened in the agent phase."""

    turns: int
    """Model calls that were answered."""
    submitted: bool
    """The agent said that it is done."""
    finish: str
    """Why it ended: "submitted", "stopped", "max_turns", "context", "timeout"."""
    facts: Mapping[str, float] = field(default_factory=dict)
    answer: str = ""
    """Text of the last reply; what single-turn tasks are judged by."""
    log: bytes = b""
    """What a command harness wrote; kept beside the episode, never read by a grader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A grade. Infrastructure failures raise instead: they are no grade."""

    reward: float
    reason: str
    facts: Mapping[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    """What was seen that an honest agent does not do, for example "tamper"."""
    log: bytes = b""
    """Output of the grading run, for people."""


class Model(Protocol):
    """One session's model, as a harness calls it."""

    async def chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> ChatReply:
        """One model call. Raises ``ContextLengthExceeded`` or another ``TollwayError``."""
        ...


class Sessions(Protocol):
    """The part of ``session_server.client.SessionClient`` that episodes use."""

    async def create(
        self,
        *,
        task_id: str = "",
        group_id: str = "",
        sampling: Sampling | None = None,
        metadata: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        wait_s: float = 0.0,
        options: SessionOptions = ...,
    ) -> Session:
        """Open a session."""
        ...

    async def chat(self, session: Session, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> ChatReply:
        """One model call."""
        ...

    async def reward(
        self,
        session_id: str,
        reward: float | None,
        *,
        error: str | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        """Record the outcome."""
        ...

    async def trajectories(self, session_id: str) -> tuple[Trajectory, ...]:
        """All rows of a session."""
        ...

    async def close(self, session_id: str) -> None:
        """End a session and keep its record."""
        ...

    async def delete(self, session_id: str) -> None:
        """Abort and forget a session; safe to call twice."""
        ...


class Toolset(ABC):
    """The tools of one episode, with the episode's own state. Opened before the agent starts, closed after it."""

    async def open(self) -> tuple[Message, ...]:
        """Make ready. Returns what the agent is told after the task's own messages."""
        return ()

    async def aclose(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of what ``open`` took; called once, whatever happened."""

    @property
    @abstractmethod
    def specs(self) -> tuple[ToolSpec, ...]:
        """What the model is offered; the same for every call of an episode."""

    @abstractmethod
    async def call(self, call: ToolCall) -> ToolAnswer:
        """Execute one call. A call that makes no sense is answered, never raised; only infrastructure raises."""

    @property
    @abstractmethod
    def facts(self) -> Mapping[str, float]:
        """Named numbers about what was done so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What a harness works with: one episode's session, its model, its tools and its sandbox."""

    session: Session
    """URLs and the token, for harnesses that call the model themselves."""
    model: Model
    """The same session for harnesses of this process; the runner counts its answers and bounds its calls."""
    tools: Toolset
    sandbox: Sandbox | None
    """``None`` for a task without one."""
    opening: tuple[Message, ...] = ()
    """What the toolset said when it was opened: told after ``task.messages``."""
    provider: SandboxProvider | None = None
    """For harnesses with a sandbox of their own, which is theirs to kill; ``None`` outside an episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outfit:
    """What a harness adds to its sandbox. Numbers are minima, added to nothing: the larger of both counts."""

    mounts: Mapping[str, Path] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    mem_mb: int = 0
    pids: int = 0
    network: Literal["public"] | tuple[str, ...] | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    this_machine: str | None = None
    """Why the mounts must be this machine's own files and not copies, and what to do where they cannot be."""


class Harness(ABC):
    """Lets a model work on a task. Must stop when cancelled and open nothing that outlives the call."""

    needs_model: ClassVar[bool] = True
    """False for those that never call one, such as the reference solution."""
    sandboxes: int = 1
    """How many sandboxes an episode holds while the agent works."""

    @asynccontextmanager
    async def outfit(self, task: Task, session: Session) -> AsyncIterator[Outfit]:
        """What the sandbox needs besides the task's machine; open as long as the sandbox lives."""
        yield Outfit()

    @abstractmethod
    async def run(self, task: Task, desk: Desk) -> AgentRun:
        """Work until the agent submits, stops or may not go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an episode leaves to its grader, and what the grader may use."""

    submission: Mapping[str, bytes]
    """Those of ``task.sources`` that existed, as the agent left them."""
    provider: SandboxProvider
    """For sandboxes of the grader's own."""
    run: AgentRun = AgentRun(turns=0, submitted=True, finish="submitted")
    sessions: Sessions | None = None
    """For graders that ask a model; such a session is theirs to close. ``None`` outside an episode."""
    tools: Toolset | None = None
    """The episode's, closed already."""
    sandbox: Sandbox | None = None
    """The agent's, alive, for graders with ``in_agents_sandbox``."""


class Grader(ABC):
    """Judges what an agent left."""

    in_agents_sandbox: ClassVar[bool] = False
    """Grade where the agent worked. Only for formats that demand it: the agent may have prepared that place."""

    @abstractmethod
    async def grade(self, task: Task, work: Work) -> Verdict:
        """Judge ``work``. Anything missing or broken in it is a grade of 0; only infrastructure raises."""


class Environment(ABC):
    """Makes tasks, and the tools and grader that belong to them. Use as ``async with`` around its episodes."""

    name: str
    size: int | None = None
    """Number of different tasks; ``None`` for an endless order."""
    needs_submission: bool = True
    """Whether a run that did not end by submitting is 0 without being graded."""

    async def open(self) -> None:  # noqa: B027 - most hold nothing
        """Start what tasks need (servers, downloads that are allowed). Called once, before the first task."""

    async def aclose(self) -> None:  # noqa: B027 - most hold nothing
        """Stop what ``open`` started."""

    @abstractmethod
    def task(self, index: int) -> Task:
        """Task ``index`` of the endless order; the same index is always the same task."""

    def find(self, task_id: str) -> Task:
        """The task of that id. Raises ``NotFound``."""
        for index in range(self.size or 0):
            task = self.task(index)
            if task.task_id == task_id:
                return task
        raise NotFound(f"{self.name} has no task {task_id!r}")

    @abstractmethod
    def toolset(self, task: Task, sandbox: Sandbox | None) -> Toolset:
        """Fresh tools for one episode over its sandbox."""

    @abstractmethod
    def grader(self, task: Task) -> Grader:
        """Who judges this task."""

    def reference(self, task: Task) -> str | None:
        """The known answer, for graders that are given one; ``None`` where there is none."""
        return None

    async def solve(self, task: Task, sandbox: Sandbox) -> None:
        """Do what the reference solution does, in the agent's sandbox. Raises ``CapabilityMissing`` without one."""
        raise CapabilityMissing(f"{self.name} has no reference solution for {task.task_id}")

    async def collect(self, task: Task, sandbox: Sandbox) -> Mapping[str, bytes]:
        """The task's source files as the agent left them; links, FIFOs and missing files are left out."""
        return await collect(sandbox, task.sources)


async def collect(sandbox: Sandbox, sources: Sequence[str]) -> dict[str, bytes]:
    """Contents of those of ``sources`` that are regular files of at most ``MAX_SOURCE_BYTES``."""
    found = {}
    for path in sources:
        try:
            found[path] = await sandbox.read(path, max_bytes=MAX_SOURCE_BYTES)
        except BadRequest:
            continue
    return found
