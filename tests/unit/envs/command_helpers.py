"""A small agent for command harnesses, and episodes of it over a real session server and real sandboxes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tollway.envs.base import AgentRun, Desk, Harness, Task
from tollway.envs.config import EnvConfig
from tollway.envs.harnesses.command import CommandHarness
from tollway.envs.micro_swe.environment import MicroSwe
from tollway.envs.micro_swe.rules import RULES, edit_command
from tollway.envs.runner import EpisodeRunner
from tollway.ports import GroupRequest
from tollway.records import Group, Sampling
from tollway.sandboxes.base import SandboxProvider
from tollway.session_server.fake import FakeServer

SAMPLING = Sampling(temperature=1.0, max_new_tokens=32)

AGENT = """\
import json, os, subprocess, sys, urllib.error, urllib.request

MODEL, KEY = os.environ["AGENT_MODEL"], os.environ["AGENT_KEY"]


def ask(messages, model=MODEL, key=KEY, path="/chat/completions"):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    call = urllib.request.Request(model + path, data=body, headers=headers)
    with urllib.request.urlopen(call, timeout=30) as answer:
        return json.load(answer)["choices"][0]["message"]


def turns(count):
    messages = [{"role": "user", "content": open(os.environ["AGENT_TASK"]).read()}]
    for number in range(count):
        messages += [ask(messages), {"role": "user", "content": "go on %d" % number}]


def fix():
    subprocess.run(json.loads(os.environ["AGENT_FIX"]), check=True, stdout=subprocess.DEVNULL)


"""
"""What every agent of these tests begins with."""


def settings(body: str, index: int = 0, **command: object) -> dict[str, object]:
    """``[env]`` for an agent whose program ends with ``body``; ``fix()`` repairs task ``index``."""
    config = EnvConfig()
    project = MicroSwe(config).project(index)
    own: dict[str, object] = {
        "argv": ["/usr/bin/python3", "{home}/agent.py"],
        "files": {"agent.py": AGENT + body},
        "env": {
            "AGENT_MODEL": "{openai_base_url}",
            "AGENT_KEY": "{token}",
            "AGENT_TASK": "{instruction_file}",
            "AGENT_FIX": json.dumps(edit_command(RULES[project.rule], project.path)),
        },
    }
    for name, value in command.items():
        before = own.get(name)
        own[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return {"harness": "command", "attempts": 1, "agent_timeout_s": 60.0, "command": own}


class Watched(Harness):
    """A harness whose runs are kept."""

    def __init__(self, inner: CommandHarness) -> None:
        self.inner = inner
        self.runs: list[AgentRun] = []
        self.outfit = inner.outfit  # type: ignore[method-assign]  # the very same

    async def run(self, task: Task, desk: Desk) -> AgentRun:
        self.runs.append(await self.inner.run(task, desk))
        return self.runs[-1]


class Scene:
    """One server, one provider, and what episodes of commands left."""

    def __init__(self, server: FakeServer, provider: SandboxProvider) -> None:
        self.server, self.provider = server, provider
        self.runs: list[AgentRun] = []

    async def play(self, env: Mapping[str, object], index: int = 0) -> Group:
        """One episode."""
        config = EnvConfig.model_validate(env)
        environment = MicroSwe(config)
        harness = Watched(CommandHarness(config, environment))
        runner = EpisodeRunner(
            config, environment=environment, harness=harness, sessions=self.server.client, provider=self.provider
        )
        try:
            return await runner.run_group(GroupRequest(group_id="g", prompt_index=index, samples=1, sampling=SAMPLING))
        finally:
            await runner.aclose()
            self.runs += harness.runs

    @property
    def log(self) -> str:
        """What the last run wrote."""
        return self.runs[-1].log.decode()


@asynccontextmanager
async def scene(folder: Path, provider: SandboxProvider) -> AsyncIterator[Scene]:
    """A real session server over a scripted engine."""
    async with FakeServer(folder) as server:
        yield Scene(server, provider)
