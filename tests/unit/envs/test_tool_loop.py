"""The tool loop and micro-SWE's tools: every call is answered, limits hold, blanks hide exactly the text."""

from __future__ import annotations

import json

import pytest
from episode_helpers import ScriptedSessions, calls, repair, request, runner, script

from tollway.envs.micro_swe.environment import CHECK_COMMAND, TOOLS, MicroSweTools, check_text
from tollway.envs.micro_swe.projects import project_at
from tollway.envs.micro_swe.rules import RULES, edit_command
from tollway.messages import Message, ToolCall
from tollway.sandboxes.base import ExecResult, SandboxSpec
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.fake import FakeProvider, Process
from tollway.sandboxes.local import LocalProvider


async def _tools(provider: FakeProvider) -> tuple[MicroSweTools, list[list[str]]]:
    ran: list[list[str]] = []

    async def record(process: Process) -> int:
        ran.append(list(process.argv))
        process.stdout += b"KeyError at calc.py:7\n"
        return 1

    provider.programs |= {"python3": record, "sed": record}
    sandbox = await provider.create(SandboxSpec(ttl_s=60, labels={"t": "t"}))
    return MicroSweTools(sandbox, "calc.py", timeout_s=5), ran


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("edit", '{"rule": "nope"}'),
        ("edit", "{}"),
        ("edit", '{"rule": 3}'),
        ("edit", '{"rule": ["cast"]}'),
        ("edit", '{"rule": "cast", "more": 1}'),
        ("edit", '{"rule": "cast"'),
        ("edit", '"cast"'),
        ("run", '{"now": true}'),
        ("run", "[]"),
        ("submit", '{"x": 1}'),
        ("rm -rf", "{}"),
        ("", ""),
    ],
)
async def test_calls_that_make_no_sense_are_answered_and_run_nothing(name: str, arguments: str) -> None:
    async with FakeProvider(SandboxConfig()) as provider:
        tools, ran = await _tools(provider)
        answer = await tools.call(ToolCall("c", name, arguments))
        assert (answer.text, answer.ends) == ("bad call", False)
        assert ran == []
        assert tools.facts["bad_calls"] == 1.0
        assert tools.facts["edits"] == 0.0


async def test_each_tool_call_is_one_command_and_one_edit_is_allowed() -> None:
    async with FakeProvider(SandboxConfig()) as provider:
        tools, ran = await _tools(provider)
        assert (await tools.call(ToolCall("c", "edit", '{"rule":"cast"}'))).text == "applied"
        assert (await tools.call(ToolCall("c", "run", ""))).text == "KeyError at calc.py:7"
        assert (await tools.call(ToolCall("c", "edit", '{"rule":"guard"}'))).text == "no edits left"
        assert ran == [edit_command(RULES["cast"], "calc.py"), list(CHECK_COMMAND)]
        assert tools.facts["ran_checks"] == 0.0, "it ran only after its edit"
        assert (await tools.call(ToolCall("c", "submit", "{}"))).ends


async def test_an_edit_that_finds_no_site_uses_the_edit_up(local: LocalProvider) -> None:
    project = project_at(0, "train", 3)
    source = project.files[project.path]
    without = next(name for name, rule in RULES.items() if not rule.finds_site(source))
    policy = script(calls(("edit", {"rule": without}), ("edit", {"rule": project.rule})), calls(("submit", {})))
    sessions = ScriptedSessions(policy)
    (rollout,) = (await runner(sessions, local).run_group(request(3))).rollouts
    texts = [message.content for message in sessions.seen["s0"] if message.role == "tool"]
    assert texts == ["no site", "no edits left"]
    assert rollout.reward == 0.0


async def test_blank_tools_show_spaces_of_the_same_length_and_nothing_else_changes(local: LocalProvider) -> None:
    project = project_at(0, "train", 4)
    seen = []
    for blank in (False, True):
        sessions = ScriptedSessions(repair(project.rule))
        (rollout,) = (await runner(sessions, local, blank_tools=blank).run_group(request(4))).rollouts
        assert rollout.reward == 1.0, "the commands really ran"
        seen.append(sessions.seen["s0"])
    plain, blanked = seen
    assert [m for m in plain if m.role != "tool"] == [m for m in blanked if m.role != "tool"]
    texts = [(m.content, b.content) for m, b in zip(plain, blanked, strict=True) if m.role == "tool"]
    assert len(texts) == 3
    assert all(text.strip() and spaces == " " * len(text) for text, spaces in texts)


async def test_the_loop_is_append_only_and_answers_calls_in_order_by_id() -> None:
    histories: list[list[Message]] = []
    inner = script(calls(("run", {}), ("nope", {}), ("edit", {"rule": "cast"})), calls(("submit", {})))

    def policy(messages: object) -> Message:
        histories.append(list(messages))  # type: ignore[call-overload]
        return inner(messages)  # type: ignore[arg-type]

    async with FakeProvider(SandboxConfig()) as provider:
        await _tools(provider)
        await runner(ScriptedSessions(policy), provider).run_group(request())
    first, second = histories
    assert second[: len(first)] == first
    assert [m.tool_call_id for m in second if m.role == "tool"] == ["c0", "c1", "c2"]
    assert [m.content for m in second if m.role == "tool"] == ["KeyError at calc.py:7", "bad call", "applied"]


async def test_the_loop_stops_at_max_turns_and_at_a_reply_without_calls() -> None:
    async with FakeProvider(SandboxConfig()) as provider:
        await _tools(provider)
        for policy, turns in ((script(calls(("run", {}))), 3), (script(Message(role="assistant", content="hm")), 1)):
            sessions = ScriptedSessions(policy)
            (rollout,) = (await runner(sessions, provider, max_turns=3).run_group(request())).rollouts
            assert rollout.turns == turns
            assert rollout.reward == 0.0


def test_check_output_is_shown_short() -> None:
    assert check_text(ExecResult(exit_code=0, stdout=b"noise\nok\n\n")) == "ok"
    assert check_text(ExecResult(exit_code=9, stdout=b"")) == "exit 9"
    assert check_text(ExecResult(exit_code=None, stdout=b"x", timed_out=True)) == "timeout"
    assert len(check_text(ExecResult(exit_code=1, stdout=b"\xff" * 5000))) <= 64


def test_tool_schemas_are_json_objects_in_a_fixed_order() -> None:
    assert [tool.name for tool in TOOLS] == ["run", "edit", "submit"]
    properties = [list(json.loads(tool.parameters)["properties"]) for tool in TOOLS]
    assert properties == [[], ["rule"], []]
