"""OpenEnv as an environment: a server's tasks or seeds, one socket per episode, the sum of its rewards.

Depends on ``envs.base``, ``envs.served`` and siblings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import aiohttp

from tollway.envs.base import Environment, Grader, Task, Toolset, Verdict, Work
from tollway.envs.config import EnvConfig
from tollway.envs.openenv.config import OpenEnvConfig
from tollway.envs.openenv.tools import OpenEnvTools
from tollway.envs.order import place
from tollway.envs.served import ServedProgram, serve
from tollway.errors import ConfigError, EpisodeFailed, NotFound
from tollway.messages import Message
from tollway.sandboxes.base import Sandbox

__all__ = ["OpenEnv", "SumOfRewards"]

_HELDOUT_SEEDS = 1 << 30
"""Where the seeds of the held-out split begin when the server has no splits."""
_SHOWN_KEYS = ("instruction", "prompt", "question")
"""Fields of a task of the server's task API that are told to the agent."""


class OpenEnv(Environment):
    """One OpenEnv server. Works from ``open`` to ``aclose``."""

    name = "openenv"
    needs_submission = False

    def __init__(self, config: EnvConfig) -> None:
        self._config, self._openenv = config, config.openenv
        self.size = self._openenv.tasks or None
        self._http: aiohttp.ClientSession | None = None
        self._program: ServedProgram | None = None
        self._url = ""
        self._split: str | None = None
        self._tasks: tuple[object, ...] = ()

    async def open(self) -> None:
        """Start or find the server and read its tasks. Raises ``ConfigError`` or ``ComponentLost``."""
        self._http = aiohttp.ClientSession()
        try:
            served = await serve(self._openenv, section="env.openenv", ready="/health", http=self._http)
            self._program, self._url = (None, served) if isinstance(served, str) else (served, served.url)
            await self._read_tasks(self._http)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop what ``open`` started."""
        if self._program is not None:
            await self._program.aclose()
            self._program = None
        if self._http is not None:
            await self._http.close()
            self._http = None

    def task(self, index: int) -> Task:
        """The server's task, or the seed, at ``index`` of the seeded order."""
        at = place(self._config.seed, self.size, index) if self.size else index
        return self._task(at)

    def find(self, task_id: str) -> Task:
        """The task of that id."""
        at = task_id.rpartition("/")[2]
        if at.isascii() and at.isdigit() and len(at) < 10 and (self.size is None or int(at) < self.size):
            task = self._task(int(at))
            if task.task_id == task_id:
                return task
        raise NotFound(f"no task {task_id!r}; they are called {self._task(0).task_id!r} and so on")

    def toolset(self, task: Task, sandbox: Sandbox | None) -> Toolset:
        """A socket of the episode's own."""
        if self._http is None:
            raise EpisodeFailed("the OpenEnv environment is not open; enter it before its episodes")
        at = int(task.task_id.rpartition("/")[2])
        reset: dict[str, object] = dict(self._openenv.reset)
        if self._split is not None:
            reset |= {"split": self._split, "index": at}
        else:
            reset["seed"] = at + (_HELDOUT_SEEDS if self._config.split == "heldout" else 0)
        return OpenEnvTools(self._http, self._url, self._openenv, reset)

    def grader(self, task: Task) -> Grader:
        """The sum of the rewards that the server gave."""
        return SumOfRewards(self._openenv)

    def _task(self, at: int) -> Task:
        told = [self._openenv.instruction]
        if self._tasks:
            raw = self._tasks[at]
            shown = [raw[key] for key in _SHOWN_KEYS if isinstance(raw, dict) and isinstance(raw.get(key), str)]
            told += cast("list[str]", shown[:1])
        text = "\n\n".join(filter(None, told)) or "Work in the environment with the tools that you have."
        return Task(
            task_id=f"{self.name}/{self._split or self._config.split}/{at}",
            messages=(Message(role="user", content=text),),
            machine=None,
        )

    # -- the server's task API ---------------------------------------------------------------------

    async def _read_tasks(self, http: aiohttp.ClientSession) -> None:
        """Splits and tasks when the server has them; it answers 404 or 501 when not."""
        name = self._openenv.environment
        if name is None:
            listed = await self._get(http, "GET", "/list_environments", None)
            if not (isinstance(listed, list) and len(listed) == 1 and isinstance(listed[0], str)):
                self._no_tasks()
                return
            name = listed[0]
        splits = await self._get(http, "GET", f"/{name}/splits", None)
        if not isinstance(splits, list) or not splits:
            self._no_tasks()
            return
        self._split = self._choose(splits)
        tasks = await self._get(http, "POST", f"/{name}/tasks", {"split": self._split})
        found = tasks.get("tasks") if isinstance(tasks, dict) else None
        if not isinstance(found, list) or not found:
            raise ConfigError(f"env.openenv: the server's split {self._split!r} of {name!r} has no tasks")
        self._tasks, self.size = tuple(found), len(found)

    def _no_tasks(self) -> None:
        wanted = self._openenv.train_split or self._openenv.heldout_split or self._openenv.environment
        if wanted is not None:
            raise ConfigError(f"env.openenv: {wanted!r} was asked for, and the server has no task API")

    def _choose(self, splits: list[object]) -> str:
        known = {str(each.get("name")): str(each.get("type")) for each in splits if isinstance(each, dict)}
        heldout = self._config.split == "heldout"
        wanted = self._openenv.heldout_split if heldout else self._openenv.train_split
        if wanted is not None:
            if wanted not in known:
                raise ConfigError(f"env.openenv: no split {wanted!r} at the server; it has {', '.join(known)}")
            return wanted
        for kind in ("test", "validation") if heldout else ("train",):
            for name, its in known.items():
                if its == kind:
                    return name
        key = "heldout_split" if heldout else "train_split"
        raise ConfigError(f"env.openenv: no split of the server fits env.split; set {key} to one of {', '.join(known)}")

    async def _get(self, http: aiohttp.ClientSession, method: str, path: str, body: object) -> object:
        try:
            async with http.request(
                method,
                self._url + path,
                json=body,
                timeout=aiohttp.ClientTimeout(total=self._openenv.step_timeout_s),
            ) as response:
                if response.status in (404, 405, 501):
                    return None
                if response.status >= 400:
                    raise ConfigError(
                        f"env.openenv: {path} answered {response.status}: {(await response.text())[:300]}"
                    )
                return cast(object, await response.json(content_type=None))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ConfigError(f"env.openenv: {self._url}{path}: {error}") from error


@dataclass(frozen=True, slots=True)
class SumOfRewards(Grader):
    """The sum that the episode's socket brought in."""

    config: OpenEnvConfig

    async def grade(self, task: Task, work: Work) -> Verdict:
        """Raises ``EpisodeFailed`` for a sum outside of the configured range, or one that nobody gave."""
        tools = work.tools
        if not isinstance(tools, OpenEnvTools):
            raise EpisodeFailed(f"an OpenEnv episode is graded by its own tools, found {type(tools).__name__}")
        reward, low, high = tools.reward, self.config.lowest, self.config.highest
        if (low is not None and reward < low) or (high is not None and reward > high):
            raise EpisodeFailed(f"the environment's rewards sum up to {reward}, outside of {low} to {high}")
        seen = int(tools.facts["rewards_seen"])
        return Verdict(
            reward=reward, reason=f"sum of {seen} rewards" if seen else "no reward was given", facts=tools.facts
        )
