"""What runs on the in-memory provider: a small shell and a handful of POSIX programs, as coroutines.

They work on the files of a fake sandbox, never on this machine. Depends on ``errors``, ``trees`` for the three
scripts of a transfer, and ``workspace.parts_of``.
"""

from __future__ import annotations

import asyncio
import io
import re
import shlex
import tarfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tollway.sandboxes import trees
from tollway.sandboxes.workspace import parts_of

if TYPE_CHECKING:
    from tollway.sandboxes.fake import FakeSandbox

__all__ = ["PROGRAMS", "Machine", "Path", "Process", "Program", "run_program"]

Path = tuple[str, ...]
"""Components relative to the workspace; a path outside it starts with ``/``."""


@dataclass(slots=True)
class Machine:
    """What a fake sandbox holds. Whoever has its id sees the same one."""

    files: dict[Path, bytes] = field(default_factory=dict)
    links: dict[Path, str] = field(default_factory=dict)
    modes: dict[Path, int] = field(default_factory=dict)
    directories: set[Path] = field(default_factory=set)
    """Those that were made empty; a file makes the ones above it."""

    def copy(self) -> Machine:
        """The same state, independent from now on."""
        return Machine(dict(self.files), dict(self.links), dict(self.modes), set(self.directories))

    def is_directory(self, path: Path) -> bool:
        """Whether it was made, or something lies below it."""
        known = (*self.files, *self.links, *self.directories)
        return (
            path in ((), ("/",))
            or any(each[: len(path)] == path and each not in self.files for each in known)
            or (any(len(each) > len(path) and each[: len(path)] == path for each in known))
        )

    def resolved(self, path: Path) -> Path:
        """The file that a path leads to through links in the workspace."""
        for _ in range(8):
            if path not in self.links:
                break
            path = _joined(path[:-1], self.links[path])
        return path

    def remove(self, path: Path) -> None:
        """A file or a directory with everything below it."""
        for kind in (self.files, self.links, self.modes):
            for each in [each for each in kind if each[: len(path)] == path]:
                del kind[each]
        self.directories = {each for each in self.directories if each[: len(path)] != path}


@dataclass(slots=True)
class Process:
    """One running fake command: what it got, and what it wrote."""

    sandbox: FakeSandbox
    argv: Sequence[str]
    cwd: Path
    env: Mapping[str, str]
    stdin: bytes
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    children: list[asyncio.Task[int]] = field(default_factory=list)
    """What was started in the background; it ends with the command."""

    def path(self, name: str) -> Path:
        """``name`` as a workspace path, relative to the command's directory."""
        return _joined(self.cwd, name)

    def inner(self, argv: Sequence[str]) -> Process:
        """A program that this one starts, with streams of its own."""
        return Process(self.sandbox, argv, self.cwd, self.env, self.stdin, children=self.children)


Program = Callable[[Process], Awaitable[int]]
"""Writes to the process's streams and returns the exit code; its name is ``argv[0]``."""


async def run_program(process: Process) -> int:
    """Run ``process.argv`` with the provider's programs; 127 for an unknown one."""
    name = process.argv[0].rpartition("/")[2]
    program = process.sandbox.programs.get(name)
    if program is None:
        process.stderr += f"{name}: not found\n".encode()
        return 127
    return await program(process)


def _joined(base: Path, name: str) -> Path:
    if name.startswith("/") and not name.startswith("/workspace"):
        return ("/", *(part for part in name.split("/") if part not in ("", ".")))
    if name in (".", "/workspace"):
        return base if name == "." else ()
    return parts_of(name) if name.startswith("/") else (*base, *parts_of(name))


# -- the shell ------------------------------------------------------------------------------------------

_OPERATORS = {";", "&&", "&", "\n"}


async def _shell(process: Process) -> int:
    """``sh -c`` for simple commands, ``;``, ``&&``, ``&``, ``( )``, ``>``, ``>>``, ``>&2``; nothing else."""
    transfer = _TRANSFERS.get(process.argv[2])
    if transfer is not None:
        return await transfer(process)
    lexer = shlex.shlex(process.argv[2], posix=True, punctuation_chars="();&>")
    lexer.whitespace_split = True
    return await _list(process, list(lexer))


async def _list(process: Process, words: list[str]) -> int:
    code, at = 0, 0
    while at < len(words):
        end = at
        depth = 0
        while end < len(words) and (depth or words[end] not in _OPERATORS):
            depth += (words[end] == "(") - (words[end] == ")")
            end += 1
        operator = words[end] if end < len(words) else ";"
        if operator == "&":
            process.children.append(asyncio.create_task(_one(process, words[at:end])))
        else:
            if words[at : at + 1] == ["exit"]:
                return int(words[at + 1]) if end > at + 1 else code
            code = await _one(process, words[at:end])
            if operator == "&&" and code != 0:
                return code
        at = end + 1
    return code


async def _one(process: Process, words: list[str]) -> int:
    """A simple command or a group, with its redirections."""
    target, append, to_stderr = None, False, False
    while len(words) > 2 and words[-2] in (">", ">>", ">&"):
        if words[-2] == ">&":
            to_stderr = words[-1] == "2"
        else:
            target, append = words[-1], words[-2] == ">>"
        words = words[:-2]
    if not words:
        return 0
    inner = process.inner(words)
    if target is None and not to_stderr:
        inner.stdout, inner.stderr = process.stdout, process.stderr
    code = await (_list(inner, words[1:-1]) if words[0] == "(" else run_program(inner))
    if to_stderr:
        process.stderr += inner.stdout
    if target not in (None, "/dev/null"):
        machine, path = process.sandbox.machine, process.path(str(target))
        path = machine.resolved(path)
        machine.files[path] = (machine.files.get(path, b"") if append else b"") + bytes(inner.stdout)
    return code


# -- transfers ------------------------------------------------------------------------------------------


async def _unpack(process: Process) -> int:
    """``trees.UNPACK``."""
    dest, name = process.path(process.argv[4]), process.path(process.argv[5])
    machine = process.sandbox.machine
    data = machine.files.pop(name, None)
    if data is None:
        return 2
    machine.directories.add(dest)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            path = (*dest, *parts_of(member.name))
            machine.modes[path] = member.mode
            content = archive.extractfile(member) if member.isreg() else None
            if content is not None:
                machine.files[path] = content.read()
            elif member.issym():
                machine.links[path] = member.linkname
            else:
                machine.directories.add(path)
    return 0


async def _append(process: Process) -> int:
    """``trees.APPEND``."""
    machine = process.sandbox.machine
    path = process.path(process.argv[4])
    machine.files[path] = machine.files.get(path, b"") + machine.files.pop(process.path(process.argv[5]), b"")
    return 0


async def _pack(process: Process) -> int:
    """``trees.PACK``."""
    top, parts = process.path(process.argv[4]), process.path(process.argv[5])
    machine = process.sandbox.machine
    if not machine.is_directory(top):
        process.stderr += f"sh: cd: can't cd to {process.argv[4]}\n".encode()
        return 1
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted({*machine.directories, *machine.files, *machine.links}):
            if path[: len(top)] != top or path == top or (top == () and path[0] == "/"):
                continue
            member = tarfile.TarInfo("./" + "/".join(path[len(top) :]))
            data = machine.files.get(path)
            member.mode = machine.modes.get(path, 0o755 if data is None else 0o644)
            if data is not None:
                member.size = len(data)
            elif path in machine.links:
                member.type, member.linkname = tarfile.SYMTYPE, machine.links[path]
            else:
                member.type = tarfile.DIRTYPE
            archive.addfile(member, io.BytesIO(data or b""))
    data = buffer.getvalue()
    count = -(-len(data) // trees.PART_BYTES)
    for number in range(count):
        letters = "".join(chr(97 + number // 26**place % 26) for place in (3, 2, 1, 0))
        machine.files[(*parts, letters)] = data[number * trees.PART_BYTES : (number + 1) * trees.PART_BYTES]
    process.stdout += f"{count}\n".encode()
    return 0


_TRANSFERS: dict[str, Program] = {trees.UNPACK: _unpack, trees.APPEND: _append, trees.PACK: _pack}


# -- programs -------------------------------------------------------------------------------------------


async def _true(process: Process) -> int:
    return 0


async def _false(process: Process) -> int:
    return 1


async def _echo(process: Process) -> int:
    process.stdout += " ".join(process.argv[1:]).encode() + b"\n"
    return 0


async def _printf(process: Process) -> int:
    template = process.argv[1].encode().replace(rb"\n", b"\n")
    template = re.sub(rb"\\([0-7]{1,3})", lambda match: bytes([int(match[1], 8)]), template)
    for argument in process.argv[2:] or [""]:
        process.stdout += template.replace(b"%s", argument.encode())
    return 0


async def _cat(process: Process) -> int:
    if len(process.argv) == 1:
        process.stdout += process.stdin
    for name in [name for name in process.argv[1:] if name != "--"]:
        data = _content(process, name)
        if data is None:
            return 1
        process.stdout += data
    return 0


def _content(process: Process, name: str) -> bytes | None:
    data = process.sandbox.machine.files.get(process.sandbox.machine.resolved(process.path(name)))
    if data is None:
        process.stderr += f"{process.argv[0]}: {name}: No such file or directory\n".encode()
    return data


async def _wc(process: Process) -> int:
    """``wc -c [FILE]``."""
    data = _content(process, process.argv[2]) if len(process.argv) > 2 else process.stdin
    if data is None:
        return 1
    process.stdout += " ".join([str(len(data)), *process.argv[2:3]]).encode() + b"\n"
    return 0


async def _test(process: Process) -> int:
    """``test -f|-d|-x PATH``."""
    machine, path = process.sandbox.machine, process.path(process.argv[2])
    if process.argv[1] == "-d":
        return 0 if machine.is_directory(path) else 1
    path = machine.resolved(path)
    return 0 if path in machine.files and (process.argv[1] == "-f" or machine.modes.get(path, 0) & 0o111) else 1


async def _head(process: Process) -> int:
    """``head -c N /dev/zero``."""
    process.stdout += bytes(int(process.argv[2]))
    return 0


async def _pwd(process: Process) -> int:
    process.stdout += "/".join(("/workspace", *process.cwd)).encode() + b"\n"
    return 0


async def _printenv(process: Process) -> int:
    value = process.env.get(process.argv[1])
    if value is None:
        return 1
    process.stdout += value.encode() + b"\n"
    return 0


async def _sleep(process: Process) -> int:
    await asyncio.sleep(float(process.argv[1]))
    return 0


async def _link(process: Process) -> int:
    """``ln -s TARGET LINK``."""
    process.sandbox.machine.links[process.path(process.argv[-1])] = process.argv[-2]
    return 0


async def _mkdir(process: Process) -> int:
    process.sandbox.machine.directories.add(process.path(process.argv[-1]))
    return 0


async def _chmod(process: Process) -> int:
    """``chmod OCTAL PATH...``; symbolic modes change nothing."""
    if process.argv[1].isdigit():
        for name in process.argv[2:]:
            process.sandbox.machine.modes[process.path(name)] = int(process.argv[1], 8)
    return 0


async def _rm(process: Process) -> int:
    for name in [name for name in process.argv[1:] if not name.startswith("-")]:
        process.sandbox.machine.remove(process.path(name))
    return 0


async def _yes(process: Process) -> int:
    while True:
        process.stdout += b"y\n" * 512
        await asyncio.sleep(0.001)


PROGRAMS: dict[str, Program] = {
    "cat": _cat,
    "chmod": _chmod,
    "echo": _echo,
    "false": _false,
    "head": _head,
    "ln": _link,
    "mkdir": _mkdir,
    "printenv": _printenv,
    "printf": _printf,
    "pwd": _pwd,
    "rm": _rm,
    "sh": _shell,
    "sleep": _sleep,
    "test": _test,
    "true": _true,
    "wc": _wc,
    "yes": _yes,
}
