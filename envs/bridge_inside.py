"""The program that starts a harness in its sandbox: brings the bridge's sockets to loopback, writes files, runs it.

Run as ``/usr/bin/python3 -I -S bridge_inside.py`` with one JSON object on standard input:

    {"mark": text, "ports": {"8700": "/run/tollway/model.sock"}, "files": [[path, text, mode], ...],
     "path": [directory, ...], "env": {...}, "argv": [...], "stdin": text}

Secrets come this way because argument lists can be read by others and the environment of this process by the code
that the agent runs. The harness is a child: it gets this process's signals, its exit status is passed on, and the
ports live as long as it does. What goes wrong before it runs is said in one line that begins with ``mark``, with exit
status 125. Must import nothing but the standard library, of Python 3.8 or newer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from functools import partial

CHUNK = 1 << 16
NOT_STARTED = 125
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes as they come, and their end."""
    try:
        while True:
            data = await reader.read(CHUNK)
            if not data:
                break
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.transport.abort()  # the other half ends with it


async def carry(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection of the harness, through the socket at ``path``, until either side ends."""
    try:
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(path)
    except OSError:
        writer.transport.abort()
        return
    halves = [asyncio.create_task(pump(reader, upstream_writer)), asyncio.create_task(pump(upstream_reader, writer))]
    try:
        await asyncio.gather(*halves)
    finally:
        upstream_writer.close()
        writer.close()


async def open_ports(ports: dict[str, str]) -> list[asyncio.AbstractServer]:
    """Listen on each port of loopback and lead it to its socket."""
    servers: list[asyncio.AbstractServer] = []
    for port, path in ports.items():
        if not os.path.exists(path):  # noqa: ASYNC240 - nothing runs yet
            raise OSError(
                f"there is no socket {path} here, so this sandbox's provider takes no sockets of the host: "
                "set env.command.public_url to an address of the session server that the sandbox can reach"
            )
        servers.append(await asyncio.start_server(partial(carry, path), "127.0.0.1", int(port)))
    return servers


def write_files(files: list[tuple[str, str, int]]) -> None:
    """Every file with the directories above it."""
    for path, text, mode in files:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)


async def run(spec: dict[str, object]) -> int:
    """Exit status of the harness."""
    servers = await open_ports(spec["ports"])  # type: ignore[arg-type]  # what our own JSON holds
    write_files(spec["files"])  # type: ignore[arg-type]  # what our own JSON holds
    said = str(spec["stdin"]).encode()
    # Before there is a child: a signal that comes meanwhile is for it, too.
    early: list[int] = []
    children: list[asyncio.subprocess.Process] = []
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, pass_on, number, children, early)
    # Also for finding the command itself, which is why it is set here.
    os.environ["PATH"] = ":".join([*spec["path"], os.environ.get("PATH", os.defpath)])  # type: ignore[misc]  # likewise
    child = await asyncio.create_subprocess_exec(
        *spec["argv"],  # type: ignore[misc]  # what our own JSON holds
        env={**os.environ, **spec["env"]},  # type: ignore[dict-item]  # what our own JSON holds
        stdin=asyncio.subprocess.PIPE if said else asyncio.subprocess.DEVNULL,
    )
    children.append(child)
    for waiting in early:
        pass_on(waiting, children, early)
    if child.stdin is not None:
        with contextlib.suppress(OSError):  # the harness need not read it
            child.stdin.write(said)
            await child.stdin.drain()
        child.stdin.close()
    status = await child.wait()
    for server in servers:
        server.close()
    return status if status >= 0 else 128 - status


def pass_on(number: int, children: list[asyncio.subprocess.Process], early: list[int]) -> None:
    """A signal for the child, or for later when there is none yet."""
    if not children:
        early.append(number)
        return
    with contextlib.suppress(ProcessLookupError):
        children[0].send_signal(number)


def main() -> None:
    """Read, run, end."""
    spec = json.loads(sys.stdin.buffer.read().decode())
    with contextlib.suppress(OSError):
        # Others may have the same file open: the first process of a bubblewrap sandbox does, and can be read.
        os.ftruncate(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what came with the secrets is closed for all that follows
    try:
        status = asyncio.run(run(spec))
    except OSError as error:
        sys.stderr.write(f"{spec['mark']} {error}\n")
        sys.stderr.flush()
        status = NOT_STARTED
    os._exit(status)  # what is still connected is of no use to anyone


if __name__ == "__main__":
    main()
