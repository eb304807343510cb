"""The bridge in a container without a network: a volume with a socket in it, whose other end is this process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tollway.envs.base import Desk, Task, ToolAnswer, Toolset
from tollway.envs.config import EnvConfig
from tollway.envs.harnesses.command import CommandHarness
from tollway.envs.micro_swe.environment import MicroSwe
from tollway.messages import Message, ToolCall
from tollway.sandboxes.base import SandboxSpec
from tollway.sandboxes.config import DockerConfig, SandboxConfig
from tollway.sandboxes.docker import DockerProvider
from tollway.session_server.fake import FakeServer

pytestmark = [pytest.mark.all, pytest.mark.slow(300), pytest.mark.timeout(300)]
_STAGE = Path(__file__).resolve().parents[1] / "providers" / "docker_stage.py"

AGENT = """\
import json, os, socket, sys, urllib.error, urllib.request
def ask(path, key):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(sys.argv[1] + path, data=body, headers=headers)) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
key = open(sys.argv[2]).read()
told = [ask("/v1/chat/completions", key), ask("/engines", key), ask("/v1/chat/completions", "x"), os.getuid() != 0]
try:
    socket.create_connection(("10.0.0.1", 80), timeout=2)
except OSError:
    told.append("no network")
print(json.dumps(told))
"""


class _NoTools(Toolset):
    specs = ()
    facts = {}  # noqa: RUF012 - never changed

    async def call(self, call: ToolCall) -> ToolAnswer:
        raise AssertionError


@pytest.fixture
def docker_provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerProvider]:
    spec = importlib.util.spec_from_file_location("docker_stage_of_harnesses", _STAGE)
    assert spec is not None
    assert spec.loader is not None
    stage = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stage
    spec.loader.exec_module(stage)
    try:
        with stage.daemon(tmp_path_factory.mktemp("docker")) as running:  # a short path, for its sockets
            docker = DockerConfig(url=running.url, image=stage.IMAGE, pull="never")
            yield DockerProvider(SandboxConfig(provider="docker", docker=docker))
    except stage.NoDaemon as error:
        pytest.skip(str(error))


async def test_a_command_in_a_container_reaches_its_model_and_nothing_else(
    docker_provider: DockerProvider, tmp_path: Path
) -> None:
    config = EnvConfig.model_validate(
        {
            "harness": "command",
            "command": {
                "argv": ["/usr/bin/python3", "{home}/agent.py", "{base_url}", "{home}/key"],
                "files": {"agent.py": AGENT, "key": "{token}"},
                "mounts": {"/usr": "/usr"},  # the test's image has no Python
            },
        }
    )
    harness = CommandHarness(config, MicroSwe(config))
    task = Task(task_id="t", messages=(Message(role="user", content="Work."),))
    (tmp_path / "server").mkdir()
    async with FakeServer(tmp_path / "server") as server, docker_provider as provider:
        session = await server.client.create()
        async with harness.outfit(task, session) as outfit:
            spec = SandboxSpec(
                ttl_s=120, labels={"suite": "harness"}, mounts=outfit.mounts, mem_mb=512, pids=outfit.pids
            )
            sandbox = await provider.create(spec)
            desk = Desk(session=session, model=server.client, tools=_NoTools(), sandbox=sandbox)  # type: ignore[arg-type]
            run = await harness.run(task, desk)
            assert run.answer == '[200, 403, 401, true, "no network"]', run.log.decode()
            assert (run.submitted, run.turns) == (True, 1)
            await sandbox.kill()
