"""The ``[env.command]`` section: agent harnesses that run as a command.

Must not import anything but pydantic and the kernel's configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from tollway.config import Section

__all__ = ["CommandConfig"]


class CommandConfig(Section):
    """Settings of the harness ``command`` and of the shipped agent commands.

    ``argv``, ``env`` and ``files`` are templates: ``{base_url}``, ``{openai_base_url}``, ``{anthropic_base_url}``,
    ``{token}``, ``{model}``, ``{context_tokens}``, ``{instruction}``, ``{instruction_file}``, ``{workspace}`` and
    ``{home}`` are replaced, everything else in braces stays.
    """

    argv: tuple[str, ...] = ()
    """The command of the harness ``command``; further arguments of the others. Must not hold the token."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the harness's process, on top of its own."""
    files: dict[str, str] = Field(default_factory=dict)
    """Texts by path, below the harness's home directory unless absolute; only the sandbox's user can read them."""
    stdin: str = ""
    """Template of what it reads from standard input; nothing by default."""
    mounts: dict[str, Path] = Field(default_factory=dict)
    """Files and directories of this machine that its sandbox can read, by absolute path inside."""
    where: Literal["inside", "beside"] = "inside"
    """Whether it runs in the task's sandbox, or in one of its own with ``tollway-exec`` as the way to the task's."""
    exec_timeout_s: float = Field(default=600.0, gt=0)
    """Longest command that a harness beside runs in the task's sandbox."""
    network: Literal["none", "public"] = "none"
    """Network of the sandbox that it runs in; without one it still reaches its model."""
    model: str = Field(default="policy", pattern="^[A-Za-z0-9][A-Za-z0-9._:@/-]*$")
    """What it is told to call the model."""
    context_tokens: int = Field(default=131_072, ge=1024)
    """The context that it is told the model has; what the engines serve."""
    submitted_codes: tuple[int, ...] = (0,)
    """Exit statuses that say that the agent is done; any other one is a run that was not submitted."""
    mem_mb: int = Field(default=0, ge=0)
    """Memory of its sandbox at least; the shipped harnesses know what they need."""
    pids: int = Field(default=128, ge=1)
    """Processes and threads of its sandbox at least."""
    port: int = Field(default=8700, ge=1024, le=65_535)
    """Port of the sandbox's own loopback where the model is; with an open network it is a random one."""
    public_url: str | None = None
    """Address of the session server for sandboxes on other machines. They get it and the session's token instead of
    the bridge, have an open network, and their image has to bring the harness."""
    max_body_mb: int = Field(default=64, ge=1)
    """Largest request."""
    max_connections: int = Field(default=64, ge=1)
    """Connections to the model at once, of one episode."""
    python_home: Path | None = None
    """Environment with the Python harnesses; default: ``.venv-harnesses``, as ``scripts/setup_harnesses`` makes it."""
    openhands_home: Path | None = None
    """Python with the OpenHands SDK; default: ``.python-openhands``, as ``scripts/setup_harnesses`` makes it."""
    node_home: Path | None = None
    """Directory with the ``node_modules`` of the npm harnesses; default: ``.node-harnesses``, made likewise."""
    node: Path | None = None
    """The Node.js program, 22 or newer; default: the one of ``python_home``, else the one on PATH."""
