"""A session server in memory, with scripted policies: what the runner and harness tests talk to."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tollway.envs.config import EnvConfig
from tollway.envs.harnesses.tool_loop import ToolLoop
from tollway.envs.micro_swe.environment import MicroSwe
from tollway.envs.runner import EpisodeRunner
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.ports import GroupRequest
from tollway.records import Sampling, TokenSpan, Trajectory
from tollway.sandboxes.base import SandboxProvider
from tollway.session_server.client import ChatReply, Session, SessionOptions, Usage

Policy = Callable[[Sequence[Message]], Message]
SAMPLING = Sampling(temperature=1.0, max_new_tokens=32)


def calls(*named: tuple[str, dict[str, object]]) -> Message:
    """An assistant message that makes these tool calls."""
    return Message(
        role="assistant",
        tool_calls=tuple(ToolCall(f"c{at}", name, json.dumps(arguments)) for at, (name, arguments) in enumerate(named)),
    )


def script(*replies: Message) -> Policy:
    """Answers in this order, by the number of assistant messages so far; the last one repeats."""

    def policy(messages: Sequence[Message]) -> Message:
        turn = sum(message.role == "assistant" for message in messages)
        return replies[min(turn, len(replies) - 1)]

    return policy


def repair(rule: str) -> Policy:
    """Run, apply ``rule``, run again, submit."""
    return script(calls(("run", {})), calls(("edit", {"rule": rule})), calls(("run", {})), calls(("submit", {})))


class ScriptedSessions:
    """The runner's side of a session server. Faults are raised oldest first; ``stall`` blocks a call for ever."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.deleted: list[str] = []
        self.rewards: dict[str, float | None] = {}
        self.seen: dict[str, list[Message]] = {}
        self.faults: dict[str, deque[Exception]] = {}
        self.stall: set[str] = set()
        self.stalled = asyncio.Event()
        self._numbers = itertools.count()

    async def _enter(self, name: str) -> None:
        await asyncio.sleep(0)
        if name in self.stall:
            self.stalled.set()
            await asyncio.Event().wait()
        if self.faults.get(name):
            raise self.faults[name].popleft()

    async def create(
        self,
        *,
        task_id: str = "",
        group_id: str = "",
        sampling: Sampling | None = None,
        metadata: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        wait_s: float = 0.0,
        options: SessionOptions | None = None,
    ) -> Session:
        await self._enter("create")
        name = f"s{next(self._numbers)}"
        self.opened.append(name)
        return Session(
            session_id=name, token="t", base_url="", openai_base_url="", anthropic_base_url="", expires_at=0.0
        )

    async def chat(self, session: Session, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> ChatReply:
        await self._enter("chat")
        self.seen[session.session_id] = list(messages)
        message = self.policy(messages)
        finish = "tool_calls" if message.tool_calls else "stop"
        return ChatReply(message=message, finish_reason=finish, usage=Usage(1, 1, None))

    async def reward(
        self,
        session_id: str,
        reward: float | None,
        *,
        error: str | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        await self._enter("reward")
        self.rewards[session_id] = reward

    async def trajectories(self, session_id: str) -> tuple[Trajectory, ...]:
        await self._enter("trajectories")
        return (row_of(session_id, self.rewards[session_id]),)

    async def close(self, session_id: str) -> None:
        await self._enter("close")
        self.closed.append(session_id)

    async def delete(self, session_id: str) -> None:
        await self._enter("delete")
        self.deleted.append(session_id)

    @property
    def unfinished(self) -> set[str]:
        """Sessions that were neither closed nor deleted."""
        return set(self.opened) - set(self.closed) - set(self.deleted)


def row_of(session_id: str, reward: float | None) -> Trajectory:
    """One call of one sampled token."""
    return Trajectory(
        token_ids=np.array([1, 2], np.int32),
        loss_mask=np.array([0, 1], np.uint8),
        logprobs=np.array([np.nan, -0.5], np.float32),
        weight_version=np.array([-1, 3], np.int32),
        session_id=session_id,
        leaf=0,
        branch_reason="root",
        turn_spans=(TokenSpan(1, 2),),
        finish_reasons=("stop",),
        sampling=SAMPLING,
        engine_ids=("e",),
        cached_tokens=(None,),
        reward=reward,
    )


def runner(
    sessions: ScriptedSessions, provider: SandboxProvider, *, blank_tools: bool = False, **settings: object
) -> EpisodeRunner:
    """A micro-SWE runner over these parts."""
    config = EnvConfig.model_validate({"attempts": 1, "blank_tools": blank_tools, **settings})
    environment = MicroSwe(config)
    return EpisodeRunner(
        config,
        environment=environment,
        harness=ToolLoop(config, environment),
        sessions=sessions,
        provider=provider,
    )


def request(index: int = 0, samples: int = 1) -> GroupRequest:
    """Ask for attempts at task ``index``."""
    return GroupRequest(group_id=f"g{index}", prompt_index=index, samples=samples, sampling=SAMPLING)
