"""The general coding tools: real work in real sandboxes, words for every misuse, errors only for infrastructure."""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import Sequence

import pytest
from episode_helpers import SAMPLING, ScriptedSessions, calls, script
from hypothesis import given, settings
from hypothesis import strategies as st

from tollway.envs.base import Environment, Grader, Task, Toolset
from tollway.envs.config import EnvConfig
from tollway.envs.cutting import cut_middle
from tollway.envs.episode import Episode
from tollway.envs.grading import HiddenCalls
from tollway.envs.harnesses.tool_loop import ToolLoop
from tollway.envs.runner import EpisodeRunner
from tollway.envs.tools import MAX_COMMAND_BYTES, TOOLS, CodingTools, shown
from tollway.errors import SandboxError, SandboxGone
from tollway.messages import Message, ToolCall
from tollway.sandboxes.base import ExecResult, Sandbox, SandboxProvider, SandboxSpec
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider
from tollway.sandboxes.local import LocalProvider

SPEC = SandboxSpec(ttl_s=120, labels={"t": "t"}, files={"a.py": b"one\ntwo\ntwo\n", "dir/crlf.txt": b"x\r\ny\r\n"})


async def _tools(provider: SandboxProvider, **limits: float) -> CodingTools:
    return CodingTools(await provider.create(SPEC), **limits)  # type: ignore[arg-type]


async def _say(tools: CodingTools, name: str, **arguments: object) -> str:
    answer = await tools.call(ToolCall("c", name, json.dumps(arguments)))
    assert not answer.ends
    return answer.text


async def test_an_agent_looks_edits_runs_and_submits(local: LocalProvider) -> None:
    tools = await _tools(local, timeout_s=20)
    assert await _say(tools, "read", path="a.py") == "     1\tone\n     2\ttwo\n     3\ttwo"
    assert await _say(tools, "edit", path="a.py", old="one\ntwo", new="ONE\n2") == "edited a.py"
    assert await _say(tools, "bash", command="cat a.py; pwd -P") == "ONE\n2\ntwo\n/workspace"
    assert await _say(tools, "edit", path="new/run.sh", old="", new="#!/bin/sh\necho hi\n") == "created new/run.sh"
    assert await _say(tools, "bash", command="chmod 755 new/run.sh && new/run.sh") == "hi"
    assert await _say(tools, "edit", path="/workspace/new/run.sh", old="hi", new="ho") == "edited new/run.sh"
    assert await _say(tools, "bash", command="new/run.sh") == "ho", "it can still be run"
    answer = await tools.call(ToolCall("c", "submit", "{}"))
    assert (answer.text, answer.ends) == ("submitted", True)
    facts = tools.facts
    assert (facts["bash_calls"], facts["edits"], facts["reads"], facts["bad_calls"]) == (3, 3, 1, 0)
    assert facts["tool_s"] > 0


async def test_how_a_command_ended_is_said_in_words(local: LocalProvider) -> None:
    tools = await _tools(local, timeout_s=20, max_output=400)
    assert await _say(tools, "bash", command="true") == "[no output]"
    assert await _say(tools, "bash", command="echo out; echo err >&2; exit 3") == "out\n[stderr]\nerr\n[exit code 3]"
    assert await _say(tools, "bash", command="echo begun; sleep 30", timeout=0.3) == "begun\n[stopped after 0.3 s]"
    assert await _say(tools, "bash", command=r"printf 'a\226\000b'") == "a\\x96\x00b"
    long = await _say(tools, "bash", command="seq 1 100000")
    assert len(long) <= 400
    assert long.startswith("1\n2\n")
    assert long.endswith("100000")
    assert "bytes left out" in long
    assert tools.facts["tool_timeouts"] == 1
    assert "cannot be" not in await _say(tools, "bash", command="kill -9 $$")


async def test_reading_shows_parts_and_says_what_is_no_text(local: LocalProvider) -> None:
    tools = await _tools(local, timeout_s=5)
    await _say(tools, "bash", command="seq 1 5000 > long; printf 'a\\000b' > bin; : > empty; ln -s a.py link; mkfifo p")
    assert (await _say(tools, "read", path="long", start=3, lines=2)).endswith("4\n[lines 3 to 4 of 5000]")
    assert "[lines 1 to 2000 of 5000]" in await _say(tools, "read", path="long", lines=99999)
    assert "is no text: 3 bytes" in await _say(tools, "read", path="bin")
    assert await _say(tools, "read", path="empty") == "empty is empty"
    assert "     1\tone" in await _say(tools, "read", path="link")
    assert "error" in await _say(tools, "read", path="long", start=9999)
    assert "root" in await _say(tools, "read", path="/etc/passwd") or "error" in await _say(
        tools, "read", path="/etc/passwd"
    )
    for odd in ("missing", "dir", "../../etc/shadow", "-n"):
        assert (await _say(tools, "read", path=odd)).startswith("error: "), odd
    assert "no regular file" in await _say(CodingTools(tools._sandbox, timeout_s=0.5), "read", path="p")


async def test_an_edit_that_cannot_be_made_says_why_and_changes_nothing(local: LocalProvider) -> None:
    tools = await _tools(local, timeout_s=20)
    await _say(tools, "bash", command="ln -s /etc/passwd out; ln -s nowhere dangling")
    for words, arguments in (
        ("occurs 2 times", {"path": "a.py", "old": "two", "new": "x"}),
        ("is not in a.py", {"path": "a.py", "old": "three", "new": "x"}),
        ("lines end in", {"path": "dir/crlf.txt", "old": "x\ny", "new": "z"}),
        ("not empty", {"path": "a.py", "old": "", "new": "x"}),
        ("same text", {"path": "a.py", "old": "one", "new": "one"}),
        ("creates a file", {"path": "b.py", "old": "x", "new": "y"}),
        ("outside the workspace", {"path": "/etc/hosts", "old": "x", "new": "y"}),
        ("error", {"path": "../x", "old": "", "new": "y"}),
        ("error", {"path": "out", "old": "root", "new": "y"}),
        ("no regular file", {"path": "dangling", "old": "", "new": "y"}),
        ("no regular file", {"path": "dir", "old": "", "new": "y"}),
    ):
        said = await _say(tools, "edit", **arguments)
        assert said.startswith("error: "), arguments
        assert words in said, (said, arguments)
    assert await _say(tools, "bash", command="cat a.py; ls") == "one\ntwo\ntwo\na.py\ndangling\ndir\nout"
    assert tools.facts["edits"] == 0


BAD = [
    ("nope", "{}"),
    ("", ""),
    ("submit", '{"now": 1}'),
    ("bash", ""),
    ("bash", "[]"),
    ("bash", "{"),
    ("bash", '{"command": 3}'),
    ("bash", '{"command": " "}'),
    ("bash", '{"command": "ls", "cwd": "/"}'),
    ("bash", '{"command": "ls", "timeout": -1}'),
    ("bash", '{"command": "ls", "timeout": NaN}'),
    ("bash", '{"command": "ls", "timeout": true}'),
    ("bash", '{"command": "ls \\u0000"}'),
    ("bash", '{"command": "ls \\ud800"}'),
    ("bash", json.dumps({"command": "x" * (MAX_COMMAND_BYTES + 1)})),
    ("bash", "[" * 100_000),
    ("read", '{"path": "a.py", "start": 0}'),
    ("read", '{"path": "a.py", "lines": 1.5}'),
    ("read", '{"path": ""}'),
    ("read", '{"path": "a\\u0000"}'),
    ("edit", '{"path": "a.py", "old": "x"}'),
    ("edit", '{"path": "\\udfff", "old": "", "new": ""}'),
]


@pytest.mark.parametrize(("name", "arguments"), BAD, ids=range(len(BAD)))
async def test_a_call_that_makes_no_sense_is_answered(name: str, arguments: str) -> None:
    async with FakeProvider(SandboxConfig()) as provider:
        tools = await _tools(provider)
        answer = await tools.call(ToolCall("c", name, arguments))
        assert answer.text.startswith("error: ")
        assert not answer.ends
        assert tools.facts["bad_calls"] == 1
        assert tools.facts["bash_calls"] == 0


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(["bash", "read", "edit"]) | st.text(max_size=6)
KEYS = st.sampled_from(["command", "timeout", "path", "start", "lines", "old", "new"]) | st.text(max_size=4)
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=4).map(json.dumps) | st.text(max_size=40)


@given(said=st.lists(st.tuples(NAMES, ARGUMENTS), max_size=5))
@settings(max_examples=150, deadline=None)
async def test_nothing_that_a_model_can_send_raises(said: list[tuple[str, str]]) -> None:
    async with FakeProvider(SandboxConfig()) as provider:
        tools = await _tools(provider, max_output=200)
        for name, arguments in said:
            answer = await tools.call(ToolCall("c", name, arguments))
            assert len(answer.text.encode()) <= 200


@pytest.mark.parametrize(("name", "where"), [("bash", "exec"), ("read", "read"), ("edit", "read"), ("edit", "write")])
async def test_a_broken_sandbox_is_raised_and_not_told_to_the_model(name: str, where: str) -> None:
    arguments = {
        "bash": {"command": "true"},
        "read": {"path": "a.py"},
        "edit": {"path": "a.py", "old": "one", "new": "1"},
    }
    for error in (SandboxError("unreachable"), SandboxGone("evicted")):
        async with FakeProvider(SandboxConfig()) as provider:
            tools = await _tools(provider)
            setattr(provider.faults, where, deque([error]))
            with pytest.raises(type(error), match=str(error)):
                await tools.call(ToolCall("c", name, json.dumps(arguments[name])))


@given(text=st.text(max_size=400), limit=st.integers(0, 120))
@settings(max_examples=300, deadline=None)
def test_text_is_cut_to_its_limit_and_keeps_both_ends(text: str, limit: int) -> None:
    cut = cut_middle(text, limit)
    assert len(cut.encode()) <= limit
    if len(text.encode("utf-8", "surrogatepass")) <= limit:
        assert cut == text


def test_any_bytes_are_shown_within_the_limit() -> None:
    rng = random.Random(1)
    for size in (0, 1, 50, 5000):
        done = ExecResult(
            exit_code=137, stdout=rng.randbytes(size), stderr=rng.randbytes(size), oom=True, truncated=True
        )
        text = shown(done, 300, limit_s=1)
        assert len(text.encode()) <= 300
        assert text.endswith("[more output was dropped]\n[killed: out of memory]")


def test_schemas_are_objects_that_allow_nothing_else() -> None:
    assert [tool.name for tool in TOOLS] == ["bash", "read", "edit", "submit"]
    for tool in TOOLS:
        schema = json.loads(tool.parameters)
        assert schema["additionalProperties"] is False
        assert set(schema["required"]) <= set(schema["properties"])


class Sums(Environment):
    """One task: make ``add`` add."""

    name = "sums"
    size = 1

    def task(self, index: int) -> Task:
        return Task(
            task_id="sums/0",
            messages=(Message(role="user", content="add() is wrong"),),
            files={"sums.py": b"def add(a, b):\n    return a - b\n"},
            sources=("sums.py",),
        )

    def toolset(self, task: Task, sandbox: Sandbox | None) -> Toolset:
        assert sandbox is not None
        return CodingTools(sandbox, timeout_s=20)

    def grader(self, task: Task) -> Grader:
        return HiddenCalls(module="sums", function="add", cases=[((2, 3), 5)])


RIGHT = ("edit", {"path": "sums.py", "old": "a - b", "new": "a + b"})
CHECK = ("bash", {"command": "python3 -c 'import sums; print(sums.add(2, 3))'"})


async def _run(provider: SandboxProvider, *replies: Message) -> tuple[Episode, list[str]]:
    """One episode of ``Sums`` with these replies, and what the model was shown."""
    sessions = ScriptedSessions(script(*replies))
    config = EnvConfig(max_turns=8, attempts=1)
    environment = Sums()
    runner = EpisodeRunner(
        config,
        environment=environment,
        harness=ToolLoop(config, environment),
        sessions=sessions,
        provider=provider,
    )
    (episode,) = await runner.run_task(environment.task(0), group_id="g", samples=1, sampling=SAMPLING)
    await runner.aclose()
    assert sessions.unfinished == set()
    return episode, [message.content for message in sessions.seen["s0"] if message.role == "tool"]


async def test_a_tool_loop_with_coding_tools_repairs_a_program(local: LocalProvider) -> None:
    episode, told = await _run(local, calls(CHECK), calls(RIGHT, CHECK), calls(("submit", {})))
    assert told == ["-1", "edited sums.py", "5"]
    assert episode.rollout().reward == 1.0
    assert episode.rollout().facts["bash_calls"] == 2.0
    assert local.live == 0


async def test_any_change_that_repairs_nothing_earns_nothing(local: LocalProvider) -> None:
    """A difference is no repair, and what was changed beside the sources is not looked at."""
    for edit in (
        ("edit", {"path": "sums.py", "old": "a - b", "new": "a * b"}),
        ("edit", {"path": "sums.py", "old": "def add", "new": "def (("}),
        ("edit", {"path": "conftest.py", "old": "", "new": "import sums\nsums.add = lambda a, b: a + b\n"}),
        ("bash", {"command": "rm sums.py"}),
    ):
        episode, _ = await _run(local, calls(edit), calls(("submit", {})))
        assert episode.failure is None
        assert episode.rollout().reward == 0.0


async def test_a_sandbox_that_ends_in_the_middle_is_infrastructure(local: LocalProvider) -> None:
    async def kill(_: object) -> None:
        (info,) = await local.list()
        await (await local.attach(info.id)).kill()

    killed: list[asyncio.Task[None]] = []

    def policy(messages: Sequence[Message]) -> Message:
        killed.append(asyncio.create_task(kill(messages)))
        return calls(("bash", {"command": "sleep 20"}))

    sessions = ScriptedSessions(policy)
    config = EnvConfig(attempts=1)
    runner = EpisodeRunner(
        config, environment=Sums(), harness=ToolLoop(config, Sums()), sessions=sessions, provider=local
    )
    (episode,) = await runner.run_task(Sums().task(0), group_id="g", samples=1, sampling=SAMPLING)
    await asyncio.gather(*killed)
    await runner.aclose()
    assert episode.rollout().reward is None
    assert str(episode.failure).startswith("sandbox_")
    assert sessions.rewards == {}
