"""How a serving process and its owner meet: take a port, say ready in one line, read that line.

The line is JSON on stdout, ``{"event": "ready", "url", "pid"}``. Owns neither the server nor the process;
depends on ``errors`` only.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from tollway.errors import ConfigError

__all__ = ["KEEP_ALIVE_S", "announce", "handling_signals", "listen", "read_ready", "say_ready"]

KEEP_ALIVE_S = 75
"""How long a server keeps an idle connection: longer than any client, so that no request meets the closing of
one, which looks like a lost server."""


def listen(host: str, port: int, *, key: str) -> socket.socket:
    """Bind and listen, before anything slow, so that a taken port is known at once.

    ``key`` names the setting that a ``ConfigError`` tells to change.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named so that asyncio turns Nagle's delay off: an answer in two writes would wait 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        wanted = f"{key} to a free port, or 0 for any"
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            wanted = f"{key.partition('.')[0]}.host to an address of this machine"
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; set {wanted}") from error
    listener.setblocking(False)
    return listener


@contextmanager
def handling_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """SIGTERM and SIGINT go to ``handle`` in the event loop: the process ends in its own time, with its own status."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number, None)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def announce(listener: socket.socket, **more: object) -> None:
    """Write the ready line. Call it when requests are accepted, and write nothing else to stdout.

    ``more`` are further fields of the line.
    """
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    say_ready(f"http://{shown}:{port}", **more)


def say_ready(url: str, **more: object) -> None:
    """The same for a server that another process of ours is."""
    line = {"event": "ready", "url": url, "pid": os.getpid(), **more}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def read_ready(line: bytes) -> str:
    """The URL that a ready line names. Raises ``ValueError`` for any other line.

    >>> read_ready(b'{"event": "ready", "url": "http://127.0.0.1:1", "pid": 2}')
    'http://127.0.0.1:1'
    """
    said = json.loads(line)
    if not isinstance(said, dict) or said.get("event") != "ready" or "url" not in said:
        raise ValueError(f"no ready line: {line[:200]!r}")
    return str(said["url"])
