"""The program that starts a harness, run here as it is run in a sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
from pathlib import Path

import pytest

from tollway.envs.bridge import PROGRAM

PYTHON = "/usr/bin/python3"
pytestmark = pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason="this machine has no /usr/bin/python3")


async def start(**spec: object) -> asyncio.subprocess.Process:
    """Started and told; its standard input is closed."""
    whole = {"mark": "MARK", "ports": {}, "files": [], "path": [], "env": {}, "argv": ["true"], "stdin": ""}
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, "-I", "-S", PROGRAM),
        env={"PATH": "/usr/bin:/bin"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps({**whole, **spec}).encode())
    process.stdin.close()
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_signals_reach_the_harness_and_its_exit_status_comes_back(number: signal.Signals) -> None:
    script = 'for s in TERM INT HUP; do trap "echo $s; exit 9" $s; done; echo ready; while :; do sleep 0.05; done'
    process = await start(argv=["bash", "-c", script])
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    out, _ = await process.communicate()
    assert (out.decode().strip(), process.returncode) == (number.name.removeprefix("SIG"), 9)


async def test_a_harness_that_is_killed_ends_as_a_shell_would_say_it() -> None:
    process = await start(argv=["sh", "-c", "kill -9 $$"])
    await process.communicate()
    assert process.returncode == 128 + 9


async def test_files_are_for_the_user_alone_and_links_in_their_place_are_not_followed(tmp_path: Path) -> None:
    there, secret = tmp_path / "deep" / "er" / "file", tmp_path / "other"
    process = await start(files=[[str(there), "té{xt}", 0o600]], argv=["cat", str(there)])
    out, _ = await process.communicate()
    assert (out.decode(), process.returncode) == ("té{xt}", 0)
    assert stat.S_IMODE(there.stat().st_mode) == 0o600
    secret.write_text("kept")
    there.unlink()
    there.symlink_to(secret)
    process = await start(files=[[str(there), "lost", 0o600]])
    _, err = await process.communicate()
    assert process.returncode == 125
    assert err.startswith(b"MARK ")
    assert secret.read_text() == "kept"


async def test_what_keeps_a_harness_from_starting_is_said_behind_the_mark(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        path = tmp_path / "s"
        with socket.socket(socket.AF_UNIX) as there:
            there.bind(str(path))
            for spec, words in (
                ({"argv": ["no-such-program"]}, "no-such-program"),
                ({"ports": {port: str(tmp_path / "nowhere")}}, "env.command.public_url"),
                ({"ports": {port: str(path)}}, port),
            ):
                process = await start(**spec)
                out, err = await process.communicate()
                assert (process.returncode, out) == (125, b"")
                assert err.decode().startswith("MARK ")
                assert words in err.decode()


async def test_large_bodies_pass_both_ways_and_the_port_ends_with_the_harness(tmp_path: Path) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.readexactly(size)
        writer.write(data[::-1])
        await writer.drain()
        writer.close()

    size = 5_000_000
    client = (
        "import socket, sys\n"
        "with socket.create_connection(('127.0.0.1', int(sys.argv[1]))) as link:\n"
        "    link.sendall(bytes(range(250)) * 20_000)\n"
        "    answer = b''.join(iter(lambda: link.recv(65536), b''))\n"
        "print(answer == (bytes(range(250)) * 20_000)[::-1])\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = await asyncio.start_unix_server(echo, tmp_path / "s")
    async with server:
        process = await start(ports={str(port): str(tmp_path / "s")}, argv=[PYTHON, "-c", client, str(port)])
        out, err = await process.communicate()
        assert (out, process.returncode) == (b"True\n", 0), err
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_what_it_was_told_cannot_be_read_again_by_who_holds_the_same_file(tmp_path: Path) -> None:
    """The first process of a bubblewrap sandbox has the standard input of its command open, too."""
    told = tmp_path / "told"
    spec = {"mark": "M", "ports": {}, "files": [], "path": [], "env": {}, "argv": ["cat", str(told)], "stdin": "SECRET"}
    told.write_text(json.dumps(spec))
    with told.open("r+b") as stdin:
        process = await asyncio.create_subprocess_exec(
            *(PYTHON, "-I", "-S", PROGRAM), stdin=stdin, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
    assert (out, process.returncode) == (b"", 0)
