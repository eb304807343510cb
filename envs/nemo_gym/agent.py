"""The harness for episodes that a NeMo Gym agent server runs: one /run, with the episode's session as its model.

Depends on ``envs.base``, ``environment`` and ``relay``.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from tollway.envs.base import AgentRun, Desk, Environment, Harness, Task
from tollway.envs.config import EnvConfig
from tollway.envs.nemo_gym.environment import NemoGym, NemoGymTools
from tollway.errors import ConfigError, EpisodeFailed

__all__ = ["ServerAgent"]


class ServerAgent(Harness):
    """Posts the task to the agent server and waits for its verdict."""

    def __init__(self, config: EnvConfig, environment: Environment) -> None:
        inner = getattr(environment, "inner", environment)
        if not isinstance(inner, NemoGym) or config.nemo_gym.agent != "server":
            raise ConfigError('this harness is for env.name = "nemo-gym" with env.nemo_gym.agent = "server"')
        self._environment = inner

    async def run(self, task: Task, desk: Desk) -> AgentRun:
        """Let the server work. Raises ``EpisodeFailed`` when it fails or never calls the model."""
        relay, tools = self._environment.relay, desk.tools
        if relay is None or not isinstance(tools, NemoGymTools):
            raise EpisodeFailed("the NeMo Gym environment is not open; enter it before its episodes")
        mark = secrets.token_urlsafe(16)
        relay.sessions[mark] = desk.session
        try:
            verdict = await tools.run(mark)
        finally:
            del relay.sessions[mark]
            turns = relay.answered.pop(mark, 0)
        if turns == 0:
            raise EpisodeFailed(
                "the agent server finished without one call of its model; is its model server our port?"
            )
        return AgentRun(turns=turns, submitted=False, finish="stopped", answer=_last_text(verdict))


def _last_text(verdict: Mapping[str, object]) -> str:
    """Text of the last message in the verdict's response."""
    response = verdict.get("response")
    items = response.get("output") if isinstance(response, dict) else None
    for item in reversed(items if isinstance(items, list) else []):
        if isinstance(item, dict) and item.get("type") == "message" and isinstance(item.get("content"), list):
            return "".join(str(part.get("text", "")) for part in item["content"] if isinstance(part, dict))
    return ""
