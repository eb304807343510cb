"""A task with its directories on this machine. Depends on ``cache`` and ``task``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tollway.envs.swe.cache import Cache, tree_files
from tollway.envs.swe.task import SweTask
from tollway.errors import BadRequest

__all__ = ["Prepared", "prepare"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What sandboxes of a task share, read-only."""

    tree: Path
    """The repository as the agent gets it."""
    site: Path | None
    """Packages for its tests; ``None`` when the standard library is enough."""
    sources: tuple[str, ...]
    """Files of the library that are there."""


def prepare(cache: Cache, task: SweTask, *, download: bool = False) -> Prepared:
    """Make a task ready. Raises ``ConfigError`` with the command to run when something was not fetched."""
    site = cache.packages(task.requires, download=download) if task.framework == "pytest" else None
    tree = cache.tree(task, download=download)
    if site is not None:
        for one in (*task.packages, *task.modules):
            name = one.rpartition("/")[2]
            if (site / name).exists():
                raise BadRequest(
                    f"{task.instance_id}: {name} is also one of the packages that tests need, so that an installed copy"
                    " would stand in for the library under test"
                )
    sources = tuple(path for path in tree_files(tree) if task.may_submit(path))
    if not sources:
        raise BadRequest(f"{task.instance_id}: its packages and modules name no file of the source")
    return Prepared(tree, site, sources)
