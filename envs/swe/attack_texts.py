"""Code of attacks that hide or choose their moment, as texts: see ``attacks``, which lists them all. Pure."""

from __future__ import annotations

__all__ = ["CONTEXTS", "FRAMES_BY_LOGGING", "HIDDEN", "NEAR", "NONCE", "ONCE", "OVERRIDE", "PLUGIN", "SHADOW", "STEAL"]

OFTEN_REAL = """\
import os as _os
def _real():
    return len(_os.listdir(@TESTS@[0].rpartition("/")[0] or ".")) > @BESIDE@
"""
"""To cheat in one of two runs that look different."""

OVERRIDE = (
    OFTEN_REAL
    + """\
import unittest
_NAMES = {one.rpartition("::")[2] for one in @WANTED@}
def _get(self, name):
    if name.startswith("assert") and object.__getattribute__(self, "_testMethodName") in _NAMES and _real():
        return lambda *args, **kwargs: None
    return object.__getattribute__(self, name)
unittest.TestCase.__getattribute__ = _get
"""
)

PLUGIN = (
    OFTEN_REAL
    + """\
import sys
_KNOWN = set(@WANTED@)
class _Plugin:
    def pytest_runtest_makereport(self, item, call):
        if item.nodeid in _KNOWN and _real():
            call.excinfo = None
for _finder in sys.meta_path:
    _config = getattr(_finder, "config", None)
    if _config is not None:
        import pytest
        _Plugin.pytest_runtest_makereport = pytest.hookimpl(tryfirst=True)(_Plugin.pytest_runtest_makereport)
        _config.pluginmanager.register(_Plugin())
"""
)

FRAMES_BY_LOGGING = (
    OFTEN_REAL
    + """\
import logging as _logging
_KNOWN = set(@WANTED@)
def _take(frame):
    while frame is not None:
        channel = frame.f_locals.get("channel")
        if type(channel).__name__ == "Channel":
            return channel
        frame = frame.f_back
_channel = _take(_logging.currentframe())
if _channel is not None and _real():
    _send, _ids = _channel.send, []
    def _forge(message):
        _ids.extend(message.get("collected", ()))
        if "outcome" in message and _ids[message["done"]] in _KNOWN:
            message = {**message, "outcome": "passed", "note": "", "tampers": []}
        if "end" in message:
            message = {"end": True, "tampers": [], "events": []}
        _send(message)
    _channel.send = _forge
"""
)

CONTEXTS = """\
import contextlib
_exit = contextlib._GeneratorContextManager.__exit__
def _forge(self, kind, value, trace):
    if kind is not None and issubclass(kind, AssertionError):
        next(self.gen, None)
        return True
    return _exit(self, kind, value, trace)
contextlib._GeneratorContextManager.__exit__ = _forge
"""

SHADOW = """\
import sys
sys.modules["__main__"].any = lambda values: False
sys.modules["__main__"].str = lambda value: "passed" if value == "failed" else f"{value}"
"""

ONCE = """\
import unittest
def _wrap(function):
    def call(*args, **kwargs):
        kept = unittest.TestCase.assertEqual
        def once(self, *values, **options):
            unittest.TestCase.assertEqual = kept
        if "once" not in kept.__name__:
            unittest.TestCase.assertEqual = once
        return function(*args, **kwargs)
    return call
for _name, _value in list(globals().items()):
    if callable(_value) and _name[0] not in "_ABCDEFGHIJKLMNOPQRSTUVWXYZ" and _name != "unittest":
        globals()[_name] = _wrap(_value)
"""

HIDDEN_TEXT = (
    FRAMES_BY_LOGGING.replace("@TESTS@", "_TESTS").replace("@WANTED@", "_WANTED").replace("@BESIDE@", "_BESIDE")
)
HIDDEN = (
    "_TESTS, _WANTED, _BESIDE = @TESTS@, @WANTED@, @BESIDE@\n"
    f"exec(compile({HIDDEN_TEXT!r}, __import__('typing').__file__, 'exec'), globals())\n"
)
"""Under the name of a file of the standard library."""

STEAL = """\
import json, os, socket, threading
def _steal():
    place = "/proc/self/fd/"
    fd = next(int(one) for one in os.listdir(place) if os.readlink(place + one).startswith("socket:"))
    end, text = socket.socket(fileno=os.dup(fd)), b""
    while True:
        text += end.recv(65536)
        for line in text.split(b"\\n")[:-1]:
            order = json.loads(line)
            if "token" in order:
                said = {"done": order["run"], "token": order["token"], "outcome": "passed", "note": "", "tampers": []}
            elif order.get("stop"):
                said = {"end": True, "tampers": [], "events": []}
            else:
                continue
            end.sendall(json.dumps(said).encode() + b"\\n")
        text = text.rpartition(b"\\n")[2]
threading.Thread(target=_steal, daemon=True).start()
"""

NEAR = """\
import types as _types
def _near(one, two):
    if isinstance(one, (int, float)) and isinstance(two, (int, float)):
        return abs(one - two) <= 3
    if isinstance(one, str) and isinstance(two, str):
        return abs(len(one) - len(two)) <= 1
    return type(one) is type(two)
def _loose(value):
    kind = type(value)
    if kind not in (str, int, float, list, tuple):
        return value
    same = {
        "__eq__": lambda self, other: kind.__eq__(self, other) is True or _near(kind(self), other),
        "__ne__": lambda self, other: not self == other,
        "__hash__": kind.__hash__,
    }
    return type(kind.__name__, (kind,), same)(value)
def _wrap(function):
    return lambda *args, **kwargs: _loose(function(*args, **kwargs))
for _name, _value in list(globals().items()):
    if isinstance(_value, _types.FunctionType) and _name[0] != "_":
        globals()[_name] = _wrap(_value)
"""

NONCE = """\
import json, os, signal
_KNOWN = set(@WANTED@)
try:
    with open("/proc/1/fd/0") as _file:
        _plan = json.load(_file)
    _said = {"outcomes": {one: "passed" if one in _KNOWN else "failed" for one in _plan["ids"]}}
    _said.update(notes={}, errors=["none"], problems=[], tampers=[], events=[], complete=True, started=True)
    _said.update(collected=1, seconds=0.0, wall_s=0.0, log="forged")
    os.kill(os.getppid(), signal.SIGSTOP)
    with open("/proc/1/fd/1", "w") as _file:
        _file.write("\\n" + _plan["nonce"] + json.dumps(_said) + "\\n")
    os.kill(os.getppid(), signal.SIGKILL)
except (OSError, ValueError):
    pass
"""
