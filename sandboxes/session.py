"""The launcher's end of a long-lived sandbox: talks to the agent inside, and believes nothing that it says.

A sandbox whose agent is gone, silent past a deadline or out of step is ended, and every call on it is
answered as gone; what the agent can say is how its own commands ended, within the sizes that were asked for.
Runs inside the launcher process: standard library only, no tollway imports but its siblings there.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
from collections.abc import Callable

from tollway.sandboxes.launcher_command import CHUNK, Command, Head

__all__ = ["ARGV", "CALL_GRACE_S", "REPLY", "REQUEST", "Session"]

REQUEST = struct.Struct("<IIIIdI")
"""Operation (1 run, 2 kill), number of the call, sizes of words and stdin, timeout, bytes to keep of each stream."""
REPLY = struct.Struct("<IIIiIdd")
"""Number, sizes of stdout and stderr, exit code, flags (1 timed out, 2 truncated, 4 killed), CPU and wall seconds."""
CALL_GRACE_S = 8.0
"""How long after its deadline an agent may take to answer."""
_RUN, _KILL = 1, 2
_READY = 0
_LATEST_S = 1e9

Answer = Callable[..., None]
_LOADER = """
import os
n = int(os.read(0, 8))
t = b""
while len(t) < n: t += os.read(0, n - len(t))
exec(compile(t, "agent", "exec"))
"""
ARGV = ("/usr/bin/python3", "-I", "-S", "-B", "-c", _LOADER)
"""Runs the agent from its socket, so that its text need not be a file inside."""


class Session:
    """One agent and the calls that wait for it."""

    def __init__(
        self,
        command: Command,
        control: socket.socket,
        selector: selectors.BaseSelector,
        answer: Answer,
        kill: Callable[[Command], None],
        remind: Callable[[float, int], None],
    ) -> None:
        self.command, self._control, self._selector = command, control, selector
        self._answer, self._kill, self._remind = answer, kill, remind
        self._opening: int | None = None
        self._calls: dict[int, tuple[int, float]] = {}
        """Bytes kept and deadline by number."""
        self._inbox, self._outbox = bytearray(), bytearray()
        self._ended = self._lied = False
        self._at_end: list[Callable[[], None]] = []
        control.setblocking(False)
        selector.register(control, selectors.EVENT_READ, self)

    def opened(self, number: int) -> None:
        """The first process was started: send it the agent; ``number`` is answered when that is ready."""
        self._opening = number
        with open(os.path.join(os.path.dirname(__file__), "agent_process.py"), "rb") as file:
            text = file.read()
        self._send(b"%8d" % len(text) + text)

    def call(self, number: int, head: Head, body: bytes) -> None:
        """Run a command inside."""
        if self._ended:
            self._answer(number, {"gone": True})
            return
        timeout_s, room = float(str(head["timeout_s"])), int(str(head["max_output"]))
        words = int(str(head["options"]))
        latest = time.monotonic() + min(timeout_s, _LATEST_S) + CALL_GRACE_S
        self._calls[number] = (room, latest)
        self._remind(latest, self.command.id)
        self._send(REQUEST.pack(_RUN, number, words, len(body) - words, timeout_s, room) + body)

    def cancel(self, number: int) -> None:
        """End a call early; the agent answers it when nothing of the command is left."""
        if number in self._calls:
            latest = time.monotonic() + CALL_GRACE_S
            self._calls[number] = (self._calls[number][0], latest)
            self._remind(latest, self.command.id)
            self._send(REQUEST.pack(_KILL, number, 0, 0, 0.0, 0))

    def overdue(self, now: float) -> bool:
        """Whether a call should have been answered by now."""
        return any(latest <= now for _, latest in self._calls.values())

    def end(self, then: Callable[[], None]) -> None:
        """Call ``then`` when the last process is gone, at once when it is."""
        if self._ended:
            then()
        else:
            self._at_end.append(then)

    def finished(self, said: str) -> None:
        """Its first process has been reaped: nothing of it is left."""
        self._ended = True
        if self._control.fileno() in self._selector.get_map():
            self._selector.unregister(self._control)
        self._control.close()
        if self._opening is not None:
            launch_error = self.command.reported("launch-error")
            reason = f"cannot start bwrap: {launch_error}" if launch_error else f"no agent in the sandbox: {said}"
            self._answer(self._opening, {"error": reason})
            self._opening = None
        for number in self._calls:
            self._answer(number, {"gone": True})
        self._calls.clear()
        for then in self._at_end:
            then()

    def ready(self, events: int) -> None:
        """Its socket can be read or written."""
        if self._ended:
            return
        if events & selectors.EVENT_WRITE:
            self._send(b"")
        if not events & selectors.EVENT_READ:
            return
        try:
            data = self._control.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or self._lied:
            self._give_up()
            return
        self._inbox += data
        while len(self._inbox) >= REPLY.size and not self._lied:
            number, out, err, code, flags, cpu_s, duration_s = REPLY.unpack_from(self._inbox)
            if not self._expected(number, out, err):
                self._give_up()
                return
            end = REPLY.size + out + err
            if len(self._inbox) < end:
                return
            body = bytes(self._inbox[REPLY.size : end])
            del self._inbox[:end]
            if number == _READY:
                self._answer(self._opening, {"ready": True})
                self._opening = None
                continue
            del self._calls[number]
            timed_out = bool(flags & 1)
            head = {
                "out": out,
                "truncated": bool(flags & 2),
                "timed_out": timed_out,
                "killed": bool(flags & 4),
                "exit_code": None if timed_out or flags & 4 else min(max(code, 0), 255),
                "oom": self.command.group is not None and self.command.group.ran_out(),
                "cpu_s": cpu_s if 0 <= cpu_s < _LATEST_S else 0.0,
                "duration_s": duration_s if 0 <= duration_s < _LATEST_S else 0.0,
            }
            self._answer(number, head, body)

    def _expected(self, number: int, out: int, err: int) -> bool:
        if number == _READY:
            return self._opening is not None and out == err == 0
        return number in self._calls and max(out, err) <= self._calls[number][0]

    def _give_up(self) -> None:
        """The agent is gone or lies: end the sandbox; ``finished`` answers the calls."""
        self._lied = True
        if self._control.fileno() in self._selector.get_map():
            self._selector.unregister(self._control)
        self._kill(self.command)

    def _send(self, data: bytes) -> None:
        if self._lied:
            return
        self._outbox += data
        try:
            sent = self._control.send(self._outbox) if self._outbox else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._give_up()
            return
        del self._outbox[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        if self._selector.get_key(self._control).events != wanted:
            self._selector.modify(self._control, wanted, self)
