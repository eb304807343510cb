"""Typed access to fields of a request body; every refusal names the field. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import orjson

from tollway.errors import BadRequest
from tollway.session_server.families.base import RenderOptions

__all__ = [
    "ANY_OBJECT",
    "boolean",
    "integer",
    "json_text",
    "logit_bias",
    "mapping",
    "not_text",
    "number",
    "output_schema",
    "refuse_set",
    "render_options",
    "string",
    "strings",
    "text_of",
    "top_k",
]

Json = Mapping[str, object]
ANY_OBJECT = '{"type":"object"}'
"""Schema of a reply that has to be any JSON object."""
_EXACT = 2**53
"""Beyond this a float is not the whole number that was written; JSON readers make one of any huge integer."""
_MEDIA = ("image", "audio", "video", "file", "document")


def boolean(raw: Json, name: str) -> bool | None:
    """An optional true or false."""
    value = raw.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise BadRequest(f"{name} must be true or false, got {type(value).__name__}", param=name)


def string(raw: Json, name: str) -> str | None:
    """An optional text."""
    value = raw.get(name)
    if value is None or isinstance(value, str):
        return value
    raise BadRequest(f"{name} must be text, got {type(value).__name__}", param=name)


def mapping(raw: Json, name: str) -> Json:
    """An optional object; empty when it is not there."""
    value = raw.get(name)
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise BadRequest(f"{name} must be an object, got {type(value).__name__}", param=name)


def integer(raw: Json, name: str, low: int, high: int) -> int | None:
    """An optional whole number in [low, high]."""
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadRequest(f"{name} must be a whole number from {low} to {high}, got {_shown(value)}", param=name)
    return value


def number(raw: Json, name: str, low: float, high: float, *, above: bool = False) -> float | None:
    """An optional number in [low, high], or in (low, high] with ``above``."""
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadRequest(f"{name} must be a number, got {_shown(value)}", param=name)
    if not low <= value <= high or (above and value == low):
        raise BadRequest(f"{name} must be in {'(' if above else '['}{low}, {high}], got {value!r}", param=name)
    return float(value)


def top_k(raw: Json) -> int | None:
    """How many candidates sampling looks at; 0 and -1 both mean all of them, which is -1 for engines."""
    value = integer(raw, "top_k", -1, 2**31 - 1)
    return -1 if value == 0 else value


def strings(raw: Json, name: str, most: int) -> tuple[str, ...]:
    """An optional text or list of texts; empty texts are refused."""
    value = raw.get(name)
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > most or not all(isinstance(x, str) and x for x in items):
        raise BadRequest(f"{name} must be a text or at most {most} non-empty texts", param=name)
    return tuple(items)


def logit_bias(raw: Json) -> dict[str, float]:
    """Decimal token id -> bias in [-100, 100]."""
    found = {}
    for token in (biases := mapping(raw, "logit_bias")):
        if not (token.isascii() and token.isdigit()) or len(token) > 9:
            raise BadRequest(f"logit_bias key {token[:40]!r} is not a decimal token id", param="logit_bias")
        bias = biases[token]
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise BadRequest(f"logit_bias of {token} must be a number from -100 to 100", param="logit_bias")
        found[str(int(token))] = float(bias)
    return found


def render_options(raw: Json, effort: object = None) -> RenderOptions:
    """Template switches: ``chat_template_kwargs``, and an effort of ``none``, which turns thinking off.

    Other efforts are hints that no template here takes; they change nothing.
    """
    switches = mapping(raw, "chat_template_kwargs")
    unknown = sorted(set(switches) - {"enable_thinking"})
    if unknown:
        raise BadRequest(f"chat_template_kwargs {unknown[0]!r} is not supported here", param="chat_template_kwargs")
    thinking = boolean(switches, "enable_thinking")
    if thinking is None and effort == "none":
        thinking = False
    return RenderOptions(thinking=thinking)


def output_schema(form: object, where: str, inner: str | None = None) -> str | None:
    """JSON schema text of a wished reply format; ``None`` for plain text.

    ``inner``: key under which the format keeps its schema object, where the dialect nests it.
    """
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else form
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if not isinstance(form, dict) or kind != "json_schema":
        raise BadRequest(
            f"{where}.type is {_shown(kind)}; use text, json_object or json_schema (with its schema)", param=where
        )
    holder = form.get(inner) if inner is not None else form
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        place = f"{where}.{inner}.schema" if inner is not None else f"{where}.schema"
        raise BadRequest(f"{place} must be a JSON schema object", param=where)
    return json_text(schema, where)


def text_of(raw: object, where: str, kinds: Mapping[str, str]) -> str:
    """Text of a message: a string, null, or a list of text parts, which follow each other without a gap.

    ``kinds``: part type -> key of its text. Any other part is refused: the model takes text only.
    """
    if isinstance(raw, str):
        return raw
    if raw is None:
        return ""
    if not isinstance(raw, list):
        raise BadRequest(f"{where} must be text or a list of parts, got {type(raw).__name__}", param=where)
    parts: list[str] = []
    for part in raw:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        key = kinds.get(kind) if isinstance(kind, str) else None
        text = part.get(key) if isinstance(part, dict) and key is not None else None
        if not isinstance(text, str):
            raise not_text(kind, where)
        parts.append(text)
    return parts[0] if len(parts) == 1 else "".join(parts)


def not_text(kind: object, where: str) -> BadRequest:
    """What a part that is no text is answered with."""
    said = "this model takes text only"
    if isinstance(kind, str) and any(media in kind for media in _MEDIA):
        said += "; leave images, audio and files out, or put their text in"
    return BadRequest(f"{where} has a part of type {_shown(kind)}; {said}", param=where)


def refuse_set(raw: Json, names: Iterable[str]) -> None:
    """Refuse fields that are set to something; null, zero, false and empty are no wish."""
    for name in names:
        if raw.get(name):
            raise BadRequest(f"{name} is not supported here; leave it out", param=name)


def json_text(value: object, where: str) -> str:
    """JSON text of a value that came as JSON. ``BadRequest`` when it is nested deeper than writers go."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise BadRequest(f"{where}: {error}", param=where) from None


def _shown(value: object) -> str:
    """A value for an error text, never a whole body."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
