"""Picks a model family by name: built in, from ``renderers``, a chat template, or from a third party.

Third parties register a ``Family`` class, or a function that makes one, under the entry-point group
``tollway.families``; it is called with the tokenizer path (``None`` when none is configured). Heavy libraries
are imported only when a family that needs them is asked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tollway.errors import ConfigError
from tollway.plugins import Plugins
from tollway.session_server.families.base import Family
from tollway.session_server.families.compact import CompactFamily

__all__ = ["GROUP", "FamilyEntry", "families", "load_family"]

GROUP = "tollway.families"
_THIRD_PARTY = Plugins(
    key="server.family",
    port=Family,  # type: ignore[type-abstract]  # compared with, never called
    group=GROUP,
    shipped={},
)


@dataclass(frozen=True, slots=True)
class FamilyEntry:
    """One line of ``tollway families``."""

    name: str
    source: str
    """``built in``, ``renderers``, ``jinja`` or ``entry point``."""
    thinking: str
    """Whether a request may switch it: ``switch``, ``fixed`` or ``-``."""
    tools: str
    """The format of its tool calls, as far as they can be forced; ``parsed`` when they can only be read."""
    tested: str
    """The vocabulary that the shipped tests prove it with; ``*``: the family's control strings added to it."""
    note: str = ""


def load_family(
    name: str, *, tokenizer: Path | None = None, thinking: bool = True, chat_template: Path | None = None
) -> Family:
    """Build the family called ``name``.

    ``compact-bytes`` is built in; ``jinja`` renders any chat template (``jinja:FORMAT`` names its tool calls) and
    ``auto`` reads the model directory; any entry point of the group, or a ``module:Class``, comes next; every other
    name is one of the ``renderers`` library's families (``qwen3``, ...), which needs ``tokenizer``: a
    ``tokenizer.json`` or a model directory that has one. ``chat_template`` is for ``jinja`` alone. Raises
    ``ConfigError``.

    >>> load_family("compact-bytes").vocab_size
    272
    """
    if name == "auto":
        from tollway.session_server.families.detect import detect_family

        name = detect_family(tokenizer)
    if chat_template is not None and name.partition(":")[0] != "jinja":
        raise ConfigError(f"server.chat_template is for family jinja; server.family is {name!r}")
    if name == CompactFamily.name:
        return CompactFamily()
    if name.partition(":")[0] == "jinja":
        from tollway.session_server.families.jinja import load_jinja_family

        return load_jinja_family(name, tokenizer=tokenizer, chat_template=chat_template, thinking=thinking)
    if name in _THIRD_PARTY.names() or (":" in name and not name.startswith("renderer:")):
        return _THIRD_PARTY.open(name, tokenizer)
    from tollway.session_server.families.catalogue import load_renderers_family

    return load_renderers_family(name, tokenizer=tokenizer, thinking=thinking)


def families() -> Iterator[FamilyEntry]:
    """Every family that this installation knows, and those that it cannot use, with the reason."""
    yield FamilyEntry(CompactFamily.name, "built in", "-", "parsed", "its own 272 ids")
    yield FamilyEntry("auto", "built in", "", "", "", "picks one of the others from a model directory, or refuses")
    yield FamilyEntry(
        "jinja", "jinja", "template's", "template's", "qwen3", "any chat template; a turn costs O(conversation)"
    )
    for name in _THIRD_PARTY.names():
        yield FamilyEntry(name, "entry point", "", "", "")
    if importlib.util.find_spec("renderers") is None:
        note = "not installed: pip install tollway[renderers]"
        yield FamilyEntry("(some thirty more)", "renderers", "", "", "", note)
        return
    from tollway.session_server.families.catalogue import UNUSABLE, family_kinds, thinking_switch
    from tollway.session_server.families.formats import TOOL_FORMATS
    from tollway.session_server.families.vocabularies import VOCABULARIES

    for name, kind in family_kinds().items():
        form = TOOL_FORMATS.get(name)
        yield FamilyEntry(
            name,
            "renderers",
            "fixed" if thinking_switch(name, kind) is None else "switch",
            "parsed" if form is None else form.name,
            name if name in VOCABULARIES else "qwen3*",
            _NOTES.get(name, ""),
        )
    for name, reason in UNUSABLE.items():
        if name != "auto":
            yield FamilyEntry(name, "renderers", "", "", "", f"not usable by this name: {reason}")


_NOTES = {
    "gpt-oss": "needs openai-harmony's vocabulary file: set TIKTOKEN_ENCODINGS_BASE where nothing can be downloaded",
    "llama-3": "one tool call per reply",
}
