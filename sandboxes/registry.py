"""Providers by name: the shipped ones, those of installed packages, and ``module:Class``.

Third parties register a ``SandboxProvider`` subclass whose constructor takes a ``SandboxConfig`` under the
entry-point group ``tollway.sandboxes``. Imports a provider only when it is asked for.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from tollway.errors import ConfigError
from tollway.sandboxes.base import SandboxProvider
from tollway.sandboxes.config import SandboxConfig

__all__ = ["GROUP", "names", "open_provider"]

GROUP = "tollway.sandboxes"
_SHIPPED = {
    "fake": "tollway.sandboxes.fake:FakeProvider",
    "local": "tollway.sandboxes.local:LocalProvider",
}


def names() -> tuple[str, ...]:
    """Every provider name that ``open_provider`` knows, sorted."""
    return tuple(sorted({*_SHIPPED, *(entry.name for entry in entry_points(group=GROUP))}))


def open_provider(config: SandboxConfig) -> SandboxProvider:
    """The provider that ``config.provider`` names; ``ConfigError`` names the known ones."""
    name = config.provider
    target = _SHIPPED.get(name) or next((e.value for e in entry_points(group=GROUP) if e.name == name), None)
    if target is None and ":" in name:
        target = name
    if target is None:
        raise ConfigError(f"sandbox.provider={name!r} is unknown; known: {', '.join(names())}, or module:Class")
    module, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"sandbox.provider={name!r}: cannot load {target}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, SandboxProvider)):
        raise ConfigError(f"sandbox.provider={name!r}: {target} is not a SandboxProvider class")
    # A third party's constructor is not ours to know statically.
    provider: SandboxProvider = found(config)
    return provider
