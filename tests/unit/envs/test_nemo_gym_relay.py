"""Episodes that an agent server runs: its model calls reach their own session, marked, and nobody else's do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from episode_helpers import ScriptedSessions, request, script

from tollway.envs.config import EnvConfig
from tollway.envs.harnesses.registry import open_harness
from tollway.envs.nemo_gym.environment import NemoGym
from tollway.envs.registry import open_environment
from tollway.envs.runner import EpisodeRunner
from tollway.errors import ConfigError
from tollway.messages import Message
from tollway.records import Rollout
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider
from tollway.session_server.client import Session

HARNESS = "tollway.envs.nemo_gym.agent:ServerAgent"
ROW = {"responses_create_params": {"input": "say ok", "metadata": {"mine": "1"}}, "wanted": "ok"}


class Sessions(ScriptedSessions):
    """Sessions whose model is at ``base``."""

    def __init__(self, base: str) -> None:
        super().__init__(script(Message(role="assistant", content="")))
        self.base = base

    async def create(self, **wishes: object) -> Session:  # type: ignore[override]  # passes all of them on
        made = await super().create(**wishes)  # type: ignore[arg-type]
        return Session(
            session_id=made.session_id, token=f"token-{made.session_id}", base_url=self.base,
            openai_base_url=f"{self.base}/v1", anthropic_base_url=self.base, expires_at=0.0,
        )  # fmt: skip


class Sides:
    """A model and an agent server on one port; the agent makes ``calls`` model calls, then answers with them."""

    def __init__(self) -> None:
        self.calls = 1
        self.url = ""
        self.model_url = ""
        self.seen: list[tuple[str, dict[str, object]]] = []

    async def model(self, asked: web.Request) -> web.Response:
        body = await asked.json()
        self.seen.append((asked.headers["authorization"], body))
        part = {"type": "output_text", "text": "ok"}
        return web.json_response({"output": [{"type": "message", "role": "assistant", "content": [part]}]})

    async def run(self, asked: web.Request) -> web.Response:
        body = await asked.json()
        answer: dict[str, object] = {}
        async with aiohttp.ClientSession() as http:
            for _ in range(self.calls):
                params = {**body["responses_create_params"], "temperature": None}
                async with http.post(f"{self.model_url}/v1/responses", json=params) as response:
                    answer = await response.json()
        return web.json_response({**body, "response": answer, "reward": 0.75})


@pytest.fixture
async def sides() -> AsyncIterator[Sides]:
    made = Sides()
    app = web.Application()
    app.router.add_post("/v1/responses", made.model)
    app.router.add_post("/run", made.run)
    app.router.add_get("/", _fine)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


async def _fine(asked: web.Request) -> web.Response:
    return web.json_response({})


Play = Callable[..., Awaitable[tuple[list[Rollout], Sessions]]]


@pytest.fixture
async def play(sides: Sides, tmp_path: Path) -> AsyncIterator[Play]:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(ROW))
    section = {"agent": "server", "url": sides.url, "data": str(data)}
    config = EnvConfig.model_validate({"harness": HARNESS, "attempts": 1, "name": "nemo-gym", "nemo_gym": section})
    environment = NemoGym(config)
    await environment.open()
    assert environment.relay is not None
    assert environment.relay._runner is not None
    sides.model_url = f"http://127.0.0.1:{environment.relay._runner.addresses[0][1]}"

    async def run(samples: int = 1) -> tuple[list[Rollout], Sessions]:
        sessions = Sessions(sides.url)
        runner = EpisodeRunner(
            config,
            environment=environment,
            harness=open_harness(config, environment),
            sessions=sessions,
            provider=FakeProvider(SandboxConfig()),
        )
        group = await runner.run_group(request(0, samples))
        await runner.aclose()
        return list(group.rollouts), sessions

    yield run
    assert environment.relay.sessions == {}
    await environment.aclose()


async def test_model_calls_of_concurrent_episodes_reach_their_own_sessions(sides: Sides, play: Play) -> None:
    sides.calls = 2
    rollouts, sessions = await play(samples=3)
    assert [(rollout.error, rollout.reward, rollout.turns) for rollout in rollouts] == [(None, 0.75, 2)] * 3
    tokens = [authorization for authorization, _ in sides.seen]
    assert sorted(tokens) == sorted([f"Bearer token-{name}" for name in sessions.opened] * 2)
    for _, body in sides.seen:
        assert body == {"input": "say ok", "metadata": {"mine": "1"}}  # neither the mark nor what was null


async def test_a_server_that_never_calls_our_model_earned_nothing_and_failed(sides: Sides, play: Play) -> None:
    sides.calls = 0
    (rollout,), _ = await play()
    assert rollout.reward is None
    assert rollout.error is not None
    assert "without one call of its model" in rollout.error


async def test_a_call_without_the_mark_of_a_running_episode_is_refused(sides: Sides, play: Play) -> None:
    await play()
    count = len(sides.seen)
    async with aiohttp.ClientSession() as http:
        for body in ({"input": "x"}, {"input": "x", "metadata": {"tollway_episode": "guess"}}, [1], "{"):
            async with http.post(f"{sides.model_url}/v1/responses", json=body) as response:
                assert response.status == 401
    assert len(sides.seen) == count


def test_the_harness_is_for_this_environment_only() -> None:
    config = EnvConfig(name="maths", harness=HARNESS)
    environment = open_environment(config)
    with pytest.raises(ConfigError, match=r"env\.nemo_gym\.agent"):
        open_harness(config, environment)


async def test_a_port_that_is_taken_is_said(sides: Sides, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(ROW))
    taken = int(sides.url.rpartition(":")[2])
    section = {"agent": "server", "url": sides.url, "data": str(data), "model_port": taken}
    with pytest.raises(ConfigError, match="cannot listen"):
        await NemoGym(EnvConfig.model_validate({"nemo_gym": section})).open()
