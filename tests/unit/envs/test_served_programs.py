"""Programs of somebody else's: they get nothing of ours, and end with us, however we end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from tollway.envs.served import ServedProgram, serve
from tollway.envs.served_config import ServedConfig
from tollway.errors import ComponentLost

SERVER = """
import http.server, os, subprocess, sys, json
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"pid": os.getpid(), "env": sorted(os.environ)}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
OWNER = """
import asyncio, sys, aiohttp
from tollway.envs.served import serve
from tollway.envs.served_config import ServedConfig
async def main():
    async with aiohttp.ClientSession() as http:
        config = ServedConfig(command=(sys.executable, "-c", sys.argv[1], "{port}"))
        program = await serve(config, section="env.test", ready="/", http=http)
        async with http.get(program.url) as response:
            print((await response.json(content_type=None))["pid"], flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_program_gets_no_variable_of_ours_and_ends_when_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLLWAY_ADMIN_KEY", "secret")
    config = ServedConfig(command=(sys.executable, "-c", SERVER, "{port}"), command_env={"MINE": "1"})
    async with aiohttp.ClientSession() as http:
        program = await serve(config, section="env.test", ready="/", http=http)
        assert isinstance(program, ServedProgram)
        async with http.get(program.url) as response:
            said = await response.json(content_type=None)
        assert "MINE" in said["env"]
        assert "TOLLWAY_ADMIN_KEY" not in said["env"]
        assert program.ended is None
        await program.aclose()
    assert program.ended is not None
    assert not _alive(said["pid"])


async def test_a_program_ends_when_its_owner_is_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        pid = int(await asyncio.to_thread(owner.stdout.readline))
        assert _alive(pid)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        deadline = time.monotonic() + 20
        while _alive(pid) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert not _alive(pid)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


async def test_starting_that_is_cancelled_leaves_no_program(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    program = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    config = ServedConfig(command=(sys.executable, "-c", program, "{port}"))
    async with aiohttp.ClientSession() as http:
        starting = asyncio.create_task(serve(config, section="env.test", ready="/", http=http))
        while not mark.exists() or not mark.read_text():
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert not _alive(int(mark.read_text()))


async def test_a_program_that_is_not_there_is_named() -> None:
    config = ServedConfig(command=(".venv-nowhere/bin/python", "{port}"))
    async with aiohttp.ClientSession() as http:
        with pytest.raises(ComponentLost, match=r"cannot start \.venv-nowhere/bin/python .*No such file or directory"):
            await serve(config, section="env.test", ready="/", http=http)
