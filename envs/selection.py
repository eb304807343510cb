"""Which tasks of an environment are meant: by index, by range, by id, or by a pattern over ids.

Pure; depends on ``envs.base``.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence

from tollway.envs.base import Environment, Task
from tollway.errors import ConfigError, NotFound

__all__ = ["one_task", "select_tasks"]

_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")
_MOST = 1_000_000
"""Tasks that one selection may name."""


def select_tasks(environment: Environment, wanted: Sequence[str], *, count: int) -> list[Task]:
    """The tasks that ``wanted`` names, each once, in that order; without a name ``count`` tasks of the endless order.

    A name is an index, a range of indices as ``3-7``, a task id, or a pattern over ids with ``*``; several may be
    joined by commas. Raises ``ConfigError`` for one that names nothing.
    """
    names = [name.strip() for each in wanted for name in each.split(",") if name.strip()]
    if not names:
        return [environment.task(index) for index in range(count)]
    found: dict[str, Task] = {}
    for name in names:
        for task in _named(environment, name):
            found.setdefault(task.task_id, task)
            if len(found) > _MOST:
                raise ConfigError(f"--tasks names more than {_MOST} tasks")
    return list(found.values())


def one_task(environment: Environment, name: str) -> Task:
    """The task of an index or an id. Raises ``ConfigError``."""
    try:
        return environment.task(int(name)) if _is_index(name) else environment.find(name)
    except NotFound as error:
        raise ConfigError(f"{error}; name one by its id, or by its place in the order: 0, 1, ...") from error


def _named(environment: Environment, name: str) -> Iterator[Task]:
    if match := _RANGE.fullmatch(name):
        first, last = int(match[1]), int(match[2])
        if last < first or last - first >= _MOST:
            raise ConfigError(f"--tasks {name}: want FIRST-LAST, at most {_MOST} of them")
        yield from (environment.task(index) for index in range(first, last + 1))
    elif set(name) & set("*?["):
        yield from _matching(environment, name)
    else:
        yield one_task(environment, name)


def _matching(environment: Environment, pattern: str) -> list[Task]:
    if environment.size is None:
        raise ConfigError(f"--tasks {pattern}: {environment.name} has no end to look through; give indices or ids")
    tasks = {task.task_id: task for task in map(environment.task, range(environment.size))}
    if not (found := [task for task_id, task in sorted(tasks.items()) if fnmatch.fnmatchcase(task_id, pattern)]):
        raise ConfigError(f"--tasks {pattern}: none of the {len(tasks)} tasks of {environment.name} has such an id")
    return found


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10
