"""Runs episodes: session, sandbox, agent, grade, record, release. Implements ``ports.EpisodeSource``.

Infrastructure failures make an episode end without a reward, never with 0, and only whole episodes are
retried, each with a new session and a new sandbox. Whatever happens, cancellation included, no sandbox and no
unfinished session is left. Depends on ``envs.base``; which environment, harness, provider
and server it works with is passed in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

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
from tollway.envs.config import EnvConfig
from tollway.errors import (
    ComponentLost,
    EngineLost,
    EpisodeFailed,
    NoEngine,
    SandboxError,
    SandboxGone,
    SandboxUnavailable,
    TollwayError,
)
from tollway.messages import Message, ToolSpec
from tollway.ports import EpisodeSource, GroupRequest
from tollway.records import Group, Rollout, Sampling, Trajectory
from tollway.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from tollway.session_server.client import ChatReply, Session

__all__ = ["EpisodeRunner"]

logger = logging.getLogger(__name__)
T = TypeVar("T")
_RETRY_DELAY_S = 0.2
_BEATS_PER_TTL = 3


@dataclass(frozen=True, slots=True)
class _Failure:
    """An attempt that infrastructure ended."""

    error: Exception
    session_id: str


class EpisodeRunner(EpisodeSource):
    """Episodes of one environment over one session server and one sandbox provider; owns neither."""

    def __init__(
        self,
        config: EnvConfig,
        *,
        environment: Environment,
        harness: Harness,
        sessions: Sessions,
        provider: SandboxProvider,
    ) -> None:
        self._config = config
        self._environment, self._harness = environment, harness
        self._sessions, self._provider = sessions, provider
        self._places = asyncio.Semaphore(config.max_episodes)
        self._releases: set[asyncio.Task[None]] = set()
        self.opening_grace_s = 5.0
        """Beyond ``open_timeout_s``, for the server's own answer that it has no capacity."""

    async def run_group(self, request: GroupRequest) -> Group:
        """All attempts at task ``request.prompt_index``, together."""
        task = self._environment.task(request.prompt_index)
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._rollout(task, request)) for _ in range(request.samples)]
        except BaseExceptionGroup as errors:
            # One error ends the group: name it, not the bundle.
            raise errors.exceptions[0] from None
        results = [each.result() for each in running]
        failures = [each for each in results if isinstance(each, _Failure)]
        if len(failures) == len(results) and all(isinstance(each.error, NoEngine | EngineLost) for each in failures):
            raise ComponentLost(f"no engine answers: {failures[0].error}") from failures[0].error
        rollouts = tuple(_failed(each) if isinstance(each, _Failure) else each for each in results)
        return Group(group_id=request.group_id, task_id=task.task_id, rollouts=rollouts)

    async def aclose(self) -> None:
        """Wait for sessions that are still being deleted in the background."""
        while self._releases:
            await asyncio.gather(*self._releases, return_exceptions=True)

    async def _rollout(self, task: Task, request: GroupRequest) -> Rollout | _Failure:
        """One rollout: attempts at the whole episode until one is not ended by infrastructure."""
        async with self._places:
            for attempt in range(1, self._config.attempts + 1):
                result = await self._attempt(task, request)
                if isinstance(result, Rollout):
                    return result
                if isinstance(result.error, ComponentLost):
                    raise result.error
                if isinstance(result.error, SandboxUnavailable):
                    raise ComponentLost(f"no sandbox can run: {result.error}") from result.error
                logger.warning("episode of %s failed, attempt %d: %s", task.task_id, attempt, result.error)
                if attempt < self._config.attempts:
                    await asyncio.sleep(_RETRY_DELAY_S)
        return result

    async def _attempt(self, task: Task, request: GroupRequest) -> Rollout | _Failure:
        session_id = ""
        try:
            async with self._session(task, request.group_id, request.sampling) as session:
                session_id = session.session_id
                return await self._episode(task, session)
        except TollwayError as error:
            return _Failure(error, session_id)
        except Exception as error:
            # A harness or grader is the user's code: its fault ends this episode, not the run.
            logger.exception("episode of %s broke", task.task_id)
            return _Failure(EpisodeFailed(f"{type(error).__name__}: {error}"), session_id)

    @asynccontextmanager
    async def _session(self, task: Task, group_id: str, sampling: Sampling) -> AsyncIterator[Session]:
        """A session that is closed after a whole episode and deleted after anything else."""
        opening = asyncio.create_task(
            self._sessions.create(
                task_id=task.task_id,
                group_id=group_id,
                sampling=sampling,
                metadata={"environment": self._environment.name},
                wait_s=self._config.open_timeout_s,
            )
        )
        try:
            limit = self._config.open_timeout_s + self.opening_grace_s
            session = await _within(limit, "opening a session", asyncio.shield(opening))
        except BaseException:
            self._release(self._delete_when_open(opening))
            raise
        try:
            yield session
            await _within(self._config.record_timeout_s, "closing a session", self._sessions.close(session.session_id))
        except BaseException:
            self._release(self._delete(session.session_id))
            raise

    async def _episode(self, task: Task, session: Session) -> Rollout:
        started = time.monotonic()
        async with self._harness.outfit(task, session) as outfit, self._machine(task, session, outfit) as sandbox:
            tools = self._environment.toolset(task, sandbox)
            run = await self._agent(task, session, sandbox, tools)
            work = Work(
                submission=await self._collect(task, run, sandbox),
                provider=self._provider,
                run=run,
                sessions=self._sessions,
                tools=tools,
                sandbox=sandbox,
            )
            graded_from = time.monotonic()
            verdict = None
            if self._environment.grader(task).in_agents_sandbox:
                verdict = await self._grade(task, work)
        # The agent's sandbox is gone by now, so that grading can always get a place.
        if verdict is None:
            verdict = await self._grade(task, replace(work, sandbox=None))
        ended = time.monotonic()
        facts = {
            **run.facts,
            **verdict.facts,
            "submitted": float(run.submitted),
            "timed_out": float(run.finish == "timeout"),
            "truncated": float(run.finish == "context"),
            "agent_s": graded_from - started,
            "grade_s": ended - graded_from,
        }
        rows = await self._record(session.session_id, run, verdict)
        return Rollout(
            session_id=session.session_id,
            rows=rows,
            reward=verdict.reward,
            turns=run.turns,
            duration_s=time.monotonic() - started,
            facts=facts,
        )

    @asynccontextmanager
    async def _machine(self, task: Task, session: Session, outfit: Outfit) -> AsyncIterator[Sandbox | None]:
        """The agent's sandbox with a heartbeat, killed when the block ends; ``None`` for a task without one."""
        if task.machine is None:
            yield None
            return
        ttl_s = self._config.sandbox_ttl_s
        labels = {"task": task.task_id, "session": session.session_id}
        sandbox = await self._provider.create(_spec(task, task.machine, outfit, ttl_s, labels))
        beat = asyncio.create_task(_heartbeat(sandbox, ttl_s))
        try:
            yield sandbox
        finally:
            beat.cancel()
            await sandbox.kill()

    async def _agent(self, task: Task, session: Session, sandbox: Sandbox | None, tools: Toolset) -> AgentRun:
        """The agent phase: at most as long as the task or the configuration allows."""
        model = _SessionModel(self._sessions, session, self._config.model_timeout_s)
        limit_s = task.limits.agent_s or self._config.agent_timeout_s
        try:
            opening = await tools.open()
            desk = Desk(session=session, model=model, tools=tools, sandbox=sandbox, opening=opening)
            async with asyncio.timeout(limit_s) as deadline:
                return await self._harness.run(task, desk)
        except TimeoutError:
            if not deadline.expired():
                raise
            # What is there is still worth a grade; the mark tells it from a finished run.
            return AgentRun(turns=model.answered, submitted=False, finish="timeout", facts=tools.facts)
        finally:
            await tools.aclose()

    async def _collect(self, task: Task, run: AgentRun, sandbox: Sandbox | None) -> Mapping[str, bytes]:
        wanted = run.submitted or not self._environment.needs_submission
        return await self._environment.collect(task, sandbox) if wanted and sandbox is not None else {}

    async def _grade(self, task: Task, work: Work) -> Verdict:
        if self._environment.needs_submission and not work.run.submitted:
            return Verdict(reward=0.0, reason=f"not submitted: {work.run.finish}")
        return await self._environment.grader(task).grade(task, work)

    async def _record(self, session_id: str, run: AgentRun, verdict: Verdict) -> tuple[Trajectory, ...]:
        limit = self._config.record_timeout_s
        details = {"reason": verdict.reason, "finish": run.finish, "turns": run.turns}
        await _within(limit, "writing a reward", self._sessions.reward(session_id, verdict.reward, details=details))
        return await _within(limit, "fetching trajectories", self._sessions.trajectories(session_id))

    def _release(self, work: Coroutine[object, object, None]) -> None:
        """Clean up in a task of its own: a cancelled episode cannot wait for it, ``aclose`` does."""
        task = asyncio.create_task(work)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _delete(self, session_id: str) -> None:
        try:
            await _within(self._config.record_timeout_s, "deleting a session", self._sessions.delete(session_id))
        except TollwayError as error:
            logger.warning("session %s could not be deleted: %s", session_id[:8], error)

    async def _delete_when_open(self, opening: asyncio.Task[Session]) -> None:
        try:
            session = await _within(self._config.open_timeout_s, "opening a session", opening)
        except TollwayError:
            return  # it never opened
        await self._delete(session.session_id)


def _spec(task: Task, machine: Machine, outfit: Outfit, ttl_s: float, labels: Mapping[str, str]) -> SandboxSpec:
    """The task's machine with what the harness needs on top."""
    return SandboxSpec(
        ttl_s=ttl_s,
        labels=labels,
        image=machine.image,
        files=task.files,
        tree=machine.tree,
        mounts={**machine.mounts, **outfit.mounts},
        env={**machine.env, **outfit.env},
        cpu=machine.cpu,
        mem_mb=max(machine.mem_mb, outfit.mem_mb),
        disk_mb=machine.disk_mb,
        pids=max(machine.pids, outfit.pids),
        network=outfit.network or machine.network,
        options={**machine.options, **outfit.options},
    )


class _SessionModel:
    """``base.Model`` over one session, with a deadline per call."""

    def __init__(self, sessions: Sessions, session: Session, timeout_s: float) -> None:
        self._sessions, self._session, self._timeout_s = sessions, session, timeout_s
        self.answered = 0

    async def chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> ChatReply:
        reply = await _within(self._timeout_s, "a model call", self._sessions.chat(self._session, messages, tools))
        self.answered += 1
        return reply


async def _heartbeat(sandbox: Sandbox, ttl_s: float) -> None:
    """Keep a sandbox alive while its agent works: a short TTL ends it soon when we die, not when we are slow."""
    while True:
        await asyncio.sleep(ttl_s / _BEATS_PER_TTL)
        try:
            await sandbox.extend(ttl_s)
        except SandboxGone:
            return  # the next command says so
        except SandboxError as error:
            logger.warning("heartbeat of sandbox %s: %s", sandbox.id, error)


async def _within(limit_s: float, what: str, work: Coroutine[object, object, T] | asyncio.Future[T]) -> T:
    """Await ``work`` for at most ``limit_s``; a stall of our own parts is an infrastructure failure."""
    try:
        async with asyncio.timeout(limit_s) as deadline:
            return await work
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise EpisodeFailed(f"{what} took longer than {limit_s} s") from error


def _failed(failure: _Failure) -> Rollout:
    code = failure.error.code if isinstance(failure.error, TollwayError) else "internal"
    return Rollout(session_id=failure.session_id, rows=(), reward=None, error=f"{code}: {failure.error}")
