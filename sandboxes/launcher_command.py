"""One bwrap run inside the launcher process: the forked child that becomes it, its pipes, its end.

Runs inside the launcher process: standard library only, no tollway imports but its siblings there.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Iterable

from tollway.sandboxes.cgroups import Group
from tollway.sandboxes.mounts import Space, join

TYPE_CHECKING = False
"""As in ``typing``, which costs every fork a tenth of its time."""
if TYPE_CHECKING:
    from tollway.sandboxes.session import Session

__all__ = ["ARGS_FD", "CHUNK", "SECCOMP_FD", "STATUS_FD", "Command", "Head", "Start", "memory_file", "spawn", "walk"]

ARGS_FD, STATUS_FD, SECCOMP_FD = 3, 4, 5
CHUNK = 1 << 16
_STOP_S = 2.0
"""How long stopping the processes of a command without namespaces may take."""

Head = dict[str, object]


class Command:
    """One running bwrap: its processes, pipes and what it wrote so far."""

    def __init__(self, number: int, max_output: int) -> None:
        self.id, self.max_output = number, max_output
        self.started = time.monotonic()
        self.outer = 0
        self.inner = 0
        self.outer_code: int | None = None
        self.inner_gone = False
        self.timed_out = self.truncated = False
        self.killed_at: float | None = None
        self.cpu_s = 0.0
        self.streams: dict[int, bytearray] = {}
        self.status_fd = -1
        self.status = b""
        self.group: Group | None = None
        self.session: Session | None = None
        """Set for a long-lived sandbox's agent."""
        self.loose = False
        """Whether it runs without namespaces."""
        self.box: object = None
        """The sandbox that it belongs to, compared by identity only."""

    def read_status(self) -> None:
        """Take what bwrap reported so far: its child's pid, and the exit code if the command really ran."""
        try:
            while chunk := os.read(self.status_fd, 4096):
                self.status += chunk
        except BlockingIOError:
            pass
        if not self.inner:
            self.inner = int(str(self.reported("child-pid") or 0))

    def reported(self, key: str) -> object:
        """A value of bwrap's status documents, ``None`` when it has not been reported."""
        for line in self.status.splitlines():
            try:
                document = json.loads(line)
            except ValueError:
                continue
            if key in document:
                return document[key]
        return None

    def kill(self) -> None:
        """SIGKILL bwrap and the namespace's first process: the kernel kills the rest with it."""
        self.killed_at = self.killed_at or time.monotonic()
        self.read_status()
        if self.loose and self.outer_code is None:
            # No namespace holds its processes together: stop them until no new ones appear, the first one last.
            stopped: set[int] = set()
            end = time.monotonic() + _STOP_S
            while (fresh := set(walk([self.outer])) - stopped) and time.monotonic() < end:
                for pid in fresh:
                    signal_one(pid, signal.SIGSTOP)
                stopped |= fresh
            for pid in stopped:
                signal_one(pid)
        elif self.outer_code is None:
            # The group holds the child too until bwrap gives it a session of its own, so no moment is missed.
            signal_group(self.outer)
        if self.inner and not self.inner_gone:
            signal_one(self.inner)

    def keep(self, fd: int, chunk: bytes) -> None:
        """Add to what a stream wrote, as far as there is room."""
        stream = self.streams[fd]
        room = self.max_output - len(stream)
        if len(chunk) > room:
            self.truncated = True
        stream += chunk[:room]

    def drain(self) -> None:
        """Take what is still in the pipes, and close them.

        A writer outside the namespace can hold a pipe open for ever: nothing here waits.
        """
        for fd in self.streams:
            try:
                while chunk := os.read(fd, CHUNK):
                    self.keep(fd, chunk)
                    if self.truncated:
                        break
            except BlockingIOError:
                pass
            os.close(fd)
        os.close(self.status_fd)


class Start:
    """What a bwrap run needs besides its command line."""

    def __init__(
        self, bwrap: str, options: bytes, head: Head, stdin: int, *, space: Space | None = None, seccomp: int = -1
    ) -> None:
        """``head`` holds argv, rlimits and uid; ``stdin`` is closed here when the child has it; -1 is no filter."""
        self.bwrap, self.options, self.stdin, self.space, self.seccomp = bwrap, options, stdin, space, seccomp
        argv, limits, uid = head["argv"], head["rlimits"], head["uid"]
        if not isinstance(argv, list) or not isinstance(limits, list):
            raise TypeError("argv and rlimits are lists")
        self.argv: list[str] = argv
        self.rlimits: list[tuple[int, int]] = limits
        self.uid = uid if isinstance(uid, int) else None


def spawn(command: Command, start: Start) -> None:
    """Fork the child that becomes bwrap and fill in ``command``; on ``OSError`` no descriptor is left open."""
    options = b"--json-status-fd\0%d\0" % STATUS_FD
    if start.seccomp >= 0:
        options += b"--seccomp\0%d\0" % SECCOMP_FD
    ours: list[int] = []
    theirs: list[int] = [start.stdin]
    try:
        args_fd = memory_file(options + start.options)
        theirs.append(args_fd)
        seccomp = -1
        if start.seccomp >= 0:
            # Opened anew: a duplicate would share the place up to which others have read.
            seccomp = os.open(f"/proc/self/fd/{start.seccomp}", os.O_RDONLY | os.O_CLOEXEC)
            theirs.append(seccomp)
        for _ in range(3):
            reader, writer = os.pipe2(os.O_CLOEXEC)
            ours.append(reader)
            theirs.append(writer)
        out_w, err_w, status_w = theirs[-3:]
        command.outer = os.fork()
        if command.outer == 0:
            extra = (seccomp,) if seccomp >= 0 else ()
            _become_bwrap(start, command.group, (start.stdin, out_w, err_w, args_fd, status_w, *extra))
    except OSError:
        for fd in ours:
            os.close(fd)
        raise
    finally:
        for fd in theirs:
            os.close(fd)
    for fd in ours:
        os.set_blocking(fd, False)
    command.status_fd = ours[2]
    command.streams = {ours[0]: bytearray(), ours[1]: bytearray()}


def _become_bwrap(start: Start, group: Group | None, fds: tuple[int, ...]) -> None:
    """In the forked child: limits, namespace, own session, unprivileged uid, empty environment, bwrap."""
    try:
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)  # what Python ignores, exec would pass on
        if group is not None:
            group.enter()
        # Above the target numbers first, so that no dup2 overwrites a source that is still needed.
        sources = [fd if fd > SECCOMP_FD else os.dup(fd) for fd in fds]
        while min(sources) <= SECCOMP_FD:
            sources = [fd if fd > SECCOMP_FD else os.dup(fd) for fd in sources]
        for target, source in enumerate(sources):
            os.dup2(source, target)
        if start.space is not None and start.space.namespace >= 0:
            join(start.space.namespace)
        for kind, value in start.rlimits:
            _, hard = resource.getrlimit(kind)
            limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (limit, limit))
        if start.uid is not None:
            os.setgroups([])
            os.setgid(start.uid)
            os.setuid(start.uid)
        os.execve(start.bwrap, ["bwrap", "--args", str(ARGS_FD), "--", *start.argv], {})  # noqa: S606 - argv, no shell
    except BaseException as error:  # a forked child must never return into the loop
        try:
            os.write(fds[4], json.dumps({"launch-error": str(error)}).encode())
        finally:
            os._exit(127)


def walk(roots: Iterable[int]) -> list[int]:
    """The processes of this machine that descend from ``roots``, these included."""
    below: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue  # it ended meanwhile
        below.setdefault(parent, []).append(int(name))
    found = [root for root in roots if root > 0]
    for pid in found:
        found += below.get(pid, [])
    return found


def memory_file(data: bytes) -> int:
    """Descriptor from which ``data`` can be read."""
    fd = os.memfd_create("tollway", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def signal_one(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def signal_group(pid: int) -> None:
    """SIGKILL the group that a child of ours leads, or the child before it leads one."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        signal_one(pid)  # it has not reached setsid yet
