"""Control groups of local sandboxes: where they can be made, and one per sandbox.

Version 2 and version 1 hierarchies are found from /proc; each controller is used where it is writable, and
without any the limits of processes are all there is. Runs inside the launcher process and in the probe:
standard library only, no tollway imports.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Mapping

__all__ = ["CONTROLLERS", "Group", "GroupLimits", "Place", "find", "remove_place", "sweep"]

CONTROLLERS = ("memory", "pids", "cpu")
"""Those that bound a sandbox; the freezer is used when it is there."""
_PERIOD_US = 100_000
_NAME = re.compile(r"tollway-(\d+)-(\d+)")
_REMOVE_S = 2.0
_SHARE = 0.8
"""Part of this machine's memory that all sandboxes of one owner may take together."""


class Place:
    """A directory in which groups with some controllers can be made."""

    def __init__(self, path: str, version: int, controllers: Iterable[str]) -> None:
        self.path, self.version, self.controllers = path, version, tuple(controllers)


class GroupLimits:
    """Bounds of one sandbox: bytes, processes, cores; ``None`` for no bound."""

    def __init__(self, memory: int, pids: int | None, cpu: float | None) -> None:
        self.memory, self.pids, self.cpu = memory, pids, cpu


def find(root: str = "/") -> tuple[Place, ...]:
    """The places where this process may make groups, at most one per controller."""
    own = _own_groups(_text(f"{root}/proc/self/cgroup"))
    wanted = set(CONTROLLERS)
    found: list[Place] = []
    for kind, mount_root, mounted, options in _hierarchies(_text(f"{root}/proc/self/mountinfo")):
        names = ("",) if kind == "cgroup2" else tuple(name for name in own if name in options)
        for name in names[:1]:
            base = f"{root.rstrip('/')}{mounted}"
            relative = _below(own.get(name, "/"), mount_root)
            if kind == "cgroup2":
                place = _second_version(base, relative, wanted)
            else:
                place = _first_version(base, relative, tuple(sorted(wanted & options)))
            if place is not None:
                found.append(place)
                wanted -= set(place.controllers)
    return tuple(found)


class Group:
    """The groups of one sandbox, one per place."""

    def __init__(self, places: tuple[Place, ...], owner: str, name: str, limits: GroupLimits) -> None:
        """Make them below ``owner`` and set the limits. Raises ``OSError`` and leaves nothing."""
        self._paths: dict[str, str] = {}
        self._memory: Place | None = None
        self._freezer = ""
        try:
            for place in places:
                if settings(place, limits):
                    self._make(place, owner, name, limits)
        except OSError:
            self.remove()
            raise
        self._ooms = 0

    def enter(self) -> None:
        """Move the calling process in."""
        for path, entrance in self._paths.items():
            _write(f"{path}/{entrance}", "0")

    def ran_out(self) -> bool:
        """Whether the kernel killed something for memory since the last question."""
        if self._memory is None:
            return False
        file = "memory.events" if self._memory.version == 2 else "memory.oom_control"
        count = 0
        for line in _text(f"{self._memory.path}/{file}").splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                count = int(value)
        rose, self._ooms = count > self._ooms, count
        return rose

    def remove(self) -> None:
        """Remove them; processes that just died may hold them for a moment."""
        for path in self._paths:
            _remove(path)
        self._paths = {}

    def _make(self, place: Place, owner: str, name: str, limits: GroupLimits) -> None:
        parent = f"{place.path}/{owner}"
        if not os.path.isdir(parent):
            os.mkdir(parent, 0o755)
            if place.version == 2:
                _write(f"{parent}/cgroup.subtree_control", " ".join(f"+{each}" for each in place.controllers))
            if "memory" in place.controllers:
                # Limits of single sandboxes may add up to more than there is: the machine itself must live on.
                most = int(_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
                _write(f"{parent}/{'memory.max' if place.version == 2 else 'memory.limit_in_bytes'}", str(most))
        path = f"{parent}/{name}"
        os.mkdir(path, 0o755)
        # The kernel moves one thread, itself, without the lock that a process waits milliseconds for.
        self._paths[path] = "cgroup.procs" if place.version == 2 else "tasks"
        for file, value in settings(place, limits):
            try:
                _write(f"{path}/{file}", value)
            except OSError:
                if file not in _OPTIONAL:
                    raise
        if "memory" in place.controllers:
            self._memory = Place(path, place.version, place.controllers)


_OPTIONAL = {"memory.swap.max", "memory.memsw.limit_in_bytes", "cpu.cfs_quota_us"}
"""Absent where the kernel does not count swap; a quota is refused where the group above has a smaller one."""


def settings(place: Place, limits: GroupLimits) -> list[tuple[str, str]]:
    """Files to write, in order, for a group at ``place``.

    >>> settings(Place("/sys/fs/cgroup", 2, ("pids",)), GroupLimits(1 << 20, 9, None))
    [('pids.max', '9')]
    """
    second = place.version == 2
    found: list[tuple[str, str]] = []
    if "memory" in place.controllers:
        names = (
            ("memory.max", "memory.swap.max") if second else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        )
        found += [(names[0], str(limits.memory)), (names[1], "0" if second else str(limits.memory))]
    if "pids" in place.controllers and limits.pids is not None:
        found.append(("pids.max", str(limits.pids)))
    if "cpu" in place.controllers and limits.cpu is not None:
        quota = max(1000, int(limits.cpu * _PERIOD_US))
        if second:
            found.append(("cpu.max", f"{quota} {_PERIOD_US}"))
        else:
            found += [("cpu.cfs_period_us", str(_PERIOD_US)), ("cpu.cfs_quota_us", str(quota))]
    return found


def remove_place(places: tuple[Place, ...], owner: str) -> None:
    """Remove all groups of one owner whose processes are dead."""
    for place in places:
        parent = f"{place.path}/{owner}"
        with contextlib.suppress(OSError):
            for name in os.listdir(parent):
                if os.path.isdir(f"{parent}/{name}"):
                    _remove(f"{parent}/{name}")
            _remove(parent)


def sweep(places: tuple[Place, ...]) -> None:
    """Remove the groups of owners that are dead; a group with processes cannot be removed."""
    for place in places:
        with contextlib.suppress(OSError):
            for name in os.listdir(place.path):
                match = _NAME.fullmatch(name)
                if match is not None and not os.path.exists(f"/proc/{match[2]}"):
                    remove_place((place,), name)


def _own_groups(text: str) -> Mapping[str, str]:
    """Path of this process's group by controller, the version 2 one under the empty name."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            found[name] = path
    return found


def _hierarchies(text: str) -> list[tuple[str, str, str, set[str]]]:
    """(type, root, mount point, options) of every cgroup mount, from the text of mountinfo."""
    found = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) > 4 and len(kind) > 2 and kind[0] in ("cgroup", "cgroup2"):
            found.append((kind[0], fields[3], fields[4], set(kind[2].split(","))))
    return found


def _below(path: str, root: str) -> str:
    """``path`` relative to the part of the hierarchy that is mounted; its top when it lies elsewhere."""
    if root == "/":
        return path.rstrip("/")
    return path[len(root) :].rstrip("/") if path == root or path.startswith(f"{root}/") else ""


def _first_version(base: str, relative: str, controllers: tuple[str, ...]) -> Place | None:
    for path in (base + relative, base) if relative else (base,):
        if controllers and _writable(path):
            return Place(path, 1, controllers)
    return None


def _second_version(base: str, relative: str, wanted: set[str]) -> Place | None:
    """Our own group when it passes controllers on (only one without processes can), else the one above it."""
    candidates = [relative, os.path.dirname(relative).rstrip("/")] if relative else [""]
    for candidate in candidates:
        path = base + candidate
        offered = wanted & set(_text(f"{path}/cgroup.controllers").split())
        passed = offered & set(_text(f"{path}/cgroup.subtree_control").split())
        if offered - passed and not candidate and _is_top(path) and _writable(path):
            with contextlib.suppress(OSError):  # the top of the hierarchy may hold processes and pass on
                _write(f"{path}/cgroup.subtree_control", " ".join(f"+{each}" for each in sorted(offered - passed)))
                passed = offered & set(_text(f"{path}/cgroup.subtree_control").split())
        if passed and _writable(path):
            return Place(path, 2, tuple(sorted(passed)))
    return None


def _is_top(path: str) -> bool:
    return not os.path.exists(f"{path}/cgroup.type")


def _writable(path: str) -> bool:
    return os.access(path, os.W_OK | os.X_OK) and os.access(f"{path}/cgroup.procs", os.W_OK)


def _remove(path: str) -> None:
    end = time.monotonic() + _REMOVE_S
    while True:
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > end:
                return
            time.sleep(0.002)
        else:
            return


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
