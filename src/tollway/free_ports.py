"""Ports for programs that want to be told one: free now, and still free when a slow program comes to listen there.

A port from the range that the kernel gives to outgoing connections may be taken by any of them in the meantime.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

__all__ = ["free_ports"]

_FIRST, _LAST = 10_000, 65_535
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LINUX = (32_768, 60_999)


def free_ports(count: int = 1, host: str = "127.0.0.1") -> list[int]:
    """``count`` different ports of ``host``. Raises ``OSError`` for a host that is none, or has no port left."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found: list[int] = []
    with ExitStack() as held:
        for port in _candidates():
            if len(found) == count:
                break
            probe = held.enter_context(socket.socket(family))
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
            else:
                found.append(int(probe.getsockname()[1]))
    if len(found) < count:
        raise OSError(errno.EADDRINUSE, f"{count} free ports of {host} are wanted, and there are {len(found)}")
    return found


def _candidates() -> Iterator[int]:
    """First, in random order, those that no connection gets by itself; then some of the kernel's own choice."""
    try:
        low, high = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):  # another system
        low, high = _LINUX
    quiet = [*range(_FIRST, min(low, _LAST + 1)), *range(max(high + 1, _FIRST), _LAST + 1)]
    yield from random.sample(quiet, min(len(quiet), 1000))
    yield from [0] * 100
