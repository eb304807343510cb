"""NeMo Gym resources servers as an environment: their data and verdicts, their tools, our agents.

Each episode has a session of the server's own, which its cookies name. Depends on ``envs.base``, ``envs.served``
and ``wire``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from tollway.envs.base import Environment, Grader, Task, ToolAnswer, Toolset, Verdict, Work
from tollway.envs.config import EnvConfig
from tollway.envs.cutting import cut_characters
from tollway.envs.nemo_gym.config import NemoGymConfig
from tollway.envs.nemo_gym.relay import MARK, ModelRelay
from tollway.envs.nemo_gym.wire import Row, answer_item, call_items, read_rows, response_of
from tollway.envs.order import place
from tollway.envs.served import ServedProgram, serve
from tollway.envs.served_config import ServedConfig
from tollway.errors import EpisodeFailed, NotFound
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.sandboxes.base import Sandbox

__all__ = ["NemoGym", "NemoGymTools", "VerifiedByServer"]


class NemoGym(Environment):
    """One resources server and a file of its data. Works from ``open`` to ``aclose``."""

    name = "nemo-gym"
    needs_submission = False

    def __init__(self, config: EnvConfig) -> None:
        self._config, self._gym = config, config.nemo_gym
        path = (self._gym.heldout_data if config.split == "heldout" else None) or self._gym.data
        self._rows = read_rows(path)
        self.size = len(self._rows)
        self._http: aiohttp.ClientSession | None = None
        self._program: ServedProgram | None = None
        self._url = ""
        self.relay: ModelRelay | None = None
        """Where an agent server's model calls arrive; ``None`` when the agent is ours."""

    async def open(self) -> None:
        """Start or find the server. Raises ``ConfigError`` or ``ComponentLost``."""
        # Cookies name an episode's session, so each episode keeps its own.
        self._http = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        served_config: ServedConfig = self._gym
        try:
            if self._gym.agent == "server":
                self.relay = ModelRelay(self._http, timeout_s=self._config.model_timeout_s)
                port = await self.relay.start(self._gym.model_port)
                command = tuple(part.replace("{model_port}", str(port)) for part in self._gym.command)
                served_config = self._gym.model_copy(update={"command": command})
            served = await serve(served_config, section="env.nemo_gym", ready="/", http=self._http)
        except BaseException:
            await self.aclose()
            raise
        self._program, self._url = (None, served) if isinstance(served, str) else (served, served.url)

    async def aclose(self) -> None:
        """Stop what ``open`` started."""
        if self._program is not None:
            await self._program.aclose()
            self._program = None
        if self.relay is not None:
            await self.relay.aclose()
            self.relay = None
        if self._http is not None:
            await self._http.close()
            self._http = None

    def task(self, index: int) -> Task:
        """The line at ``index`` of the seeded order."""
        return self._task(place(self._config.seed, len(self._rows), index))

    def find(self, task_id: str) -> Task:
        """The task of that id: "nemo-gym/SPLIT/LINE", lines from 0."""
        at = task_id.rpartition("/")[2]
        if at.isascii() and at.isdigit() and int(at) < len(self._rows) and self._task(int(at)).task_id == task_id:
            return self._task(int(at))
        raise NotFound(f"no task {task_id!r}; they are {self._task(0).task_id!r} and so on, {self.size} in all")

    def toolset(self, task: Task, sandbox: Sandbox | None) -> Toolset:
        """The server's tools, in a session of the episode's own."""
        if self._http is None:
            raise EpisodeFailed("the NeMo Gym environment is not open; enter it before its episodes")
        row = self._rows[int(task.task_id.rpartition("/")[2])]
        return NemoGymTools(self._http, self._url, self._gym, row)

    def grader(self, task: Task) -> Grader:
        """The server's own verdict."""
        return VerifiedByServer()

    def _task(self, at: int) -> Task:
        task_id = f"{self.name}/{self._config.split}/{at}"
        return Task(task_id=task_id, messages=self._rows[at].messages, machine=None)


class NemoGymTools(Toolset):
    """One session of the server: seeded by ``open``, its tools called by path, its verdict asked for at the end."""

    def __init__(self, http: aiohttp.ClientSession, url: str, config: NemoGymConfig, row: Row) -> None:
        self._http, self._url, self._config, self._row = http, url, config, row
        self._cookies: dict[str, str] = {}
        self._output: list[dict[str, object]] = []
        self._calls = self._bad = 0
        self._verdict: Mapping[str, object] | None = None

    async def open(self) -> tuple[Message, ...]:
        """Seed the session; an agent server does that by itself."""
        if self._config.agent == "server":
            return ()
        status, text = await self._post("/seed_session", self._row.raw)
        if status != 200:
            raise EpisodeFailed(f"the NeMo Gym server answered /seed_session with {status}: {text[:300]}")
        return ()

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The tools of the line of data; none of ours when an agent server has them."""
        return self._row.tools if self._config.agent == "ours" else ()

    @property
    def sent(self) -> frozenset[str]:
        """Fields that the verdict only repeats."""
        return frozenset(self._row.raw)

    @property
    def facts(self) -> Mapping[str, float]:
        """How much was called."""
        return {"calls": float(self._calls), "bad_calls": float(self._bad)}

    async def call(self, call: ToolCall) -> ToolAnswer:
        """Post the arguments to the tool's path; whatever the server answers, errors too, is shown."""
        text = await self._answer(call)
        self._output += call_items(call, text)
        return ToolAnswer(text)

    async def run(self, episode: str) -> Mapping[str, object]:
        """Let the agent server do the whole episode, marked with ``episode`` in its model calls; its verdict."""
        params = dict(self._row.params)
        said = params.get("metadata")
        params["metadata"] = {**(said if isinstance(said, dict) else {}), MARK: episode}
        body = {**self._row.raw, "responses_create_params": params}
        status, text = await self._post("/run", body, limit_s=self._config.run_timeout_s)
        self._verdict = _object("/run", status, text)
        return self._verdict

    async def verify(self, answer: str) -> Mapping[str, object]:
        """The server's verdict on the episode. Raises ``EpisodeFailed``."""
        if self._config.agent == "server":
            if self._verdict is None:
                raise EpisodeFailed("the agent server did not finish its /run, so there is no verdict")
            return self._verdict
        body = {**self._row.raw, "response": response_of(self._row, [*self._output, answer_item(answer)])}
        status, text = await self._post("/verify", body)
        return _object("/verify", status, text)

    async def _answer(self, call: ToolCall) -> str:
        # Only listed names become paths: a model must not reach the server's other routes.
        if call.name not in {spec.name for spec in self.specs}:
            self._bad += 1
            return json.dumps({"error": f"there is no tool {call.name!r}"})
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            self._bad += 1
            return json.dumps({"error": "the arguments are no JSON"})
        status, text = await self._post(f"/{call.name}", arguments)
        self._calls += 1
        self._bad += status >= 400
        return cut_characters(text, self._config.max_output_chars)

    async def _post(self, path: str, body: object, *, limit_s: float | None = None) -> tuple[int, str]:
        limit = aiohttp.ClientTimeout(total=limit_s or self._config.request_timeout_s)
        try:
            async with self._http.post(self._url + path, json=body, cookies=self._cookies, timeout=limit) as response:
                text = await response.text()
                self._cookies |= {name: morsel.value for name, morsel in response.cookies.items()}
                return response.status, text
        except TimeoutError:
            raise EpisodeFailed(
                f"the NeMo Gym server took longer than {limit.total:g} s for {path}; see env.nemo_gym"
            ) from None
        except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
            raise EpisodeFailed(f"the NeMo Gym server is gone: {path}: {error}") from error


@dataclass(frozen=True, slots=True)
class VerifiedByServer(Grader):
    """The ``reward`` of ``/verify``."""

    async def grade(self, task: Task, work: Work) -> Verdict:
        """Ask the server. Raises ``EpisodeFailed`` when it gives no finite number."""
        tools = work.tools
        if not isinstance(tools, NemoGymTools):
            raise EpisodeFailed(f"a NeMo Gym episode is graded by its own tools, found {type(tools).__name__}")
        verdict = await tools.verify(work.run.answer)
        reward = verdict.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise EpisodeFailed(f"the NeMo Gym server gave a reward of {reward!r}, want a finite number")
        facts = {
            f"verify_{name}": float(value)
            for name, value in verdict.items()
            if name != "reward"
            and name not in tools.sent
            and isinstance(value, (bool, int, float))
            and math.isfinite(value)
        }
        return Verdict(reward=float(reward), reason="by the server's /verify", facts={**tools.facts, **facts})


def _object(path: str, status: int, text: str) -> dict[str, object]:
    if status != 200:
        raise EpisodeFailed(f"the NeMo Gym server answered {path} with {status}: {text[:300]}")
    try:
        verdict = json.loads(text)
    except ValueError as error:
        raise EpisodeFailed(f"the NeMo Gym server's verdict is no JSON: {error}") from error
    if not isinstance(verdict, dict):
        raise EpisodeFailed(f"the NeMo Gym server's verdict is a {type(verdict).__name__}, want an object")
    return verdict
