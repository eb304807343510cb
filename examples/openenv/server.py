"""Two OpenEnv environments, made with the package's own base classes: one with MCP tools, one with typed actions.

python examples/openenv/server.py echo --port 8000
python examples/openenv/server.py guess --port 8000
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

TASKS = {"train": [17, 42, 63, 88], "test": [5, 71]}


class Echo(MCPEnvironment):
    """Two tools that say what they are told."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("echo")

        @server.tool
        def echo_message(message: str) -> str:
            """Echo back the provided message."""
            return message

        @server.tool
        def echo_with_length(message: str) -> dict[str, Any]:
            """Echo back the message with its length."""
            return {"message": message, "length": len(message)}

        super().__init__(server)
        self._state = State(episode_id="echo", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        self._state = State(episode_id=episode_id or str(seed), step_count=0)
        return Observation(done=False, reward=0.0, metadata={"message": "Echo environment ready!"})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError(f"only tools are known here, not {type(action).__name__}")

    @property
    def state(self) -> State:
        return self._state


class Guess(Action):
    """Guess the number."""

    number: int = Field(ge=0, le=100, description="Your guess, from 0 to 100.")


class Hint(Observation):
    """What the game says."""

    hint: str = ""


class GuessTheNumber(Environment):
    """A number from 0 to 100; "higher" or "lower" until it is found. Six guesses; finding it earns 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._number, self._left = 0, 0

    def list_splits(self) -> list[str]:
        return list(TASKS)

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        return [{"id": f"{split}-{at}", "instruction": "Find my number."} for at in range(len(TASKS[split]))]

    def num_tasks(self, split: str) -> int:
        return len(TASKS[split])

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        return self.list_tasks(split)[index]

    def reset(self, seed: int | None = None, split: str | None = None, index: int | None = None, **_: Any) -> Hint:
        self._number = (
            TASKS[split][index] if split is not None and index is not None else random.Random(seed).randint(0, 100)
        )
        self._left = 6
        return Hint(hint="I have a number from 0 to 100.", done=False, reward=0.0)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._left -= 1
        if action.number == self._number:
            return Hint(hint="Found it!", done=True, reward=1.0)
        word = "higher" if action.number < self._number else "lower"
        return Hint(hint=word, done=self._left == 0, reward=0.0)

    @property
    def state(self) -> State:
        return State(step_count=6 - self._left)


APPS = {
    "echo": lambda most: create_app(
        Echo, CallToolAction, CallToolObservation, env_name="echo", max_concurrent_envs=most
    ),
    "guess": lambda most: create_app(GuessTheNumber, Guess, Hint, env_name="guess", max_concurrent_envs=most),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=sorted(APPS))
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--most", type=int, default=64, help="episodes at once")
    arguments = parser.parse_args()
    uvicorn.run(APPS[arguments.name](arguments.most), host="127.0.0.1", port=arguments.port, log_level="warning")
