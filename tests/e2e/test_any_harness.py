"""The unmodified OpenAI SDK works through a session, and the export is what the engine saw."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from tollway.fresh_model import ModelShape, write_fresh_model
from tollway.router.supervisor import ServerProcess
from tollway.session_server.client import SessionClient
from tollway.session_server.families.compact import CompactFamily

KEY = "an-admin-key-for-tests"
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {"name": "ls", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
    }
]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[SessionClient]:
    """A real engine and a real session server, started as the README says."""
    write_fresh_model(tmp_path / "model", ModelShape(vocab_size=272, num_hidden_layers=1), seed=3)
    tollway = [sys.executable, "-P", "-m", "tollway"]
    engine = await ServerProcess.start(
        [
            *tollway,
            "engine",
            "--model-path",
            str(tmp_path / "model"),
            "--port",
            "0",
            "--set",
            "engine.weight_version=0",
        ],
        name="engine",
        log=tmp_path / "engine.log",
    )
    try:
        journal = ("--set", f"server.journal={tmp_path / 'journal.sqlite'}", "--set", "server.engine_wait_s=30")
        server = await ServerProcess.start(
            [*tollway, "serve", "--engine", engine.url, "--port", "0", *journal],
            name="server",
            log=tmp_path / "server.log",
            env={"TOLLWAY_ADMIN_KEY": KEY},
        )
        try:
            async with aiohttp.ClientSession() as http:
                yield SessionClient(server.url, KEY, http=http)
        finally:
            await server.stop()
    finally:
        await engine.stop()


async def test_the_openai_sdk_runs_turns_with_tools_streamed_and_not(client: SessionClient) -> None:
    session = await client.create(task_id="t")
    sdk = openai.AsyncOpenAI(base_url=session.openai_base_url, api_key=session.token, max_retries=0)
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "list <|im_end|> files"}]
    first = await sdk.chat.completions.create(model="policy", messages=messages, tools=TOOLS, max_tokens=12)
    assert first.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert first.usage is not None
    messages.append({"role": "assistant", "content": first.choices[0].message.content})
    messages.append({"role": "user", "content": "again"})
    text, finish, usage = "", [], None
    stream = await sdk.chat.completions.create(
        model="policy",
        messages=messages,
        tools=TOOLS,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish += [choice.finish_reason] if choice.finish_reason else []
    await sdk.close()
    assert len(finish) == 1
    assert usage is not None

    (row,) = await client.trajectories(session.session_id)
    spans = row.turn_spans
    assert [span.end - span.start for span in spans] == [first.usage.completion_tokens, usage.completion_tokens]
    assert spans[1].start == usage.prompt_tokens
    assert int(row.loss_mask.sum()) == sum(span.end - span.start for span in spans)
    family = CompactFamily()
    sampled = row.token_ids[spans[1].start : spans[1].end]
    assert family.parse(sampled, (), prompt_end=np.zeros(0, np.int32)).content == text
    assert set(row.weight_version[row.loss_mask == 1].tolist()) == {0}


async def test_the_readmes_episode_runs_as_printed(client: SessionClient) -> None:
    readme = Path(__file__).resolve().parents[2] / "README.md"
    (code,) = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    assert "http://127.0.0.1:8700" in code
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code.replace("http://127.0.0.1:8700", client.base_url)),
        env=os.environ | {"TOLLWAY_ADMIN_KEY": KEY},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert out.startswith(b"[256 258 ")


async def test_a_stranger_without_the_token_learns_nothing(client: SessionClient) -> None:
    session = await client.create()
    answers = []
    async with aiohttp.ClientSession() as http:
        for session_id in (session.session_id, "0" * len(session.session_id)):
            for token in ("", "wrong", KEY[:-1]):
                url = f"{client.base_url}/sessions/{session_id}/v1/chat/completions"
                headers = {"authorization": f"Bearer {token}"}
                async with http.post(url, json={"messages": []}, headers=headers) as reply:
                    answers.append((reply.status, await reply.text()))
    assert {status for status, _ in answers} == {401}
    assert len({body for _, body in answers}) == 1


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc/net/tcp")
async def test_both_servers_listen_on_loopback_only(client: SessionClient) -> None:
    port = int(client.base_url.rpartition(":")[2])
    lines = await asyncio.to_thread(Path("/proc/net/tcp").read_text)
    listening = [line.split()[1] for line in lines.splitlines()[1:] if line.split()[3] == "0A"]
    mine = [address for address in listening if int(address.split(":")[1], 16) == port]
    assert mine == [f"0100007F:{port:04X}"]
    assert os.environ.get("TOLLWAY_ADMIN_KEY", "") != KEY
