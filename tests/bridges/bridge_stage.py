"""Runs whole episodes of an environment with a scripted model, as training and evaluation do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from episode_helpers import ScriptedSessions, request

from tollway.envs.base import Environment
from tollway.envs.config import EnvConfig
from tollway.envs.harnesses.registry import open_harness
from tollway.envs.registry import open_environment
from tollway.envs.runner import EpisodeRunner
from tollway.messages import Message
from tollway.records import Rollout
from tollway.sandboxes.base import SandboxProvider
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider

__all__ = ["Stage", "stage"]

Policy = Callable[[Sequence[Message]], Message]


class Stage:
    """An open environment."""

    def __init__(self, config: EnvConfig, environment: Environment, provider: SandboxProvider) -> None:
        self.config, self.environment, self.provider = config, environment, provider

    async def play(self, index: int, policy: Policy, *, samples: int = 1) -> tuple[list[Rollout], ScriptedSessions]:
        """Attempts at task ``index`` by a model that answers with ``policy``."""
        sessions = ScriptedSessions(policy)
        runner = EpisodeRunner(
            self.config,
            environment=self.environment,
            harness=open_harness(self.config, self.environment),
            sessions=sessions,
            provider=self.provider,
        )
        group = await runner.run_group(request(index, samples))
        await runner.aclose()
        assert not sessions.unfinished
        assert self.provider.live == 0
        return list(group.rollouts), sessions


@asynccontextmanager
async def stage(provider: SandboxProvider | None = None, **fields: object) -> AsyncIterator[Stage]:
    """Open the environment that ``[env]`` with ``fields`` names."""
    config = EnvConfig.model_validate({"attempts": 1, "max_turns": 10, **fields})
    environment = open_environment(config)
    await environment.open()
    try:
        yield Stage(config, environment, provider or FakeProvider(SandboxConfig()))
    finally:
        await environment.aclose()
