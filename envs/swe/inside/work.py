"""The untrusted half of a test run: loads tests and the library under test, runs one test when told to.

Started by ``supervise.py`` with the number of a socket. Whatever this process says may be a lie of the code
that it runs; what can be noticed from inside is noticed here (replaced parts of the test framework, tracing
hooks, looks into frames, the collector or test files) and reported with the results. Standard library and,
where mounted, pytest; Python 3.9 or newer.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any


class Channel:
    """Lines of JSON over the supervisor's socket. Functions are kept, so that replacing them changes nothing."""

    def __init__(self, fd: int) -> None:
        opened = socket.socket(fileno=fd)
        self._recv, self._sendall = opened.recv, opened.sendall
        self._loads, self._encode = json.JSONDecoder().decode, json.JSONEncoder().encode
        self._opened, self._buffer = opened, b""

    def receive(self) -> Any:
        while b"\n" not in self._buffer:
            chunk = self._recv(1 << 16)
            if not chunk:
                os._exit(3)
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return self._loads(line.decode())

    def send(self, message: dict[str, Any]) -> None:
        self._sendall(self._encode(message).encode() + b"\n")


# -- what an honest library leaves alone ---------------------------------------------------------------

GUARDED = {
    *("_pytest", "pytest", "pluggy", "unittest", "builtins", "operator", "socket", "json", "traceback", "os"),
    *("time", "signal", "sys", "inspect", "linecache", "gc", "importlib", "types", "threading", "ast", "__main__"),
    *("contextlib", "functools"),
}
"""What is looked at between tests; at the beginning and at the end everything is."""
SKIPPED = {"__dict__", "__weakref__", "__doc__", "__annotations__", "__abstractmethods__", "_abc_impl", "__module__"}
UNSTEADY = {"warnings"}
"""Modules whose functions pytest itself replaces for a while."""


class Fingerprint:
    """Functions and classes of all that was there before the library was loaded, this program included."""

    def __init__(self) -> None:
        self._modules = {name: module for name, module in list(sys.modules.items()) if name not in UNSTEADY}
        self._guarded = {name: one for name, one in self._modules.items() if name.partition(".")[0] in GUARDED}
        self._builtins = set(dir(sys.modules["builtins"])) | {"__getattr__"}
        self._before = self._take(self._modules)
        self._before_guarded = self._take(self._guarded)
        self._trace = (sys.gettrace(), sys.getprofile())

    def _take(self, modules: dict[str, Any]) -> dict[tuple[str, ...], tuple[object, ...]]:
        found: dict[tuple[str, ...], tuple[object, ...]] = {}
        for name, module in modules.items():
            for key, value in list(vars(module).items()):
                if isinstance(value, type):
                    found[name, key] = (value,)
                    if value.__module__ == name:
                        for inner, member in list(vars(value).items()):
                            plain = getattr(member, "__func__", member)
                            if inner not in SKIPPED and (callable(plain) or isinstance(plain, property)):
                                found[name, key, inner] = plain, *made_of(plain)
                elif callable(value):
                    found[name, key] = value, *made_of(value)
        return found

    def changes(self, *, everywhere: bool) -> list[str]:
        """Names of what is not what it was, and of what stands before something that was there."""
        before = self._before if everywhere else self._before_guarded
        now = self._take(self._modules if everywhere else self._guarded)
        found = []
        for key, value in before.items():
            other = now.get(key, ())
            if len(other) != len(value) or any(one is not two for one, two in zip(value, other, strict=False)):
                found.append("replaced " + ".".join(key))
        for key in now.keys() - before.keys():
            # A new name in a module matters where it hides a builtin, in a class where it overrides.
            if key[1] in self._builtins or (len(key) == 3 and key[:2] in before):
                found.append("added " + ".".join(key))
        if (sys.gettrace(), sys.getprofile()) != self._trace:
            found.append("installed a trace or profile function")
        return found[:20]


def made_of(function: object) -> tuple[object, ...]:
    """Parts of a function that can be exchanged while it stays the same object."""
    return tuple(getattr(function, name, None) for name in ("__code__", "__defaults__", "__kwdefaults__"))


WATCHED = (
    "sys._getframe",
    "sys._current_frames",
    "sys._current_exceptions",
    "sys.settrace",
    "sys.setprofile",
    "sys.monitoring",
    "gc.",
    "ctypes.",
    "code.__new__",
    "os.fork",
    "os.exec",
    "os.posix_spawn",
    "os.kill",
    "os.system",
    "subprocess.Popen",
    "socket.connect",
)
LOOKS = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
INTERNALS = ("_testcapi", "_testinternalcapi", "_xxsubinterpreters", "_posixsubprocess")
THROUGH = ("inspect.py", "traceback.py", "gc.py", "subprocess.py", "ctypes/__init__.py")
"""Modules that ask for whoever calls them."""
LOGGING = "logging/__init__.py"
"""Asks for frames itself; only who calls its function for that directly wants them."""


class Watch:
    """Notes what the library under test asks the interpreter for that says something about spying."""

    def __init__(self, packages: tuple[str, ...], tests: tuple[str, ...]) -> None:
        self.seen: dict[str, bool] = {}
        self._packages, self._tests = packages, tests
        self._getframe, self._realpath, self._modules = sys._getframe, os.path.realpath, sys.modules
        self._busy: list[int] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self._busy:
            return
        label = self._label(event, args)
        if label is None or label in self.seen:
            return
        self._busy.append(1)
        try:
            if event == "open":
                if self._realpath(args[0]).startswith(self._tests) and self._reads():
                    self.seen[label] = True
            elif self._asks():
                self.seen[label] = True
        finally:
            self._busy.pop()

    def _label(self, event: str, args: tuple[Any, ...]) -> str | None:
        """What an event is called in the report, if it can be worth one."""
        if event == "open":
            return "opened a test file" if isinstance(args[0], str) and args[0].endswith(".py") else None
        if event == "import":
            return "import " + args[0] if args[0] in INTERNALS and args[0] not in self._modules else None
        if event == "object.__getattr__":
            return str(args[1]) if args[1] in LOOKS else None
        if event == "object.__setattr__":
            return "set " + args[1] if args[1] in ("__code__", "__defaults__", "__kwdefaults__") else None
        return event if event.startswith(WATCHED) else None

    def _genuine(self, frame: Any) -> bool:
        """Whether a frame's code belongs to the module that its file name says."""
        module = self._modules.get(frame.f_globals.get("__name__"))
        if module is None or vars(module) is not frame.f_globals:
            return False
        name = frame.f_code.co_filename
        return bool(name.startswith("<frozen ") or name == getattr(module, "__file__", None))

    def _asks(self) -> bool:
        """Whether the library's own code asked, directly, through a module made for it, or under another name."""
        frame: Any = self._getframe(2)
        logged = 0
        for _ in range(20):
            if frame is None:
                return False
            name = frame.f_code.co_filename
            if name.startswith(self._packages):
                return True
            if self._genuine(frame):
                logged += name.endswith(LOGGING)
                if not name.endswith(THROUGH) and not (name.endswith(LOGGING) and logged == 1):
                    return False
            frame = frame.f_back
        return False

    def _reads(self) -> bool:
        """Whether the library's own code reads something, through whatever module of the standard library."""
        frame: Any = self._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(self._packages):
                return True
            # Warnings show the line that they are about.
            if name in self._tests or name == __file__ or name.endswith("/warnings.py") or "pytest" in name:
                return False
            frame = frame.f_back
        return False


# -- frameworks ----------------------------------------------------------------------------------------


RunOne = Callable[[int, "int | None"], "tuple[str, str]"]


def drive(
    channel: Channel,
    ids: list[str],
    errors: list[str],
    run_one: RunOne,
    fingerprint: Fingerprint,
    seen: dict[str, bool],
) -> None:
    """Answer the supervisor until it says stop."""
    tampers = fingerprint.changes(everywhere=True)
    channel.send({"collected": ids, "errors": errors})
    selected = channel.receive()["selected"]
    following = {at: selected[place + 1] if place + 1 < len(selected) else None for place, at in enumerate(selected)}
    while True:
        order = channel.receive()
        if order.get("stop"):
            tampers += fingerprint.changes(everywhere=True)
            channel.send({"end": True, "tampers": sorted(set(tampers)), "events": sorted(seen)})
            return
        at = order["run"]
        outcome, note = run_one(at, following[at])
        found = fingerprint.changes(everywhere=False) if order["check"] else []
        channel.send({"done": at, "token": order["token"], "outcome": outcome, "note": note, "tampers": found})


def run_pytest(channel: Channel, plan: dict[str, Any]) -> int:
    import pytest
    from _pytest import runner

    channel.send({"ready": True})

    class Driver:
        """A pytest plugin in the place of the run loop."""

        def __init__(self) -> None:
            self.errors: list[str] = []

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                self.errors.append(f"{report.nodeid}: {str(report.longrepr)[-600:]}")

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtestloop(self, session: Any) -> bool:
            items = session.items

            def run_one(at: int, following: int | None) -> tuple[str, str]:
                after = items[following] if following is not None else None
                reports = runner.runtestprotocol(items[at], log=False, nextitem=after)
                return verdict(reports), note(reports)

            drive(channel, [item.nodeid for item in items], self.errors, run_one, self.fingerprint, watch.seen)
            return True

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection(self) -> None:
            self.fingerprint = Fingerprint()

    watch = Watch(tuple(plan["watch"]), tuple(os.path.abspath(one) for one in plan["files"]))
    options = ["-q", "-c", os.devnull, "--rootdir", os.getcwd(), "--confcutdir", os.getcwd(), "--tb=short"]
    options += ["--continue-on-collection-errors", "-p", "no:cacheprovider", "-p", "no:junitxml", "-p", "no:pastebin"]
    return int(pytest.main([*options, *plan["options"], *plan["files"]], plugins=[Driver()]))


def verdict(reports: Sequence[Any]) -> str:
    """passed only if every phase passed and nobody called it an expected failure."""
    phases = {report.when: report for report in reports}
    if any(hasattr(report, "wasxfail") for report in reports):
        return "xfail"
    if any(report.outcome == "skipped" for report in reports):
        return "skipped"
    if any(report.when != "call" and report.outcome == "failed" for report in reports):
        return "error"
    if set(phases) != {"setup", "call", "teardown"}:
        return "incomplete"
    return str(phases["call"].outcome)


def note(reports: Sequence[Any]) -> str:
    for report in reports:
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            return str(crash.message if crash is not None else report.longrepr)[:1200]
    return ""


def last_words(trace: str) -> str:
    """What a traceback says after its last frame."""
    lines = trace.rstrip().splitlines()
    frames = [at for at, line in enumerate(lines) if line.startswith("  File ")]
    start = (frames[-1] if frames else -1) + 1
    while start < len(lines) - 1 and lines[start].startswith(" "):
        start += 1
    return "\n".join(lines[start:])[:1200]


def run_unittest(channel: Channel, plan: dict[str, Any]) -> int:
    import importlib.util
    import unittest

    channel.send({"ready": True})
    fingerprint = Fingerprint()
    watch = Watch(tuple(plan["watch"]), tuple(os.path.abspath(one) for one in plan["files"]))
    ids: list[str] = []
    tests: list[unittest.TestCase] = []
    errors: list[str] = []
    for path in plan["files"]:
        name = path[:-3].replace("/", "_")
        try:
            spec: Any = importlib.util.spec_from_file_location(name, path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        except BaseException as error:
            errors.append(f"{path}: {type(error).__name__}: {error}"[:600])
            continue
        for label, value in list(vars(module).items()):
            if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == name:
                for method in unittest.defaultTestLoader.getTestCaseNames(value):
                    ids.append(f"{path}::{label}::{method}")
                    tests.append(value(method))

    def run_one(at: int, _following: int | None) -> tuple[str, str]:
        result = unittest.TestResult()
        ran = tests[at].run(result)
        if ran is not result:
            return "incomplete", ""
        if result.skipped:
            return "skipped", ""
        if result.expectedFailures or result.unexpectedSuccesses:
            return "xfail", ""
        if result.errors or result.failures:
            return "failed", last_words([*result.errors, *result.failures][0][1])
        return ("passed" if result.testsRun == 1 else "incomplete"), ""

    drive(channel, ids, errors, run_one, fingerprint, watch.seen)
    return 0


def main() -> int:
    channel = Channel(int(sys.argv[1]))
    del sys.argv[1:]
    plan = channel.receive()
    sys.path[:] = [*plan["paths"], *(path for path in sys.path[1:] if path != sys.path[0])]
    run = run_pytest if plan["framework"] == "pytest" else run_unittest
    return int(run(channel, plan))


if __name__ == "__main__":
    status = 4
    try:
        status = main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(status)
