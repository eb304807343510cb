"""Sets of tasks: the ones in this package and directories of the user's. Depends on ``task``."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tollway.envs.swe.task import SweTask, read_task
from tollway.errors import BadRequest, ConfigError

__all__ = ["SETS", "Entry", "find_set", "read_set"]

_HERE = Path(__file__).parent
SETS = {"tiny": _HERE / "tiny", "shipped": _HERE / "shipped"}
"""The sets that come with this package."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One task directory."""

    folder: Path
    task: SweTask
    instruction: str


def find_set(name: str) -> Path:
    """The directory of a set: a name of ``SETS``, or a path."""
    folder = SETS.get(name) or Path(name)
    if not folder.is_dir():
        raise ConfigError(f"no task set {name!r}; want {', '.join(sorted(SETS))} or a directory of tasks")
    return folder


def read_set(name: str, only: Sequence[str] = ()) -> tuple[Entry, ...]:
    """All tasks of a set, by id. Raises ``ConfigError`` with everything that is wrong with any of them."""
    folder = find_set(name)
    folders = [folder] if (folder / "swe.json").is_file() else sorted(one.parent for one in folder.glob("*/swe.json"))
    wrong: list[str] = []
    found: dict[str, Entry] = {}
    for one in folders:
        try:
            task = read_task(one)
            instruction = (one / "instruction.md").read_text(encoding="utf-8")
        except (BadRequest, OSError, UnicodeDecodeError) as error:
            wrong.append(str(error))
            continue
        if task.instance_id in found:
            wrong.append(f"{one}: instance_id {task.instance_id} is also that of {found[task.instance_id].folder}")
        found[task.instance_id] = Entry(one, task, instruction)
    if wrong:
        raise ConfigError("\n".join([f"task set {name!r} cannot be used:", *wrong[:20]]))
    chosen = {name: entry for name, entry in sorted(found.items()) if _chosen(name, only)}
    if not chosen:
        raise ConfigError(f"task set {name!r} has no tasks" + (f" that fit {list(only)}" if only else ""))
    return tuple(chosen.values())


def _chosen(name: str, only: Sequence[str]) -> bool:
    wanted = [one for one in only if not one.startswith("!")]
    unwanted = [one[1:] for one in only if one.startswith("!")]
    fits = not wanted or any(fnmatch.fnmatchcase(name, one) for one in wanted)
    return fits and not any(fnmatch.fnmatchcase(name, one) for one in unwanted)
