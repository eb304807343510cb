"""Unmodified harnesses through the server: each runs its task and leaves one exact trajectory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness_stage import Stage, on_stage
from scripted import COMMANDS, PAY, PLAYS, RESULT, ROOT, SAY, TASK, ScriptedModel, play, qwen3_tokenizer

from tollway.router.fake import FakeRequest
from tollway.session_server.families.base import Family

pytestmark = pytest.mark.all
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@dataclass(frozen=True)
class Case:
    """One way to run one harness, and what is to be seen on the wire."""

    harness: str
    route: str
    streams: bool
    arguments: tuple[str, ...] = ()
    """Of an SDK example; a command line has its usual ones."""
    fenced: bool = False
    """It reads commands from text and offers no tools."""
    installs: bool = False
    """It tries to fetch a package of its own from its package registry, and does without when it cannot."""

    @property
    def command(self) -> list[str]:
        """What is run."""
        if self.arguments and COMMANDS[self.harness][0] == "python":
            return [*COMMANDS[self.harness][:2], *self.arguments, TASK]
        return [*COMMANDS[self.harness], *self.arguments]


CASES = {
    "openai-chat": Case("openai", CHAT, False, ("chat",)),
    "openai-chat-stream": Case("openai", CHAT, True, ("chat-stream",)),
    "openai-responses": Case("openai", RESPONSES, False, ("responses",)),
    "openai-responses-stream": Case("openai", RESPONSES, True, ("responses-stream",)),
    "openai-responses-stateless": Case("openai", RESPONSES, False, ("responses-stateless",)),
    "anthropic": Case("anthropic", MESSAGES, False, ("messages",)),
    "anthropic-stream": Case("anthropic", MESSAGES, True, ("stream",)),
    "litellm-openai": Case("litellm", CHAT, False, ("openai",)),
    "litellm-openai-stream": Case("litellm", CHAT, True, ("openai", "--stream")),
    "litellm-hosted-vllm": Case("litellm", CHAT, False, ("hosted_vllm",)),
    "litellm-anthropic": Case("litellm", MESSAGES, False, ("anthropic",)),
    "litellm-anthropic-stream": Case("litellm", MESSAGES, True, ("anthropic", "--stream")),
    "mini-swe-agent": Case("mini_swe_agent", CHAT, False),
    "mini-swe-agent-text": Case(
        "mini_swe_agent", CHAT, False, ("-c", "mini_textbased.yaml", "--model-class", "litellm_textbased"), fenced=True
    ),
    "codex": Case("codex", RESPONSES, True),
    "claude-code": Case("claude_code", MESSAGES, True),
    "qwen-code": Case("qwen_code", CHAT, True),
    "opencode": Case("opencode", CHAT, True, installs=True),
}


def _continues_by_id(stage: Stage) -> None:
    calls = [call.body for call in stage.calls(RESPONSES)]
    assert ["previous_response_id" in body for body in calls] == [False, True, True]
    assert [[item["type"] for item in body["input"]] for body in calls[1:]] == [["function_call_output"]] * 2


def _sends_everything(stage: Stage) -> None:
    calls = [call.body for call in stage.calls(RESPONSES)]
    assert [body["store"] for body in calls] == [False] * 3
    assert "reasoning" in {item.get("type") for item in calls[-1]["input"]}
    assert all("previous_response_id" not in body for body in calls)


def _counts_and_thinks(stage: Stage) -> None:
    (count,) = stage.calls(f"{MESSAGES}/count_tokens")
    assert json.loads(count.answer)["input_tokens"] == len(stage.model.main[0].input_ids)
    assert all(b'"thinking"' in call.answer and b'"signature' in call.answer for call in stage.calls(MESSAGES))


def _thinking_comes_back_signed(stage: Stage) -> None:
    messages = stage.calls(MESSAGES)[-1].body["messages"]
    replies = [message["content"] for message in messages if message["role"] == "assistant"]
    assert [[block["type"] for block in blocks] for blocks in replies] == [["thinking", "text", "tool_use"]] * 2
    assert all(blocks[0]["signature"] for blocks in replies)


def _title_first(stage: Stage) -> None:
    title, *others = [call.body for call in stage.calls(CHAT)]
    assert "tools" not in title
    assert all("tools" in body for body in others)


WIRE = {
    "openai-responses": _continues_by_id,
    "openai-responses-stream": _continues_by_id,
    "openai-responses-stateless": _sends_everything,
    "anthropic": _counts_and_thinks,
    "anthropic-stream": _counts_and_thinks,
    "litellm-anthropic": _thinking_comes_back_signed,
    "litellm-anthropic-stream": _thinking_comes_back_signed,
    "codex": _sends_everything,
    "claude-code": _thinking_comes_back_signed,
    "opencode": _title_first,
}
"""What else docs/harnesses.md says of a harness's requests."""


@pytest.mark.usefixtures("harnesses")
@pytest.mark.parametrize("name", CASES)
async def test_a_harness_runs_its_task_and_exports_one_exact_trajectory(
    name: str, tmp_path: Path, qwen: Family
) -> None:
    case = CASES[name]
    async with on_stage(case.harness, tmp_path, qwen, fenced=case.fenced) as stage:
        status = await stage.run(case.command)
        assert status == 0, stage.output
        assert (stage.folder / "out.txt").read_text(encoding="utf-8") == RESULT, stage.output
        await stage.exact_main_row()
        calls = stage.calls(case.route)
        assert len(calls) == len(stage.engine.requests)
        assert {bool(call.body.get("stream")) for call in calls} == {case.streams}
        assert {call.status for call in calls} == {200}
        if name in WIRE:
            WIRE[name](stage)
        assert stage.outside.asked == [] or (case.installs and len(set(stage.outside.asked)) == 1)


@pytest.mark.usefixtures("harnesses")
async def test_a_sub_agent_of_claude_code_is_a_conversation_of_its_own(tmp_path: Path, qwen: Family) -> None:
    write, run = PLAYS["claude_code"]
    look = {"description": "Look", "prompt": "Say what you see.", "subagent_type": "general-purpose"}
    async with on_stage("claude_code", tmp_path, qwen, calls=[write, ("Agent", look), run]) as stage:
        assert await stage.run(COMMANDS["claude_code"]) == 0, stage.output
        main = await stage.exact_main_row()
        assert len(main.turn_spans) == 4
        (side,) = stage.model.side
        assert side.input_ids[:200] != stage.model.main[0].input_ids[:200]
        assert all(row.trainable for row in await stage.exact_rows())


@pytest.mark.usefixtures("harnesses")
@pytest.mark.parametrize("provider", ["Tollway", "OpenAI"])
async def test_a_compaction_of_codex_starts_a_new_conversation_and_keeps_the_old_one(
    provider: str, tmp_path: Path, qwen: Family
) -> None:
    """It asks in a message and without tools, or, of a provider called OpenAI, by an item at the end of its input."""
    calls = [("exec_command", {"cmd": SAY}), ("exec_command", {"cmd": "seq 1 3000"}), ("exec_command", {"cmd": PAY})]
    options = ["-c", "model_auto_compact_token_limit=12000", "-c", f'model_providers.tollway.name="{provider}"']
    async with on_stage("codex", tmp_path, qwen, calls=calls) as stage:
        assert await stage.run([*COMMANDS["codex"], *options]) == 0, stage.output
        assert (stage.folder / "out.txt").read_text(encoding="utf-8") == RESULT, stage.output
        main, (side,) = [stage.sequence(request.rid) for request in stage.model.main], stage.model.side
        rows = [(row.token_ids.tolist(), row.side_request) for row in await stage.exact_rows()]
        summary = stage.sequence(side.rid)
        if provider == "OpenAI":
            assert summary[: len(main[2])] == main[2]
            assert rows == [(summary, False), (main[3], False)]
        else:
            assert rows == [(main[2], False), (summary, True), (main[3], False)]


@pytest.mark.usefixtures("harnesses")
async def test_the_commands_of_the_document_run_as_printed(tmp_path: Path, qwen: Family) -> None:
    document = (ROOT / "docs" / "harnesses.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```\n(session=.*?)```", document, re.DOTALL)
    async with on_stage("openai", tmp_path, qwen) as stage:
        block = block.replace("http://127.0.0.1:8700", stage.tap.url).replace("run.py", f"run.py chat '{TASK}'")
        script = f"set -eu\nROOT={ROOT}\nexport TOLLWAY_ADMIN_KEY={stage.server.admin_key}\n{block}"
        # The harness works where it is started, and that shall not be the repository.
        script = script.replace(".venv-harnesses/", "$ROOT/.venv-harnesses/").replace("examples/", "$ROOT/examples/")
        assert await stage.run(["bash", "-c", script]) == 0, stage.output
        answer, export = stage.output.split("\n", 1)
        assert f"{answer}\n" == f"out.txt says: {RESULT}"
        assert json.loads(export)["columns"]["token_ids"]["data"] == stage.sequence(stage.model.main[-1].rid)


@pytest.mark.usefixtures("harnesses")
def test_the_example_without_a_model_says_what_a_trainer_gets() -> None:
    command = [sys.executable, ROOT / "examples" / "harnesses" / "scripted.py", "openai"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert RESULT.strip() in done.stdout
    assert re.search(r"root: \d+ ids, 3 turns, \d+ sampled ids to train on", done.stderr)


def test_the_script_samples_ids_that_encoding_its_text_would_not_give(qwen: Family, tmp_path: Path) -> None:
    model = ScriptedModel(qwen, play(PLAYS["openai"], tmp_path))
    tokenizer = qwen3_tokenizer()
    prompt = tokenizer.encode(f'<|im_start|>system\n{{"function": {{"name": "write_file"}}}}{TASK}')
    ids = list(model(FakeRequest(json.dumps({"input_ids": prompt, "rid": "r"}).encode(), {}, 0)).ids)
    assert tokenizer.decode(ids).startswith("<think>\nWhat is left to do?\n</think>\n\nTollgate step 1.\n<tool_call>\n")
    assert tokenizer.encode(tokenizer.decode(ids)) != ids
