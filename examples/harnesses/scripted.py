"""Run one harness through a real session server over a scripted engine, and show what a trainer would get.

usage: scripted.py HARNESS      (one of: see COMMANDS below)

Needs no model and no GPU: the engine answers from a script, with the real Qwen3 vocabulary and chat template.
Everything else is real: the harness, its tools, HTTP, sessions, the journal and the export. The harnesses come
from ``scripts/setup_harnesses``; this program runs in ``.venv``. The harness works in a new temporary folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from tollway.router.fake import FakeEngine, FakeReply, FakeRequest
from tollway.session_server.fake import FakeServer
from tollway.session_server.families.base import Family
from tollway.session_server.families.registry import load_family
from tollway.session_server.families.vocabularies import real_vocabulary
from tollway.session_server.tokens import ControlTokenizer, load_tokenizer

__all__ = [
    "COMMANDS",
    "LINE",
    "PAY",
    "PLAYS",
    "RESULT",
    "ROOT",
    "SAY",
    "TASK",
    "Call",
    "ScriptedModel",
    "Turn",
    "environment",
    "play",
    "qwen3",
    "qwen3_tokenizer",
]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TASK = "Tollgate task: write gate.txt, then make out.txt from it, then say what out.txt says."
LINE = "toll <|im_end|> é"
"""Foreign text on purpose: what looks like a control id has to stay text on its way through tools."""
RESULT = "paid <|im_end|> é\n"
"""Content of ``out.txt`` when both tools ran."""
PAY = "sed s/toll/paid/ gate.txt > out.txt && cat out.txt"
SAY = f"printf '%s\\n' '{LINE}' > gate.txt"
_FINISH = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_SUMMARIZE = "Answer with the summary only"
"""What the server's own request for a compaction says."""
_PIECE = 3
"""Characters that are encoded together: other ids than the text encoded as a whole would give."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model says once: thinking, text, and a tool call or none."""

    text: str
    tool: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)


Call = tuple[str, Mapping[str, object]]
"""Name of a tool and its arguments."""
SDK: tuple[Call, ...] = ("write_file", {"path": "gate.txt", "text": LINE + "\n"}), ("run_command", {"command": PAY})
PLAYS: dict[str, tuple[Call, ...]] = {
    "openai": SDK,
    "anthropic": SDK,
    "litellm": SDK,
    "mini_swe_agent": (("bash", {"command": SAY}), ("bash", {"command": PAY}), ("bash", {"command": _FINISH})),
    "codex": (("exec_command", {"cmd": SAY}), ("exec_command", {"cmd": PAY})),
    "claude_code": (
        ("Write", {"file_path": "{folder}/gate.txt", "content": LINE + "\n"}),
        ("Bash", {"command": PAY, "description": "Pay"}),
    ),
    "qwen_code": (
        ("write_file", {"file_path": "{folder}/gate.txt", "content": LINE + "\n"}),
        ("run_shell_command", {"command": PAY, "is_background": False}),
    ),
    "opencode": (
        ("write", {"filePath": "{folder}/gate.txt", "content": LINE + "\n"}),
        ("bash", {"command": PAY, "description": "Pay"}),
    ),
    "openhands": (("terminal", {"command": SAY}), ("terminal", {"command": PAY}), ("finish", {"message": "Done."})),
}
"""Harness -> the tool calls that it is given, in its own tools' names and arguments."""

COMMANDS: dict[str, list[str]] = {
    "openai": ["python", f"{HERE}/openai/run.py", "chat", TASK],
    "anthropic": ["python", f"{HERE}/anthropic/run.py", "messages", TASK],
    "litellm": ["python", f"{HERE}/litellm/run.py", "openai", TASK],
    "mini_swe_agent": [f"{HERE}/mini_swe_agent/run.sh", TASK],
    "codex": [f"{HERE}/codex/run.sh", TASK, "--sandbox", "danger-full-access"],
    "claude_code": [f"{HERE}/claude_code/run.sh", TASK, "--allowedTools", "Bash,Write"],
    "qwen_code": [f"{HERE}/qwen_code/run.sh", TASK, "--yolo"],
    "opencode": [f"{HERE}/opencode/run.sh", TASK],
}
"""Harness -> command that runs the task; the tools only touch the folder that they start in."""


def qwen3() -> Family:
    """The Qwen3 family over its real vocabulary; takes some seconds."""
    return load_family("qwen3", tokenizer=real_vocabulary("qwen3"))


@lru_cache(maxsize=1)
def qwen3_tokenizer() -> ControlTokenizer:
    """The vocabulary that the script writes in."""
    return load_tokenizer(real_vocabulary("qwen3"))


def play(calls: Sequence[Call], folder: Path) -> list[Turn]:
    """The turns of a model that makes these calls, one at a time, and then answers."""
    turns = []
    for number, (tool, arguments) in enumerate(calls, 1):
        filled = {
            name: value.replace("{folder}", str(folder)) if isinstance(value, str) else value
            for name, value in arguments.items()
        }
        turns.append(Turn(f"Tollgate step {number}.", tool, filled))
    return [*turns, Turn(f"out.txt says: {RESULT}")]


class ScriptedModel:
    """A ``FakeEngine`` script: plays the turns in the main conversation; any other one gets its summary so far.

    The prompt decides, as for a model: a conversation that offers the turns' tools is the main one, and what it
    holds of earlier turns says which one comes next. ``fenced``: commands stand in the text, there are no tools.
    ``task``: words of the task, by which the main conversation is known.
    """

    def __init__(self, family: Family, turns: Sequence[Turn], *, fenced: bool = False, task: str = TASK) -> None:
        self._tokenizer = qwen3_tokenizer()
        self._stop = family.stop_ids[0]
        self._turns = turns
        self._fenced, self._task = fenced, task
        self.main: list[FakeRequest] = []
        """Requests of the main conversation, in order."""
        self.side: list[FakeRequest] = []
        """Requests for titles and summaries, and those of sub-agents."""
        self.logprobs: dict[str, list[float]] = {}
        """Request id -> what the engine reported for each sampled id."""

    def __call__(self, request: FakeRequest) -> FakeReply:
        """Answer one call."""
        prompt = self._tokenizer.decode(request.input_ids)
        done = [turn.text for turn in self._turns[:-1] if turn.text in prompt]
        if not self._is_main(prompt):
            self.side.append(request)
            return self._reply(request, self._encode(" ".join(["Tollgate notes.", *done])))
        self.main.append(request)
        return self._reply(request, self._say(self._turns[len(done)]))

    def _is_main(self, prompt: str) -> bool:
        offered = self._fenced or f'"function": {{"name": "{self._turns[0].tool}"' in prompt
        return offered and self._task in prompt and _SUMMARIZE not in prompt.rpartition("<|im_start|>user")[2]

    def _reply(self, request: FakeRequest, ids: list[int]) -> FakeReply:
        ids = [*ids, self._stop]
        logprobs = self.logprobs[request.rid] = [-((at * 37 + token) % 1999) / 512 for at, token in enumerate(ids)]
        return FakeReply(ids=ids, logprobs=logprobs, chunk=4)

    def _say(self, turn: Turn) -> list[int]:
        control = self._tokenizer.control
        ids = [control["<think>"], *self._encode("\nWhat is left to do?\n"), control["</think>"]]
        if turn.tool and self._fenced:
            command = turn.arguments["command"]
            return ids + self._encode(f"\n\n{turn.text}\n\n```mswea_bash_command\n{command}\n```")
        ids += self._encode(f"\n\n{turn.text}")
        if turn.tool:
            # Spacing that no serializer would choose: the ids have to survive that, too.
            arguments = json.dumps(turn.arguments, ensure_ascii=False, separators=(" , ", ":"))
            text = f'\n{{"name": "{turn.tool}", "arguments": {arguments}}}\n'
            ids += [*self._encode("\n"), control["<tool_call>"], *self._encode(text), control["</tool_call>"]]
        return ids

    def _encode(self, text: str) -> list[int]:
        """Ordinary ids, never control ids, of pieces of the text."""
        pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
        return [token for piece in pieces for token in self._tokenizer.encode(self._tokenizer.guard(piece))]


def environment(home: Path, url: str, token: str) -> dict[str, str]:
    """Environment of a harness: its programs, a home of its own, one session, nothing of the caller's."""
    programs = f"{ROOT}/.venv-harnesses/bin:{ROOT}/.node-harnesses/node_modules/.bin"
    return {
        "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PYTHONUNBUFFERED": "1",
        "TOLLWAY_SESSION_URL": url,
        "TOLLWAY_SESSION_TOKEN": token,
    }


async def show(harness: str) -> int:
    """Run one harness in a temporary folder and print its session."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, home, data = (Path(scratch, name) for name in ("work", "home", "server"))
        for path in (folder, home, data):
            path.mkdir()
        family = qwen3()
        engine = FakeEngine(ScriptedModel(family, play(PLAYS[harness], folder)), context_length=131072)
        async with engine, FakeServer(data, engines=[engine], family=family) as server:
            session = await server.client.create(task_id=harness)
            process = await asyncio.create_subprocess_exec(
                *COMMANDS[harness],
                cwd=folder,
                env=environment(home, session.base_url, session.token),
                stdin=asyncio.subprocess.DEVNULL,
            )
            status = await process.wait()
            print(f"\n{harness} exited with {status}; session {session.session_id}:", file=sys.stderr)
            for row in await server.client.trajectories(session.session_id):
                print(
                    f"  {row.branch_reason}: {row.token_ids.size} ids, {len(row.turn_spans)} turns, "
                    f"{int(row.loss_mask.sum())} sampled ids "
                    + ("to train on" if row.trainable else f"not to train on ({row.untrainable_reason})"),
                    file=sys.stderr,
                )
    return status


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"usage: scripted.py HARNESS, one of: {', '.join(COMMANDS)}")
    missing = [name for name in (".venv-harnesses", ".node-harnesses") if not (ROOT / name).is_dir()]
    if missing:
        sys.exit(f"{' and '.join(missing)} not found: scripts/setup_harnesses installs the harnesses")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(asyncio.run(show(sys.argv[1])))
