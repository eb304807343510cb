"""Can this machine run local sandboxes, and if not, what should be done about it?

Finds the bwrap program, runs one real sandbox with the provider's own options, and tries what bounds it: mounts,
control groups, the system call filter. Used by the provider when something fails and by ``tollway doctor``.
Depends on ``bwrap``, ``limits``, ``mounts``, ``cgroups``, ``seccomp`` and the configuration.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tollway.errors import SandboxUnavailable, TollwayError
from tollway.sandboxes.bwrap import base_options, command_options, encode
from tollway.sandboxes.cgroups import find
from tollway.sandboxes.config import LocalConfig
from tollway.sandboxes.launcher import boot
from tollway.sandboxes.limits import own_uid_map, usable_uids
from tollway.sandboxes.program import INSTALL, find_bwrap, staged
from tollway.sandboxes.seccomp import filter_program
from tollway.sandboxes.workspace import default_root, is_memory

__all__ = ["Bounds", "Probe", "bounds", "probe", "remedy"]

_FORBIDDING = {
    "/proc/sys/user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=15000"),
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
}
"""Kernel settings by path: the value that forbids user namespaces, and the command that allows them."""
_PYTHON = Path("/usr/bin/python3")
_TRIAL = "print(module.trial(sys.argv[1], sys.argv[2], int(sys.argv[3]) if sys.argv[3] else None))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What ``tollway doctor`` shows."""

    available: bool
    reason: str
    """One sentence: what works, or what is missing and how to get it."""
    bwrap: Path | None = None
    python: Path | None = None
    """The Python that sandboxed programs see; ``None`` when /usr has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What holds a local sandbox's use of this machine."""

    mounts: bool
    """Whether the kernel bounds workspaces and shows trees without copying them."""
    mounts_detail: str
    groups: bool
    """Whether control groups bound memory over all processes of a sandbox."""
    groups_detail: str
    filtered: bool
    """Whether there is a system call filter for this architecture."""


def remedy(message: str) -> str:
    """Explain a bwrap failure: which setting of this machine forbids it, and the next step."""
    for path, (forbidding, command) in _FORBIDDING.items():
        try:
            value = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if value == forbidding:
            return f"{message}; user namespaces are switched off here ({path} is {value}): run `{command}` as root"
    if "Can't find source path" in message and "Permission denied" in message:
        return (
            f"{message}; sandboxes run under uids of their own, which must be able to reach their workspaces: "
            "set sandbox.local.root to a directory all of whose parents others may enter (mode o+x)"
        )
    if "Unknown option" in message:
        return f"{message}; this bwrap is too old, {INSTALL}"
    return (
        f"{message}; if this is a container, its runtime forbids user namespaces: start it with "
        "`--security-opt seccomp=unconfined --security-opt apparmor=unconfined`, or use another sandbox.provider; "
        "sandbox.local.unsafe=true runs trusted code without isolation"
    )


def probe(config: LocalConfig | None = None) -> Probe:
    """Run ``true`` in a real sandbox with the provider's options and uid drop. Never raises."""
    config = config or LocalConfig()
    python = _PYTHON if os.access(_PYTHON, os.X_OK) else None
    try:
        bwrap = find_bwrap(config)
        with tempfile.TemporaryDirectory(prefix="tollway-probe-", dir=config.root or default_root()) as place:
            _run_true(config, staged(bwrap, Path(place)), place)
    except (TollwayError, OSError) as error:
        return Probe(available=False, reason=str(error), python=python)
    if python is None:
        return Probe(
            available=True,
            reason=f"bubblewrap works, but {_PYTHON} is missing: install the system package python3 for Python tasks",
            bwrap=bwrap,
        )
    return Probe(available=True, reason="bubblewrap and user namespaces work", bwrap=bwrap, python=python)


def bounds(config: LocalConfig | None = None) -> Bounds:
    """Try what limits sandboxes beyond namespaces. Never raises."""
    config = config or LocalConfig()
    places = find()
    controllers = sorted(name for place in places for name in place.controllers)
    versions = " and ".join(f"version {number}" for number in sorted({place.version for place in places}))
    groups_detail = (
        f"control groups, {versions}: {', '.join(controllers)}"
        if controllers
        else "no writable control groups: mem_mb bounds each process, not their sum; run as root or delegate a group"
    )
    found = _try_mounts(config)
    return Bounds(
        mounts=found == "overlay",
        mounts_detail={
            "overlay": "workspaces are bounded by the kernel, trees are shown without a copy",
            "tmpfs": "workspaces are bounded by the kernel; trees are copied, as overlays cannot be mounted here",
        }.get(found, f"plain directories: trees are copied, disk_mb is looked at once a second ({found})"),
        groups="memory" in controllers,
        groups_detail=groups_detail,
        filtered=filter_program(os.uname().machine) is not None,
    )


def _try_mounts(config: LocalConfig) -> str:
    """Answer of ``mounts.trial``, which leaves its process in another namespace and so gets one of its own."""
    if config.root is not None and not (config.root.is_dir() and is_memory(config.root)):
        return f"sandbox.local.root={config.root} is no memory file system"
    uid = usable_uids(own_uid_map(), config.uid_base, config.uid_count)[0] if os.getuid() == 0 else None
    try:
        with tempfile.TemporaryDirectory(prefix="tollway-probe-", dir=config.root or default_root()) as place:
            for name in ("space", "tree"):
                os.mkdir(os.path.join(place, name))
            words = [os.path.join(place, "space"), os.path.join(place, "tree"), str(uid or "")]
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-B", "-c", boot("mounts", _TRIAL), *words],
                env={},
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            )
    except (OSError, TollwayError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout.strip() or done.stderr.strip()[-200:]


def _run_true(config: LocalConfig, bwrap: Path, place: str) -> None:
    uid = usable_uids(own_uid_map(), config.uid_base, config.uid_count)[0] if os.getuid() == 0 else None
    workspace = os.path.join(place, "w")
    os.mkdir(workspace, 0o700)
    Path(place).chmod(0o711)
    if uid is not None:
        os.chown(workspace, uid, uid)
    options = encode([*base_options(workspace, network=False, tmp_bytes=1 << 20), *command_options("/workspace", {})])
    reader, writer = os.pipe()
    os.write(writer, options)
    os.close(writer)
    try:
        done = subprocess.run(
            [str(bwrap), "--args", str(reader), "--", "/usr/bin/true"],
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=(reader,),
            user=uid,
            group=uid,
            extra_groups=None if uid is None else [],
            timeout=20,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SandboxUnavailable(f"{bwrap} did not finish within 20 s") from None
    finally:
        os.close(reader)
    if done.returncode != 0:
        raise SandboxUnavailable(remedy(f"bwrap failed: {done.stderr.decode('utf-8', 'replace').strip()[:300]}"))
