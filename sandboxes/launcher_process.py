"""The process that starts sandboxed commands: mounts, forks, drops the uid, runs bwrap, collects, kills.

It is run as a program of its own, by ``launcher``, and imports only the standard library and its siblings here
(``launcher_boxes``, ``launcher_command``, ``session`` and below), so that forking costs a fraction of a millisecond
however large its owner is. It is the subreaper of everything that it starts: a command counts as ended only when
the first process of its pid namespace has been reaped, that is, when nothing of it is left. When the owner's end
of the socket closes, whatever the reason, everything is killed and the process ends.

There are two of it, parent and child: the child is the launcher, the parent guards it. When either of them
dies, the other kills every sandboxed process that is left.

Frames on the socket, both ways: two little-endian uint32 (length of head, length of body), the head as JSON,
the body as bytes. Each carries an ``op`` and an ``id``, and is answered by one frame with that id: ``make`` and
``remove`` a sandbox, ``exec`` with bwrap options and stdin as body, ``session`` and ``call`` for a long-lived
sandbox, ``signal`` for all of its processes; ``kill`` ends an ``exec`` or a ``call`` early and has no answer.
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
import time
from collections.abc import Sequence

from tollway.sandboxes import cgroups
from tollway.sandboxes.launcher_boxes import Box, Boxes
from tollway.sandboxes.launcher_command import CHUNK, Command, Head, Start, memory_file, signal_one, spawn, walk
from tollway.sandboxes.session import ARGV, Session

__all__ = ["Launcher", "main"]

HEADER = struct.Struct("<II")
KILL_GRACE_S = 10.0
"""How long a SIGKILLed command may take to disappear before it is reported as stuck."""
PR_SET_CHILD_SUBREAPER = 36


class Launcher:
    """Event loop over the owner's socket, the commands' pipes and SIGCHLD."""

    def __init__(self, owner: socket.socket, bwrap: str, guardian: int, settings: Head) -> None:
        self.owner, self.bwrap, self.guardian = owner, bwrap, guardian
        self.selector = selectors.DefaultSelector()
        self.commands: dict[int, Command] = {}
        self.by_pid: dict[int, Command] = {}
        self.deadlines: list[tuple[float, int]] = []
        self.inbox, self.outbox = bytearray(), bytearray()
        self.null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self.seccomp = _number(settings.get("seccomp"), -1)
        self.loose = bool(settings.get("unsafe"))
        self.boxes = Boxes(settings)
        owner.setblocking(False)
        self.selector.register(owner, selectors.EVENT_READ)
        self.selector.register(guardian, selectors.EVENT_READ)
        self.wake, wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.selector.register(self.wake, selectors.EVENT_READ)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._answer(0, {"pid": os.getpid(), **self.boxes.facts})

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
                elif isinstance(key.data, Session):
                    key.data.ready(events)
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
        number = _number(head["id"])
        box = self.boxes.get(head.get("box"))
        try:
            match head["op"]:
                case "exec" if box is not None or head.get("box") is None:
                    self._start(head, body, box)
                case "kill":
                    self._kill_early(number, box)
                case "make":
                    self._answer(number, self.boxes.make(head))
                case "remove":
                    self._remove(number, str(head["box"]))
                case "session" if box is not None:
                    self._start_session(number, head, body, box)
                case "call" if box is not None and box.session is not None:
                    box.session.call(number, head, body)
                case "signal" if box is not None:
                    self._signal(number, head, box)
                case _:
                    self._answer(number, {"gone": True})
        except OSError as error:
            self._answer(number, {"error": f"cannot {head['op']}: {error}", "errno": error.errno})

    def _answer(self, number: int, head: Head, *body: bytes) -> None:
        encoded = json.dumps({"id": number, **head}).encode()
        self.outbox += HEADER.pack(len(encoded), sum(map(len, body))) + encoded + b"".join(body)
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

    # -- sandboxes ---------------------------------------------------------------------------------

    def _remove(self, number: int, name: str) -> None:
        box = self.boxes.forget(name)
        if box is None:
            self._answer(number, {})
        elif box.session is not None and box.session.command.id in self.commands:
            # Answered when its last process is gone.
            box.session.end(lambda: self._clear(number, box))
            self._kill(box.session.command)
        else:
            self._clear(number, box)

    def _clear(self, number: int, box: Box) -> None:
        self._answer(number, self.boxes.clear(box))

    def _start_session(self, number: int, head: Head, body: bytes, box: Box) -> None:
        ours, theirs = socket.socketpair()
        command = Command(-number, 4096)
        session = Session(command, ours, self.selector, self._answer, self._kill, self._remind)
        try:
            self._spawn(command, {**head, "argv": list(ARGV)}, body, box, theirs.detach())
        except OSError:
            ours.close()
            raise
        box.session = command.session = session
        session.opened(number)

    def _signal(self, number: int, head: Head, box: Box) -> None:
        """Stop or continue every process of a sandbox; what is forked meanwhile is found in the next round."""
        signals = signal.Signals(_number(head["signal"]))
        done: set[int] = set()
        roots = [each.inner or each.outer for each in self.commands.values() if each.box is box]
        while fresh := set(walk(roots)) - done:
            for pid in fresh:
                signal_one(pid, signals)
            done |= fresh
        self._answer(number, {"processes": len(done)})

    # -- commands ----------------------------------------------------------------------------------

    def _start(self, head: Head, body: bytes, box: Box | None) -> None:
        command = Command(_number(head["id"]), _number(head["max_output"]))
        split = _number(head["options"])
        stdin = memory_file(body[split:]) if split < len(body) else os.dup(self.null)
        try:
            self._spawn(command, head, body[:split], box, stdin)
        except OSError as error:
            self._report(command, {"error": f"cannot start bwrap: {error}"})
            return
        heapq.heappush(self.deadlines, (command.started + float(str(head["timeout_s"])), command.id))

    def _spawn(self, command: Command, head: Head, options: bytes, box: Box | None, stdin: int) -> None:
        space = box.space if box is not None else None
        start = Start(self.bwrap, options, head, stdin, space=space, seccomp=self.seccomp)
        try:
            command.group = self.boxes.group(box)
        except OSError:
            os.close(stdin)
            raise
        command.box, command.loose = box, self.loose
        spawn(command, start)
        for fd in command.streams:
            self.selector.register(fd, selectors.EVENT_READ, command)
        self.commands[command.id] = self.by_pid[command.outer] = command

    def _report(self, command: Command, extra: Head) -> None:
        out, err = (bytes(stream) for stream in [*command.streams.values(), b"", b""][:2])
        head = {
            "out": len(out),
            "truncated": command.truncated,
            "timed_out": command.timed_out,
            "cpu_s": command.cpu_s,
            "duration_s": time.monotonic() - command.started,
            **extra,
        }
        self._answer(command.id, head, out, err)

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
        command.keep(fd, chunk)

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
        signal_one(command.inner)

    def _finish(self, command: Command, error: str | None = None) -> None:
        command.read_status()
        for fd in command.streams:
            if fd in self.selector.get_map():
                self.selector.unregister(fd)
        command.drain()
        del self.commands[command.id]
        if command.session is not None:
            command.session.finished(error or bytes(list(command.streams.values())[1]).decode("utf-8", "replace"))
            return
        launch_error = command.reported("launch-error")
        self._report(
            command,
            {
                "exit_code": command.reported("exit-code"),
                "killed": command.killed_at is not None,
                "oom": command.group is not None and command.group.ran_out(),
                "bwrap_code": command.outer_code,
                "error": error or (launch_error and f"cannot start bwrap: {launch_error}"),
            },
        )

    def _kill_early(self, number: int, box: Box | None) -> None:
        command = self.commands.get(number)
        if command is not None and command.killed_at is None:
            self._kill(command)
        elif box is not None and box.session is not None:
            box.session.cancel(number)

    def _kill(self, command: Command) -> None:
        command.kill()
        heapq.heappush(self.deadlines, (time.monotonic() + KILL_GRACE_S, command.id))

    def _remind(self, at: float, number: int) -> None:
        heapq.heappush(self.deadlines, (at, number))

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
                if command.session is not None and not command.session.overdue(now):
                    continue
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
        self.boxes.close()


def _number(value: object, default: int = 0) -> int:
    return value if isinstance(value, int) else default


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass


def main(arguments: Sequence[str]) -> None:
    """Entry point. Arguments: descriptor of the owner's socket, the bwrap program, settings as JSON."""
    owner = socket.socket(fileno=int(arguments[0]))
    settings = json.loads(arguments[2])
    kept = [owner.fileno(), *settings["descriptors"]]
    for fd in kept:
        os.set_inheritable(fd, False)
    os.umask(0o022)
    os.chdir("/")
    _allow_many_descriptors()
    gc.collect()
    gc.freeze()
    ours, guardians = os.pipe2(os.O_CLOEXEC)  # nothing is ever written: it ends with the guardian
    _become_subreaper()
    launcher = os.fork()
    if launcher == 0:
        os.close(guardians)
        _become_subreaper()  # fork does not pass it on
        Launcher(owner, arguments[1], ours, settings).run()
        return
    owner.close()
    os.close(ours)
    for fd in settings["descriptors"]:
        os.close(fd)
    _guard(launcher)


def _allow_many_descriptors() -> None:
    """Each sandbox holds some, and each command three more; commands have limits of their own."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _become_subreaper() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _guard(launcher: int) -> None:
    """Wait for the launcher to end, then kill what it left: all of it is our child from that moment on.

    bwrap's own --die-with-parent does not reach a sandbox whose parent dies while it is being set up.
    """
    os.waitpid(launcher, 0)
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in walk([os.getpid()])[1:]:
                signal_one(pid)
            # The death of one may bring the next: its children become ours before it can be reaped.
            os.waitpid(-1, 0)
    cgroups.remove_place(cgroups.find(), f"tollway-{os.getuid()}-{launcher}")
