"""Who made a sandbox: two labels on every create, and the answer whether that process still lives.

A provider that outlives its users (a cloud service, a daemon) keeps what a killed trainer left. The labels let
anybody find it: ``tollway-owner`` names host, process and its start, ``tollway-create`` the instant and the
attempt. Values stay within 63 letters, digits, ``-``, ``_`` and ``.``, which every known service accepts.
Depends on the standard library.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ATTEMPT", "OWNER", "Owner", "attempt_mark", "created_at", "owner_mark", "owner_of"]

OWNER = "tollway-owner"
"""Label that names the process, and the provider object in it, that a sandbox belongs to."""
ATTEMPT = "tollway-create"
"""Label that names one call of a provider's create, and when it was made."""
_MARK = re.compile(r"(?P<host>[A-Za-z0-9.-]{1,24})_(?P<pid>\d{1,9})_(?P<started>\d{1,16})_[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Owner:
    """What an owner label says."""

    host: str
    pid: int
    started: int
    """Start of the process in clock ticks since boot, with the pid its identity."""

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, on this host (and in this container, since its last start)."""
        return self.host == _host()

    @property
    def is_dead(self) -> bool:
        """Whether it is certain that the process is gone; of other hosts nothing is certain."""
        return self.is_here and _started(self.pid) != self.started


def owner_mark() -> str:
    """A new value for the label ``OWNER``: this process, and a random part for who holds it."""
    return f"{_host()}_{os.getpid()}_{_started(os.getpid()) or 0}_{secrets.token_hex(4)}"


def attempt_mark() -> str:
    """A new value for the label ``ATTEMPT``."""
    return f"{int(time.time())}-{secrets.token_hex(8)}"


def owner_of(labels: Mapping[str, str]) -> Owner | None:
    """The owner that the labels name; ``None`` for sandboxes that others made."""
    match = _MARK.fullmatch(labels.get(OWNER, ""))
    return Owner(match["host"], int(match["pid"]), int(match["started"])) if match else None


def created_at(labels: Mapping[str, str]) -> float | None:
    """``time.time()`` of the create; ``None`` when no label says it.

    >>> created_at({"tollway-create": "1700000000-00ff"})
    1700000000.0
    """
    seconds = labels.get(ATTEMPT, "").partition("-")[0]
    return float(seconds) if seconds.isdecimal() else None


@functools.cache
def _host() -> str:
    """This host's name and, in eight digits, where its process ids mean something.

    Containers may share a name and a kernel but not their processes: nobody may be taken for dead because his pid
    is not found in another container.
    """
    try:
        place = (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii')} {os.readlink('/proc/self/ns/pid')}"
        )
    except OSError:
        place = secrets.token_hex(8)
    digest = hashlib.sha256(f"{socket.gethostname()} {place}".encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9.-]', '-', socket.gethostname())[:15]}-{digest}"


def _started(pid: int) -> int | None:
    """Start of a live process in clock ticks since boot; ``None`` when there is none, or it is a zombie."""
    try:
        # The name, in brackets, may hold spaces and brackets itself.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
