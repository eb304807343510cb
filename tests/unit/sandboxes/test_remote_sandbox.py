"""What remote providers share, on a machine that is a shell in a directory of this one."""

from __future__ import annotations

import asyncio
import os
import secrets
import tarfile
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest

from tollway.errors import BadRequest, CapabilityMissing, SandboxError, SandboxGone, SandboxUnavailable
from tollway.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from tollway.sandboxes.config import DockerConfig, SandboxConfig
from tollway.sandboxes.docker import DockerProvider
from tollway.sandboxes.docker_settings import KEEPER, archive_of, container_settings, workspace_archive
from tollway.sandboxes.remote import RemoteSandbox, expires_in, labels_of, marks_of, restored_spec, wanted_marks
from tollway.sandboxes.remote_program import Reply


class ShellSandbox(RemoteSandbox):
    """``sh`` in a temporary directory; a service that can lose its connection."""

    def __init__(self, provider: SandboxProvider, spec: SandboxSpec) -> None:
        self.place = tempfile.TemporaryDirectory()
        super().__init__(provider, secrets.token_hex(4), spec, workspace=self.place.name)
        self.programs: list[str] = []
        self.uploads: list[str] = []
        self.answers: list[asyncio.Future[tuple[bytes, bytes]]] = []
        self.lost: Exception | None = None
        self.destroyed = 0

    async def _program(self, program: str, *, timeout_s: float, user: str | None) -> Reply:
        self.programs.append(program)
        assert len(program) < 128 << 10
        process = await asyncio.create_subprocess_exec("sh", "-c", program, stdout=asyncio.subprocess.PIPE)
        # As at a service, the program runs on when nobody waits for it.
        answer = asyncio.ensure_future(process.communicate())
        self.answers.append(answer)
        if self.lost is not None:
            await asyncio.sleep(0.3)
            lost, self.lost = self.lost, None
            raise lost
        output, _ = await asyncio.shield(answer)
        code = process.returncode or 0
        return Reply(output, code if code >= 0 else 128 - code)

    async def _upload(self, path: str, data: bytes) -> None:
        self.uploads.append(path)
        Path(path).write_bytes(data)

    async def _destroy(self) -> None:
        self.destroyed += 1
        await asyncio.gather(*self.answers)
        self.place.cleanup()


class ShellProvider(SandboxProvider):
    name: ClassVar[str] = "shell"

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        return ShellSandbox(self, spec)


@pytest.fixture
async def sandbox() -> AsyncIterator[ShellSandbox]:
    async with ShellProvider(SandboxConfig()) as provider:
        made = await provider.create(SandboxSpec(ttl_s=60, labels={"a": "b"}, env={"X": "spec", "Y": "spec"}))
        assert isinstance(made, ShellSandbox)
        yield made
    assert made.destroyed == 1


async def test_large_input_and_large_programs_travel_as_files_and_leave_none(sandbox: ShellSandbox) -> None:
    data = secrets.token_bytes(200_000)
    assert (await sandbox.exec(["cat"], stdin=data, timeout_s=30)).stdout == data
    assert (await sandbox.exec(["sh", "-c", "echo ${#0}", "'" * 120_000], timeout_s=30)).stdout == b"120000\n"
    await sandbox.write("f", data)
    assert await sandbox.read("f") == data
    assert len(sandbox.uploads) == 3
    assert [path.name for path in Path(sandbox.workspace).iterdir()] == ["f"]


async def test_a_commands_environment_lies_on_top_of_the_specs(sandbox: ShellSandbox) -> None:
    done = await sandbox.exec("echo $X $Y", env={"Y": "own"}, timeout_s=30)
    assert done.stdout == b"spec own\n"


async def test_a_cancelled_command_is_ended_before_the_caller_hears_of_it(sandbox: ShellSandbox) -> None:
    running = asyncio.create_task(sandbox.exec("echo $$ >pid; sleep 300", timeout_s=60))
    pid = Path(sandbox.workspace, "pid")
    async with asyncio.timeout(20):
        while not pid.exists() or not pid.read_text():
            await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not Path("/proc", pid.read_text().strip()).exists()


async def test_after_a_lost_connection_the_command_is_ended_and_not_run_again(sandbox: ShellSandbox) -> None:
    sandbox.lost = SandboxError("the connection broke")
    with pytest.raises(SandboxError, match="broke"):
        await sandbox.exec("echo run >>runs; sleep 300", timeout_s=60)
    await asyncio.gather(*sandbox.answers)
    assert await sandbox.read("runs") == b"run\n"


async def test_a_machine_that_is_gone_stays_gone(sandbox: ShellSandbox) -> None:
    sandbox.lost = SandboxGone("no such machine")
    with pytest.raises(SandboxGone, match="is gone at the service"):
        await sandbox.exec(["sleep", "1"], timeout_s=60)
    await asyncio.gather(*sandbox.answers)
    with pytest.raises(SandboxGone):
        await sandbox.read("x")
    assert len(sandbox.programs) == 1


async def test_a_kill_ends_running_commands_as_gone(sandbox: ShellSandbox) -> None:
    running = asyncio.create_task(sandbox.exec("sleep 2", timeout_s=60))
    await asyncio.sleep(0.2)
    await sandbox.kill()
    with pytest.raises(SandboxGone):
        await running


def test_marks_carry_the_labels_and_the_planned_end() -> None:
    marks = marks_of(SandboxSpec(ttl_s=100, labels={"run": "1", "tollway-owner": "me"}))
    assert labels_of(marks) == {"run": "1", "tollway-owner": "me"}
    assert 99 < expires_in(marks) <= 102
    assert expires_in({}) == expires_in({"tollway-expires": "x"}) == 0
    assert wanted_marks({"run": "1"}).items() <= marks.items()
    assert restored_spec(marks, 5).labels == labels_of(marks)
    assert restored_spec({"tollway": "sandbox"}, 0).ttl_s == 1


def test_a_container_gets_no_rights_and_every_limit(tmp_path: Path) -> None:
    spec = SandboxSpec(
        ttl_s=60, labels={"a": "b"}, cpu=1.5, mem_mb=100, pids=10, disk_mb=7, mounts={"/opt/x": tmp_path}
    )
    settings = container_settings(spec, DockerConfig(), "image", at_home=True)
    host = settings["HostConfig"]
    assert isinstance(host, dict)
    assert (host["CapDrop"], host["SecurityOpt"], host["NetworkMode"]) == (["ALL"], ["no-new-privileges"], "none")
    assert (host["Memory"], host["MemorySwap"], host["NanoCpus"]) == (100 << 20, 100 << 20, 1_500_000_000)
    assert host["Mounts"] == [{"Type": "bind", "Source": str(tmp_path), "Target": "/opt/x", "ReadOnly": True}]
    assert (host["AutoRemove"], settings["User"], settings["Entrypoint"]) == (True, "0:0", ["/bin/sh", "-c", KEEPER])
    with pytest.raises(CapabilityMissing):
        container_settings(spec, DockerConfig(), "image", at_home=False)


def test_archives_belong_to_the_sandboxs_user_and_hold_no_devices(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir(mode=0o500)
    (tmp_path / "run").write_bytes(b"x")
    (tmp_path / "run").chmod(0o755)
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe")
    with workspace_archive(tmp_path, "1000:1001") as file, tarfile.open(fileobj=file) as archive:
        members = {member.name: member for member in archive}
    assert set(members) == {"workspace", "workspace/sub", "workspace/run", "workspace/link"}
    assert {(member.uid, member.gid) for member in members.values()} == {(1000, 1001)}
    assert members["workspace/link"].issym()
    assert (members["workspace/run"].mode, members["workspace/sub"].mode & 0o700) == (0o755, 0o700)
    with tarfile.open(fileobj=archive_of("f", b"data", "5")) as archive:
        (member,) = archive.getmembers()
        assert (member.name, member.uid, member.gid, member.size) == ("f", 5, 5, 4)


async def test_wrong_paths_never_reach_the_machine(sandbox: ShellSandbox) -> None:
    for path in ("../x", "/etc/passwd", "", "a/../../b"):
        with pytest.raises(BadRequest):
            await sandbox.read(path)
        with pytest.raises(BadRequest):
            await sandbox.write(path, b"")
    assert sandbox.programs == []


async def test_a_daemon_that_is_nowhere_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(url: str | None) -> None:
        raise AssertionError  # what aiodocker does, without a word

    monkeypatch.setattr(pytest.importorskip("aiodocker"), "Docker", nowhere)
    async with DockerProvider(SandboxConfig(provider="docker")) as provider:
        with pytest.raises(SandboxUnavailable, match="no socket where a daemon usually has one; start it, or name it"):
            provider.client()
