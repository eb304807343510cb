"""One attempt at one task, phase by phase: open, set-up, agent, collect, grade, record.

Owns the deadlines of the phases, and that whatever ends an attempt at whatever point - a fault, a deadline, a
cancellation - leaves no sandbox, no unfinished session, and nothing of the harness or the tools. Retrying and
counting attempts is for ``envs.runner``. Depends on ``envs.base``, ``envs.leases`` and ``envs.places``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tollway import telemetry
from tollway.envs.base import (
    AgentRun,
    Desk,
    Environment,
    Harness,
    Machine,
    Outfit,
    Sessions,
    Task,
    Toolset,
    Verdict,
    Work,
)
from tollway.envs.borrowed import BorrowedSessions
from tollway.envs.config import EnvConfig
from tollway.envs.leases import Held, Leases, OutOfTime, Overrun, leaf_of, within
from tollway.envs.places import Places
from tollway.envs.usage import usage_of
from tollway.errors import CapabilityMissing, EngineLost, EpisodeFailed, SandboxError, TollwayError
from tollway.messages import Message, ToolSpec
from tollway.records import Rollout, Sampling, Trajectory
from tollway.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from tollway.sandboxes.heartbeat import heartbeat
from tollway.session_server.client import ChatReply, Session

__all__ = ["PHASES", "Attempt", "Episode", "Listener", "Order", "Parts", "Phase", "PhaseBegan"]

logger = logging.getLogger(__name__)

Phase = Literal["wait", "open", "set-up", "agent", "collect", "grade", "record"]
PHASES: tuple[Phase, ...] = ("wait", "open", "set-up", "agent", "collect", "grade", "record")
"""In order. "wait" is the wait for a place, which is bounded by the episodes that hold one."""
_LAST_WORDS = 300
"""Characters of an agent's log that an error text repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBegan:
    """News of a running attempt."""

    number: int
    """Of the attempt, unique within its runner."""
    task_id: str
    attempt: int
    phase: Phase


Listener = Callable[[PhaseBegan], None]


@dataclass(slots=True, kw_only=True)
class Parts:
    """What every attempt of a runner works with."""

    config: EnvConfig
    environment: Environment
    harness: Harness
    sessions: Sessions
    provider: SandboxProvider
    leases: Leases
    places: Places
    listen: Listener | None = None
    keeps_rows: bool = False
    """Fetch what a failed attempt recorded, too."""
    opening_grace_s: float = 5.0
    """Beyond ``open_timeout_s``, for the server's own answer that it has no capacity."""
    faults: set[tuple[str, str]] = field(default_factory=set)
    """Where users' code has raised what: each place has its traceback in the log once, not once an episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Which attempt this is."""

    task: Task
    task_id: str
    """Of the task, with its environment's name."""
    group_id: str
    sampling: Sampling
    number: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What came of an attempt. Exactly one of ``verdict`` and ``error`` decides it."""

    task: Task
    task_id: str
    environment: str
    harness: str
    group_id: str
    attempt: int
    session_id: str = ""
    phase: Phase
    """The last one that began."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds of each phase that began, and "total"."""
    run: AgentRun | None = None
    verdict: Verdict | None = None
    rows: tuple[Trajectory, ...] = ()
    submission: Mapping[str, bytes] | None = None
    """What was collected; ``None``: nothing was."""
    error: TollwayError | None = None
    """Infrastructure ended it; then it has no reward, whatever else is known."""
    retryable: bool = True
    """Whether another attempt may end differently."""
    earlier: tuple[str, ...] = ()
    """Errors of the attempts before this one."""
    folder: Path | None = None
    """Where its artifacts lie."""

    @property
    def failure(self) -> str | None:
        """The error with its code."""
        return None if self.error is None else f"{self.error.code}: {self.error}"

    def rollout(self) -> Rollout:
        """The attempt as the trainer takes it."""
        if self.error is not None or self.verdict is None or self.run is None:
            return Rollout(session_id=self.session_id, rows=(), reward=None, error=self.failure or "internal: no grade")
        return Rollout(
            session_id=self.session_id,
            rows=self.rows,
            reward=self.verdict.reward,
            turns=self.run.turns,
            duration_s=self.seconds["total"],
            facts=_facts(self.run, self.verdict, self.seconds, self.rows),
        )


class Attempt:
    """One attempt; ``run`` it once."""

    def __init__(self, parts: Parts, order: Order) -> None:
        self._parts, self._order, self._config = parts, order, parts.config
        self._seconds: dict[str, float] = {}
        self._phase_now: Phase = "wait"
        self._session_id = ""
        self._run: AgentRun | None = None
        self._verdict: Verdict | None = None
        self._rows: tuple[Trajectory, ...] = ()
        self._submission: Mapping[str, bytes] | None = None
        self._provider_gave_up = False

    async def run(self) -> Episode:
        """Go through the phases. Errors are in the episode; only a cancellation is raised."""
        started = time.monotonic()
        error: TollwayError | None = None
        try:
            await self._phases()
        except TollwayError as found:
            error = found
        except Exception as found:
            # A harness, toolset or grader is the user's code: its fault ends this episode, not the run.
            leaf = leaf_of(found)
            if isinstance(leaf, TollwayError):
                error = leaf
            else:
                self._log_once(leaf)
                error = EpisodeFailed(f"{type(leaf).__name__}: {leaf}")
        self._seconds["total"] = time.monotonic() - started
        return Episode(
            task=self._order.task,
            task_id=self._order.task_id,
            environment=self._parts.environment.name,
            harness=self._config.harness,
            group_id=self._order.group_id,
            attempt=self._order.attempt,
            session_id=self._session_id,
            phase=self._phase_now,
            seconds=dict(self._seconds),
            run=self._run,
            verdict=self._verdict,
            rows=self._rows,
            submission=self._submission,
            error=error,
            retryable=not self._provider_gave_up,
        )

    def _log_once(self, fault: BaseException) -> None:
        frames = traceback.extract_tb(fault.__traceback__)
        place = (type(fault).__name__, f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "")
        if place not in self._parts.faults:
            self._parts.faults.add(place)
            logger.error("episode of %s broke", self._order.task_id, exc_info=fault)

    async def _phases(self) -> None:
        async with AsyncExitStack() as place:
            if self._order.task.machine is not None:
                async with self._phase("wait"):
                    await place.enter_async_context(self._parts.places.take(self._parts.harness.sandboxes))
            async with self._session() as session:
                try:
                    work = await self._work(session)
                    # The agent's sandbox is gone by now; its place is there for the grader's.
                    if self._verdict is None:
                        await self._grade_elsewhere(work)
                    await place.aclose()
                    await self._record(session)
                except Exception as error:
                    await self._salvage(session, error)
                    raise

    async def _work(self, session: Session) -> Work:
        """Set-up, agent and collect; also grade, for graders that must have the agent's sandbox."""
        task, parts, config = self._order.task, self._parts, self._config
        async with AsyncExitStack() as room:
            async with AsyncExitStack() as desk:
                async with self._phase("set-up", config.setup_timeout_s):
                    held = parts.leases.hold(parts.harness.outfit(task, session), "the harness's outfit")
                    outfit = await room.enter_async_context(held)
                    sandbox = await room.enter_async_context(self._machine(session, outfit.value))
                    tools = parts.environment.toolset(task, sandbox)
                    opened = await desk.enter_async_context(parts.leases.hold(_opened(tools), "the tools"))
                async with self._phase("agent"):
                    run = await self._agent(session, sandbox, tools, (outfit, opened))
            self._run = run
            wanted = run.submitted or not parts.environment.needs_submission
            if wanted and sandbox is not None:
                async with self._phase("collect"):
                    collecting = parts.environment.collect(task, sandbox)
                    self._submission = await parts.leases.run(collecting, config.collect_timeout_s, "collecting files")
            work = Work(submission=self._submission or {}, provider=parts.provider, run=run, tools=tools)
            if wanted and parts.environment.grader(task).in_agents_sandbox:
                await self._grade(replace(work, sandbox=sandbox))
        return work

    async def _agent(
        self, session: Session, sandbox: Sandbox | None, tools: Toolset, needs: tuple[Held[Outfit], Held[Opening]]
    ) -> AgentRun:
        """The agent phase: at most as long as the task or the configuration allows."""
        parts, task, config = self._parts, self._order.task, self._config
        model = _SessionModel(parts.sessions, session, config.model_timeout_s)
        desk = Desk(
            session=session,
            model=model,
            tools=tools,
            sandbox=sandbox,
            opening=needs[1].value,
            provider=parts.provider,
        )
        limit_s = task.limits.agent_s or config.agent_timeout_s
        try:
            run = await parts.leases.run(parts.harness.run(task, desk), limit_s, "the agent", needs)
        except Overrun as error:
            if error.stuck:
                raise
            # What is there is still worth a grade; the mark tells it from a finished run.
            if isinstance(error.late, AgentRun):
                run = replace(error.late, submitted=False, finish="timeout")
            else:
                run = AgentRun(turns=model.answered, submitted=False, finish="timeout", facts=tools.facts)
        if not isinstance(run, AgentRun):
            raise EpisodeFailed(f"harness {config.harness} returned a {type(run).__name__}, want an AgentRun")
        if parts.harness.needs_model and run.turns == 0 and run.finish != "context":
            self._run = run
            raise EpisodeFailed(f"the agent ended ({run.finish}) without one answered model call{_last_words(run.log)}")
        return run

    async def _grade_elsewhere(self, work: Work) -> None:
        if self._parts.environment.needs_submission and not work.run.submitted:
            self._verdict = Verdict(reward=0.0, reason=f"not submitted: {work.run.finish}")
            return
        await self._grade(work)

    async def _grade(self, work: Work) -> None:
        parts, task = self._parts, self._order.task
        limit_s = task.limits.grade_s or self._config.grade_timeout_s
        async with self._phase("grade"), BorrowedSessions(parts.sessions, self._delete, parts.leases) as borrowed:
            grading = parts.environment.grader(task).grade(task, replace(work, sessions=borrowed))
            verdict = await parts.leases.run(grading, limit_s, "grading")
        if not isinstance(verdict, Verdict) or not math.isfinite(verdict.reward):
            raise EpisodeFailed(f"the grader of {self._order.task_id} gave {verdict!r:.200}, want a finite reward")
        self._verdict = verdict

    async def _record(self, session: Session) -> None:
        """Write the reward, fetch what was recorded, close."""
        run, verdict = self._run, self._verdict
        if run is None or verdict is None:
            raise EpisodeFailed("there is no grade to record")
        limit, sessions, name = self._config.record_timeout_s, self._parts.sessions, session.session_id
        details: dict[str, object] = {"reason": verdict.reason, "finish": run.finish, "turns": run.turns}
        if verdict.flags:
            details["flags"] = list(verdict.flags)
        async with self._phase("record"):
            await within(limit, "writing a reward", sessions.reward(name, verdict.reward, details=details))
            self._rows = await within(limit, "fetching trajectories", sessions.trajectories(name))
            if run.turns and self._parts.harness.needs_model and not self._rows:
                raise EpisodeFailed(f"the server exported no row of {run.turns} model calls")
            await within(limit, "closing a session", sessions.close(name))

    async def _salvage(self, session: Session, error: Exception) -> None:
        """What a failed attempt recorded, for people who look for the reason."""
        if not self._parts.keeps_rows or self._rows or isinstance(error, EngineLost):
            return
        try:
            work = self._parts.sessions.trajectories(session.session_id)
            self._rows = await within(self._config.record_timeout_s, "fetching trajectories", work)
        except TollwayError as second:
            logger.info("the record of a failed episode could not be had: %s", second)

    # -- what is opened ----------------------------------------------------------------------------

    @asynccontextmanager
    async def _phase(self, name: Phase, limit_s: float | None = None) -> AsyncIterator[None]:
        self._phase_now = name
        order, started = self._order, time.monotonic()
        if self._parts.listen is not None:
            self._parts.listen(
                PhaseBegan(number=order.number, task_id=order.task_id, attempt=order.attempt, phase=name)
            )
        try:
            async with asyncio.timeout(limit_s) as deadline:
                yield
        except TimeoutError as error:
            if not deadline.expired() or limit_s is None:
                raise
            raise OutOfTime(f"{name} of {order.task_id}", limit_s) from error
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - started

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        """A session that is closed by a whole episode and deleted after anything else."""
        parts, order = self._parts, self._order
        creating = parts.sessions.create(
            task_id=order.task_id,
            group_id=order.group_id,
            sampling=order.sampling,
            metadata={"environment": parts.environment.name, "harness": self._config.harness},
            wait_s=self._config.open_timeout_s,
        )
        async with self._phase("open"):
            opening = parts.leases.own(creating, "opening a session")
            try:
                limit = self._config.open_timeout_s + parts.opening_grace_s
                session = await within(limit, "opening a session", asyncio.shield(opening))
            except BaseException:
                parts.leases.own(self._delete_when_open(opening), "deleting a late session")
                raise
        self._session_id = session.session_id
        mark = telemetry.session_id.set(session.session_id)
        try:
            yield session
        except BaseException:
            parts.leases.own(self._delete(session.session_id), "deleting a session")
            raise
        finally:
            telemetry.session_id.reset(mark)

    async def _delete(self, session_id: str) -> None:
        limit_s = self._config.record_timeout_s
        try:
            await within(limit_s, "deleting a session", self._parts.sessions.delete(session_id))
        except TollwayError as error:
            logger.warning("session %s could not be deleted: %s", session_id[:8], error)

    async def _delete_when_open(self, opening: asyncio.Task[Session]) -> None:
        try:
            session = await within(self._config.open_timeout_s, "opening a session", opening)
        except Exception:
            return  # it never opened, and whoever wanted it knows why
        await self._delete(session.session_id)

    @asynccontextmanager
    async def _machine(self, session: Session, outfit: Outfit) -> AsyncIterator[Sandbox | None]:
        """The agent's sandbox with a heartbeat, killed when the block ends; ``None`` for a task without one."""
        task, parts = self._order.task, self._parts
        if task.machine is None:
            yield None
            return
        if outfit.this_machine is not None and "host_files" not in parts.provider.caps:
            raise CapabilityMissing(
                f"provider {parts.provider.name} takes no files of this machine: {outfit.this_machine}"
            )
        ttl_s = self._config.sandbox_ttl_s
        labels = {"task": self._order.task_id, "session": session.session_id}
        try:
            sandbox = await parts.provider.create(_spec(task, task.machine, outfit, ttl_s, labels))
        except SandboxError:
            # The provider has tried as often as it is worth; tries of tries would multiply.
            self._provider_gave_up = True
            raise
        beat = parts.leases.own(heartbeat(sandbox, ttl_s), f"heartbeat of sandbox {sandbox.id}")
        try:
            yield sandbox
        finally:
            beat.cancel()
            await parts.leases.release(sandbox.kill(), f"killing sandbox {sandbox.id}")


Opening = tuple[Message, ...]


@asynccontextmanager
async def _opened(tools: Toolset) -> AsyncIterator[Opening]:
    """What the toolset says when it is opened. Closed also when opening failed: it may have got half-way."""
    try:
        yield await tools.open()
    finally:
        await tools.aclose()


class _SessionModel:
    """``base.Model`` over one session, with a deadline per call."""

    def __init__(self, sessions: Sessions, session: Session, timeout_s: float) -> None:
        self._sessions, self._session, self._timeout_s = sessions, session, timeout_s
        self.answered = 0

    async def chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> ChatReply:
        reply = await within(self._timeout_s, "a model call", self._sessions.chat(self._session, messages, tools))
        self.answered += 1
        return reply


def _spec(task: Task, machine: Machine, outfit: Outfit, ttl_s: float, labels: Mapping[str, str]) -> SandboxSpec:
    """The task's machine with what the harness needs on top."""
    return replace(
        machine.spec(ttl_s=ttl_s, labels=labels, files=task.files),
        mounts={**machine.mounts, **outfit.mounts},
        env={**machine.env, **outfit.env},
        mem_mb=max(machine.mem_mb, outfit.mem_mb),
        pids=max(machine.pids, outfit.pids),
        network=outfit.network or machine.network,
        options={**machine.options, **outfit.options},
    )


def _facts(
    run: AgentRun, verdict: Verdict, seconds: Mapping[str, float], rows: Sequence[Trajectory]
) -> dict[str, float]:
    """Named numbers of a graded episode. What is not known is not there: a missing fact is no zero."""
    told = {**usage_of(rows).facts(), **run.facts, **verdict.facts}
    facts = {
        # From code of a user's: one NaN would make every mean NaN.
        **{name: float(value) for name, value in told.items() if _is_known(value)},
        "submitted": float(run.submitted),
        "timed_out": float(run.finish == "timeout"),
        "truncated": float(run.finish == "context"),
        "flagged": float(bool(verdict.flags)),
    }
    names = {"set-up": "setup_s", "agent": "agent_s", "grade": "grade_s"}
    return facts | {name: seconds[phase] for phase, name in names.items() if phase in seconds}


def _is_known(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _last_words(log: bytes) -> str:
    text = log.decode("utf-8", "backslashreplace").strip()[-_LAST_WORDS:]
    return f"; it wrote: {text}" if text else ""
