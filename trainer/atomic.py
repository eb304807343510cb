"""Writing files and directories so that a crash leaves the old state or the new one, never a part.

The order is always: write beside, flush, rename, flush the parent. Depends on the standard library only.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["fsync_path", "fsync_tree", "replace_directory", "write_file"]


def fsync_path(path: Path) -> None:
    """Flush one file or directory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(root: Path) -> None:
    """Flush every file below ``root``, then every directory, the root last."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            fsync_path(Path(folder, name))
        fsync_path(Path(folder))


def write_file(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``."""
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    fsync_path(path.parent)


def replace_directory(draft: Path, target: Path) -> None:
    """Move a flushed ``draft`` to ``target`` on the same file system, displacing what was there."""
    old = target.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    draft.rename(target)
    fsync_path(target.parent)
    shutil.rmtree(old, ignore_errors=True)
