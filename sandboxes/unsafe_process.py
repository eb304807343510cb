"""Stands in for bwrap where ``sandbox.local.unsafe`` asks for commands without any isolation.

Takes bwrap's arguments, understands the directory and the variables among them, and ignores the rest: no
namespaces, no limits on what can be read or reached. What it keeps is that nothing of a command outlives it.
Run as a program of its own by the launcher: standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from pathlib import Path

__all__ = ["descendants", "write_program"]

_WORKSPACE = "/workspace"
_PR_SET_CHILD_SUBREAPER = 36
_TWO = {"--setenv", "--symlink", "--ro-bind", "--ro-bind-try", "--bind"}
_NONE = {"--unshare-user", "--unshare-all", "--disable-userns", "--share-net", "--die-with-parent", "--new-session"}
_NONE |= {"--clearenv", "--as-pid-1"}


def write_program(place: Path, python: str) -> Path:
    """A file in ``place`` that can be executed like bwrap and is this module."""
    path = place / "unsafe-bwrap"
    path.write_text(f"#!{python} -ISB\n{Path(__file__).read_text(encoding='utf-8')}", encoding="utf-8")
    path.chmod(0o755)
    return path


def descendants(root: int) -> list[int]:
    """The processes below ``root``."""
    below: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue  # it ended meanwhile
        if state != b"Z":
            below.setdefault(int(parent), []).append(int(name))
    found = [root]
    for pid in found:
        found += below.get(pid, [])
    return found[1:]


def _main() -> None:
    words = _options(int(sys.argv[2]))
    argv = sys.argv[4:]
    environment: dict[str, str] = {}
    workspace = directory = "/"
    status = -1
    while words:
        name = words.pop(0)
        values = [words.pop(0) for _ in range(2 if name in _TWO else 0 if name in _NONE else 1)]
        if name == "--setenv":
            environment[values[0]] = values[1]
        elif name == "--bind" and values[1] == _WORKSPACE:
            workspace = values[0]
        elif name == "--chdir":
            directory = values[0]
        elif name == "--json-status-fd":
            status = int(values[0])
        elif name == "--seccomp":
            os.close(int(values[0]))
    environment = {name: workspace if value == _WORKSPACE else value for name, value in environment.items()}
    if directory == _WORKSPACE or directory.startswith(f"{_WORKSPACE}/"):
        directory = workspace + directory[len(_WORKSPACE) :]
    # What the command leaves behind becomes a child of this process, whatever it does to detach itself.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(status, False)
    child = os.fork()
    if child == 0:
        _become(argv, directory, environment)
    _, result = os.waitpid(child, 0)
    while left := descendants(os.getpid()):
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(result)
    os.write(status, json.dumps({"exit-code": code if code >= 0 else 128 - code}).encode() + b"\n")


def _become(argv: list[str], directory: str, environment: dict[str, str]) -> None:
    text = f"Can't chdir to {directory}"
    try:
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(directory)
        text = f"execvp {argv[0]}"
        os.execvpe(argv[0], argv, environment)  # noqa: S606 - argv, no shell
    except OSError as error:
        os.write(2, f"{text}: {error.strerror}\n".encode("utf-8", "surrogateescape"))
        os._exit(126 if isinstance(error, PermissionError) else 127)


def _options(fd: int) -> list[str]:
    with os.fdopen(fd, "rb") as file:
        return os.fsdecode(file.read()).split("\0")[:-1]


if __name__ == "__main__":
    _main()
