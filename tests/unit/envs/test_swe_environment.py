"""The environment over the tiny set: work in a sandbox, collect, grade."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from swe_helpers import tiny

from tollway.envs.base import Work
from tollway.envs.config import EnvConfig
from tollway.envs.registry import open_environment
from tollway.envs.swe.config import SweConfig
from tollway.errors import ConfigError, NotFound
from tollway.messages import ToolCall
from tollway.sandboxes.base import Sandbox, SandboxSpec
from tollway.sandboxes.local import LocalProvider


async def started(local: LocalProvider, environment: object, task: object) -> Sandbox:
    machine = task.machine  # type: ignore[attr-defined]
    return await local.create(
        SandboxSpec(
            ttl_s=120, labels={"t": "swe"}, tree=machine.tree, mounts=machine.mounts, env=machine.env, mem_mb=512
        )
    )


async def test_an_agent_that_repairs_the_library_is_paid(local: LocalProvider, tmp_path: Path) -> None:
    environment = tiny(tmp_path, "spans-f*")
    await environment.open()
    task = environment.find(environment.ids[0])
    sandbox = await started(local, environment, task)
    tools = environment.toolset(task, sandbox)
    run = ToolCall("1", "bash", json.dumps({"command": "python3 -m unittest tests.test_core"}))
    assert "FAILED" in (await tools.call(run)).text
    await environment.solve(task, sandbox)
    assert "OK" in (await tools.call(run)).text
    # What an agent leaves lying about is neither collected nor in the way.
    litter = "mkdir spans/tests; touch conftest.py spans/conftest.py spans/tests/a.py spans/x.pth"
    litter += "; ln -s /etc/passwd spans/p.py"
    await sandbox.exec(f"{litter}; echo 'x = 1' > spans/extra.py", timeout_s=20)
    handed = await environment.collect(task, sandbox)
    assert set(handed) == {"spans/__init__.py", "spans/core.py", "spans/text.py", "spans/extra.py"}
    verdict = await environment.grader(task).grade(task, Work(submission=handed, provider=local))
    assert (verdict.reward, verdict.flags) == (1.0, ()), verdict.reason
    assert (await sandbox.exec(["git", "log"], timeout_s=20)).exit_code != 0


async def test_the_agent_sees_neither_the_fix_nor_the_task_file(local: LocalProvider, tmp_path: Path) -> None:
    environment = tiny(tmp_path, "wording-*")
    await environment.open()
    for task_id in environment.ids:
        task = environment.find(task_id)
        sandbox = await started(local, environment, task)
        names = "-name swe.json -o -name '*.patch' -o -name .git"
        found = await sandbox.exec(f"find /workspace /opt /tmp {names}", timeout_s=30)
        assert found.stdout.strip() == b""
        await sandbox.kill()
        assert task.machine is not None
        assert task.machine.network == "none"


def test_the_order_is_seeded_and_each_epoch_has_every_task(tmp_path: Path) -> None:
    environment = tiny(tmp_path)
    assert environment.size == 9
    names = [environment.task(index).task_id for index in range(18)]
    assert sorted(names[:9]) == sorted(names[9:]) == list(environment.ids)
    assert environment.find(names[0].removeprefix("swe/")) == environment.task(0)
    with pytest.raises(NotFound, match="no SWE task"):
        environment.find("nothing")


def test_training_runs_a_sample_and_evaluation_everything(tmp_path: Path) -> None:
    swe = SweConfig(tasks="tiny", cache=tmp_path / "cache", p2p_sample=7)
    for split, count in (("train", 7), ("heldout", 0)):
        environment = open_environment(EnvConfig.model_validate({"name": "swe", "split": split, "swe": swe}))
        assert environment.grader(environment.task(0)).p2p_sample == count  # type: ignore[attr-defined]


async def test_what_was_not_fetched_is_said_before_the_first_episode(tmp_path: Path) -> None:
    swe = SweConfig(tasks="shipped", only=("tabulate-*",), cache=tmp_path / "cache")
    environment = open_environment(EnvConfig(name="swe", swe=swe))
    with pytest.raises(ConfigError, match="tollway tasks fetch"):
        await environment.open()
