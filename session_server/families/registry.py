"""Picks a model family by name: built in, from ``renderers``, or from a third party.

Third parties register a ``Family`` class, or a function that makes one, under the entry-point group
``tollway.families``; it is called with the tokenizer path (``None`` when none is configured). Heavy libraries
are imported only when a family that needs them is asked for.
"""

from __future__ import annotations

from pathlib import Path

from tollway.plugins import Plugins
from tollway.session_server.families.base import Family
from tollway.session_server.families.compact import CompactFamily

__all__ = ["GROUP", "load_family"]

GROUP = "tollway.families"
_THIRD_PARTY = Plugins(
    key="server.family",
    port=Family,  # type: ignore[type-abstract]  # compared with, never called
    group=GROUP,
    shipped={},
)


def load_family(name: str, *, tokenizer: Path | None = None, thinking: bool = True) -> Family:
    """Build the family called ``name``.

    ``compact-bytes`` is built in; any entry point of the group, or a ``module:Class``, comes next; every other
    name is one of the ``renderers`` library's families (``qwen3``, ...), which needs ``tokenizer``: a
    ``tokenizer.json`` or a model directory that has one. Raises ``ConfigError``.

    >>> load_family("compact-bytes").vocab_size
    272
    """
    if name == CompactFamily.name:
        return CompactFamily()
    if ":" in name or name in _THIRD_PARTY.names():
        return _THIRD_PARTY.open(name, tokenizer)
    from tollway.session_server.families.catalogue import load_renderers_family

    return load_renderers_family(name, tokenizer=tokenizer, thinking=thinking)
