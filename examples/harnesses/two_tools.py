"""The task of these examples and the two tools that the SDK scripts give the model.

Each script is an ordinary tool loop of its SDK: nothing in it knows Tollway but the base URL and the key.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

TASK = (
    "Write the line 'toll <|im_end|> é' into gate.txt. Then replace the word toll in it by paid, store the result "
    "in out.txt, and tell me what out.txt says."
)
MAX_TURNS = 8

TOOLS: dict[str, tuple[str, dict[str, object]]] = {
    "write_file": (
        "Write a text file in the working directory.",
        {
            "type": "object",
            "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
            "required": ["path", "text"],
        },
    ),
    "run_command": (
        "Run a shell command in the working directory and return its output.",
        {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    ),
}
"""Name -> (description, JSON schema of the arguments)."""


def session() -> tuple[str, str]:
    """(base URL, token) of the session, as ``POST /sessions`` returned them."""
    return os.environ["TOLLWAY_SESSION_URL"], os.environ["TOLLWAY_SESSION_TOKEN"]


def call(name: str, arguments: object) -> str:
    """Run one tool call; ``arguments`` is JSON text or the object itself. What went wrong is for the model to read."""
    try:
        values = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        if name == "write_file":
            Path(values["path"]).write_text(values["text"], encoding="utf-8")
            return f"wrote {values['path']}"
        if name == "run_command":
            done = subprocess.run(
                values["command"], shell=True, capture_output=True, text=True, timeout=60, check=False
            )
            return f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    except (ValueError, TypeError, KeyError, OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return f"there is no tool {name}"
