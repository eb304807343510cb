"""verifiers tasksets as an environment: their tasks, their set-up and their scores; our agents and sandboxes.

Depends on ``envs.base``, ``envs.tools`` and ``link``.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from tollway.envs.base import Environment, Grader, Limits, Machine, Task, ToolAnswer, Toolset, Verdict, Work
from tollway.envs.config import EnvConfig
from tollway.envs.order import place
from tollway.envs.plain import NoTools
from tollway.envs.tools import CodingTools
from tollway.envs.verifiers.config import VerifiersConfig
from tollway.envs.verifiers.link import WorkerLink
from tollway.errors import ConfigError, EpisodeFailed, NotFound
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.sandboxes.base import Sandbox

__all__ = ["Verifiers", "VerifiersTools"]

_ROLES: Mapping[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One task as the worker lists it."""

    key: str
    index: int
    messages: tuple[Message, ...]
    sandbox: bool
    machine: Machine
    agent_s: float | None


class Verifiers(Environment):
    """One taskset in a worker process or several. Works from ``open`` to ``aclose``."""

    name = "verifiers"
    needs_submission = False

    def __init__(self, config: EnvConfig) -> None:
        self._config, self._verifiers = config, config.verifiers
        more = self._verifiers.heldout_config if config.split == "heldout" else {}
        taskset_config = {**self._verifiers.config, **more}
        self._links = [WorkerLink(self._verifiers, taskset_config) for _ in range(self._verifiers.workers)]
        self._next = itertools.count()
        self._entries: dict[str, Entry] = {}
        self._ids: tuple[str, ...] = ()

    async def open(self) -> None:
        """Start the workers and list the tasks. Raises ``ConfigError``."""
        try:
            listed = await self._links[0].start()
            for link in self._links[1:]:
                if len(await link.start()) != len(listed):
                    raise ConfigError("env.verifiers: two workers of one taskset list different tasks; set workers = 1")
        except BaseException:
            await self.aclose()
            raise
        for index, raw in enumerate(listed):
            entry = _entry(index, raw, self._verifiers)
            self._entries[f"{self.name}/{entry.key}"] = entry
        if len(self._entries) < len(listed):
            raise ConfigError(f"env.verifiers: {len(listed)} tasks have only {len(self._entries)} different keys")
        self._ids = tuple(self._entries)
        self.size = len(self._ids)

    async def aclose(self) -> None:
        """End the workers."""
        for link in self._links:
            await link.aclose()

    def task(self, index: int) -> Task:
        """The task at ``index`` of the seeded order."""
        if not self._ids:
            raise EpisodeFailed("the verifiers environment is not open; enter it before its episodes")
        return self._task(self._ids[place(self._config.seed, len(self._ids), index)])

    def find(self, task_id: str) -> Task:
        """The task of that key."""
        wanted = task_id if task_id in self._entries else f"{self.name}/{task_id}"
        if wanted not in self._entries:
            raise NotFound(f"no task {task_id!r} in {self._verifiers.taskset!r}")
        return self._task(wanted)

    def toolset(self, task: Task, sandbox: Sandbox | None) -> Toolset:
        """The coding tools over a sandbox, or none."""
        number = next(self._next)
        link = self._links[number % len(self._links)]
        tools = VerifiersTools(link, self._entries[task.task_id], f"e{number}", sandbox, self._verifiers)
        # An episode that ends before it is scored leaves nothing in the worker.
        weakref.finalize(tools, link.dropped.append, tools.episode).atexit = False
        return tools

    def grader(self, task: Task) -> Grader:
        """The taskset's own rewards, in the agent's sandbox where there is one."""
        limit_s = self._verifiers.score_timeout_s
        return ScoredInside(limit_s=limit_s) if task.machine is not None else Scored(limit_s=limit_s)

    async def validate(self, task: Task, sandbox: Sandbox) -> bool | None:
        """The task's own check of its ground truth; ``None`` when it has none."""
        link, episode = self._links[0], f"v{next(self._next)}"
        link.sandboxes[episode] = sandbox
        try:
            fields = {"episode": episode, "index": self._entries[task.task_id].index}
            valid = (await link.request("validate", fields, self._verifiers.score_timeout_s)).get("valid")
        finally:
            del link.sandboxes[episode]
        return valid if isinstance(valid, bool) else None

    def _task(self, task_id: str) -> Task:
        entry = self._entries[task_id]
        return Task(
            task_id=task_id,
            messages=entry.messages,
            machine=entry.machine if entry.sandbox else None,
            limits=Limits(agent_s=entry.agent_s),
        )


class VerifiersTools(Toolset):
    """What the agent may call, and the record of it that the taskset scores."""

    def __init__(
        self, link: WorkerLink, entry: Entry, episode: str, sandbox: Sandbox | None, config: VerifiersConfig
    ) -> None:
        self.link, self.entry, self.episode = link, entry, episode
        self._sandbox, self._limit_s = sandbox, config.score_timeout_s
        coding = sandbox is not None and config.tools != "none"
        self._inner: Toolset = (
            CodingTools(sandbox, timeout_s=config.tool_timeout_s) if coding and sandbox else NoTools()
        )
        self.transcript: list[dict[str, object]] = [
            {"role": message.role, "content": message.content} for message in entry.messages
        ]

    async def open(self) -> tuple[Message, ...]:
        """Let the task set itself up."""
        if self._sandbox is not None:
            self.link.sandboxes[self.episode] = self._sandbox
        fields = {"episode": self.episode, "index": self.entry.index, "sandbox": self._sandbox is not None}
        await self.link.request("begin", fields, self._limit_s)
        return ()

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The coding tools, or none."""
        return self._inner.specs

    @property
    def facts(self) -> Mapping[str, float]:
        """Those of the coding tools."""
        return self._inner.facts

    async def call(self, call: ToolCall) -> ToolAnswer:
        """Execute one call and remember it."""
        answer = await self._inner.call(call)
        said = {"id": call.id, "type": "function", "name": call.name, "arguments": call.arguments}
        self.transcript.append({"role": "assistant", "content": None, "tool_calls": [said]})
        self.transcript.append({"role": "tool", "tool_call_id": call.id, "content": answer.text})
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored(Grader):
    """The sum of the taskset's weighted rewards."""

    limit_s: float

    async def grade(self, task: Task, work: Work) -> Verdict:
        """Finalize and score in the worker. Raises ``EpisodeFailed`` for whatever the taskset raises."""
        tools = work.tools
        if not isinstance(tools, VerifiersTools):
            raise EpisodeFailed(f"a verifiers episode is graded by its own tools, found {type(tools).__name__}")
        messages = [*tools.transcript, {"role": "assistant", "content": work.run.answer}]
        fields = {"episode": tools.episode, "messages": messages, "ok": work.run.finish in ("submitted", "stopped")}
        try:
            result = await tools.link.request("score", fields, self.limit_s)
        finally:
            tools.link.sandboxes.pop(tools.episode, None)
        reward = result.get("reward")
        if not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise EpisodeFailed(f"the taskset gave a reward of {reward!r}, want a finite number")
        facts = {**_numbers("reward", result.get("rewards")), **_numbers("metric", result.get("metrics"))}
        return Verdict(reward=float(reward), reason=f"by {len(facts)} rewards and metrics of the taskset", facts=facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredInside(Scored):
    """The same where the agent worked: rewards of the taskset look at the agent's sandbox."""

    in_agents_sandbox: ClassVar[bool] = True


def _numbers(prefix: str, raw: object) -> dict[str, float]:
    found = raw.items() if isinstance(raw, dict) else ()
    return {f"{prefix}_{name}": float(value) for name, value in found if isinstance(value, (int, float))}


def _entry(index: int, raw: Mapping[str, object], config: VerifiersConfig) -> Entry:
    said = raw.get("messages")
    if not isinstance(said, list) or not said:
        raise ConfigError(f"env.verifiers: task {index} has no messages")
    for each in said:
        if each.get("role") not in _ROLES:
            raise ConfigError(f"env.verifiers: task {index} begins with a message of role {each.get('role')!r}")
    image, agent_s = raw.get("image"), raw.get("agent_s")
    machine = Machine(
        image=image if isinstance(image, str) else None,
        cpu=_number(raw.get("cpu")),
        mem_mb=int((_number(raw.get("memory_gb")) or 1.0) * 1024),
        disk_mb=int((_number(raw.get("disk_gb")) or 1.0) * 1024),
        pids=config.pids,
        network=config.network,
    )
    return Entry(
        key=str(raw["key"])[:16] if len(str(raw["key"])) == 64 else str(raw["key"]),
        index=index,
        messages=tuple(Message(role=_ROLES[each["role"]], content=str(each["content"])) for each in said),
        sandbox=config.tools == "coding" or (config.tools == "auto" and raw.get("sandbox") is True),
        machine=machine,
        agent_s=_number(agent_s),
    )


def _number(raw: object) -> float | None:
    return float(raw) if isinstance(raw, (int, float)) and raw > 0 else None
