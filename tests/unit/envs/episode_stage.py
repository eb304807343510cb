"""An environment, a harness, tools and a grader that count what they open and close, for tests of the runner."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from episode_helpers import SAMPLING, ScriptedSessions, row_of

from tollway.envs.base import (
    AgentRun,
    Desk,
    Environment,
    Grader,
    Harness,
    Machine,
    Outfit,
    Task,
    ToolAnswer,
    Toolset,
    Verdict,
    Work,
)
from tollway.envs.config import EnvConfig
from tollway.envs.episode import Episode
from tollway.envs.runner import EpisodeRunner
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.records import Trajectory
from tollway.sandboxes.base import Sandbox, SandboxProvider
from tollway.sandboxes.spec import SandboxSpec


class Counts:
    """How often each thing was opened and closed, and where to stall, break or ignore being cancelled."""

    def __init__(self) -> None:
        self.opened: Counter[str] = Counter()
        self.closed: Counter[str] = Counter()
        self.stall: set[str] = set()
        self.stubborn: set[str] = set()
        self.breaks: dict[str, Exception] = {}
        self.reached: set[str] = set()

    async def at(self, where: str) -> None:
        """A few awaits at a named place."""
        self.reached.add(where)
        for _ in range(2):
            await asyncio.sleep(0)
        if where in self.breaks:
            raise self.breaks[where]
        if where in self.stall:
            await asyncio.Event().wait()
        while where in self.stubborn:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    @property
    def held(self) -> dict[str, int]:
        """What is open."""
        return {name: count - self.closed[name] for name, count in self.opened.items() if count != self.closed[name]}


class CountingTools(Toolset):
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    async def open(self) -> tuple[Message, ...]:
        self._counts.opened["tools"] += 1
        await self._counts.at("tools.open")
        return (Message(role="user", content="ready"),)

    async def aclose(self) -> None:
        await self._counts.at("tools.aclose")
        self._counts.closed["tools"] += 1

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return ()

    async def call(self, call: ToolCall) -> ToolAnswer:
        return ToolAnswer("done", ends=True)

    @property
    def facts(self) -> Mapping[str, float]:
        return {"tool_s": 0.5}


class CountingGrader(Grader):
    """Uses a sandbox and a session of its own."""

    def __init__(self, counts: Counts, reward: float) -> None:
        self._counts, self._reward = counts, reward

    async def grade(self, task: Task, work: Work) -> Verdict:
        await self._counts.at("grade")
        sandbox = await work.provider.create(SandboxSpec(ttl_s=60, labels={"role": "grader"}))
        try:
            await sandbox.exec(["true"], timeout_s=5)
        finally:
            await sandbox.kill()
        if work.sessions is not None:
            session = await work.sessions.create(task_id=task.task_id)
            await work.sessions.chat(session, [])
            await work.sessions.close(session.session_id)
        return Verdict(reward=self._reward, reason="judged", log=b"graded")


class GraderInPlace(CountingGrader):
    in_agents_sandbox = True

    async def grade(self, task: Task, work: Work) -> Verdict:
        assert work.sandbox is not None
        await self._counts.at("grade")
        done = await work.sandbox.exec(["cat", "a.txt"], timeout_s=5)
        return Verdict(reward=self._reward, reason=done.stdout.decode())


class CountingEnvironment(Environment):
    name = "counting"
    size = 3

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.reward = 1.0
        self.grades = CountingGrader
        self.machine: Machine | None = Machine()

    def task(self, index: int) -> Task:
        return Task(
            task_id=f"counting/{index % 3}",
            messages=(Message(role="user", content="go"),),
            files={"a.txt": b"one\n"},
            sources=("a.txt",),
            machine=self.machine,
        )

    def toolset(self, task: Task, sandbox: Sandbox | None) -> Toolset:
        return CountingTools(self.counts)

    def grader(self, task: Task) -> Grader:
        return self.grades(self.counts, self.reward)

    async def collect(self, task: Task, sandbox: Sandbox) -> Mapping[str, bytes]:
        await self.counts.at("collect")
        return await super().collect(task, sandbox)


class CountingHarness(Harness):
    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self.result: object = None
        self.loses_outfit = False

    @asynccontextmanager
    async def outfit(self, task: Task, session: object) -> AsyncIterator[Outfit]:
        self._counts.opened["outfit"] += 1
        try:
            await self._counts.at("outfit.enter")
            if self.loses_outfit:
                # As a bridge whose listener dies: its task group ends the block.
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._dies())
                    yield Outfit()
            else:
                yield Outfit()
            await self._counts.at("outfit.exit")
        finally:
            self._counts.closed["outfit"] += 1

    async def _dies(self) -> None:
        await asyncio.sleep(0.02)
        raise OSError("the bridge fell")

    async def run(self, task: Task, desk: Desk) -> AgentRun:
        assert desk.opening == (Message(role="user", content="ready"),)
        await desk.model.chat(task.messages, ())
        await self._counts.at("agent")
        if desk.sandbox is not None:
            await desk.sandbox.write("a.txt", b"two\n")
        if self.result is not None:
            return self.result  # type: ignore[return-value]
        return AgentRun(turns=1, submitted=True, finish="submitted", log=b"agent says hello", facts=desk.tools.facts)


class Stage:
    """A runner over counted parts."""

    def __init__(self, provider: SandboxProvider, **settings: object) -> None:
        self.counts = Counts()
        self.provider = provider
        self.sessions = ScriptedSessions(lambda _: Message(role="assistant", content="ok"))
        self.environment = CountingEnvironment(self.counts)
        self.harness = CountingHarness(self.counts)
        self.config = EnvConfig.model_validate({"attempts": 1, "release_timeout_s": 5.0, **settings})
        self.runner = EpisodeRunner(
            self.config,
            environment=self.environment,
            harness=self.harness,
            sessions=self.sessions,
            provider=provider,
        )

    async def episodes(self, samples: int = 1, index: int = 0) -> list[Episode]:
        """Episodes of one task."""
        task = self.environment.task(index)
        return await self.runner.run_task(task, group_id="g", samples=samples, sampling=SAMPLING)

    async def sessions_rows(self, session_id: str) -> tuple[Trajectory, ...]:
        """The rows of a session, before it has a reward, too."""
        return (row_of(session_id, self.sessions.rewards.get(session_id)),)

    async def episode(self) -> Episode:
        """One episode of task 0."""
        (episode,) = await self.episodes()
        return episode

    async def assert_clean(self) -> None:
        """Nothing is held: sandboxes, sessions, tools, outfits."""
        await self.runner.aclose()
        assert self.counts.held == {}
        assert self.sessions.unfinished == set()
        assert [task for task in self.runner._leases._owned if not task.done()] == []
        async with asyncio.timeout(20):  # a create that was cancelled is finished and killed by the provider
            while self.provider.live or self.provider._owned:
                await asyncio.sleep(0)
