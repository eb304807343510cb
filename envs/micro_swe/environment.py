"""micro-SWE as an environment: the task texts, the three tools over a sandbox, the grader.

Tool texts are kept short: a conversation of this environment is little more than a hundred bytes, so that a
model of half a million parameters can learn it. Depends on ``envs.base``, ``envs.grading`` and siblings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from tollway.envs.base import Environment, Grader, Task, ToolAnswer, Toolset
from tollway.envs.config import EnvConfig
from tollway.envs.grading import PYTHON, HiddenCalls
from tollway.envs.micro_swe.projects import CHECK, Project, project_at
from tollway.envs.micro_swe.rules import BAD_CALL, NO_EDITS_LEFT, RULES, edit_command, edit_text
from tollway.errors import NotFound, SandboxError
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.sandboxes.base import ExecResult, Sandbox

__all__ = ["CHECK_COMMAND", "TOOLS", "MicroSwe", "MicroSweTools", "check_text", "task_of"]

CHECK_COMMAND = (*PYTHON, CHECK)
MAX_EDITS = 1
MAX_TEXT = 64
"""Bytes of check output that the model sees."""

TOOLS = (
    ToolSpec(name="run", description="Run the project's check.", parameters='{"type":"object","properties":{}}'),
    ToolSpec(
        name="edit",
        description="Rewrite the file by a rule. One edit is allowed.",
        parameters=json.dumps(
            {
                "type": "object",
                "properties": {"rule": {"type": "string", "enum": list(RULES)}},
                "required": ["rule"],
            },
            separators=(",", ":"),
        ),
    ),
    ToolSpec(name="submit", description="Hand in the project.", parameters='{"type":"object","properties":{}}'),
)


class MicroSwe(Environment):
    """Endless small bugs: 8 kinds in 4 project shapes."""

    name = "micro-swe"

    def __init__(self, config: EnvConfig) -> None:
        self._config = config

    def project(self, index: int) -> Project:
        """The project behind a task."""
        return project_at(self._config.seed, self._config.split, index)

    def task(self, index: int) -> Task:
        """Task ``index`` of the seeded order."""
        return self.find(f"{self.name}/{self._config.split}/{self._config.seed}/{index}")

    def find(self, task_id: str) -> Task:
        """The task of that id, of any seed and split."""
        return task_of(_project_of(task_id), task_id)

    def toolset(self, task: Task, sandbox: Sandbox | None) -> Toolset:
        """run, edit and submit."""
        if sandbox is None:
            raise ValueError("micro-swe tasks are worked on in a sandbox")
        return MicroSweTools(sandbox, _path_of(task), timeout_s=self._config.exec_timeout_s)

    def grader(self, task: Task) -> Grader:
        """The hidden calls of the task's project."""
        project = _project_of(task.task_id)
        return HiddenCalls(
            module=project.module,
            function=project.function,
            cases=project.hidden,
            timeout_s=self._config.exec_timeout_s,
        )

    async def solve(self, task: Task, sandbox: Sandbox) -> None:
        """Apply the rule that repairs the project."""
        project = _project_of(task.task_id)
        command = edit_command(RULES[project.rule], project.path)
        done = await sandbox.exec(command, timeout_s=self._config.exec_timeout_s)
        if done.timed_out:
            raise SandboxError(f"the reference edit of {task.task_id} did not end; is the sandbox's sed usable?")


class MicroSweTools(Toolset):
    """The tools of one episode. Every call is a command in the sandbox; one edit is allowed."""

    def __init__(self, sandbox: Sandbox, path: str, *, timeout_s: float) -> None:
        self._sandbox, self._path, self._timeout_s = sandbox, path, timeout_s
        self._edits = self._runs = self._bad = 0
        self._ran_first = False
        self._sandbox_s = 0.0

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """run, edit(rule), submit."""
        return TOOLS

    @property
    def facts(self) -> Mapping[str, float]:
        """What the agent did, and how long its commands took."""
        return {
            "ran_checks": float(self._ran_first),
            "runs": float(self._runs),
            "edits": float(self._edits),
            "bad_calls": float(self._bad),
            "tool_s": self._sandbox_s,
        }

    async def call(self, call: ToolCall) -> ToolAnswer:
        """Execute one call; anything that is none of the three is answered with "bad call"."""
        arguments = _arguments(call.arguments)
        if call.name == "submit" and arguments == {}:
            return ToolAnswer("submitted", ends=True)
        if call.name == "run" and arguments == {}:
            return ToolAnswer(await self._run())
        rule = arguments.get("rule") if arguments is not None and len(arguments) == 1 else None
        if call.name == "edit" and isinstance(rule, str) and rule in RULES:
            return ToolAnswer(await self._edit(rule))
        self._bad += 1
        return ToolAnswer(BAD_CALL)

    async def _run(self) -> str:
        self._runs += 1
        self._ran_first = self._ran_first or self._edits == 0
        return check_text(await self._exec(CHECK_COMMAND))

    async def _edit(self, rule: str) -> str:
        if self._edits >= MAX_EDITS:
            return NO_EDITS_LEFT
        self._edits += 1
        return edit_text((await self._exec(edit_command(RULES[rule], self._path))).stdout)

    async def _exec(self, command: tuple[str, ...] | list[str]) -> ExecResult:
        done = await self._sandbox.exec(list(command), timeout_s=self._timeout_s, max_output=4096)
        self._sandbox_s += done.duration_s
        return done


def task_of(project: Project, task_id: str) -> Task:
    """The task that asks to repair ``project``."""
    return Task(
        task_id=task_id,
        messages=(Message(role="user", content=f"fix {project.path}"),),
        files={path: text.encode() for path, text in project.files.items()},
        sources=project.sources,
    )


def check_text(done: ExecResult) -> str:
    """What the model sees of a check run: its last line, or why there is none."""
    if done.timed_out:
        return "timeout"
    lines = done.stdout.decode("utf-8", "replace").split("\n")
    text = next((line for line in reversed(lines) if line.strip()), f"exit {done.exit_code}")
    return text[:MAX_TEXT]


def _project_of(task_id: str) -> Project:
    """The project behind an id, ``micro-swe/SPLIT/SEED/INDEX``. Raises ``NotFound``."""
    name, split, *numbers = task_id.split("/") if task_id.count("/") == 3 else ("", "", "", "")
    if name != MicroSwe.name or split not in ("train", "heldout") or not all(map(_is_number, numbers)):
        raise NotFound(f"no task {task_id!r}; ids are {MicroSwe.name}/train/SEED/INDEX or {MicroSwe.name}/heldout/...")
    return project_at(int(numbers[0]), "train" if split == "train" else "heldout", int(numbers[1]))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _path_of(task: Task) -> str:
    return task.messages[0].content.removeprefix("fix ")


def _arguments(raw: str) -> dict[str, object] | None:
    """Arguments as an object; ``None`` when they are anything else."""
    try:
        parsed = json.loads(raw or "{}")
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None
