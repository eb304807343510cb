"""NeMo Gym's HTTP side against a server of our own: sessions by cookie, tools by path, verdicts and failures."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web

from tollway.envs.base import AgentRun, Verdict, Work
from tollway.envs.config import EnvConfig
from tollway.envs.nemo_gym.environment import NemoGym
from tollway.envs.nemo_gym.wire import read_rows
from tollway.errors import ComponentLost, ConfigError, EpisodeFailed, NotFound
from tollway.messages import ToolCall
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider

TOOL = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}, "strict": True}
PARAMS = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "add"}]}], "tools": [TOOL]}
ROWS = [
    {"responses_create_params": {**PARAMS, "instructions": "Be brief."}, "start": 1, "wanted": 3},
    {"responses_create_params": {"input": "only say it"}, "start": 5, "wanted": 5},
]


class Server:
    """Counts per session; a session is a cookie."""

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}
        self.verified: list[dict[str, object]] = []
        self.verdict: Callable[[bool], object] = lambda right: {"reward": float(right), "depth": 2}
        self.status = 200
        self.url = ""
        self._names = itertools.count()

    async def seed(self, request: web.Request) -> web.Response:
        if self.status != 200:
            return web.json_response({"detail": "no"}, status=self.status)
        name = f"s{next(self._names)}"
        self.sums[name] = (await request.json())["start"]
        response = web.json_response({})
        response.set_cookie("session", name)
        return response

    async def add(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "n" not in body:
            return web.json_response({"detail": "n is missing"}, status=422)
        self.sums[request.cookies["session"]] += body["n"]
        return web.json_response({"sum": self.sums[request.cookies["session"]]})

    async def verify(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.verified.append(body)
        right = self.sums[request.cookies["session"]] == body["wanted"]
        verdict = self.verdict(right)
        if isinstance(verdict, dict):
            return web.json_response({**body, **verdict})
        return web.Response(text=str(verdict))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_post("/seed_session", made.seed)
    app.router.add_post("/add", made.add)
    app.router.add_post("/verify", made.verify)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


@pytest.fixture
async def environment(server: Server, tmp_path: Path) -> AsyncIterator[NemoGym]:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    made = NemoGym(EnvConfig.model_validate({"nemo_gym": {"url": server.url, "data": str(data)}}))
    await made.open()
    yield made
    await made.aclose()


async def _play(environment: NemoGym, index: int, *steps: int, answer: str = "done") -> Verdict:
    task = environment.find(f"nemo-gym/train/{index}")
    tools = environment.toolset(task, None)
    await tools.open()
    for at, step in enumerate(steps):
        await tools.call(ToolCall(f"c{at}", "add", json.dumps({"n": step})))
    await tools.aclose()
    run = AgentRun(turns=1, submitted=False, finish="stopped", answer=answer)
    work = Work(submission={}, provider=FakeProvider(SandboxConfig()), run=run, tools=tools)
    return await environment.grader(task).grade(task, work)


async def test_an_episode_is_seeded_worked_on_by_path_and_verified(server: Server, environment: NemoGym) -> None:
    assert [message.content for message in environment.find("nemo-gym/train/0").messages] == ["Be brief.", "add"]
    right = await _play(environment, 0, 1, 1, answer="3")
    assert (right.reward, right.facts["verify_depth"], right.facts["calls"]) == (1.0, 2.0, 2.0)
    (sent,) = server.verified
    items = sent["response"]["output"]  # type: ignore[index]
    kinds = ["function_call", "function_call_output"] * 2 + ["message"]
    assert [item["type"] for item in items] == kinds
    assert items[1] == {"type": "function_call_output", "call_id": "c0", "output": '{"sum": 2}'}
    assert items[-1]["content"][0]["text"] == "3"
    assert (await _play(environment, 0, 7)).reward == 0.0
    assert (await _play(environment, 1)).reward == 1.0


async def test_concurrent_episodes_have_sessions_of_their_own(environment: NemoGym) -> None:
    verdicts = await asyncio.gather(*(_play(environment, 0, step, 2 - step) for step in range(6)))
    assert [verdict.reward for verdict in verdicts] == [1.0] * 6


async def test_calls_that_make_no_sense_are_answered_and_reach_no_other_route(
    server: Server, environment: NemoGym
) -> None:
    tools = environment.toolset(environment.find("nemo-gym/train/0"), None)
    await tools.open()
    for name, arguments in (("verify", "{}"), ("../verify", "{}"), ("seed_session", '{"start": 3}'), ("add", "{")):
        assert "error" in (await tools.call(ToolCall("1", name, arguments))).text
    assert "n is missing" in (await tools.call(ToolCall("1", "add", "{}"))).text
    assert tools.facts["bad_calls"] == 5.0
    assert server.verified == []
    assert len(server.sums) == 1


@pytest.mark.parametrize(
    ("verdict", "complaint"),
    [
        ({"reward": None}, "reward of None"),
        ({"reward": True}, "reward of True"),
        ({"reward": "1"}, "reward of '1'"),
        ('{"reward": NaN}', "reward of nan"),
        ("[1]", "verdict is a list"),
        ("nope", "no JSON"),
    ],
)
async def test_a_verdict_without_a_number_is_infrastructure(
    server: Server, environment: NemoGym, verdict: object, complaint: str
) -> None:
    server.verdict = lambda right: verdict
    with pytest.raises(EpisodeFailed, match=complaint):
        await _play(environment, 1)


async def test_a_server_that_refuses_or_is_gone_is_infrastructure(server: Server, environment: NemoGym) -> None:
    server.status = 500
    with pytest.raises(EpisodeFailed, match="/seed_session with 500"):
        await _play(environment, 0)
    server.status = 200
    closed = EnvConfig.model_validate(
        {"nemo_gym": {"url": "http://127.0.0.1:9", "ready_timeout_s": 0.3, "data": str(_rows_file(environment))}}
    )
    with pytest.raises(ComponentLost, match="not ready after"):
        await NemoGym(closed).open()


def _rows_file(environment: NemoGym) -> Path:
    path = environment._gym.data
    assert path is not None
    return path


def test_a_wrong_line_of_data_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    for line, complaint in {
        "{": "is not JSON",
        "{}": "no responses_create_params.input",
        '{"responses_create_params": {"input": []}}': "want text or items",
        '{"responses_create_params": {"input": [{"type": "function_call"}]}}': "no message of text",
        '{"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}}': "no text",
        '{"responses_create_params": {"input": "x", "tools": [{"type": "web_search"}]}}': "no function",
    }.items():
        path.write_text(json.dumps(ROWS[1]) + "\n" + line)
        with pytest.raises(ConfigError, match="line 2") as caught:
            read_rows(path)
        assert complaint in str(caught.value)
    path.write_text("")
    for missing, complaint in ((path, "no lines"), (tmp_path / "x", "cannot read"), (None, "is not set")):
        with pytest.raises(ConfigError, match=complaint):
            read_rows(missing)


async def test_an_unknown_task_is_not_found(environment: NemoGym) -> None:
    for name in ("nemo-gym/train/2", "nemo-gym/heldout/0", "nemo-gym/train/x", ""):
        with pytest.raises(NotFound, match="2 in all"):
            environment.find(name)
