"""The server as a process: it says when it is ready, dies cleanly, and loses nothing when it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from server_helpers import user

from tollway.errors import ServerStopping, TollwayError
from tollway.router.fake import FakeEngine, FakeReply
from tollway.session_server.client import Session, SessionClient

MAIN = """
import sys, json
from pathlib import Path
from tollway.errors import ServerStopping, TollwayError
from tollway.router.config import RouterConfig
from tollway.session_server.config import ServerConfig
from tollway.session_server.server import run
settings = json.loads(sys.argv[1])
try:
    run(ServerConfig(**settings["server"]), RouterConfig(), admin_key=settings["key"], engine_urls=settings["engines"])
except TollwayError as error:
    sys.stderr.write(f"{error.code}: {error}")
    sys.exit(2)
"""


@contextlib.asynccontextmanager
async def process(
    key: str = "k", engines: list[str] | None = None, **server: Any
) -> AsyncIterator[asyncio.subprocess.Process]:
    settings = {"server": server, "key": key, "engines": engines or []}
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MAIN, json.dumps(settings), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


async def ready(running: asyncio.subprocess.Process) -> dict[str, Any]:
    assert running.stdout is not None
    line = await running.stdout.readline()
    return dict(json.loads(line))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_announces_itself_and_exits_cleanly(tmp_path: Path, number: int) -> None:
    async with process(port=0, journal=str(tmp_path / "j.sqlite")) as running:
        told = await ready(running)
        assert told["event"] == "ready"
        assert told["pid"] == running.pid
        async with aiohttp.ClientSession() as http, http.get(told["url"] + "/healthz") as response:
            assert response.status == 200
        running.send_signal(number)
        assert await running.wait() == 0


async def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with process(port=port, journal=str(tmp_path / "j.sqlite")) as running:
            _, words = await running.communicate()
            assert running.returncode == 2
            assert f"config_error: cannot listen on 127.0.0.1:{port}".encode() in words


async def test_an_address_that_strangers_reach_is_warned_about(tmp_path: Path) -> None:
    for host, warned in (("0.0.0.0", True), ("localhost", False)):
        async with process(host=host, port=0, journal=str(tmp_path / "j.sqlite")) as running:
            await ready(running)
            running.terminate()
            _, words = await running.communicate()
            assert (b"tokens travel unencrypted" in words) == warned


@pytest.mark.parametrize("ends", [True, False])
async def test_a_stop_waits_for_running_turns_and_not_for_ever(tmp_path: Path, ends: bool) -> None:
    slow = FakeReply(ids=[*b"abc", 261], delay_s=0.2 if ends else 100.0)
    async with FakeEngine(lambda request: slow) as engine:
        settings = {"engines": [engine.url], "port": 0, "journal": str(tmp_path / "j.sqlite"), "engine_wait_s": 20.0}
        async with process(**settings, drain_s=30.0 if ends else 0.2) as running, aiohttp.ClientSession() as http:
            client = SessionClient((await ready(running))["url"], "k", http=http)
            session = await client.create()
            asking = asyncio.ensure_future(client.chat(session, [user("hi")]))
            streaming = asyncio.ensure_future(streamed(client, session, [user("hi")]))
            while engine.in_flight < 2:
                await asyncio.sleep(0.01)
            running.terminate()
            answers = await asyncio.gather(asking, streaming, return_exceptions=True)
            assert await running.wait() == 0
        if ends:
            assert answers[1] == "abc"
        else:
            assert isinstance(answers[0], ServerStopping)
            assert isinstance(answers[1], TollwayError), "an error event, and no last one"
            assert engine.aborts
        async with process(**settings) as running, aiohttp.ClientSession() as http:
            client = SessionClient((await ready(running))["url"], "k", http=http)
            assert len(await client.trajectories(session.session_id)) == (2 if ends else 0)


async def test_an_unusable_journal_and_a_missing_key_are_clear_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    async with process(port=0, journal=str(tmp_path / "file" / "j.sqlite")) as running:
        _, words = await running.communicate()
        assert running.returncode == 2
        assert b"set server.journal" in words
    (tmp_path / "text.sqlite").write_text("this is no database, certainly not one of ours" * 100)
    async with process(port=0, journal=str(tmp_path / "text.sqlite")) as running:
        _, words = await running.communicate()
        assert running.returncode == 2
    async with process(key="", port=0, journal=str(tmp_path / "j.sqlite")) as running:
        _, words = await running.communicate()
        assert running.returncode == 2
        assert b"TOLLWAY_ADMIN_KEY" in words


async def test_a_start_that_waits_for_engines_says_which_one_failed(tmp_path: Path) -> None:
    async with FakeEngine(version="default") as engine:
        url = engine.url
        async with process(engines=[url], port=0, journal=str(tmp_path / "j.sqlite"), engine_wait_s=0.5) as running:
            _, words = await running.communicate()
            assert running.returncode == 2
            assert b"no_engine" in words
            assert b"update_weight_version" in words


@pytest.mark.parametrize("round_", range(3))
async def test_a_killed_server_has_every_turn_whose_reply_arrived(tmp_path: Path, round_: int) -> None:
    """SIGKILL under load, twice on the same journal; the export has all that clients saw end."""
    seen: dict[str, list[str]] = {}

    async def talk(client: SessionClient, session: Session, stream: bool) -> None:
        messages: list[Any] = [user(session.session_id)]
        with contextlib.suppress(TollwayError, aiohttp.ClientError):
            while True:
                if stream:
                    text = await streamed(client, session, messages)
                    reply: Any = {"role": "assistant", "content": text}
                else:
                    answer = await client.chat(session, messages)
                    text, reply = answer.message.content, answer.message
                seen.setdefault(session.session_id, []).append(text)
                messages += [reply, user("on")]

    numbers = iter(range(10**6))
    async with FakeEngine(lambda request: FakeReply(ids=[*f"n{next(numbers)}".encode(), 261])) as engine:
        settings = {"engines": [engine.url], "port": 0, "journal": str(tmp_path / "j.sqlite"), "engine_wait_s": 20.0}
        for _ in range(2):
            async with process(**settings) as running, aiohttp.ClientSession() as http:
                client = SessionClient((await ready(running))["url"], "k", http=http)
                sessions = [await client.create() for _ in range(8)]
                talks = [asyncio.ensure_future(talk(client, s, at % 2 == 0)) for at, s in enumerate(sessions)]
                while sum(map(len, seen.values())) < 40 * (1 + round_):
                    await asyncio.sleep(0.005)
                os.kill(running.pid, signal.SIGKILL)
                await asyncio.wait(talks, timeout=20)
        async with process(**settings) as running, aiohttp.ClientSession() as http:
            client = SessionClient((await ready(running))["url"], "k", http=http)
            checked = 0
            for session_id, texts in seen.items():
                exported = b"".join(
                    bytes(row.token_ids.clip(0, 255).astype("uint8")) + b"\xff"
                    for row in await client.trajectories(session_id)
                )
                for text in texts:
                    assert text.encode() + b"\xff" in exported
                    checked += 1
            assert checked >= 40


async def streamed(client: SessionClient, session: Session, messages: list[Any]) -> str:
    """Text of a stream that reached its last event; anything else raises."""
    body = {
        "messages": [m if isinstance(m, dict) else {"role": m.role, "content": m.content} for m in messages],
        "stream": True,
    }
    url = f"{session.openai_base_url}/chat/completions"
    headers = {"authorization": f"Bearer {session.token}"}
    async with client._http.post(url, json=body, headers=headers) as response:
        data = await response.content.read()
    lines = [line for line in data.decode().split("\n\n") if line]
    if not lines or lines[-1] != "data: [DONE]":
        raise TollwayError("the stream did not end")
    return "".join(
        choice["delta"].get("content") or "" for line in lines[:-1] for choice in json.loads(line[6:])["choices"]
    )
