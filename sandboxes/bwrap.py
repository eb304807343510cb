"""The bubblewrap command line, as a pure function.

Every option is here for a reason that a test holds. Options travel through ``--args FD``, so that a
sandboxed program cannot read host paths from its ``/proc/1/cmdline``. Runs nothing, opens nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["INSIDE_PATH", "INSIDE_UID", "WORKSPACE", "base_options", "command_options", "encode"]

WORKSPACE = "/workspace"
"""Where the sandbox's private directory appears inside."""
INSIDE_UID = 1000
INSIDE_PATH = "/usr/local/bin:/usr/bin:/bin"
_USR_LINKS = ("bin", "sbin", "lib", "lib64")


def base_options(
    workspace: str,
    *,
    network: bool,
    tmp_bytes: int,
    ro_binds: Sequence[Path] = (),
    mounts: Sequence[tuple[str, str]] = (),
    links: Sequence[tuple[str, str]] = (),
    env: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """The options that all commands of one sandbox share.

    ``workspace`` is the host directory bound read-write at ``/workspace``; ``ro_binds`` are further host paths,
    bound read-only at the same place; ``mounts`` are pairs of a host path and where it appears read-only;
    ``links`` are pairs of a target and the path of a symbolic link; ``env`` comes on top of PATH, HOME, LANG and
    TMPDIR.

    >>> "--disable-userns" in base_options("/w", network=False, tmp_bytes=1)
    True
    """
    options = [
        # --disable-userns wants the explicit --unshare-user
        *("--unshare-user", "--unshare-all", "--disable-userns"),
        *(("--share-net",) if network else ()),
        *("--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID), "--hostname", "sandbox"),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *("--ro-bind", "/usr", "/usr"),
    ]
    for name in _USR_LINKS:
        options += ["--symlink", f"usr/{name}", f"/{name}"]
    options += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    if network:
        for name in ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl"):
            options += ["--ro-bind-try", name, name]
    for path in ro_binds:
        options += ["--ro-bind", str(path), str(path)]
    options += [
        *("--proc", "/proc", "--dev", "/dev"),
        # bwrap's /dev is a tmpfs as large as half of the host's memory.
        *("--size", str(tmp_bytes), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),  # noqa: S108 - the sandbox's own
        *("--size", str(tmp_bytes), "--tmpfs", "/tmp"),  # noqa: S108 - the sandbox's own
        *("--bind", workspace, WORKSPACE),
    ]
    for source, target in sorted(mounts, key=lambda pair: pair[1]):
        options += ["--ro-bind", source, target]
    for target, link in links:
        options += ["--symlink", target, link]
    options += [
        # Last: the root is a tmpfs of bwrap's that would otherwise take files.
        *("--remount-ro", "/"),
    ]
    variables = {"PATH": INSIDE_PATH, "HOME": WORKSPACE, "LANG": "C.UTF-8", "TMPDIR": "/tmp", **(env or {})}  # noqa: S108 - inside
    for key, value in variables.items():
        options += ["--setenv", key, value]
    return tuple(options)


def command_options(cwd: str, env: Mapping[str, str]) -> tuple[str, ...]:
    """What one command adds: its directory (inside the sandbox) and its own variables."""
    options = ["--chdir", cwd]
    for key, value in env.items():
        options += ["--setenv", key, value]
    return tuple(options)


def encode(options: Sequence[str]) -> bytes:
    """NUL-terminated form that ``--args`` reads.

    >>> encode(["--a", "b"])
    b'--a\\x00b\\x00'
    """
    return b"".join(option.encode() + b"\0" for option in options)
