"""Run one harness as an episode, in a sandbox without a network, over a scripted engine: no model, no GPU.

usage: episode.py HARNESS [options of tollway episode run]      (one of: see SHELLS below)

The engine answers from a script that finds and makes the fix of a shipped task. Everything else is real: it is
``tollway episode run`` in front of that engine, with the harness inside the sandbox, its bridge, the journal, the
export and the hardened grading. The harnesses come from ``scripts/setup_harnesses`` and ``scripts/setup_openhands``.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from scripted import Call, ScriptedModel, Turn, play, qwen3

from tollway.envs.swe.catalogue import read_set
from tollway.router.fake import FakeEngine
from tollway.session_server.families.vocabularies import real_vocabulary

__all__ = ["ENDS", "SHELLS", "TASK", "TASK_ID", "fix_commands", "main", "turns_of"]

ENTRY = read_set("tiny", ("stockroom-*",))[0]
"""The task: a library of this package, a bug in it, and the fix."""
TASK_ID = ENTRY.task.instance_id
TASK = ENTRY.instruction.strip().splitlines()[0]
"""The words by which its conversation is known."""

SHELLS: dict[str, Callable[[str], Call]] = {
    "mini-swe-agent": lambda command: ("bash", {"command": command}),
    "codex": lambda command: ("exec_command", {"cmd": command}),
    "claude-code": lambda command: ("Bash", {"command": command, "description": "Work"}),
    "opencode": lambda command: ("bash", {"command": command, "description": "Work"}),
    "qwen-code": lambda command: ("run_shell_command", {"command": command, "is_background": False}),
    "openhands": lambda command: ("terminal", {"command": command}),
}
"""Harness -> how its own tool runs a command."""
ENDS: dict[str, Call] = {
    "mini-swe-agent": ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
    "openhands": ("finish", {"message": "Done."}),
}
"""The call that ends a run, of those harnesses that do not end with an answer."""


def fix_commands() -> list[str]:
    """What a good agent runs: a look, then the real fix, as a replacement of the lines that it changes."""
    commands = ["ls . stockroom"]
    for patch in ENTRY.task.fix:
        for hunk in patch.hunks:
            old, new = ("".join(line for tag, line in hunk.lines if tag in kinds) for kinds in (" -", " +"))
            program = (
                f"p = {patch.path!r}; s = open(p).read(); assert s.count({old!r}) == 1; "
                f"open(p, 'w').write(s.replace({old!r}, {new!r}))"
            )
            commands.append(f"python3 -c {shlex.quote(program)}")
    return commands


def turns_of(harness: str, commands: list[str]) -> list[Turn]:
    """The turns of a model that runs these commands with the harness's own tool, and then ends."""
    calls = [SHELLS[harness](command) for command in commands]
    return play([*calls, *([ENDS[harness]] if harness in ENDS else [])], Path("/workspace"))


async def main(harness: str, options: list[str]) -> int:
    """Start the engine, run ``tollway episode run`` in front of it, pass its status on."""
    model = ScriptedModel(qwen3(), turns_of(harness, fix_commands()), task=TASK)
    async with FakeEngine(model, context_length=131_072) as engine:
        command = [sys.executable, "-m", "tollway", "episode", "run", TASK_ID, "--env", "swe"]
        command += ["--harness", harness, "--engine", engine.url, *options]
        command += ["--set", "server.family=qwen3", "--set", f"server.tokenizer={real_vocabulary('qwen3')}"]
        process = await asyncio.create_subprocess_exec(*command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return await process.wait()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in SHELLS:
        sys.exit(f"usage: episode.py HARNESS [options of tollway episode run], one of: {', '.join(SHELLS)}")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2:])))
