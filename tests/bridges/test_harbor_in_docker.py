"""Harbor tasks in images, on a real Docker daemon: real paths at the root, the task's user, both kinds of grading."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "providers"))

from docker_stage import IMAGE, Daemon, NoDaemon, daemon  # noqa: E402 - after the path

from tollway.envs.base import AgentRun, Work  # noqa: E402
from tollway.envs.config import EnvConfig  # noqa: E402
from tollway.envs.harbor.environment import Harbor  # noqa: E402
from tollway.messages import ToolCall  # noqa: E402
from tollway.sandboxes.base import SandboxProvider, SandboxSpec  # noqa: E402
from tollway.sandboxes.config import DockerConfig, SandboxConfig  # noqa: E402
from tollway.sandboxes.docker import DockerProvider  # noqa: E402

pytestmark = [pytest.mark.all, pytest.mark.slow(300), pytest.mark.timeout(300)]

EXAMPLE = ROOT / "examples" / "harbor" / "tasks" / "hello-file"
SEPARATE = '\n[verifier.environment]\ncpus = 1\nmemory_mb = 256\nnetwork_mode = "no-network"\n'


@pytest.fixture(scope="module")
def docker() -> Iterator[Daemon]:
    try:
        with daemon() as running:
            yield running
    except NoDaemon as error:
        pytest.skip(str(error))


@pytest.fixture
async def provider(docker: Daemon) -> AsyncIterator[SandboxProvider]:
    config = SandboxConfig(provider="docker", docker=DockerConfig(url=docker.url, image=IMAGE, pull="never"))
    async with DockerProvider(config) as opened:
        yield opened
    assert docker.docker("ps", "-aq") == "", "containers are left"


def _task(tmp_path: Path, *, separate: bool) -> Path:
    """hello-file in an image that its Dockerfile starts from."""
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "hello-file"))
    (folder / "environment" / "Dockerfile").write_text(f"FROM {IMAGE}\nWORKDIR /srv/app\nCOPY NOTES.txt ./\n")
    text = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(
        f'artifacts = ["hello.txt"]\n{text}{SEPARATE}'
        if separate
        else text.replace("[agent]", '[agent]\nuser = "user"')
    )
    for name in ("instruction.md", "tests/test.sh", "solution/solve.sh"):
        path = folder / name
        path.write_text(path.read_text().replace("/app/", "/srv/app/"))
    return folder


async def _play(provider: SandboxProvider, folder: Path, *calls: tuple[str, str]) -> tuple[float, list[str]]:
    environment = Harbor(EnvConfig.model_validate({"harbor": {"tasks": str(folder), "base_images": True}}))
    task = environment.task(0)
    machine = task.machine
    assert machine is not None
    assert machine.image == IMAGE
    sandbox = await provider.create(
        SandboxSpec(
            ttl_s=120,
            labels={"test": "harbor"},
            image=machine.image,
            env=machine.env,
            mem_mb=machine.mem_mb,
            disk_mb=machine.disk_mb,
            pids=machine.pids,
            network=machine.network,
            options=machine.options,
        )
    )
    try:
        tools = environment.toolset(task, sandbox)
        await tools.open()
        if calls == (("solve", ""),):
            await environment.solve(task, sandbox)
            shown = []
        else:
            shown = [(await tools.call(ToolCall("c", name, arguments))).text for name, arguments in calls]
        work = Work(
            submission=await environment.collect(task, sandbox),
            provider=provider,
            run=AgentRun(turns=1, submitted=True, finish="submitted"),
            sandbox=sandbox,
        )
        grader = environment.grader(task)
        verdict = await grader.grade(task, work if grader.in_agents_sandbox else replace(work, sandbox=None))
    finally:
        await sandbox.kill()
    return verdict.reward, shown


@pytest.mark.parametrize("separate", [False, True])
async def test_a_task_in_an_image_is_worked_on_and_graded_at_its_own_paths(
    provider: SandboxProvider, tmp_path: Path, separate: bool
) -> None:
    folder = _task(tmp_path, separate=separate)
    assert (await _play(provider, folder, ("solve", "")))[0] == 1.0
    reward, shown = await _play(
        provider,
        folder,
        ("bash", '{"command": "pwd; ls; ls /tests /solution"}'),
        ("read", '{"path": "NOTES.txt"}'),
        ("edit", '{"path": "hello.txt", "old": "", "new": "Hello"}'),
        ("edit", '{"path": "hello.txt", "old": "Hello", "new": "Hello, world!"}'),
    )
    assert reward == 1.0, shown
    assert shown[0].startswith("/srv/app\n")
    assert "NOTES.txt" in shown[0]
    assert shown[0].count("No such file") == 2
    assert "Files in this directory" in shown[1]
    assert shown[2:] == ["created hello.txt", "edited hello.txt"]
    assert (await _play(provider, folder, ("bash", '{"command": "true"}')))[0] == 0.0
