"""Real harnesses as episodes: inside a sandbox without a network each solves a task and leaves one exact trajectory."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from episode import ENDS, SHELLS, TASK, TASK_ID, fix_commands, turns_of
from harness_stage import Proof
from scripted import ROOT, ScriptedModel

from tollway.envs.base import Harness
from tollway.envs.config import EnvConfig
from tollway.envs.harnesses.registry import open_harness
from tollway.envs.runner import EpisodeRunner
from tollway.envs.swe.environment import Swe
from tollway.ports import GroupRequest
from tollway.records import Rollout, Sampling
from tollway.router.fake import FakeEngine
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.local import LocalProvider
from tollway.session_server.fake import FakeServer
from tollway.session_server.families.base import Family

pytestmark = [pytest.mark.all, pytest.mark.usefixtures("all_harnesses")]


async def _episode(
    name: str, tmp_path: Path, qwen: Family, *, first: tuple[str, ...] = (), **command: object
) -> tuple[Rollout, Proof]:
    """One episode of one harness over a scripted engine, in the local sandbox."""
    config = EnvConfig.model_validate(
        {
            "name": "swe",
            "harness": name,
            "attempts": 1,
            "agent_timeout_s": 150.0,
            "swe": {"only": (TASK_ID,), "cache": tmp_path / "cache"},
            "command": {"node_home": ROOT / ".node-harnesses", "python_home": ROOT / ".venv-harnesses", **command},
            "artifacts": str(tmp_path / "artifacts"),
        }
    )
    turns = turns_of(name, [*first, *fix_commands()])
    model = ScriptedModel(qwen, turns, task=TASK)
    environment = Swe(config)
    await environment.open()
    harness: Harness = open_harness(config, environment)
    async with (
        FakeEngine(model, context_length=131072) as engine,
        FakeServer(tmp_path, engines=[engine], family=qwen) as server,
        LocalProvider(SandboxConfig()) as provider,
    ):
        runner = EpisodeRunner(
            config, environment=environment, harness=harness, sessions=server.client, provider=provider
        )
        request = GroupRequest(
            group_id="g", prompt_index=0, samples=1, sampling=Sampling(temperature=1.0, max_new_tokens=8192)
        )
        try:
            (rollout,) = (await runner.run_group(request)).rollouts
        finally:
            await runner.aclose()
        proof = Proof(engine, model, server, rollout.session_id)
        if rollout.error is None:
            main = await proof.exact_main_row()
            assert main.token_ids.tolist() in [row.token_ids.tolist() for row in rollout.rows]
            assert rollout.turns == len(model.main) == len(engine.requests) == len(turns) - (name in ENDS)
        assert provider.live == 0
    return rollout, proof


@pytest.mark.parametrize("name", SHELLS)
async def test_a_harness_solves_a_task_inside_a_sandbox_without_a_network(
    name: str, tmp_path: Path, qwen: Family
) -> None:
    rollout, _ = await _episode(name, tmp_path, qwen)
    logs = [path.read_text(encoding="utf-8", errors="replace") for path in tmp_path.glob("artifacts/**/*.log")]
    assert rollout.error is None, (rollout, logs)
    assert rollout.reward == 1.0, (rollout, logs)
    assert rollout.facts["refused_calls"] == 0
    assert not [log for log in logs if "bridge-" in log]


@pytest.mark.parametrize("name", ["mini-swe-agent"])
async def test_mini_swe_agent_works_beside_the_tasks_sandbox(name: str, tmp_path: Path, qwen: Family) -> None:
    rollout, proof = await _episode(name, tmp_path, qwen, where="beside")
    assert rollout.error is None, rollout
    assert rollout.reward == 1.0, rollout
    # What its first command listed are the task's files, which its own sandbox does not have.
    assert "stock.py" in proof.prompt(proof.model.main[1])


@pytest.mark.parametrize("name", SHELLS)
async def test_what_the_agent_runs_inherits_neither_key_nor_address(name: str, tmp_path: Path, qwen: Family) -> None:
    """Code under test that looks for a model must not find the session by chance."""
    _, proof = await _episode(name, tmp_path, qwen, first=("env | sort",))
    seen = proof.prompt(proof.model.main[1])
    assert "PATH=" in seen
    assert "bridge-" not in seen
    assert name == "claude-code" or "127.0.0.1:8700" not in seen


@pytest.mark.parametrize("name", ["codex"])
async def test_the_example_runs_a_harness_by_the_command_line(name: str, tmp_path: Path) -> None:
    program = ROOT / "examples" / "harnesses" / "episode.py"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, program, name, "--json"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    told = json.loads(out)
    assert told["verdict"]["reward"] == 1.0, told
