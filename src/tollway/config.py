"""Typed configuration sections: the base class, the TOML reader, ``--set`` overrides, error texts.

Each package owns one frozen ``Section`` (in its own ``config.py``); ``tollway.settings`` composes them.
Nothing here knows any section. Depends on pydantic and ``errors``.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from tollway.errors import ConfigError

__all__ = ["Section", "Tree", "load", "merge_overrides", "read_tree"]

Tree = dict[str, object]
_S = typing.TypeVar("_S", bound="Section")


class Section(BaseModel):
    """Base of every configuration section: frozen, unknown keys refused, numbers finite (no wait is for ever)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def read_tree(path: Path) -> Tree:
    """Read a TOML file, or a JSON file as ``tollway config show`` prints it.

    A missing or broken file is a ``ConfigError`` with the position.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"no configuration file at {path}; name one with -c PATH") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}, want sections")
    return tree


def merge_overrides(tree: Tree, overrides: Iterable[str]) -> Tree:
    """Apply ``a.b=value`` overrides; the value is TOML, or a plain string when it is not valid TOML.

    >>> merge_overrides({"a": {"b": 1}}, ["a.b=2", "a.c=x"])
    {'a': {'b': 2, 'c': 'x'}}
    """
    merged = _copy(tree)
    for override in overrides:
        key, equals, raw = override.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            raise ConfigError(f"--set {override!r}: want section.key=value")
        try:
            value: object = tomllib.loads(f"v = {raw}")["v"]
        except tomllib.TOMLDecodeError:
            value = raw
        at = merged
        for part in path[:-1]:
            inner = at.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--set {key.strip()}: {part!r} is a value, not a section")
            at = inner
        at[path[-1]] = value
    return merged


def load(root: type[_S], tree: Tree, *, source: str) -> _S:
    """Validate ``tree`` as ``root``; every problem becomes one line that names key, value and remedy."""
    try:
        return root.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(root, tuple(problem["loc"]), problem) for problem in error.errors()]
        raise ConfigError("\n".join([f"configuration from {source} is not usable:", *lines])) from None


def _explain(root: type[BaseModel], loc: tuple[int | str, ...], problem: typing.Mapping[str, object]) -> str:
    key = ".".join(str(part) for part in loc) or "(top level)"
    kind = str(problem["type"])
    if kind == "extra_forbidden":
        known = _fields_at(root, loc[:-1])
        close = difflib.get_close_matches(str(loc[-1]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(sorted(known)) or 'none'}"
        return f"  {key}: unknown key; {hint}"
    if kind == "missing":
        return f"  {key}: required and not set; add it to the file or pass --set {key}=..."
    text = str(problem["msg"]).removeprefix("Value error, ")
    if isinstance(problem["input"], dict):  # of several keys; the text names them
        return f"  {key}: {text}"
    return f"  {key}: {text} (found {problem['input']!r})"


def _fields_at(root: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    at: object = root
    for part in loc:
        model = _model_in(at)
        if model is None or part not in model.model_fields:
            return []
        at = model.model_fields[str(part)].annotation
    model = _model_in(at)
    return list(model.model_fields) if model else []


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The section type inside ``Section``, ``Section | None`` and the like."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        for inner in typing.get_args(annotation):
            if (found := _model_in(inner)) is not None:
                return found
    return None


def _copy(tree: Tree) -> Tree:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in tree.items()}
