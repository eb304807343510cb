"""OpenEnv over its socket, against a server of our own that speaks its frames: every answer and every failure."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import pytest
from aiohttp import WSMsgType, web

from tollway.envs.base import AgentRun, Work
from tollway.envs.config import EnvConfig
from tollway.envs.openenv.environment import OpenEnv
from tollway.envs.openenv.tools import OpenEnvTools
from tollway.errors import CapacityExceeded, ComponentLost, ConfigError, EpisodeFailed, NotFound
from tollway.messages import ToolCall
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider

SCHEMA = {
    "type": "object",
    "properties": {"move": {"type": "string"}, "metadata": {"type": "object"}},
    "required": ["move"],
    "description": "A move.",
}
TOOL = {
    "name": "add",
    "description": "Add.",
    "inputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}},
}
Frame = Mapping[str, object]


def seen(content: object, reward: object = None, done: object = False) -> Frame:
    """An observation frame."""
    return {"type": "observation", "data": {"observation": content, "reward": reward, "done": done}}


def wrong(code: str, message: str = "no") -> Frame:
    """An error frame."""
    return {"type": "error", "data": {"code": code, "message": message}}


class Server:
    """Answers by ``on``: kind of frame to the frame sent back, or text, or ``None`` to close the socket."""

    def __init__(self) -> None:
        self.on: dict[str, Callable[[Frame], object]] = {
            "reset": lambda data: seen({"text": "ready"}, 0.0),
            "step": lambda data: seen({"text": json.dumps(data)}, 0.5),
            "mcp": lambda data: {"type": "mcp", "data": {"error": {"code": -32601}}},
        }
        self.frames: list[tuple[str, Frame]] = []
        self.open = 0
        self.most_open = 0
        self.full = 0
        self.api: dict[str, object] = {}
        self.url = ""

    async def socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.full > 0:
            self.full -= 1
            await socket.close()
            return socket
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    break
                frame = json.loads(message.data)
                self.frames.append((frame["type"], frame.get("data", {})))
                if frame["type"] == "close":
                    break
                answer = self.on[frame["type"]](frame.get("data", {}))
                if answer is None:
                    break
                if isinstance(answer, Awaitable):
                    answer = await answer
                await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        finally:
            self.open -= 1
        return socket

    async def plain(self, request: web.Request) -> web.Response:
        answer = self.api.get(request.path)
        if answer is None:
            return web.json_response({"detail": "no"}, status=404)
        return web.json_response(answer)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    made.api = {"/health": {"status": "healthy"}, "/schema": {"action": SCHEMA}}
    app = web.Application()
    app.router.add_get("/ws", made.socket)
    app.router.add_route("*", "/{path:.*}", made.plain)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


@pytest.fixture
async def opened(server: Server) -> AsyncIterator[Callable[..., Awaitable[OpenEnv]]]:
    made: list[OpenEnv] = []

    async def make(split: str = "train", **fields: object) -> OpenEnv:
        config = EnvConfig.model_validate({"name": "openenv", "split": split, "openenv": {"url": server.url, **fields}})
        environment = OpenEnv(config)
        made.append(environment)
        await environment.open()
        return environment

    yield make
    for environment in made:
        await environment.aclose()


def _tools(environment: OpenEnv, index: int = 0) -> OpenEnvTools:
    tools = environment.toolset(environment.task(index), None)
    assert isinstance(tools, OpenEnvTools)
    return tools


async def _grade(environment: OpenEnv, tools: OpenEnvTools) -> float:
    task = environment.task(0)
    run = AgentRun(turns=1, submitted=False, finish="stopped")
    work = Work(submission={}, provider=FakeProvider(SandboxConfig()), run=run, tools=tools)
    return (await environment.grader(task).grade(task, work)).reward


async def test_an_environment_without_tools_gets_one_whose_arguments_are_its_action(
    server: Server, opened: Callable[..., Awaitable[OpenEnv]]
) -> None:
    environment = await opened(instruction="Play.", reset={"level": 3})
    tools = _tools(environment)
    (opening,) = await tools.open()
    assert opening.content == "ready"
    (spec,) = tools.specs
    assert (spec.name, spec.description) == ("step", "A move.")
    assert json.loads(spec.parameters)["properties"] == {"move": {"type": "string"}}
    answer = await tools.call(ToolCall("1", "step", '{"move": "a1"}'))
    assert (answer.text, answer.ends) == ('{"move": "a1"}', False)
    server.on["step"] = lambda data: seen({"text": "won"}, 2, True)
    assert (await tools.call(ToolCall("2", "step", '{"move": "b2"}'))).ends
    assert (await tools.call(ToolCall("3", "step", '{"move": "c3"}'))).text == "the episode is over"
    await tools.aclose()
    assert await _grade(environment, tools) == 2.5
    assert tools.facts["steps"] == 2.0
    assert environment.task(0).messages[-1].content == "Play."
    assert ("reset", {"level": 3, "seed": 0}) in server.frames
    assert server.frames[-1][0] == "close"


async def test_mcp_tools_are_offered_and_called_by_step(
    server: Server, opened: Callable[..., Awaitable[OpenEnv]]
) -> None:
    server.on["mcp"] = lambda data: {"type": "mcp", "data": {"result": {"tools": [TOOL]}}}
    results: list[Frame] = [
        {"tool_name": "add", "result": {"content": [{"type": "text", "text": "5"}], "is_error": False}, "error": None},
        {"tool_name": "add", "result": {"content": [{"type": "text", "text": "bad"}], "is_error": True}, "error": None},
        {"tool_name": "add", "result": None, "error": {"error_type": "tool_not_found", "message": "Unknown tool"}},
    ]
    server.on["step"] = lambda data: seen(results.pop(0))
    tools = _tools(await opened())
    await tools.open()
    assert [spec.name for spec in tools.specs] == ["add"]
    texts = [(await tools.call(ToolCall("1", "add", '{"n": 2}'))).text for _ in range(3)]
    assert texts == ["5", "error: bad", "error: Unknown tool"]
    assert server.frames[-1] == ("step", {"type": "call_tool", "tool_name": "add", "arguments": {"n": 2}})
    for name, arguments in (("nope", "{}"), ("add", "[1]"), ("add", "{")):
        assert (await tools.call(ToolCall("1", name, arguments))).text.startswith("error: ")
    assert tools.facts["bad_calls"] == 3.0
    assert tools.reward == 0.0
    await tools.aclose()


async def test_a_full_server_is_tried_again_and_at_last_is_capacity(
    server: Server, opened: Callable[..., Awaitable[OpenEnv]]
) -> None:
    environment = await opened(capacity_timeout_s=5)
    server.full = 2
    tools = _tools(environment)
    await tools.open()
    await tools.aclose()
    impatient = await opened(capacity_timeout_s=0.05)
    server.full = 10**6
    with pytest.raises(CapacityExceeded, match="closed before its first frame"):
        await _tools(impatient).open()
    server.full = 0
    server.on["reset"] = lambda data: wrong("CAPACITY_REACHED", "8 of 8")
    with pytest.raises(CapacityExceeded, match="8 of 8"):
        await _tools(impatient).open()
    assert server.open == 0


async def test_one_socket_per_episode_and_none_is_left(
    server: Server, opened: Callable[..., Awaitable[OpenEnv]]
) -> None:
    environment = await opened()
    all_tools = [_tools(environment, index) for index in range(8)]
    await asyncio.gather(*(tools.open() for tools in all_tools))
    assert server.open == 8
    await asyncio.gather(*(tools.aclose() for tools in all_tools))
    async with asyncio.timeout(5):
        while server.open:
            await asyncio.sleep(0.005)
    seeds = sorted(data["seed"] for kind, data in server.frames if kind == "reset")  # type: ignore[type-var]
    assert seeds == list(range(8))


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (None, "socket is gone"),
        ("{", "no JSON"),
        ("[1]", "list"),
        ({"type": "state", "data": {}}, "'state' frame"),
        (seen({}, float("nan")), "reward of nan"),
        (seen({}, "much"), "reward of 'much'"),
        (seen({}, 1.0, "yes"), "done = 'yes'"),
        (wrong("EXECUTION_ERROR", "boom"), "EXECUTION_ERROR: boom"),
    ],
)
async def test_what_breaks_in_a_step_is_infrastructure_and_typed(
    server: Server, opened: Callable[..., Awaitable[OpenEnv]], answer: object, complaint: str
) -> None:
    tools = _tools(await opened())
    await tools.open()
    server.on["step"] = lambda data: answer
    with pytest.raises(EpisodeFailed, match=complaint):
        await tools.call(ToolCall("1", "step", '{"move": "a"}'))
    await tools.aclose()


async def test_actions_that_do_not_fit_are_told_and_exceptions_only_when_asked(
    server: Server, opened: Callable[..., Awaitable[OpenEnv]]
) -> None:
    tools = _tools(await opened(step_errors="tell"))
    await tools.open()
    for code in ("VALIDATION_ERROR", "EXECUTION_ERROR"):
        server.on["step"] = lambda data, code=code: wrong(code, "not so")  # type: ignore[misc]
        assert (await tools.call(ToolCall("1", "step", "{}"))).text == f"error: {code}: not so"
    await tools.aclose()


async def test_a_model_is_told_which_field_of_its_action_is_wrong(
    server: Server, opened: Callable[..., Awaitable[OpenEnv]]
) -> None:
    tools = _tools(await opened())
    await tools.open()
    problem = {"type": "int_parsing", "loc": ["number"], "msg": "a number is wanted", "input": "x"}
    refusal = {"code": "VALIDATION_ERROR", "message": "Invalid message", "errors": [problem]}
    server.on["step"] = lambda data: {"type": "error", "data": refusal}
    answer = await tools.call(ToolCall("1", "step", '{"number": "x"}'))
    assert answer.text == "error: VALIDATION_ERROR: Invalid message; number: a number is wanted"
    await tools.aclose()


async def test_a_silent_server_is_given_up(server: Server, opened: Callable[..., Awaitable[OpenEnv]]) -> None:
    environment = await opened(step_timeout_s=0.1)
    tools = _tools(environment)
    await tools.open()
    server.on["step"] = lambda data: asyncio.sleep(1, seen({}))
    with pytest.raises(EpisodeFailed, match=r"step_timeout_s = 0\.1"):
        await tools.call(ToolCall("1", "step", '{"move": "a"}'))
    await tools.aclose()


async def test_rewards_out_of_the_configured_range_are_refused(
    server: Server, opened: Callable[..., Awaitable[OpenEnv]]
) -> None:
    environment = await opened(lowest=0.0, highest=1.0)
    tools = _tools(environment)
    server.on["reset"] = lambda data: seen({"text": "x"}, 7.0)
    await tools.open()
    await tools.aclose()
    with pytest.raises(EpisodeFailed, match=r"outside of 0\.0 to 1\.0"):
        await _grade(environment, tools)


async def test_the_servers_tasks_and_splits_are_used_where_it_has_them(
    server: Server, opened: Callable[..., Awaitable[OpenEnv]]
) -> None:
    server.api |= {
        "/list_environments": ["chess"],
        "/chess/splits": [{"name": "openings", "type": "train"}, {"name": "ends", "type": "test"}],
        "/chess/tasks": {"tasks": [{"instruction": "Mate in 1."}, {"instruction": "Mate in 2."}, {"id": "x"}]},
    }
    environment = await opened(instruction="You are White.")
    assert environment.size == 3
    ids = {environment.task(index).task_id for index in range(3)}
    assert ids == {f"openenv/openings/{at}" for at in range(3)}
    assert environment.find("openenv/openings/1").messages[0].content == "You are White.\n\nMate in 2."
    tools = environment.toolset(environment.find("openenv/openings/1"), None)
    await tools.open()
    await tools.aclose()
    assert ("reset", {"split": "openings", "index": 1}) in server.frames
    heldout = await opened(split="heldout")
    assert heldout.task(0).task_id.startswith("openenv/ends/")
    for wanted in ("openenv/openings/3", "openenv/ends/0", "x"):
        with pytest.raises(NotFound):
            environment.find(wanted)
    with pytest.raises(ConfigError, match="no split 'middle'"):
        await opened(train_split="middle")


async def test_seeds_of_the_splits_are_apart_and_repeat_after_the_configured_number(
    server: Server, opened: Callable[..., Awaitable[OpenEnv]]
) -> None:
    environment = await opened(split="heldout", tasks=5)
    assert len({environment.task(index).task_id for index in range(50)}) == 5
    tools = _tools(environment)
    await tools.open()
    await tools.aclose()
    assert server.frames[0][1]["seed"] >= 1 << 30  # type: ignore[operator]


@pytest.mark.parametrize("fields", [{}, {"url": "http://x", "command": ["x", "{port}"]}, {"command": ["true"]}])
async def test_a_server_is_named_or_started_never_both(fields: Mapping[str, object]) -> None:
    environment = OpenEnv(EnvConfig.model_validate({"openenv": fields}))
    with pytest.raises(ConfigError, match=r"env\.openenv"):
        await environment.open()


async def test_a_program_that_ends_or_stays_silent_is_reported_with_its_last_words() -> None:
    for program, complaint in (("print('no module'); raise SystemExit(4)", "ended with 4:\nno module"),):
        command = [sys.executable, "-c", program, "{port}"]
        environment = OpenEnv(EnvConfig.model_validate({"openenv": {"command": command}}))
        with pytest.raises(ComponentLost, match=complaint):
            await environment.open()
    silent = [sys.executable, "-c", "import time; print('hm', flush=True); time.sleep(60)", "{port}"]
    config = EnvConfig.model_validate({"openenv": {"command": silent, "ready_timeout_s": 1.0}})
    with pytest.raises(ComponentLost, match="not ready after 1 s"):
        await OpenEnv(config).open()
