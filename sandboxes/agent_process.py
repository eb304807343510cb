"""The agent of a long-lived sandbox: its first process, runs commands and tells how they ended.

Runs inside the sandbox under the system's Python, from text that it is sent, so: standard library only, few
imports, Python 3.8 and later. As process 1 of its namespace nothing inside can signal it, and it
makes itself undumpable so that nothing inside can read or write its memory or descriptors. The frames are
described in ``session``. When its socket closes it ends, and the kernel ends everything inside with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import struct
import time

REQUEST = struct.Struct("<IIIIdI")
REPLY = struct.Struct("<IIIiIdd")
RUN, KILL = 1, 2
TIMED_OUT, TRUNCATED, KILLED = 1, 2, 4
CHUNK = 1 << 16
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
CLOSED = -1
STOP_S = 5.0
"""How long stopping the processes of one command may take before the whole sandbox is given up."""
LOOK_MS = 10.0
MOST_HELD = 64
"""Pipes of ended commands that something left behind may still write to. Descriptors are few, and can be passed on."""
OOM_SCORE = 500
"""Of commands: as if each held half of what the sandbox may take."""
READABLE = select.POLLIN | select.POLLHUP | select.POLLERR


class Call:
    """One command: its first process and what it wrote so far."""

    def __init__(self, number: int, room: int, deadline: float) -> None:
        self.number, self.room, self.deadline = number, room, deadline
        self.started = time.monotonic()
        self.pid = 0
        self.pipes: list[int] = []
        self.kept = [bytearray(), bytearray()]
        self.flags = 0
        self.status: int | None = None
        self.cpu_s = 0.0
        self.doomed: set[int] = set()
        """Processes that were killed and not reaped yet."""

    def keep(self, fd: int, chunk: bytes) -> None:
        """Add what one of the pipes gave, as far as there is room."""
        kept = self.kept[self.pipes.index(fd)]
        room = self.room - len(kept)
        if len(chunk) > room:
            self.flags |= TRUNCATED
        kept += chunk[:room]


class Agent:
    """Event loop over the control socket, the pipes of commands and SIGCHLD."""

    def __init__(self, control: socket.socket, prctl: object) -> None:
        self.control, self.prctl = control, prctl
        self.poll = select.poll()
        self.calls: dict[int, Call] = {}
        self.readers: dict[int, Call | None] = {}
        """Pipes by descriptor; ``None`` for those whose command has been answered and that something still holds."""
        self.inbox, self.outbox = bytearray(), bytearray()
        self.wake, writer = os.pipe()
        for fd in (self.wake, writer):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Without a handler the kernel drops it for process 1, as it does all others.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        control.setblocking(False)
        self.poll.register(control.fileno(), select.POLLIN)
        self.poll.register(self.wake, select.POLLIN)

    def run(self) -> None:
        """Serve until the other end closes."""
        self.send(REPLY.pack(0, 0, 0, 0, 0, 0.0, 0.0))
        while True:
            for fd, events in self.poll.poll(self.next_wait_ms()):
                if fd == self.control.fileno():
                    if events & select.POLLOUT:
                        self.send(b"")
                    if events & READABLE and not self.receive():
                        return
                elif fd == self.wake:
                    drain(self.wake)
                elif fd in self.readers:
                    self.read(fd)
            self.reap()
            self.settle()
            self.expire()

    def receive(self) -> bool:
        try:
            data = self.control.recv(CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        self.inbox += data
        while len(self.inbox) >= REQUEST.size:
            operation, number, words, stdin, timeout_s, room = REQUEST.unpack_from(self.inbox)
            end = REQUEST.size + words + stdin
            if len(self.inbox) < end:
                break
            body = bytes(self.inbox[REQUEST.size : end])
            del self.inbox[:end]
            if operation == RUN:
                self.start(Call(number, room, time.monotonic() + timeout_s), body[:words], body[words:], timeout_s)
            elif number in self.calls:
                self.kill(self.calls[number], KILLED)
        return True

    def send(self, data: bytes) -> None:
        self.outbox += data
        try:
            sent = self.control.send(self.outbox)
        except BlockingIOError:
            sent = 0
        except OSError:
            os._exit(0)
        del self.outbox[:sent]
        self.poll.modify(self.control.fileno(), select.POLLIN | (select.POLLOUT if self.outbox else 0))

    def start(self, call: Call, words: bytes, stdin: bytes, timeout_s: float) -> None:
        """Words: directory, number of arguments, arguments, ``NAME=value`` pairs; separated by NUL."""
        directory, count, *rest = words.split(b"\0")
        argv, pairs = rest[: int(count)], rest[int(count) :]
        environment = dict(os.environb)
        for pair in pairs:
            name, _, value = pair.partition(b"=")
            environment[name] = value
        fds: list[int] = []
        try:
            fds.append(given(stdin))
            for _ in range(2):
                fds += os.pipe()
            call.pid = os.fork()
        except OSError as error:
            for fd in fds:
                os.close(fd)
            call.kept[1] += b"cannot start the command: %s\n" % os.strerror(error.errno or 0).encode()
            call.status = 126 << 8
            self.answer(call)
            return
        if call.pid == 0:
            become(argv, directory, environment, (fds[0], fds[2], fds[4]), int(min(timeout_s, 1e9)) + 1, self.prctl)
        for fd in (fds[0], fds[2], fds[4]):
            os.close(fd)
        call.pipes = [fds[1], fds[3]]
        for fd in call.pipes:
            os.set_blocking(fd, False)
            self.readers[fd] = call
            self.poll.register(fd, select.POLLIN)
        self.calls[call.number] = call

    def read(self, fd: int) -> None:
        try:
            chunk = os.read(fd, CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            self.forget(fd)
            return
        call = self.readers[fd]
        if call is not None:
            call.keep(fd, chunk)

    def forget(self, fd: int) -> None:
        """Close a pipe that nobody writes to any more. Its number may be another command's from now on."""
        if fd in self.readers:
            call = self.readers.pop(fd)
            if call is not None:
                call.pipes[call.pipes.index(fd)] = CLOSED
            self.poll.unregister(fd)
            os.close(fd)

    def reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for call in list(self.calls.values()):
                call.doomed.discard(pid)
                if call.pid == pid:
                    call.status = status
                    call.cpu_s = usage.ru_utime + usage.ru_stime
                if call.status is not None and not call.doomed:
                    self.finish(call)

    def settle(self) -> None:
        """Some of those that were to be killed had ended by themselves, and others reaped them."""
        for call in list(self.calls.values()):
            if call.doomed:
                call.doomed = {pid for pid in call.doomed if send_signal(pid, 0)}
                if call.status is not None and not call.doomed:
                    self.finish(call)

    def finish(self, call: Call) -> None:
        """Take what is still in the pipes. What lives on may keep writing to them: it is read and dropped."""
        for fd in call.pipes:
            # A closed pipe's number may belong to a later command by now.
            while self.readers.get(fd) is call and not call.flags & TRUNCATED:
                try:
                    chunk = os.read(fd, CHUNK)
                except BlockingIOError:
                    break
                if chunk:
                    call.keep(fd, chunk)
                else:
                    self.forget(fd)
            if self.readers.get(fd) is call:
                self.readers[fd] = None
        held = [fd for fd, reader in self.readers.items() if reader is None]
        for fd in held[:-MOST_HELD]:
            self.forget(fd)
        del self.calls[call.number]
        self.answer(call)

    def answer(self, call: Call) -> None:
        status = call.status or 0
        code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        out, err = (bytes(kept[: call.room]) for kept in call.kept)
        wall_s = time.monotonic() - call.started
        self.send(REPLY.pack(call.number, len(out), len(err), code, call.flags, call.cpu_s, wall_s) + out + err)

    def kill(self, call: Call, flag: int) -> None:
        """End a command and everything that descends from it.

        Its first process collects orphans, so that all of them are found below it, however they detached
        themselves. They are stopped until no new ones appear: what is stopped cannot fork.
        """
        if call.doomed:
            return
        call.flags |= flag
        end = time.monotonic() + STOP_S
        while True:
            fresh = descendants(call.pid) - call.doomed
            if not fresh:
                break
            if time.monotonic() > end:
                os._exit(1)
            for pid in fresh:
                send_signal(pid, signal.SIGSTOP)
            call.doomed |= fresh
        for pid in call.doomed:
            send_signal(pid, signal.SIGKILL)

    def next_wait_ms(self) -> float | None:
        if any(call.doomed for call in self.calls.values()):
            return LOOK_MS
        waiting = [call.deadline for call in self.calls.values() if not call.flags & (TIMED_OUT | KILLED)]
        return max(0.0, (min(waiting) - time.monotonic()) * 1000 + 1) if waiting else None

    def expire(self) -> None:
        now = time.monotonic()
        for call in list(self.calls.values()):
            if call.deadline <= now and not call.flags & (TIMED_OUT | KILLED):
                self.kill(call, TIMED_OUT)


def become(
    argv: list[bytes],
    directory: bytes,
    environment: dict[bytes, bytes],
    fds: tuple[int, int, int],
    cpu_s: int,
    prctl: object,
) -> None:
    """In the forked child: own session, collector of orphans, standard descriptors, directory, the command."""
    code, text = 127, ""
    try:
        os.setsid()
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # type: ignore[operator]  # a C function
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        high = [os.dup(fd) if fd < 3 else fd for fd in fds]
        for target, source in enumerate(high):
            os.dup2(source, target)
        # The control socket with all others: from here on this process can be read by the rest of the sandbox.
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        go_first(prctl)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        text = "Can't chdir to " + os.fsdecode(directory)
        os.chdir(directory)
        text = "cannot run " + os.fsdecode(argv[0])
        os.execvpe(argv[0], argv, environment)  # noqa: S606 - argv, no shell
    except OSError as error:
        code = 126 if isinstance(error, PermissionError) else 127
        os.write(2, f"{text}: {os.strerror(error.errno or 0)}\n".encode("utf-8", "surrogateescape"))
    finally:
        os._exit(code)


def go_first(prctl: object) -> None:
    """When memory runs out, what the agent runs is to be killed before the agent."""
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # type: ignore[operator]  # a C function
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
        file.write(b"%d" % OOM_SCORE)


def given(data: bytes) -> int:
    """Descriptor from which a command reads ``data``."""
    if not data:
        return os.open(os.devnull, os.O_RDONLY)
    fd = os.memfd_create("stdin")
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def descendants(root: int) -> set[int]:
    """``root`` and what descends from it, zombies excepted."""
    below: dict[int, list[int]] = {}
    zombies = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open("/proc/" + name + "/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue  # it ended meanwhile
        below.setdefault(int(parent), []).append(int(name))
        if state == b"Z":
            zombies.add(int(name))
    found = [root]
    for pid in found:
        found += below.get(pid, [])
    return set(found) - (zombies - {root})


def send_signal(pid: int, number: int) -> bool:
    """Whether the process was there."""
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass


def main() -> None:
    """Entry point: the control socket, from which this text was read, is descriptor 0."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # What follows must not end this process whatever happens to one command.
    Agent(control, prctl).run()


if __name__ == "__main__":
    main()
