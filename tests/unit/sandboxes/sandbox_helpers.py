"""What several sandbox tests need: sandboxes with defaults, and a look at this machine's processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tollway.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec

_COUNTER = itertools.count()


async def make(provider: SandboxProvider, **settings: object) -> Sandbox:
    """A sandbox with a short life and a label."""
    values: Mapping[str, object] = {"ttl_s": 60.0, "labels": {"test": "unit"}, **settings}
    return await provider.create(SandboxSpec(**values))  # type: ignore[arg-type]


def processes_with(marker: str) -> list[int]:
    """Processes of this machine whose command line holds ``marker``, zombies excepted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def marker() -> str:
    """A number of seconds that no other process of this machine sleeps for."""
    return f"{os.getpid()}{time.monotonic_ns() % 10**6:06}{next(_COUNTER)}"


async def appeared(text: str, count: int = 1) -> None:
    """Wait until ``count`` processes carry ``text``."""
    end = time.monotonic() + 20
    while len(processes_with(text)) < count:
        assert time.monotonic() < end, f"no {count} processes with {text}"
        await asyncio.sleep(0.02)


async def gone(text: str) -> None:
    """Wait until no process carries ``text``."""
    end = time.monotonic() + 10
    while left := processes_with(text):
        assert time.monotonic() < end, f"still alive: {left}"
        await asyncio.sleep(0.02)


def ended(pid: int) -> bool:
    """Whether a process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def open_to_all(path: Path) -> None:
    """Let sandbox uids pass through a directory of pytest's, which are private."""
    for place in (path, *path.parents):
        if place == Path(tempfile.gettempdir()):
            break
        place.chmod(0o755)
