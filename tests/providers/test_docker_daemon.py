"""The Docker provider on a real daemon, with real containers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from docker_stage import IMAGE, Daemon, NoDaemon, daemon

from tollway.errors import BadImage, SandboxGone, SandboxUnavailable
from tollway.sandboxes import conformance
from tollway.sandboxes.base import SandboxProvider, SandboxSpec
from tollway.sandboxes.config import DockerConfig, SandboxConfig
from tollway.sandboxes.docker import DockerProvider

pytestmark = [pytest.mark.all, pytest.mark.slow(300), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def docker() -> Iterator[Daemon]:
    try:
        with daemon() as running:
            yield running
    except NoDaemon as error:
        pytest.skip(str(error))


def config(docker: Daemon, **more: object) -> SandboxConfig:
    return SandboxConfig(provider="docker", docker=DockerConfig(url=docker.url, image=IMAGE, pull="never"), **more)


@pytest.fixture
async def provider(docker: Daemon) -> AsyncIterator[SandboxProvider]:
    async with DockerProvider(config(docker)) as opened:
        yield opened
    assert docker.docker("ps", "-aq") == "", "containers are left"


def spec(**more: object) -> SandboxSpec:
    return SandboxSpec(ttl_s=60, labels={"suite": "docker"}, **more)


async def test_every_promise_is_kept(provider: SandboxProvider) -> None:
    broken = {each.name: each.error async for each in conformance.stream(provider, []) if each.error}
    # The daemon was started without a network of its own, so there is none to be had here.
    broken.pop("public_network_can_be_had", None)
    assert broken == {}


async def test_nothing_of_a_command_survives_it_however_it_hides(provider: SandboxProvider) -> None:
    sandbox = await provider.create(spec())
    hide = "setsid sleep 71 & (env -i setsid sleep 72 &); trap '' TERM; (env -i nohup setsid sleep 73 >/dev/null &); :"
    await sandbox.exec(hide, timeout_s=20)
    await sandbox.exec(f"{hide} sleep 60", timeout_s=1)
    left = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout_s=20)
    assert b"sleep 7" not in left.stdout


async def test_a_command_that_kills_everything_is_a_result_and_the_sandbox_goes_on(provider: SandboxProvider) -> None:
    sandbox = await provider.create(spec())
    assert (await sandbox.exec("kill -9 -1", timeout_s=20)).exit_code == 137
    assert (await sandbox.exec("kill -9 1; echo on", timeout_s=20)).stdout == b"on\n"


async def test_memory_and_processes_are_bounded(provider: SandboxProvider) -> None:
    sandbox = await provider.create(spec(mem_mb=64, pids=16))
    eaten = await sandbox.exec("x=$(head -c 300000000 /dev/zero | tr '\\0' x); echo ${#x}", timeout_s=60)
    assert (eaten.exit_code, eaten.oom) == (137, True)
    forks = await sandbox.exec("i=0; while [ $i -lt 200 ]; do sleep 9 & i=$((i+1)); done; echo all", timeout_s=20)
    assert b"all" not in forks.stdout


async def test_a_container_has_no_rights(provider: SandboxProvider) -> None:
    sandbox = await provider.create(spec())
    said = await sandbox.exec(
        "id -u; grep -E 'Cap|NoNewPrivs' /proc/self/status; echo x >/etc/x; ls /sys/class/net", timeout_s=20
    )
    words = said.stdout.decode().split()
    assert words[0] == "1000"
    assert words[words.index("NoNewPrivs:") + 1] == "1"
    assert all(set(words[words.index(f"Cap{which}:") + 1]) == {"0"} for which in ("Prm", "Eff", "Bnd", "Amb"))
    assert words[-1] == "lo"
    assert b"/etc/x" in said.stderr


async def test_tree_and_mounts_come_from_this_machine(provider: SandboxProvider, tmp_path: Path) -> None:
    tree, shared = tmp_path / "tree", tmp_path / "shared"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "run.sh").write_bytes(b"#!/bin/sh\necho ran\n")
    (tree / "sub" / "run.sh").chmod(0o755)
    shared.mkdir()
    (shared / "f").write_bytes(b"shared")
    sandbox = await provider.create(spec(tree=tree, mounts={"/opt/shared": shared}))
    assert (await sandbox.exec("sub/run.sh; echo changed >sub/run.sh", timeout_s=20)).stdout == b"ran\n"
    assert (tree / "sub" / "run.sh").read_bytes() == b"#!/bin/sh\necho ran\n"
    assert (await sandbox.exec("cat /opt/shared/f; echo x >/opt/shared/f", timeout_s=20)).stdout == b"shared"
    assert (shared / "f").read_bytes() == b"shared"


async def test_an_owner_that_was_killed_leaves_nothing_for_long(docker: Daemon) -> None:
    program = f"""
import asyncio, os, signal
from tollway.sandboxes.base import SandboxSpec
from tollway.sandboxes.config import DockerConfig, SandboxConfig
from tollway.sandboxes.docker import DockerProvider

async def main():
    config = SandboxConfig(docker=DockerConfig(url={docker.url!r}, image={IMAGE!r}, pull="never"))
    provider = DockerProvider(config)
    await provider.create(SandboxSpec(ttl_s=2, labels={{"suite": "orphan"}}))
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], check=False, capture_output=True)
    assert docker.docker("ps", "-q", "--filter", "label=suite=orphan") != ""
    async with asyncio.timeout(60), DockerProvider(config(docker)) as other:
        assert [info.labels["suite"] for info in await other.list({"suite": "orphan"})] == ["orphan"]
        while docker.docker("ps", "-aq", "--filter", "label=suite=orphan"):
            await asyncio.sleep(0.3)


async def test_another_process_can_attach_and_kill(provider: SandboxProvider, docker: Daemon) -> None:
    sandbox = await provider.create(spec(files={"f": b"1"}))
    async with DockerProvider(config(docker)) as other:
        again = await other.attach(sandbox.id)
        assert await again.read("f") == b"1"
        await again.kill()
        with pytest.raises(SandboxGone):
            await other.attach(sandbox.id)
    with pytest.raises(SandboxGone):
        await sandbox.exec(["true"], timeout_s=20)


async def test_a_wrong_image_and_a_missing_daemon_are_told(provider: SandboxProvider, docker: Daemon) -> None:
    with pytest.raises(BadImage):
        await provider.create(spec(image="no-such-image"))
    nowhere = config(docker).model_copy(update={"docker": DockerConfig(url="unix:///nowhere/docker.sock")})
    async with DockerProvider(nowhere) as other:
        with pytest.raises(SandboxUnavailable, match="DOCKER_HOST"):
            await other.create(spec())
