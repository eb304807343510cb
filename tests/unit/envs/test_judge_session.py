"""The judge against a real session server: its calls reach the engine of its model and leave no open session."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tollway.envs.base import AgentRun, Task, Work
from tollway.envs.judge.config import JudgeConfig
from tollway.envs.judge.grader import JudgeGrader
from tollway.errors import EpisodeFailed, TollwayError
from tollway.messages import Message
from tollway.router.fake import FakeEngine, FakeReply
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider
from tollway.session_server.client import Session, SessionClient
from tollway.session_server.fake import FakeServer

END = 261
"""What ends a reply of the byte family."""


def _says(text: str) -> FakeReply:
    return FakeReply(ids=[*text.encode(), END])


@pytest.fixture
async def judge() -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(lambda request: _says("It is.\nVERDICT: YES"))
    await engine.start()
    yield engine
    await engine.stop()


class Remembering(SessionClient):
    """Knows what it opened."""

    def __init__(self, server: FakeServer) -> None:
        super().__init__(server.url, server.admin_key, http=server.http)
        self.opened: list[str] = []

    async def create(self, **wishes: object) -> Session:  # type: ignore[override]  # passes all of them on
        session = await super().create(**wishes)  # type: ignore[arg-type]
        self.opened.append(session.session_id)
        return session


def _work(sessions: SessionClient) -> Work:
    run = AgentRun(turns=1, submitted=False, finish="stopped", answer="4")
    return Work(submission={}, provider=FakeProvider(SandboxConfig()), run=run, sessions=sessions)


TASK = Task(task_id="t", messages=(Message(role="user", content="2 + 2?"),))


async def test_a_judge_has_its_own_model_and_leaves_a_closed_session(tmp_path: Path, judge: FakeEngine) -> None:
    async with FakeServer(tmp_path) as server:
        sessions = Remembering(server)
        await sessions.add_engine(judge.url, model="judge", frozen=True)
        await server.gateway.router.fleet.wait_serving(10.0, 1, "judge")
        verdict = await JudgeGrader(JudgeConfig()).grade(TASK, _work(sessions))
        assert verdict.reward == 1.0
        assert (len(judge.requests), len(server.engine.requests)) == (1, 0)
        judge.script = lambda request: _says("who knows")
        with pytest.raises(EpisodeFailed, match="no verdict in 2 replies"):
            await JudgeGrader(JudgeConfig(asks=2)).grade(TASK, _work(sessions))
        assert (len(judge.requests), len(server.engine.requests)) == (3, 0)
        first, second = sessions.opened
        assert (await sessions.session(first))["state"] == "closed"
        with pytest.raises(TollwayError):
            await sessions.session(second)


async def test_without_an_engine_of_the_judges_model_the_episode_fails_and_is_no_reward(tmp_path: Path) -> None:
    async with FakeServer(tmp_path, settings={"engine_wait_s": 0.2}) as server:
        sessions = Remembering(server)
        with pytest.raises(TollwayError):
            await JudgeGrader(JudgeConfig(timeout_s=5.0)).grade(TASK, _work(sessions))
        assert server.engine.requests == []
