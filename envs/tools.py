"""General coding tools over a sandbox: bash, read, edit, submit.

Whatever a model sends is answered in words for the model; only a broken sandbox raises. Output is cut in its middle
to a bound and shown as text whatever bytes it holds. Knows no environment: each builds its tools with the plain
constructor. Depends on ``envs.base``, ``envs.cutting`` and ``sandboxes.base``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from tollway.envs.base import MAX_SOURCE_BYTES, ToolAnswer, Toolset
from tollway.envs.cutting import cut_middle
from tollway.errors import BadRequest
from tollway.messages import ToolCall, ToolSpec
from tollway.sandboxes.base import ExecResult

__all__ = ["TOOLS", "Bench", "CodingTools", "shown"]

Arguments = Mapping[str, object]

WORKSPACE = "/workspace/"
"""Where paths below the workspace begin when a model gives them whole."""
MAX_COMMAND_BYTES = 100_000
"""Longest command line; the kernel takes no single argument above 128 KiB."""
_ENV = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Python tells stale bytecode by second and size of the source: an edit of the same length, soon after a run, would
change nothing."""
MAX_LINES = 2000
"""Lines of a file that one ``read`` shows at most."""


def _tool(name: str, description: str, properties: Mapping[str, tuple[str, str]], *required: str) -> ToolSpec:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()},
        "required": list(required),
        "additionalProperties": False,
    }
    return ToolSpec(name=name, description=description, parameters=json.dumps(schema, separators=(",", ":")))


TOOLS = (
    _tool(
        "bash",
        "Run a shell command in the workspace. Each call is a new shell: directory and variables are not kept.",
        {
            "command": ("string", "The command line."),
            "timeout": ("number", "Seconds after which it is stopped; at most the limit of this task."),
        },
        "command",
    ),
    _tool(
        "read",
        "Show a text file with line numbers.",
        {
            "path": ("string", "Path in the workspace."),
            "start": ("integer", "First line to show, from 1."),
            "lines": ("integer", f"How many lines to show, at most {MAX_LINES}."),
        },
        "path",
    ),
    _tool(
        "edit",
        "Replace a piece of a file that occurs exactly once. An empty old text creates the file.",
        {
            "path": ("string", "Path in the workspace."),
            "old": ("string", "The text to replace, exactly as it stands in the file; empty for a new file."),
            "new": ("string", "The text to put there."),
        },
        *("path", "old", "new"),
    ),
    _tool("submit", "Hand in the workspace as it is. Ends the task.", {}),
)
"""What the model is offered; a fixed order, so that prompts share their beginning."""


class Bench(Protocol):
    """The part of ``sandboxes.base.Sandbox`` that the tools work with."""

    async def exec(
        self, cmd: str | Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Run a command to its end."""
        ...

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """A regular file; ``BadRequest`` for anything else."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Create or replace a file."""
        ...


class CodingTools(Toolset):
    """The four tools over one sandbox.

    ``timeout_s`` bounds each command, ``max_output`` the bytes of an answer.

    >>> [tool.name for tool in TOOLS]
    ['bash', 'read', 'edit', 'submit']
    """

    def __init__(self, sandbox: Bench, *, timeout_s: float = 60.0, max_output: int = 16_000) -> None:
        self._sandbox, self._timeout_s, self._max_output = sandbox, timeout_s, max_output
        self._counts = dict.fromkeys(("bash_calls", "reads", "edits", "bad_calls", "tool_timeouts"), 0)
        self._tool_s = 0.0
        self._handlers: dict[str, Callable[[Arguments], Awaitable[str]]] = {
            "bash": self._bash,
            "read": self._read,
            "edit": self._edit,
        }

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """bash, read, edit, submit."""
        return TOOLS

    @property
    def facts(self) -> Mapping[str, float]:
        """How often each tool ran, calls that made no sense, commands out of time, and seconds spent in tools."""
        return {**{name: float(count) for name, count in self._counts.items()}, "tool_s": self._tool_s}

    async def call(self, call: ToolCall) -> ToolAnswer:
        """Execute one call. Raises only what the sandbox raises when it is broken."""
        started = time.monotonic()
        try:
            arguments = _arguments(call, self.specs)
            if call.name == "submit":
                return ToolAnswer("submitted", ends=True)
            # Bounded here and not only by each tool: a path or a message of the system may be long, too.
            return ToolAnswer(cut_middle(await self._handlers[call.name](arguments), self._max_output))
        except BadRequest as error:
            self._counts["bad_calls"] += 1
            return ToolAnswer(cut_middle(f"error: {error}", self._max_output))
        finally:
            self._tool_s += time.monotonic() - started

    async def _bash(self, arguments: Arguments) -> str:
        command = _text(arguments, "command")
        if not command.strip() or "\0" in command:
            raise BadRequest("command is empty or holds a NUL")
        if len(command.encode()) > MAX_COMMAND_BYTES:
            raise BadRequest(f"command is longer than {MAX_COMMAND_BYTES} bytes; write a file with edit and run that")
        limit_s = min(_number(arguments, "timeout", self._timeout_s), self._timeout_s)
        self._counts["bash_calls"] += 1
        done = await self._sandbox.exec(command, timeout_s=limit_s, env=_ENV)
        self._counts["tool_timeouts"] += done.timed_out
        return shown(done, self._max_output, limit_s=limit_s)

    async def _read(self, arguments: Arguments) -> str:
        path = _path(arguments)
        start, count = _whole(arguments, "start", 1), _whole(arguments, "lines", MAX_LINES)
        if start < 1 or count < 1:
            raise BadRequest("start and lines are 1 or more")
        self._counts["reads"] += 1
        data = await self._contents(path)
        if b"\0" in data:
            return f"{path} is no text: {len(data)} bytes; look at it with bash, for example head -c 200 | od -c"
        lines = _decoded(data).split("\n")
        lines = lines[:-1] if lines[-1] == "" else lines
        if not lines:
            return f"{path} is empty"
        if start > len(lines):
            raise BadRequest(f"{path} has {len(lines)} lines; start {start} is beyond its end")
        end = min(start - 1 + min(count, MAX_LINES), len(lines))
        text = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines[start - 1 : end], start))
        more = f"\n[lines {start} to {end} of {len(lines)}]" if end < len(lines) or start > 1 else ""
        return cut_middle(text, self._max_output - len(more)) + more

    async def _contents(self, path: str) -> bytes:
        try:
            return await self._sandbox.read(path, max_bytes=MAX_SOURCE_BYTES)
        except BadRequest:
            # Links and files outside the workspace are read from inside, where they lead nowhere else.
            done = await self._sandbox.exec(["cat", "--", path], timeout_s=self._timeout_s)
        if done.timed_out:
            raise BadRequest(f"{path} gave nothing for {self._timeout_s:g} s: it is no regular file")
        if done.exit_code != 0:
            raise BadRequest(_decoded(done.stderr or done.stdout).strip() or f"{path} cannot be read")
        return done.stdout

    async def _edit(self, arguments: Arguments) -> str:
        path, old, new = _path(arguments), _text(arguments, "old").encode(), _text(arguments, "new").encode()
        if path.startswith("/"):
            raise BadRequest(f"{path} lies outside the workspace; edit changes files in it")
        try:
            data = await self._sandbox.read(path, max_bytes=MAX_SOURCE_BYTES)
        except BadRequest as error:
            if old:
                raise BadRequest(f"{error}; an empty old text creates a file") from error
            return await self._create(path, new)
        if not old and data:
            raise BadRequest(f"{path} exists and is not empty; give the text to replace, or remove the file first")
        found = data.count(old) if old else 1
        if found != 1:
            raise BadRequest(_why_not(path, data, old, found))
        if old == new and data:
            raise BadRequest("old and new are the same text; nothing was changed")
        await self._sandbox.write(path, data.replace(old, new, 1) if data else new, mode=await self._mode(path))
        self._counts["edits"] += 1
        return f"edited {path}"

    async def _create(self, path: str, data: bytes) -> str:
        there = await self._sandbox.exec(["test", "-e", path, "-o", "-L", path], timeout_s=self._timeout_s)
        if there.exit_code == 0:
            raise BadRequest(f"{path} exists and is no regular file that edit could change; use bash")
        await self._sandbox.write(path, data)
        self._counts["edits"] += 1
        return f"created {path}"

    async def _mode(self, path: str) -> int:
        """Its permissions, so that a script stays one that can be run."""
        done = await self._sandbox.exec(["stat", "-c", "%a", "--", path], timeout_s=self._timeout_s)
        text = done.stdout.decode("ascii", "replace").strip()
        return int(text, 8) & 0o777 if done.exit_code == 0 and text.isdigit() and not set(text) & {"8", "9"} else 0o644


def shown(done: ExecResult, limit: int, *, limit_s: float) -> str:
    """What a model sees of a finished command: its output as text, and how it ended unless that was well.

    >>> shown(ExecResult(exit_code=2, stdout=b"a\\n", stderr=b"\\x96"), 100, limit_s=5)
    'a\\n[stderr]\\n\\\\x96\\n[exit code 2]'
    """
    text = _decoded(done.stdout)
    if done.stderr:
        text += ("\n" if text and not text.endswith("\n") else "") + "[stderr]\n" + _decoded(done.stderr)
    marks = []
    if done.truncated:
        marks.append("[more output was dropped]")
    if done.timed_out:
        marks.append(f"[stopped after {limit_s:g} s]")
    elif done.oom:
        marks.append("[killed: out of memory]")
    elif done.exit_code:
        marks.append(f"[exit code {done.exit_code}]")
    end = "\n".join(marks)
    body = cut_middle(text.rstrip("\n"), max(0, limit - len(end) - 1))
    return "\n".join(part for part in (body, end) if part) or "[no output]"


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _arguments(call: ToolCall, specs: tuple[ToolSpec, ...]) -> Arguments:
    """The call's arguments as far as every tool needs them checked: known tool, an object, known names."""
    spec = next((each for each in specs if each.name == call.name), None)
    if spec is None:
        known = ", ".join(each.name for each in specs)
        raise BadRequest(f"there is no tool {call.name[:100]!r}; the tools are {known}")
    try:
        parsed = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the arguments of {call.name} are no JSON: {str(error)[:200]}") from error
    if not isinstance(parsed, dict):
        raise BadRequest(f"the arguments of {call.name} are a JSON object")
    properties = json.loads(spec.parameters)["properties"]
    if unknown := sorted(set(parsed) - set(properties)):
        raise BadRequest(f"{call.name} takes {', '.join(properties) or 'no arguments'}; not {unknown[0][:100]!r}")
    return parsed


def _text(arguments: Arguments, name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{name} is missing" if value is None else f"{name} is a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{name} holds half of a surrogate pair, which is no text") from error
    return value


def _path(arguments: Arguments) -> str:
    path = _text(arguments, "path").removeprefix(WORKSPACE)
    if not path or "\0" in path:
        raise BadRequest("path is empty or holds a NUL")
    return path


def _number(arguments: Arguments, name: str, default: float) -> float:
    value = arguments.get(name)
    if value is None:
        return default
    # The comparison also refuses NaN, which JSON parsers let through.
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise BadRequest(f"{name} is a number above 0")
    return float(min(value, default))


def _whole(arguments: Arguments, name: str, default: int) -> int:
    value = arguments.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{name} is a whole number")
    return value


def _why_not(path: str, data: bytes, old: bytes, found: int) -> str:
    if found:
        return f"the old text occurs {found} times in {path}; give more of the lines around it"
    if b"\r\n" in data and data.count(old.replace(b"\n", b"\r\n")) == 1:
        return f"the old text is not in {path}, whose lines end in \\r\\n; write them so"
    return f"the old text is not in {path}; read the file and copy it exactly, blanks included"
