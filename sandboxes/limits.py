"""Numbers that bound a sandbox on this machine: resource limits, host uids, owner identity.

Pure functions over values, plus the few /proc reads that produce those values. Must not start anything.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from pathlib import Path

from tollway.errors import SandboxUnavailable
from tollway.sandboxes.spec import SandboxSpec

__all__ = ["UidPool", "group_limits", "own_uid_map", "rlimits", "tasks_of_user", "usable_uids"]

MB = 1 << 20


def rlimits(
    *, mem_mb: int, pids: int, file_mb: int, open_files: int, cpu_s: float | None, grouped: bool = False
) -> list[tuple[int, int]]:
    """``(resource, value)`` pairs of one command; ``cpu_s`` is a backstop per process.

    ``grouped`` says that a control group bounds the memory of all processes together; then what one may map
    privately is bounded, and not its address space, of which runtimes like V8 reserve more than they use.
    NPROC counts the processes of the real uid, which is why each sandbox has a uid of its own as root.
    """
    cpu = [] if cpu_s is None else [(resource.RLIMIT_CPU, max(1, int(cpu_s) + 1))]
    return [
        (resource.RLIMIT_DATA if grouped else resource.RLIMIT_AS, mem_mb * MB),
        (resource.RLIMIT_NPROC, pids),
        (resource.RLIMIT_FSIZE, file_mb * MB),
        (resource.RLIMIT_NOFILE, open_files),
        *cpu,
        (resource.RLIMIT_CORE, 0),
    ]


def group_limits(spec: SandboxSpec, tmp_mb: int, *, own_uid: bool) -> list[float | None]:
    """Memory in bytes, processes and cores of one sandbox's control groups.

    Files in memory count as memory of whoever wrote them, so what the workspace, /tmp and /dev/shm may hold
    comes on top of what processes may take; each process is held to ``mem_mb`` by its own limit. Where each
    sandbox has a uid of its own, the limit of that uid's processes is exact, and another group would only cost time.
    """
    # bwrap itself is two processes.
    pids = None if own_uid else spec.pids + 2
    return [(spec.mem_mb + spec.disk_mb + 2 * tmp_mb) * MB, pids, spec.cpu]


def own_uid_map() -> str:
    """Text of this process's uid map."""
    return Path("/proc/self/uid_map").read_text(encoding="ascii")


def usable_uids(uid_map: str, base: int, count: int) -> range:
    """The part of ``[base, base + count)`` that this user namespace maps, else the top of what it maps.

    ``uid_map`` is the text of /proc/self/uid_map: lines of "inside outside length".

    >>> usable_uids("0 0 4294967295", 200000, 10)
    range(200000, 200010)
    >>> usable_uids("0 1000 1\\n1 100000 65536", 200000, 10)
    range(65527, 65537)
    """
    spans = [(int(line.split()[0]), int(line.split()[2])) for line in uid_map.splitlines() if line.strip()]
    for start, length in spans:
        if start <= base < start + length:
            return range(base, min(base + count, start + length))
    start, length = max(spans, key=lambda span: span[0] + span[1], default=(0, 0))
    # Low numbers belong to the system's own users: a sandbox must not share files or limits with them.
    first = max(start, start + length - count, 1000)
    if first >= start + length:
        raise SandboxUnavailable(
            "running as root in a user namespace that maps no uid above 1000, so sandboxes cannot be given one "
            "of their own; run as an ordinary user, or map more uids (/etc/subuid)"
        )
    return range(first, start + length)


def tasks_of_user(uid: int) -> int:
    """Threads that ``uid`` has on this machine: what RLIMIT_NPROC already counts for a non-root owner."""
    total = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid == uid:
                total += len(os.listdir(entry / "task"))
        except OSError:
            continue  # it ended meanwhile
    return total


class UidPool:
    """Hands out host uids, each to one live sandbox, least recently used first."""

    def __init__(self, uids: Iterable[int]) -> None:
        self._free: dict[int, None] = dict.fromkeys(uids)

    def take(self) -> int:
        """A uid that no live sandbox of this provider has."""
        if not self._free:
            raise SandboxUnavailable("all sandbox uids are in use; raise sandbox.local.uid_count")
        uid = next(iter(self._free))
        del self._free[uid]
        return uid

    def give_back(self, uid: int) -> None:
        """Its sandbox is gone: nothing runs and no file belongs to it any more."""
        self._free[uid] = None
