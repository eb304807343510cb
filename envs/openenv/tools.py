"""The tools of one OpenEnv episode: what the server offers as functions, every call a step.

An environment with MCP tools shows those; any other one gets a single tool, ``step``, whose arguments are the
server's action schema. Depends on ``envs.base`` and ``link``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import aiohttp

from tollway.envs.base import ToolAnswer, Toolset
from tollway.envs.cutting import cut_characters
from tollway.envs.openenv.config import OpenEnvConfig
from tollway.envs.openenv.link import FrameError, Link, Observation, open_link
from tollway.errors import EpisodeFailed
from tollway.messages import Message, ToolCall, ToolSpec

__all__ = ["OpenEnvTools"]

STEP = "step"


class OpenEnvTools(Toolset):
    """One socket, one episode: opened by ``open``, its rewards summed."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, config: OpenEnvConfig, reset: Mapping[str, object]
    ) -> None:
        self._http, self._url, self._config, self._reset = http, url, config, reset
        self._link: Link | None = None
        self._specs: tuple[ToolSpec, ...] = ()
        self._mcp = False
        self._steps = self._bad = 0
        self._rewards: list[float] = []
        self.done = False

    async def open(self) -> tuple[Message, ...]:
        """Get a place, reset, learn the tools. Returns the first observation."""
        self._link, first = await open_link(self._http, self._url, self._config, self._reset)
        listed = await self._link.rpc("tools/list")
        tools = listed.get("tools") if listed is not None else None
        self._mcp = isinstance(tools, list) and bool(tools)
        if isinstance(tools, list) and tools:
            self._specs = tuple(_tool_spec(tool) for tool in tools)
        else:
            self._specs = (await self._step_spec(),)
        self._count(first)
        shown = self._shown(first.content)
        return (Message(role="user", content=shown),) if shown else ()

    async def aclose(self) -> None:
        """Close the socket."""
        if self._link is not None:
            await self._link.aclose()

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The environment's tools."""
        return self._specs

    @property
    def reward(self) -> float:
        """Sum of all rewards so far."""
        return sum(self._rewards)

    @property
    def facts(self) -> Mapping[str, float]:
        """What was done so far."""
        return {
            "steps": float(self._steps),
            "bad_calls": float(self._bad),
            "rewards_seen": float(len(self._rewards)),
            "done": float(self.done),
        }

    async def call(self, call: ToolCall) -> ToolAnswer:
        """Step. A call that the environment cannot take is answered in words."""
        if self._link is None:
            raise EpisodeFailed("a tool was called before the environment was opened")
        if self.done:
            return ToolAnswer("the episode is over", ends=True)
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            return self._refuse("the arguments are no JSON")
        if not isinstance(arguments, dict):
            return self._refuse("the arguments are no object")
        if call.name not in {spec.name for spec in self._specs}:
            return self._refuse(f"there is no tool {call.name!r}")
        action = {"type": "call_tool", "tool_name": call.name, "arguments": arguments} if self._mcp else arguments
        try:
            seen = await self._link.observe("step", action)
        except FrameError as error:
            if error.frame_code == "VALIDATION_ERROR" or self._config.step_errors == "tell":
                return self._refuse(f"{error.frame_code}: {error.frame_message}")
            raise
        self._steps += 1
        self._count(seen)
        return ToolAnswer(self._shown(seen.content) or "done", ends=seen.done)

    def _refuse(self, why: str) -> ToolAnswer:
        self._bad += 1
        return ToolAnswer(f"error: {why}")

    def _count(self, seen: Observation) -> None:
        if seen.reward is not None:
            self._rewards.append(seen.reward)
        self.done = self.done or seen.done

    async def _step_spec(self) -> ToolSpec:
        """The one tool of an environment without any: its action's schema from ``/schema``."""
        try:
            async with self._http.get(
                f"{self._url}/schema", timeout=aiohttp.ClientTimeout(total=self._config.step_timeout_s)
            ) as response:
                schema = await response.json(content_type=None) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise EpisodeFailed(f"cannot read the action schema at {self._url}/schema: {error}") from error
        action = schema.get("action") if isinstance(schema, dict) else None
        if not isinstance(action, dict) or action.get("type") != "object":
            raise EpisodeFailed(f"{self._url}/schema has no object schema under 'action'; found {action!r:.200}")
        described = action.get("description")
        return ToolSpec(
            name=STEP,
            description=described if isinstance(described, str) else "Act in the environment.",
            parameters=json.dumps(_without_metadata(action), separators=(",", ":")),
        )

    def _shown(self, content: Mapping[str, object]) -> str:
        """An observation as the model reads it: a tool's own text, a single text, or JSON."""
        if "tool_name" in content and ("result" in content or "error" in content):
            text = _result_text(content)
        else:
            said = {key: value for key, value in content.items() if not (key == "metadata" and not value)}
            if set(said) == {"metadata"} and isinstance(said["metadata"], dict):
                said = said["metadata"]
            only = next(iter(said.values())) if len(said) == 1 else None
            text = only if isinstance(only, str) else json.dumps(said, ensure_ascii=False) if said else ""
        return cut_characters(text, self._config.max_observation_chars)


def _tool_spec(tool: object) -> ToolSpec:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise EpisodeFailed(f"the environment lists a tool without a name: {tool!r:.200}")
    schema = tool.get("inputSchema") or tool.get("input_schema") or {"type": "object", "properties": {}}
    description = tool.get("description")
    return ToolSpec(
        name=tool["name"],
        description=description if isinstance(description, str) else "",
        parameters=json.dumps(schema, separators=(",", ":")),
    )


def _without_metadata(action: dict[str, object]) -> dict[str, object]:
    """The free-form ``metadata`` of every OpenEnv action is no business of a model's."""
    properties = action.get("properties")
    if not isinstance(properties, dict):
        return action
    kept = {key: value for key, value in properties.items() if key != "metadata"}
    return {**action, "properties": kept}


def _result_text(content: Mapping[str, object]) -> str:
    error, result = content.get("error"), content.get("result")
    if isinstance(error, dict):
        return f"error: {error.get('message') or error}"
    if not isinstance(result, dict):
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    parts = result.get("content")
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)] if (
        isinstance(parts, list)
    ) else []  # fmt: skip
    text = "\n".join(texts) if texts else json.dumps(result.get("data", result), ensure_ascii=False)
    return f"error: {text}" if result.get("is_error") else text
