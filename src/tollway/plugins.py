"""Named implementations of a port: the shipped ones, those of installed packages, and ``module:Class``.

Owns how a name in the configuration becomes an object and what is said when it does not. Knows no port;
nothing is imported before it is asked for. Depends on ``errors`` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract
from typing import Generic, TypeVar

from tollway.errors import ConfigError

__all__ = ["Plugins"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugins(Generic[T]):
    """Where the implementations of one port are looked up: shipped names first, then entry points, then paths.

    >>> Plugins(key="a.b", port=dict, group="tollway.nothing", shipped={"counter": "collections:Counter"}).open(
    ...     "counter", "abba"
    ... )
    Counter({'a': 2, 'b': 2})
    """

    key: str
    """Configuration key that holds the name, for error texts."""
    port: type[T]
    group: str
    """Entry-point group under which third parties register."""
    shipped: Mapping[str, str]
    """``module:Class`` by name."""

    def names(self) -> tuple[str, ...]:
        """Every name that ``open`` knows, sorted."""
        return tuple(sorted({*self.shipped, *entry_points(group=self.group).names}))

    def open(self, name: str, *arguments: object) -> T:
        """Call what ``name`` stands for, a class of the port or a function that makes one, with ``arguments``.

        Raises ``ConfigError`` for an unknown name, a target that cannot be imported, and one of another kind.
        """
        target = self._target(name)
        try:
            found = EntryPoint(name, target, self.group).load()
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            # The last two: a target that is no module:Class at all.
            advice = "; put its folder on PYTHONPATH or install its package"
            told = f"{error}{advice if isinstance(error, ModuleNotFoundError) else ''}"
            raise ConfigError(f"{self.key}={name!r}: cannot load {target}: {told}") from error
        if not callable(found) or (isinstance(found, type) and not issubclass(found, self.port)):
            raise ConfigError(f"{self.key}={name!r}: {target} is not {_a(self.port)} class")
        if isinstance(found, type) and isabstract(found):
            lacking = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
            raise ConfigError(f"{self.key}={name!r}: {target} does not define {lacking}, which {_a(self.port)} must")
        made = found(*arguments)
        if not isinstance(made, self.port):
            raise ConfigError(f"{self.key}={name!r}: {target} gave {_a(type(made))}, want {_a(self.port)}")
        return made

    def _target(self, name: str) -> str:
        if name in self.shipped:
            return self.shipped[name]
        installed = next(iter(entry_points(group=self.group, name=name)), None)
        if installed is not None:
            return installed.value
        if ":" in name:
            return name
        raise ConfigError(f"{self.key}={name!r} is unknown; known: {', '.join(self.names())}, or module:Class")


def _a(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
