"""The ports of an environment: task, tools, harness, grader.

An environment makes tasks and says how they are worked on and judged; the runner (``envs.runner``) gives it
a session and sandboxes. Nothing here opens or closes anything. Depends on the kernel, ``sandboxes.base`` and
the record types of ``session_server.client``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tollway.messages import Message, ToolCall, ToolSpec
from tollway.records import Sampling, Trajectory
from tollway.sandboxes.base import Sandbox, SandboxProvider
from tollway.session_server.client import ChatReply, Session

__all__ = [
    "AgentRun",
    "Environment",
    "Grader",
    "Harness",
    "Model",
    "Sessions",
    "Task",
    "ToolAnswer",
    "Toolset",
    "Verdict",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem. Immutable and reproducible from its environment's seed and its index."""

    task_id: str
    messages: tuple[Message, ...]
    """What the agent is told, before its first call."""
    files: Mapping[str, bytes]
    """Everything that the agent's sandbox starts with, by path."""
    sources: tuple[str, ...]
    """Paths that grading takes from the agent's sandbox; everything else there is ignored."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A grade. Infrastructure failures raise instead: they are no grade."""

    reward: float
    reason: str
    facts: Mapping[str, float] = field(default_factory=dict)


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
    """The tools of one episode, with the episode's own state."""

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


class Harness(ABC):
    """Lets a model work on a task. Must stop when cancelled and open nothing that outlives the call."""

    @abstractmethod
    async def run(self, task: Task, model: Model, tools: Toolset) -> AgentRun:
        """Work until the agent submits, stops or may not go on."""


class Grader(ABC):
    """Judges what an agent left."""

    @abstractmethod
    async def grade(self, task: Task, submission: Mapping[str, bytes], provider: SandboxProvider) -> Verdict:
        """Judge the submitted source files in a sandbox of the grader's own.

        ``submission`` holds those of ``task.sources`` that existed. Anything missing or broken in it is a
        grade of 0; only infrastructure raises (``SandboxError``).
        """


class Environment(ABC):
    """Makes tasks, and the tools and grader that belong to them."""

    name: str

    @abstractmethod
    def task(self, index: int) -> Task:
        """Task ``index`` of the endless order; the same index is always the same task."""

    @abstractmethod
    def toolset(self, task: Task, sandbox: Sandbox) -> Toolset:
        """Fresh tools for one episode over its sandbox."""

    @abstractmethod
    def grader(self, task: Task) -> Grader:
        """Who judges this task."""
