"""The trusted half of a test run: starts the worker, hands it one test at a time, prints what came back.

Runs as ``python3 -I -S -B supervise.py`` with a plan on standard input. The tests, and the library under test
with them, run in the worker (``work.py``), a process of its own. This one never imports anything of theirs,
cannot be traced or read by them (it is not dumpable), and owns the only way out: one line on standard output
behind a nonce that is known to the caller and to this process alone. A result counts only as the answer to a
token that was given out for that test a moment before. Standard library only, Python 3.9 or newer.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

LOG_BYTES = 1 << 16
LINE_BYTES = 1 << 24
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


class Lost(Exception):
    """The worker does not answer as it must; the text says how."""


def protect() -> None:
    """Nobody of our uid may read this process or its descriptors; orphans of the worker come to us."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot protect the supervisor")
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Worker:
    """The process that runs tests: a socket to it, its output, and its end."""

    def __init__(self, plan: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        out, out_theirs = os.pipe()
        here = os.path.dirname(os.path.abspath(__file__))
        env = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": "/tmp",
            "TMPDIR": "/tmp",
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            **plan.get("env", {}),
        }
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                null = os.open(os.devnull, os.O_RDONLY)
                os.dup2(null, 0)
                os.dup2(out_theirs, 1)
                os.dup2(out_theirs, 2)
                os.set_inheritable(theirs.fileno(), True)
                bare = ["-S"] if plan["bare"] else []
                command = [sys.executable, "-s", *bare, "-B", os.path.join(here, "work.py"), str(theirs.fileno())]
                os.execve(command[0], command, env)
            finally:
                os._exit(127)
        theirs.close()
        os.close(out_theirs)
        self._socket, self._buffer = ours, b""
        self.log = bytearray()
        self._drain = threading.Thread(target=self._read_output, args=(out,), daemon=True)
        self._drain.start()

    def _read_output(self, fd: int) -> None:
        while True:
            chunk = os.read(fd, 65536)
            if not chunk:
                return
            self.log += chunk
            if len(self.log) > 2 * LOG_BYTES:
                del self.log[:-LOG_BYTES]

    def send(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Lost("the test process is gone") from error

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next message; ``Lost`` when none comes in time."""
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._socket], [], [], left)[0]:
                raise Lost("timeout")
            try:
                chunk = self._socket.recv(1 << 20)
            except OSError:
                chunk = b""
            if not chunk:
                raise Lost("the test process ended")
            self._buffer += chunk
            if len(self._buffer) > LINE_BYTES:
                raise Lost("the test process sent nonsense")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise Lost("the test process sent nonsense")
        return message

    def pending(self) -> bool:
        """Whether anything came that nobody asked for."""
        return bool(self._buffer) or bool(select.select([self._socket], [], [], 0)[0])

    def end(self) -> None:
        """Kill everything that the worker started, whatever it did to hide."""
        for _ in range(200):
            children = own_children()
            for pid in children:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break
            time.sleep(0.005)
        self._drain.join(1.0)


def own_children() -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
                found += [int(pid) for pid in file.read().split()]
    return found


def text(value: object, limit: int = 2000) -> str:
    return value[:limit] if isinstance(value, str) else ""


def texts(value: object, limit: int = 100) -> list[str]:
    return [text(one, 300) for one in value[:limit]] if isinstance(value, list) else []


def run(plan: dict[str, Any], report: dict[str, Any]) -> None:
    """Drive one worker through the plan; what is known goes to ``report`` at once."""
    deadline = time.monotonic() + plan["total_s"]
    worker = Worker(plan)
    try:
        worker.send({key: plan[key] for key in ("paths", "files", "framework", "watch", "options")})
        # Until then nothing of the library's has run: what fails here is not its fault.
        report["started"] = worker.receive(deadline).get("ready") is True
        if report["started"]:
            # If this process ends without a report after all, that was not for lack of a machine.
            sys.stdout.write("\n" + plan["begun"] + "\n")
            sys.stdout.flush()
        first = worker.receive(min(deadline, time.monotonic() + plan["collect_s"]))
        ids = first.get("collected")
        if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
            raise Lost("the test process sent nonsense")
        report["errors"] = texts(first.get("errors"))
        wanted = set(plan["ids"]) if plan["ids"] is not None else None
        picked = [at for at, name in enumerate(ids) if wanted is None or name in wanted]
        if len({ids[at] for at in picked}) != len(picked):
            report["problems"].append("a test was collected twice")
        report["collected"] = len(ids)
        worker.send({"selected": picked})
        chosen = random_places(len(picked))
        for place, at in enumerate(picked):
            one_test(worker, plan, report, ids[at], at, place in chosen, deadline)
            if 0 < plan["stop_after"] <= len(report["notes"]):
                raise Lost("enough tests failed")
        worker.send({"stop": True})
        last = worker.receive(min(deadline, time.monotonic() + plan["test_s"]))
        if last.get("end") is not True:
            raise Lost("the test process sent nonsense")
        report["tampers"] += texts(last.get("tampers"))
        report["events"] = texts(last.get("events"))
        report["complete"] = True
    except Lost as error:
        report["problems"].append(str(error))
    except (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError, AttributeError) as error:
        # Whatever the worker sent, it is no failure of ours.
        report["problems"].append(f"the test process sent nonsense: {error!r}"[:300])
    finally:
        worker.end()
        report["log"] = bytes(worker.log[-LOG_BYTES:]).decode("utf-8", "replace")


def one_test(
    worker: Worker, plan: dict[str, Any], report: dict[str, Any], name: str, at: int, check: bool, deadline: float
) -> None:
    """Have one test run and take its result, if it is an answer to what was asked."""
    if worker.pending():
        report["tampers"].append("a result that nobody asked for")
        raise Lost("the test process answered before it was asked")
    token = secrets.token_hex(16)
    started = time.monotonic()
    worker.send({"run": at, "token": token, "check": check})
    try:
        done = worker.receive(min(deadline, time.monotonic() + plan["test_s"]))
    except Lost as error:
        report["outcomes"][name] = "timeout" if str(error) == "timeout" else "crashed"
        raise
    if done.get("done") != at or done.get("token") != token:
        report["tampers"].append("a result without its token")
        raise Lost("the test process answered something else")
    outcome = done.get("outcome")
    report["outcomes"][name] = outcome if isinstance(outcome, str) else "unknown"
    report["seconds"] += time.monotonic() - started
    if done.get("note"):
        report["notes"][name] = text(done["note"])
    report["tampers"] += texts(done.get("tampers"))


def random_places(count: int) -> set[int]:
    """At most ten random tests after which the worker's own parts are looked at."""
    pick = secrets.SystemRandom()
    return set(pick.sample(range(count), min(10, count)))


def main() -> None:
    plan = json.load(sys.stdin)
    with contextlib.suppress(OSError):
        # Others may have the same file open: the first process of a bubblewrap sandbox does, and can be read.
        os.ftruncate(0, 0)
    protect()
    for path in plan["remove"]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    report: dict[str, Any] = {
        "outcomes": {},
        "notes": {},
        "errors": [],
        "problems": [],
        "tampers": [],
        "events": [],
        "collected": 0,
        "seconds": 0.0,
        "complete": False,
        "started": False,
        "log": "",
    }
    started = time.monotonic()
    run(plan, report)
    report["wall_s"] = time.monotonic() - started
    sys.stdout.write("\n" + plan["nonce"] + json.dumps(report) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
