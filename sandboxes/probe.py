"""Can this machine run local sandboxes, and if not, what should be done about it?

Finds the bwrap program and runs one real sandbox with the provider's own options. Used by the provider when
something fails and by ``tollway doctor``. Depends on ``bwrap``, ``limits`` and the configuration.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tollway.errors import SandboxUnavailable, TollwayError
from tollway.sandboxes.bwrap import base_options, command_options, encode
from tollway.sandboxes.config import LocalConfig
from tollway.sandboxes.limits import own_uid_map, usable_uids
from tollway.sandboxes.program import INSTALL, find_bwrap, staged
from tollway.sandboxes.workspace import default_root

__all__ = ["Probe", "probe", "remedy"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What ``tollway doctor`` shows."""

    available: bool
    reason: str
    """One sentence: what works, or what is missing and how to get it."""
    bwrap: Path | None = None
    python: Path | None = None
    """The Python that sandboxed programs see; ``None`` when /usr has none."""


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
        "`--security-opt seccomp=unconfined --security-opt apparmor=unconfined`, or use another sandbox.provider"
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
