"""Picks a model family by name: built in, from ``renderers``, or from a third party.

Third parties register a ``Family`` factory under the entry-point group ``tollway.families``; the factory is
called with the tokenizer path (``None`` when none is configured). Heavy libraries are imported only when a
family that needs them is asked for.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from tollway.errors import ConfigError
from tollway.session_server.families.base import Family
from tollway.session_server.families.compact import CompactFamily

__all__ = ["GROUP", "load_family"]

GROUP = "tollway.families"
_BUILT_IN = {CompactFamily.name: CompactFamily}


def load_family(name: str, *, tokenizer: Path | None = None, thinking: bool = True) -> Family:
    """Build the family called ``name``.

    ``compact-bytes`` is built in; any entry point of the group comes next; every other name is one of the
    ``renderers`` library's families (``qwen3``, ...), which needs ``tokenizer``: a ``tokenizer.json`` or a
    model directory that has one. Raises ``ConfigError``.

    >>> load_family("compact-bytes").vocab_size
    272
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            family = entry.load()(tokenizer)
            if not isinstance(family, Family):
                raise ConfigError(f"entry point {name!r} of {GROUP} gives a {type(family).__name__}, want a Family")
            return family
    from tollway.session_server.families.renderers_family import load_renderers_family

    return load_renderers_family(name, tokenizer=tokenizer, thinking=thinking)
