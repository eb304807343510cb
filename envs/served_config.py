"""Fields that the sections of environments behind a server share. Only pydantic and the kernel's configuration."""

from __future__ import annotations

from pydantic import Field

from tollway.config import Section

__all__ = ["ServedConfig"]


class ServedConfig(Section):
    """Where a server is, or how it is started."""

    url: str | None = None
    """Base URL of a running server."""
    command: tuple[str, ...] = ()
    """Program that serves the environment, started before the first task and stopped after the last; "{port}" in it
    stands for a free port of this machine."""
    command_env: dict[str, str] = Field(default_factory=dict)
    """Variables of that program, besides PATH, HOME, LANG and TMPDIR; nothing else of ours is passed on."""
    ready_timeout_s: float = Field(default=120.0, gt=0)
    """How long a server may take until it answers."""
