"""The process that starts sandboxed commands: forks, drops the uid, runs bwrap, collects, kills.

It is run as a program of its own (``python -I -S launcher_process.py SOCKET_FD BWRAP``) and imports only the
standard library, so that forking costs a fraction of a millisecond however large its owner is. It is the
subreaper of everything that it starts: a command counts as ended only when the first process of its pid
namespace has been reaped, that is, when nothing of it is left. When the owner's end of the socket closes,
whatever the reason, everything is killed and the process ends. It must not import tollway.

There are two of it, parent and child: the child is the launcher, the parent guards it. When either of them
dies, the other kills every sandboxed process that is left.

Frames on the socket, both ways: two little-endian uint32 (length of head, length of body), the head as JSON,
the body as bytes. ``{"op": "exec", ...}`` with the bwrap options and stdin as body is answered by one frame
with stdout and stderr as body; ``{"op": "kill", "id": n}`` ends a command early.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import heapq
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time

HEADER = struct.Struct("<II")
ARGS_FD, STATUS_FD = 3, 4
CHUNK = 1 << 16
KILL_GRACE_S = 10.0
"""How long a SIGKILLed command may take to disappear before it is reported as stuck."""
PR_SET_CHILD_SUBREAPER = 36

Head = dict[str, object]


class Command:
    """One running bwrap: its processes, pipes and what it wrote so far."""

    def __init__(self, head: Head) -> None:
        self.id = int(str(head["id"]))
        self.max_output = int(str(head["max_output"]))
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
        if self.outer_code is None:
            # The group holds the child too until bwrap gives it a session of its own, so no moment is missed.
            _signal_group(self.outer)
        if self.inner and not self.inner_gone:
            _signal(self.inner)


class Launcher:
    """Event loop over the owner's socket, the commands' pipes and SIGCHLD."""

    def __init__(self, owner: socket.socket, bwrap: str, guardian: int) -> None:
        self.owner, self.bwrap, self.guardian = owner, bwrap, guardian
        self.selector = selectors.DefaultSelector()
        self.commands: dict[int, Command] = {}
        self.by_pid: dict[int, Command] = {}
        self.deadlines: list[tuple[float, int]] = []
        self.inbox, self.outbox = bytearray(), bytearray()
        self.null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        owner.setblocking(False)
        self.selector.register(owner, selectors.EVENT_READ)
        self.selector.register(guardian, selectors.EVENT_READ)
        self.wake, wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.selector.register(self.wake, selectors.EVENT_READ)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Serve until the owner or the guardian is gone, then leave nothing behind."""
        while True:
            for key, events in self.selector.select(self._next_wait()):
                if key.fileobj is self.owner:
                    if events & selectors.EVENT_WRITE:
                        self._send()
                    if events & selectors.EVENT_READ and not self._receive():
                        self._shut_down()
                        return
                elif key.fd == self.guardian:
                    # No answers: that the commands were killed is our end, not that of their sandboxes.
                    self.owner.shutdown(socket.SHUT_RDWR)
                    self._shut_down()
                    return
                elif key.fd == self.wake:
                    _drain(self.wake)
                    self._reap()
                else:
                    self._read_stream(key.fd, key.data)
            self._expire()

    # -- owner -------------------------------------------------------------------------------------

    def _receive(self) -> bool:
        try:
            data = self.owner.recv(CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        self.inbox += data
        while len(self.inbox) >= HEADER.size:
            head_size, body_size = HEADER.unpack_from(self.inbox)
            end = HEADER.size + head_size + body_size
            if len(self.inbox) < end:
                break
            head = json.loads(self.inbox[HEADER.size : HEADER.size + head_size])
            body = bytes(self.inbox[HEADER.size + head_size : end])
            del self.inbox[:end]
            self._handle(head, body)
        return True

    def _handle(self, head: Head, body: bytes) -> None:
        if head["op"] == "kill":
            command = self.commands.get(int(str(head["id"])))
            if command is not None and command.killed_at is None:
                self._kill(command)
            return
        command = Command(head)
        try:
            self._start(command, head, body)
        except OSError as error:
            self._reply(command, {"error": f"cannot start bwrap: {error}"})

    def _reply(self, command: Command, extra: Head) -> None:
        out, err = (bytes(stream) for stream in [*command.streams.values(), b"", b""][:2])
        head = {
            "id": command.id,
            "out": len(out),
            "truncated": command.truncated,
            "timed_out": command.timed_out,
            "cpu_s": command.cpu_s,
            "duration_s": time.monotonic() - command.started,
            **extra,
        }
        encoded = json.dumps(head).encode()
        self.outbox += HEADER.pack(len(encoded), len(out) + len(err)) + encoded + out + err
        self._send()

    def _send(self) -> None:
        try:
            sent = self.owner.send(self.outbox)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(self.outbox)  # the owner is gone; the read side notices
        del self.outbox[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.outbox else 0)
        if self.selector.get_key(self.owner).events != wanted:
            self.selector.modify(self.owner, wanted)

    # -- commands ----------------------------------------------------------------------------------

    def _start(self, command: Command, head: Head, body: bytes) -> None:
        split = int(str(head["options"]))
        options = b"--json-status-fd\0%d\0" % STATUS_FD + body[:split]
        ours: list[int] = []
        theirs: list[int] = []
        try:
            args_fd = _memory_file(options)
            theirs.append(args_fd)
            stdin_fd = self.null
            if split < len(body):
                stdin_fd = _memory_file(body[split:])
                theirs.append(stdin_fd)
            for _ in ("stdout", "stderr", "status"):
                reader, writer = os.pipe2(os.O_CLOEXEC)
                ours.append(reader)
                theirs.append(writer)
            out_w, err_w, status_w = theirs[-3:]
            command.outer = os.fork()
            if command.outer == 0:
                self._become_bwrap(head, (stdin_fd, out_w, err_w, args_fd, status_w))
        except OSError:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        out_r, err_r, status_r = ours
        for fd in ours:
            os.set_blocking(fd, False)
        command.status_fd = status_r
        for fd in (out_r, err_r):
            command.streams[fd] = bytearray()
            self.selector.register(fd, selectors.EVENT_READ, command)
        self.commands[command.id] = self.by_pid[command.outer] = command
        heapq.heappush(self.deadlines, (command.started + float(str(head["timeout_s"])), command.id))

    def _become_bwrap(self, head: Head, fds: tuple[int, ...]) -> None:
        """In the forked child: own session, limits, unprivileged uid, empty environment, bwrap."""
        try:
            os.setsid()
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)  # what Python ignores, exec would pass on
            # Above the target numbers first, so that no dup2 overwrites a source that is still needed.
            sources = [fd if fd > STATUS_FD else os.dup(fd) for fd in fds]
            while min(sources) <= STATUS_FD:
                sources = [fd if fd > STATUS_FD else os.dup(fd) for fd in sources]
            for target, source in enumerate(sources):
                os.dup2(source, target)
            rlimits = head["rlimits"]
            if not isinstance(rlimits, list):
                raise TypeError("rlimits must be a list")
            for kind, value in rlimits:
                _, hard = resource.getrlimit(kind)
                limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
                resource.setrlimit(kind, (limit, limit))
            uid = head["uid"]
            if isinstance(uid, int):
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            argv = head["argv"]
            if not isinstance(argv, list):
                raise TypeError("argv must be a list")
            os.execve(self.bwrap, ["bwrap", "--args", str(ARGS_FD), "--", *argv], {})  # noqa: S606 - argv, no shell
        except BaseException as error:  # a forked child must never return into the loop
            try:
                os.write(fds[4], json.dumps({"launch-error": str(error)}).encode())
            finally:
                os._exit(127)

    def _read_stream(self, fd: int, command: Command) -> None:
        if command.id not in self.commands:
            return  # it ended earlier in this round, and the number may be another pipe by now
        try:
            chunk = os.read(fd, CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            self.selector.unregister(fd)
            return
        _keep(command, fd, chunk)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            command = self.by_pid.pop(pid, None)
            if command is None:
                continue
            command.cpu_s += usage.ru_utime + usage.ru_stime
            if pid != command.outer or command.outer_code is not None:
                command.inner_gone = True
            else:
                command.outer_code = os.waitstatus_to_exitcode(status)
                command.read_status()
                self._await_inner(command)
            if command.inner_gone:
                self._finish(command)

    def _await_inner(self, command: Command) -> None:
        """bwrap has ended: its child is ours now, unless it never existed or bwrap reaped it."""
        if not command.inner:
            command.inner_gone = True
            return
        try:
            os.waitid(os.P_PID, command.inner, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            command.inner_gone = True
            return
        self.by_pid[command.inner] = command
        _signal(command.inner)

    def _finish(self, command: Command, error: str | None = None) -> None:
        command.read_status()
        for fd in command.streams:
            # A writer outside the namespace can hold the pipe open for ever: take what is there, do not wait.
            try:
                while chunk := os.read(fd, CHUNK):
                    _keep(command, fd, chunk)
                    if command.truncated:
                        break
            except BlockingIOError:
                pass
            if fd in self.selector.get_map():
                self.selector.unregister(fd)
            os.close(fd)
        os.close(command.status_fd)
        del self.commands[command.id]
        exit_code = command.reported("exit-code")
        launch_error = command.reported("launch-error")
        self._reply(
            command,
            {
                "exit_code": exit_code,
                "killed": command.killed_at is not None,
                "bwrap_code": command.outer_code,
                "error": error or (launch_error and f"cannot start bwrap: {launch_error}"),
            },
        )

    def _kill(self, command: Command) -> None:
        command.kill()
        heapq.heappush(self.deadlines, (time.monotonic() + KILL_GRACE_S, command.id))

    def _next_wait(self) -> float | None:
        while self.deadlines and self.deadlines[0][1] not in self.commands:
            heapq.heappop(self.deadlines)
        return max(0.0, self.deadlines[0][0] - time.monotonic()) if self.deadlines else None

    def _expire(self) -> None:
        now = time.monotonic()
        while self.deadlines and self.deadlines[0][0] <= now:
            command = self.commands.get(heapq.heappop(self.deadlines)[1])
            if command is None:
                continue
            if command.killed_at is None:
                command.timed_out = True
                self._kill(command)
            elif command.killed_at + KILL_GRACE_S <= now:
                for pid in (command.outer, command.inner):
                    self.by_pid.pop(pid, None)
                self._finish(command, f"process {command.outer} did not die {KILL_GRACE_S} s after SIGKILL")

    def _shut_down(self) -> None:
        deadline = time.monotonic() + KILL_GRACE_S
        while self.commands and time.monotonic() < deadline:
            for command in list(self.commands.values()):
                command.kill()
            self._reap()
            time.sleep(0.002)


def _keep(command: Command, fd: int, chunk: bytes) -> None:
    stream = command.streams[fd]
    room = command.max_output - len(stream)
    if len(chunk) > room:
        command.truncated = True
    stream += chunk[:room]


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("tollway", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass


def _signal(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _signal_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        _signal(pid)  # it has not reached setsid yet


def main() -> None:
    """Entry point: ``launcher_process.py SOCKET_FD BWRAP``."""
    owner = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(owner.fileno(), False)
    os.umask(0o022)
    os.chdir("/")
    gc.collect()
    gc.freeze()
    ours, guardians = os.pipe2(os.O_CLOEXEC)  # nothing is ever written: it ends with the guardian
    _become_subreaper()
    launcher = os.fork()
    if launcher == 0:
        os.close(guardians)
        _become_subreaper()  # fork does not pass it on
        Launcher(owner, sys.argv[2], ours).run()
        return
    owner.close()
    os.close(ours)
    _guard(launcher)


def _become_subreaper() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _guard(launcher: int) -> None:
    """Wait for the launcher to end, then kill what it left: all of it is our child from that moment on.

    bwrap's own --die-with-parent does not reach a sandbox whose parent dies while it is being set up.
    """
    os.waitpid(launcher, 0)
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in _children():
                _signal(pid)
            # The death of one may bring the next: its children become ours before it can be reaped.
            os.waitpid(-1, 0)


def _children() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = file.read().rpartition(b")")[2].split()[1]
        except OSError:
            continue  # it ended meanwhile
        if int(parent) == os.getpid():
            found.append(int(name))
    return found


if __name__ == "__main__":
    main()
