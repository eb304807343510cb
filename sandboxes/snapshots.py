"""Copies of local workspaces, by name: with the workspaces, or in a directory that outlives the provider.

Depends on the standard library and ``errors``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tollway.errors import BadImage, SandboxError

__all__ = ["Snapshots"]

_PREFIX = "snapshot-"


class Snapshots:
    """Directories named ``snapshot-*`` in one place."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def new(self) -> Path:
        """An empty private directory for a copy."""
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._place))
        except OSError as error:
            raise SandboxError(f"cannot make a snapshot in {self._place}: {error}") from error

    def find(self, name: str) -> Path:
        """The directory of that name; ``BadImage`` for everything else."""
        path = self._place / name
        if name.startswith(_PREFIX) and "/" not in name and path.is_dir():
            return path
        raise BadImage(
            f"the local provider has no image {name!r}: its system is this machine's, and its images are the "
            f"snapshots in {self._place}"
        )
