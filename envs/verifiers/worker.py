"""The verifiers side, run as a program by the interpreter that has the verifiers package.

Knows nothing of Tollway and imports nothing of it: JSON lines in, JSON lines out. A request is ``{"id", "op", ...}``
and its answer ``{"id", "ok", "result" or "error"}``; while it works on one, it may ask for the episode's sandbox with
``{"call", "episode", "what", ...}`` and is told ``{"reply", "result" or "error"}``. What the taskset prints goes to
stderr, so that it cannot be taken for an answer.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import inspect
import itertools
import json
import math
import os
import sys
from typing import Any

Json = dict[str, Any]
MAX_EPISODES = 100_000


class Line:
    """The two ends of the pipe."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
        os.dup2(2, 1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)

    def send(self, message: Json) -> None:
        self.out.write(json.dumps(message) + "\n")
        self.out.flush()

    async def ask(self, episode: str, what: str, **fields: Any) -> Any:
        """Have something done in the sandbox of an episode."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self.send({"call": number, "episode": episode, "what": what, **fields})
        try:
            return await self._waiting[number]
        finally:
            del self._waiting[number]

    def answered(self, message: Json) -> None:
        waiting = self._waiting.get(message["reply"])
        if waiting is None or waiting.done():
            return
        if "error" in message:
            waiting.set_exception(RuntimeError(f"sandbox: {message['error']}"))
        else:
            waiting.set_result(message["result"])


def runtime_of(line: Line, episode: str) -> Any:
    """A verifiers Runtime whose box is the episode's sandbox."""
    from verifiers.v1.runtimes import ProgramResult, SubprocessConfig
    from verifiers.v1.runtimes.base import BaseRuntimeInfo, Runtime

    class SandboxRuntime(Runtime):  # type: ignore[misc]  # of a package that only the worker's Python has
        def __init__(self) -> None:
            super().__init__(f"sandbox-{episode}")
            self.config = SubprocessConfig()
            self.info = BaseRuntimeInfo(id=episode)

        async def start(self) -> None:
            """It runs already."""

        async def run(self, argv: list[str], env: dict[str, str]) -> Any:
            done = await line.ask(episode, "exec", argv=list(argv), env=self.process_env(env))
            return ProgramResult(exit_code=done["exit_code"], stdout=done["stdout"], stderr=done["stderr"])

        async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
            done = await line.ask(episode, "read", path=path, max_bytes=max_bytes)
            return base64.b64decode(done["data"])

        async def write(self, path: str, data: bytes) -> None:
            await line.ask(episode, "write", path=path, data=base64.b64encode(data).decode())

    return SandboxRuntime()


class TasksetV1:
    """A ``verifiers.v1`` Taskset."""

    def __init__(self, line: Line, name: str, config: Json, limit: int) -> None:
        from verifiers.v1 import Taskset, TasksetConfig
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import taskset_class

        found: Any = load_object(name) if ":" in name else taskset_class(name)
        kind: object = found
        if not (isinstance(kind, type) and issubclass(kind, Taskset)):
            raise TypeError(f"{name} is no Taskset class, found {kind!r}")
        config_type = concrete_type(found, TasksetConfig, origin=Taskset) or TasksetConfig
        self.line = line
        self.taskset = found(config_type(**({} if ":" in name else {"id": name}) | config))
        if found.toolsets(self.taskset.config):
            raise ValueError("this taskset has tool servers of its own, which are not run here")
        self.tasks = list(itertools.islice(iter(self.taskset), limit))
        self.episodes: dict[str, Any] = {}

    def listed(self) -> list[Json]:
        return [self.entry(task) for task in self.tasks]

    def entry(self, task: Any) -> Json:
        data = task.data
        for field in ("skills", "agent_user"):
            if getattr(data, field):
                raise ValueError(f"task {data.idx} has {field}, which cannot be had here")
        if type(task).toolsets(task.config):
            raise ValueError(f"task {data.idx} has tool servers of its own, which are not run here")
        messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        if isinstance(data.prompt, str):
            messages.append({"role": "user", "content": data.prompt})
        else:
            messages += [text_message(message) for message in data.prompt or []]
        if not any(message["role"] == "user" for message in messages):
            raise ValueError(f"task {data.idx} has no prompt: its user is simulated, which is not done here")
        return {
            "key": task.key, "name": data.name or data.id, "messages": messages, "image": data.image,
            "workdir": data.workdir, "sandbox": self.needs_sandbox(task), "agent_s": data.timeout.agent,
            "cpu": data.resources.cpu, "memory_gb": data.resources.memory, "disk_gb": data.resources.disk,
        }  # fmt: skip

    def needs_sandbox(self, task: Any) -> bool:
        from verifiers.v1 import Task

        def wanted(function: Any) -> bool:
            parameter = inspect.signature(function).parameters.get("runtime")
            return parameter is not None and parameter.default is inspect.Parameter.empty

        if type(task).NEEDS_CONTAINER or task.data.image is not None:
            return True
        if type(task).setup is not Task.setup or type(task).finalize is not Task.finalize:
            return True
        return any(wanted(each) for kind in ("reward", "metric") for each in task.hooks(kind))

    async def begin(self, episode: str, index: int, sandbox: bool) -> Json:
        from verifiers.v1 import AgentConfig, AgentInfo, Trace, TraceTask
        from verifiers.v1.state import state_cls
        from verifiers.v1.utils.decorators import invoke

        task = self.tasks[index]
        wire = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        trace = Trace(task=wire, agent=AgentInfo(config=AgentConfig()), state=state_cls(type(task))())
        runtime = runtime_of(self.line, episode) if sandbox else None
        if runtime is not None:
            runtime.env = task.runtime_env()
            await invoke(task.setup, {"trace": trace, "runtime": runtime})
        while len(self.episodes) >= MAX_EPISODES:
            self.episodes.pop(next(iter(self.episodes)))
        self.episodes[episode] = (task, trace, runtime)
        return {}

    async def score(self, episode: str, messages: list[Json], ok: bool) -> Json:
        from verifiers.v1 import MessageNode
        from verifiers.v1.utils.decorators import invoke

        task, trace, runtime = self.episodes[episode]
        prompt = len(self.entry(task)["messages"])
        for at, message in enumerate(messages):
            sampled = at >= prompt and message["role"] == "assistant"
            trace.nodes.append(MessageNode(parent=at - 1 if at else None, message=message, sampled=sampled))
        trace.is_completed = trace.ok = ok
        if runtime is not None:
            await invoke(task.finalize, {"trace": trace, "runtime": runtime})
        await task.score(trace, runtime)
        del self.episodes[episode]
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {"reward": trace.reward, "rewards": rewards, "metrics": metrics}

    async def validate(self, episode: str, index: int) -> Json:
        from verifiers.v1.utils.decorators import invoke

        return {"valid": await invoke(self.tasks[index].validate, {"runtime": runtime_of(self.line, episode)})}

    def drop(self, episode: str) -> None:
        self.episodes.pop(episode, None)


class EnvironmentV0:
    """A v0 Environment: a dataset and a rubric; its own rollouts are not run, ours are scored."""

    def __init__(self, line: Line, name: str, config: Json, limit: int) -> None:
        import verifiers

        made = load_object(name)(**config) if ":" in name else verifiers.load_environment(name, **config)
        if not hasattr(made, "rubric") or not hasattr(made, "get_dataset"):
            raise TypeError(f"{name} gave {type(made).__name__}, want a v0 Environment")
        if not isinstance(made, verifiers.SingleTurnEnv):
            raise TypeError(f"{name} is a {type(made).__name__}; of v0, single-turn environments are scored here")
        self.environment = made
        dataset = made.get_dataset()
        self.rows = [dataset[at] for at in range(min(limit, len(dataset)))]
        self.episodes: dict[str, int] = {}

    def listed(self) -> list[Json]:
        return [
            {"key": str(row.get("example_id", at)), "messages": [text_message(each) for each in row["prompt"]],
             "sandbox": False}
            for at, row in enumerate(self.rows)
        ]  # fmt: skip

    async def begin(self, episode: str, index: int, sandbox: bool) -> Json:
        self.episodes[episode] = index
        return {}

    async def score(self, episode: str, messages: list[Json], ok: bool) -> Json:
        row = self.rows[self.episodes.pop(episode)]
        prompt = row["prompt"]
        state = {
            "prompt": prompt, "completion": messages[len(prompt) :], "answer": row.get("answer", ""),
            "task": row.get("task", "default"), "info": row.get("info") or {}, "example_id": row.get("example_id", 0),
            "timing": {"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0}, "trajectory": [], "metrics": {},
            "reward": 0.0, "is_completed": True, "turn": 1, "input": row,
        }  # fmt: skip
        state = self.state(state, row)
        await self.environment.rubric.score_rollout(state)
        metrics = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
        return {"reward": float(state["reward"]), "rewards": {}, "metrics": metrics}

    def state(self, fields: Json, row: Json) -> Any:
        from verifiers.types import State

        made = State(**fields) if not isinstance(State, type) or issubclass(State, dict) else dict(fields)
        made.setdefault("input", row)
        return made

    async def validate(self, episode: str, index: int) -> Json:
        return {"valid": None}

    def drop(self, episode: str) -> None:
        self.episodes.pop(episode, None)


def load_object(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def text_message(message: Any) -> Json:
    """A prompt message as role and text; pictures and sounds are refused."""
    raw = message if isinstance(message, dict) else message.model_dump()
    content = raw.get("content") or ""
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("a prompt with parts that are no text")
        content = "\n".join(part["text"] for part in content)
    return {"role": raw["role"], "content": content}


def open_source(line: Line, message: Json) -> Any:
    import verifiers

    arguments = (line, message["taskset"], message["config"], message["limit"])
    if not hasattr(verifiers, "SingleTurnEnv"):
        return TasksetV1(*arguments)
    try:
        return EnvironmentV0(*arguments)
    except (TypeError, AttributeError) as error:  # releases that have both: it may be a Taskset
        try:
            return TasksetV1(*arguments)
        except (TypeError, AttributeError, ImportError):
            raise error from None


def finite(result: Json) -> Json:
    """JSON has no NaN, and a reward that is none must not become a number."""
    for name, value in {"reward": result["reward"], **result["rewards"], **result["metrics"]}.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}, want a finite number")
    return result


class Service:
    """Answers requests, each in a task of its own."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.source: Any = None
        self.running: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while text := await loop.run_in_executor(None, sys.stdin.readline):
            message = json.loads(text)
            if "reply" in message:
                self.line.answered(message)
                continue
            task = loop.create_task(self.handle(message))
            self.running.add(task)
            task.add_done_callback(self.running.discard)

    async def handle(self, message: Json) -> None:
        try:
            result = await self.result(message)
        except Exception as error:  # a taskset may raise anything; the other side says what it means
            self.line.send({"id": message["id"], "ok": False, "error": f"{type(error).__name__}: {error}"[:4000]})
        else:
            self.line.send({"id": message["id"], "ok": True, "result": result})

    async def result(self, message: Json) -> Any:
        op = message["op"]
        if op == "load":
            self.source = open_source(self.line, message)
            return {"tasks": self.source.listed()}
        if op == "begin":
            return await self.source.begin(message["episode"], message["index"], message["sandbox"])
        if op == "score":
            return finite(await self.source.score(message["episode"], message["messages"], message["ok"]))
        if op == "validate":
            return await self.source.validate(message["episode"], message["index"])
        if op == "drop":
            return self.source.drop(message["episode"])
        raise ValueError(f"unknown op {op!r}")


def main() -> None:
    line = Line()
    sys.path[:0] = sys.argv[1:]
    asyncio.run(Service(line).serve())
    os._exit(0)  # threads of a taskset must not keep the process


if __name__ == "__main__":
    main()
