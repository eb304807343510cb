"""Runs episodes: groups of attempts at tasks, retried as a whole. Implements ``ports.EpisodeSource``.

Infrastructure failures make an episode end without a reward, never with 0, and only whole episodes are retried, each
with a new session and a new sandbox. What one attempt is made of is in ``envs.episode``. Which environment, harness,
provider and server it works with is passed in; none of them is opened or closed here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace

from tollway.envs.artifacts import Artifacts
from tollway.envs.base import Environment, Harness, Sessions, Task
from tollway.envs.config import EnvConfig
from tollway.envs.episode import Attempt, Episode, Listener, Order, Parts
from tollway.envs.leases import Leases
from tollway.envs.places import Places
from tollway.errors import (
    BadRequest,
    CapabilityMissing,
    ComponentLost,
    ConfigError,
    EngineLost,
    NoEngine,
    SandboxUnavailable,
    TollwayError,
    Unauthorized,
)
from tollway.ports import EpisodeSource, GroupRequest
from tollway.records import Group, Sampling
from tollway.sandboxes.base import SandboxProvider

__all__ = ["EpisodeRunner", "group_of", "qualified"]

logger = logging.getLogger(__name__)
_RETRY_DELAY_S = 0.2


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
        listen: Listener | None = None,
    ) -> None:
        self._config, self._environment = config, environment
        self._slots = asyncio.Semaphore(config.max_episodes)
        self._leases = Leases(config.release_timeout_s)
        self._numbers = itertools.count()
        self.artifacts = Artifacts.of(config)
        """Where episodes leave their folders; ``None`` for nowhere."""
        self.parts = Parts(
            config=config,
            environment=environment,
            harness=harness,
            sessions=sessions,
            provider=provider,
            leases=self._leases,
            places=Places(max(1, provider.config.max_live // harness.sandboxes)),
            listen=listen,
            keeps_rows=self.artifacts is not None,
        )

    async def run_group(self, request: GroupRequest) -> Group:
        """All attempts at task ``request.prompt_index``, together."""
        task = self._environment.task(request.prompt_index)
        episodes = await self.run_task(
            task, group_id=request.group_id, samples=request.samples, sampling=request.sampling
        )
        return group_of(request.group_id, episodes)

    async def run_task(self, task: Task, *, group_id: str, samples: int, sampling: Sampling) -> list[Episode]:
        """``samples`` episodes of one task, together. Raises what would end every further one, too."""
        needed, there = self.parts.harness.sandboxes, self.parts.places.count
        if task.machine is not None and needed > there:
            raise ConfigError(
                f"harness {self._config.harness} holds {needed} sandboxes at once, and sandbox.max_live is {there}; "
                "raise it"
            )
        order = Order(
            task=task,
            task_id=qualified(self._environment, task),
            group_id=group_id,
            sampling=sampling,
            number=0,
            attempt=1,
        )
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._episode(order)) for _ in range(samples)]
        except BaseExceptionGroup as errors:
            # One error ends the group: name it, not the bundle.
            raise errors.exceptions[0] from None
        return [each.result() for each in running]

    async def aclose(self) -> None:
        """Wait, for a bounded time, for what is still being released in the background."""
        await self._leases.aclose()

    async def _episode(self, order: Order) -> Episode:
        """Attempts until one is not ended by infrastructure."""
        earlier: list[str] = []
        async with self._slots:
            while True:
                order = replace(order, number=next(self._numbers), attempt=len(earlier) + 1)
                episode = replace(await Attempt(self.parts, order).run(), earlier=tuple(earlier))
                if episode.error is None:
                    break
                _raise_fatal(episode)
                logger.warning("episode of %s failed, attempt %d: %s", order.task_id, order.attempt, episode.failure)
                if order.attempt >= self._config.attempts or not _may_help(episode):
                    break
                earlier.append(episode.failure or "")
                await asyncio.sleep(_RETRY_DELAY_S)
        if self.artifacts is None:
            return episode
        return replace(episode, folder=await self.artifacts.keep(episode))


def group_of(group_id: str, episodes: Sequence[Episode]) -> Group:
    """Episodes as the trainer takes them. Raises ``ComponentLost`` when no engine answered any of them."""
    lost = [each.error for each in episodes if isinstance(each.error, NoEngine | EngineLost)]
    if lost and len(lost) == len(episodes):
        raise ComponentLost(f"no engine answers: {lost[0]}") from lost[0]
    return Group(
        group_id=group_id, task_id=episodes[0].task_id, rollouts=tuple(episode.rollout() for episode in episodes)
    )


def qualified(environment: Environment, task: Task) -> str:
    """The task's id with its environment's name before it, so that ids of two environments are never the same."""
    prefix = f"{environment.name}/"
    return task.task_id if task.task_id.startswith(prefix) else prefix + task.task_id


def _raise_fatal(episode: Episode) -> None:
    """Raise an error that every other episode would meet, too."""
    error = episode.error
    if isinstance(error, ComponentLost | ConfigError):
        raise error
    if isinstance(error, Unauthorized) and episode.phase == "open":
        raise ConfigError(f"the session server refuses the admin key: {error}") from error
    if isinstance(error, SandboxUnavailable):
        raise ComponentLost(f"no sandbox can run: {error}") from error


def _may_help(episode: Episode) -> bool:
    """Whether a new attempt may end differently: not where a provider gave up, nor where the request is at fault."""
    error: TollwayError | None = episode.error
    return episode.retryable and not isinstance(error, BadRequest | CapabilityMissing)
