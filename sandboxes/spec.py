"""Records of the sandbox port: what to create, what to run, how it ended, what is listed.

Checked once, in the constructor, so that no provider has to. Depends on the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from tollway.errors import BadRequest, CapabilityMissing

__all__ = ["CAPABILITIES", "Command", "ExecResult", "SandboxInfo", "SandboxSpec", "check"]

CAPABILITIES = frozenset(
    {
        "attach",  # other provider objects and processes can list, use and kill its sandboxes
        "disk_limit",  # ``disk_mb`` binds
        "fork",
        "host_files",  # takes ``tree`` and ``mounts`` straight from this machine
        "memory_limit",  # ``mem_mb`` binds
        "network_hosts",
        "pause",
        "pids_limit",  # ``pids`` binds
        "public_network",
        "snapshot",
        "stderr",  # keeps it apart from stdout
        "user",
    }
)
"""Names that ``SandboxProvider.caps`` may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What to create. ``ttl_s`` and ``labels`` are required: nothing lives for ever or without an owner."""

    ttl_s: float
    """Seconds until the sandbox is destroyed unless it is extended."""
    labels: Mapping[str, str]
    """Owner's marks, at least one; ``list`` finds sandboxes by them."""
    image: str | None = None
    """Image, template or snapshot name as the provider understands it; ``None`` for its default."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files to write at once, by path relative to the workspace."""
    tree: Path | None = None
    """Directory of this machine whose contents the workspace starts with, below ``files``; it is never written."""
    mounts: Mapping[str, Path] = field(default_factory=dict)
    """Files and directories of this machine to read inside, by absolute path inside."""
    env: Mapping[str, str] = field(default_factory=dict)
    cpu: float | None = None
    """Cores; ``None`` for the provider's default. Providers without CPU limits ignore it."""
    mem_mb: int = 512
    disk_mb: int = 512
    """Most that the workspace may hold."""
    pids: int = 64
    """Processes at once."""
    network: Literal["none", "public"] | tuple[str, ...] = "none"
    """No network, the open one, or only the named hosts."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Provider-specific settings."""

    def __post_init__(self) -> None:
        if not 0 < self.ttl_s < float("inf"):
            raise BadRequest(f"a sandbox needs a finite ttl_s above 0, got {self.ttl_s}", param="ttl_s")
        if not self.labels:
            raise BadRequest("a sandbox needs at least one label that names its owner", param="labels")
        _check_variables(self.env)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """One entry of ``list``."""

    id: str
    labels: Mapping[str, str]
    expires_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a command ended. Exit codes and timeouts are results, never errors."""

    exit_code: int | None
    """128 + signal for a killed program, ``None`` when the command timed out."""
    stdout: bytes
    stderr: bytes = b""
    """Empty for providers that merge it into stdout (no ``stderr`` in ``caps``)."""
    timed_out: bool = False
    oom: bool = False
    truncated: bool = False
    """Some output was dropped beyond the cap."""
    duration_s: float = 0.0
    cpu_s: float | None = None
    """CPU seconds of the command and the sandbox around it; ``None`` when the provider cannot say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a provider is to run, as ``Sandbox.exec`` passes it on.

    Refuses what no machine could run: it is the caller's text, not infrastructure, that is wrong.
    """

    argv: Sequence[str]
    cwd: str
    """Relative to the workspace, or absolute inside the sandbox."""
    env: Mapping[str, str]
    """On top of the spec's."""
    stdin: bytes
    timeout_s: float
    max_output: int
    """Bytes to keep of each stream."""
    user: str | None
    """Only for providers with the capability ``user``."""

    def __post_init__(self) -> None:
        if not self.argv or not self.timeout_s > 0:
            raise BadRequest("a command needs a program and a timeout above 0")
        _check_variables(self.env)
        try:
            text = "".join((*self.argv, self.cwd, *self.env, *self.env.values())).encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"a command is UTF-8 text: {error}") from error
        if b"\0" in text:
            raise BadRequest("a command holds no NUL bytes; pass them by stdin")


def _check_variables(env: Mapping[str, str]) -> None:
    if any(not name or "=" in name for name in env):
        raise BadRequest("names of environment variables are not empty and hold no '='", param="env")
    if any("\0" in text for text in (*env, *env.values())):
        raise BadRequest("environment variables hold no NUL bytes", param="env")


def check(spec: SandboxSpec, provider: str, caps: frozenset[str]) -> None:
    """Refuse what this provider cannot make, before anything is made."""
    if spec.network != "none":
        needed = "public_network" if spec.network == "public" else "network_hosts"
        if needed not in caps:
            raise CapabilityMissing(f"{provider} does not offer network={spec.network!r} (capability {needed})")
    if spec.tree is not None and not spec.tree.is_dir():
        raise BadRequest(f"tree {spec.tree} is no directory of this machine", param="tree")
    for inside, source in spec.mounts.items():
        pure = PurePosixPath(inside)
        if not pure.is_absolute() or ".." in pure.parts or len(pure.parts) < 2:
            raise BadRequest(f"mount {inside!r}: want an absolute path inside, without '..'", param="mounts")
        if not source.exists():
            raise BadRequest(f"mount {inside!r}: {source} does not exist on this machine", param="mounts")
