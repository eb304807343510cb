"""An agent server of the real nemo-gym package does whole episodes, with a session of a real server as its model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tollway.envs.config import EnvConfig
from tollway.envs.harnesses.registry import open_harness
from tollway.envs.nemo_gym.environment import NemoGym
from tollway.envs.runner import EpisodeRunner
from tollway.ports import GroupRequest
from tollway.records import Sampling
from tollway.router.fake import FakeReply, FakeRequest
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider
from tollway.session_server.fake import FakeServer

pytestmark = [pytest.mark.all, pytest.mark.slow(180)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "nemo_gym"


async def test_whole_episodes_are_run_by_the_server_and_recorded_by_us(
    bridge: Callable[[str], Path], tmp_path: Path
) -> None:
    server = "resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer"
    command = [str(bridge("nemo-gym")), str(EXAMPLE / "serve_agent.py"), server, "--port", "{port}"]
    section = {
        "agent": "server",
        "command": [*command, "--model-port", "{model_port}"],
        "data": str(EXAMPLE / "counter.jsonl"),
    }
    config = EnvConfig.model_validate(
        {
            "name": "nemo-gym",
            "harness": "tollway.envs.nemo_gym.agent:ServerAgent",
            "attempts": 1,
            "nemo_gym": section,
        }
    )
    environment = NemoGym(config)
    await environment.open()
    try:
        async with FakeServer(tmp_path) as server_side:
            server_side.engine.script = _reply
            runner = EpisodeRunner(
                config,
                environment=environment,
                harness=open_harness(config, environment),
                sessions=server_side.client,
                provider=FakeProvider(SandboxConfig()),
            )
            group = await runner.run_group(
                GroupRequest(group_id="g", prompt_index=0, samples=3, sampling=Sampling(max_new_tokens=64))
            )
            await runner.aclose()
    finally:
        await environment.aclose()
    for rollout in group.rollouts:
        assert rollout.error is None, (rollout.error, environment)
        assert rollout.reward == 0.0  # nothing was added
        assert rollout.turns == 1
        assert [int(row.loss_mask.sum()) for row in rollout.rows] == [3]


def _reply(request: FakeRequest) -> FakeReply:
    return FakeReply(ids=[111, 107, 261])
