"""Every family of the ``renderers`` library, built by name.

Owns how a name and a tokenizer become a ``RenderersFamily`` and what is said when they do not fit. The library
is imported on first use. Depends on ``renderers`` and ``tokens``.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from pathlib import Path

from tollway.errors import ConfigError
from tollway.session_server.families.folding import FoldingTokenizer
from tollway.session_server.families.renderers_family import Renderer, RenderersFamily
from tollway.session_server.tokens import ControlTokenizer, load_tokenizer

__all__ = ["UNUSABLE", "family_kinds", "load_renderers_family", "renderers_family", "thinking_switch"]

UNUSABLE = {
    "auto": "picks by the name of a hub repository; ours reads the model directory instead",
    "custom": "register a Family under the entry-point group tollway.families, or use renderer:module.Class",
    "default": "cannot append or parse; family jinja renders any chat template",
}
"""Names of the library that are no families of ours, and why."""
_OWN_ENCODER = frozenset({"gpt-oss"})
"""Renderers that encode messages with a library of their own, which reads no control ids from text."""
_EFFORTS: dict[str, tuple[str, str]] = {"hy3": ("high", "no_think"), "inkling": ("high", "none")}
"""Families whose switch is an effort: its value with thinking and without."""
_EXTRA = "needs `pip install tollway[renderers]`"


def family_kinds() -> Mapping[str, typing.Any]:
    """Configuration class of each family by name. Raises ``ConfigError`` without the library."""
    try:
        from renderers.configs import RendererConfig
    except ImportError as error:
        raise ConfigError(f"model families of real models: {_EXTRA}") from error
    kinds = {str(kind.model_fields["name"].default): kind for kind in _variants(RendererConfig)}
    return {name: kind for name, kind in sorted(kinds.items()) if name not in UNUSABLE}


def thinking_switch(name: str, kind: typing.Any) -> dict[bool, dict[str, object]] | None:
    """Configuration fields that turn thinking on and off, if the family has such."""
    if name in _EFFORTS:
        on, off = _EFFORTS[name]
        return {True: {"reasoning_effort": on}, False: {"reasoning_effort": off}}
    # A field that the template does not know changes nothing.
    known = kind.template_field_names()
    field = next((field for field in ("enable_thinking", "thinking") if field in known), None)
    return None if field is None else {wanted: {field: wanted} for wanted in (True, False)}


def load_renderers_family(name: str, *, tokenizer: Path | None, thinking: bool) -> RenderersFamily:
    """Build family ``name`` of the library. Raises ``ConfigError``."""
    _kind(name)  # an unknown name is said first, before seconds are spent on reading the vocabulary
    if tokenizer is None:
        raise ConfigError(f"model family {name!r} needs server.tokenizer: a tokenizer.json or a model directory")
    return renderers_family(name, load_tokenizer(tokenizer), thinking=thinking)


def renderers_family(name: str, tokenizer: ControlTokenizer, *, thinking: bool = True) -> RenderersFamily:
    """Family ``name`` of the library over a given tokenizer.

    ``renderer:module.Class`` builds a custom renderer: a class with the library's surface. Raises ``ConfigError``.
    """
    kind, fields = _kind(name)
    switch = thinking_switch(name, kind)
    built: dict[bool, Renderer] = {}
    folding = FoldingTokenizer(tokenizer)
    try:
        from renderers.base import create_renderer

        for wanted in (True, False) if switch else (thinking,):
            built[wanted] = create_renderer(folding, kind(**fields, **(switch[wanted] if switch else {})))
        family = RenderersFamily(name, folding, built, thinking=thinking, guarded=name not in _OWN_ENCODER)
    except Exception as error:
        # The library asserts and raises freely on vocabularies that are not its model's.
        raise ConfigError(f"family {name!r} does not fit tokenizer {tokenizer.name_or_path}: {error}") from error
    return family


def _kind(name: str) -> tuple[typing.Any, dict[str, object]]:
    if name.startswith("renderer:"):
        from renderers.configs import CustomRendererConfig

        return CustomRendererConfig, {"import_path": name.removeprefix("renderer:"), "thinking_retention": "all"}
    kind = family_kinds().get(name)
    if kind is None:
        known = ", ".join(("compact-bytes", "jinja", "auto", *family_kinds()))
        raise ConfigError(f"unknown model family {name!r}; known: {known}")
    return kind, {"thinking_retention": "all"}


def _variants(annotation: object) -> list[typing.Any]:
    """Members of a (possibly annotated) union of the library's config classes."""
    args = typing.get_args(annotation)
    if not args:
        return [annotation] if hasattr(annotation, "model_fields") else []
    return [each for arg in args for each in _variants(arg)]
