"""Tool calls in the text of a reply, for templates whose format is one of the common ones.

Owns four written forms (Hermes, Qwen's XML, Llama's bare JSON, Mistral) and the thinking block before them.
A control string counts only where its id was sampled: spelled out by ordinary ids it is text. Depends on
``tokens`` and ``stream``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tollway.messages import ToolSpec
from tollway.session_server.families.base import ParsedCall, ParsedReply, arguments_text
from tollway.session_server.families.stream import Channel, Markers, PartialReader, PartialReply
from tollway.session_server.tokens import GUARD, ControlTokenizer

__all__ = ["TEXT_FORMATS", "TextFormat", "TextReader"]

Schemas = Mapping[str, Mapping[str, object]]
Attempt = Callable[[str, Schemas], list[tuple[str, str]] | None]


@dataclass(frozen=True, slots=True)
class TextFormat:
    """A written form of calls."""

    name: str
    begin: str
    """Opens a call. Empty: the whole answer is one, or is none."""
    end: str
    """Closes a call. Empty: the end of the reply does."""
    read: Attempt
    """(name, arguments as JSON text) of the calls between the two; ``None`` when that is no call."""


def _object(text: str, field: str) -> list[tuple[str, str]] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get(field, value.get("arguments", {}))
    return [(value["name"], arguments if isinstance(arguments, str) else _dump(arguments))]


def _hermes(text: str, schemas: Schemas) -> list[tuple[str, str]] | None:
    return _object(text.strip(), "arguments")


def _llama(text: str, schemas: Schemas) -> list[tuple[str, str]] | None:
    return _object(text.strip().removeprefix("<|python_tag|>").strip(), "parameters")


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*(.*?)\s*</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def _qwen_xml(text: str, schemas: Schemas) -> list[tuple[str, str]] | None:
    found = _FUNCTION.fullmatch(text)
    if found is None or _PARAMETER.sub("", found.group(2)).strip():
        return None
    schema = schemas.get(found.group(1), {})
    values = {key: _typed(value, schema.get(key)) for key, value in _PARAMETER.findall(found.group(2))}
    return [(found.group(1), _dump(values))]


_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


def _mistral(text: str, schemas: Schemas) -> list[tuple[str, str]] | None:
    """Both forms: a JSON list of calls, and names each followed by its arguments."""
    if (named := _NAMED.fullmatch(text)) is not None:
        try:
            return [(named.group(1), _dump(json.loads(named.group(2))))]
        except ValueError:
            return None
    try:
        listed = json.loads(text)
    except ValueError:
        return None
    if not isinstance(listed, list):
        return None
    calls = [_object(_dump(each), "arguments") for each in listed]
    return [call for each in calls if each is not None for call in each] if all(calls) else None


def _typed(text: str, schema: object) -> object:
    """A value as its schema wants it: XML writes strings and numbers alike."""
    wanted = schema.get("type") if isinstance(schema, dict) else None
    if wanted == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _dump(value: object) -> str:
    return arguments_text(value)


TEXT_FORMATS = {
    each.name: each
    for each in (
        TextFormat("hermes", "<tool_call>", "</tool_call>", _hermes),
        TextFormat("qwen-xml", "<tool_call>", "</tool_call>", _qwen_xml),
        TextFormat("mistral", "[TOOL_CALLS]", "", _mistral),
        TextFormat("llama-json", "", "", _llama),
    )
}
"""Forms by name, in the order in which they are tried on a template."""


class TextReader(PartialReader):
    """Reads the replies to one prompt."""

    def __init__(
        self,
        tokenizer: ControlTokenizer,
        form: TextFormat | None,
        tools: Sequence[ToolSpec],
        *,
        ends: Sequence[int],
        thinks: bool,
        opened: bool,
    ) -> None:
        """``thinks``: replies have a thinking block; ``opened``: the prompt has begun it."""
        self._tokenizer = tokenizer
        self._form = form if tools else None
        self._schemas = {tool.name: _properties(tool) for tool in tools}
        self._thinks, self._opened = thinks, opened
        words = ["<think>", "</think>"] if thinks else []
        if self._form is not None:
            words += [word for word in (self._form.begin, self._form.end) if word]
        self._words = [word for word in words if word in tokenizer.control]
        self.markers = Markers(word for word in words if word not in tokenizer.control)
        self.control_ids = tokenizer.control_ids
        self.ends = frozenset(ends)
        self.probe = tokenizer.encode("x")

    def text(self, ids: list[int]) -> bytes:
        """See ``PartialReader``."""
        return b"".join(map(self._tokenizer.token_bytes, ids))

    def waits(self, content: str) -> bool:
        """See ``PartialReader``."""
        return self._form is not None and not self._form.begin and content.lstrip()[:1] in ("", "{", "<")

    def read(self, ids: list[int]) -> PartialReply:
        """See ``PartialReader``."""
        return self._read(ids, final=False)

    def whole(self, ids: list[int]) -> ParsedReply:
        """The verdict on a finished reply."""
        return self._read(ids, final=True).reply

    def _read(self, ids: list[int], *, final: bool) -> PartialReply:
        if not self.ends.isdisjoint(ids):
            ids = ids[: next(at for at, token in enumerate(ids) if token in self.ends)]
        reasoning, text, closed = self._split_thinking(self._marked(ids))
        if not closed:
            return PartialReply(ParsedReply(reasoning=self._plain(reasoning).strip() or None), "reasoning")
        content, calls, channel = self._split_calls(text, final=final)
        shown = self._plain(reasoning).strip() if reasoning is not None else ""
        return PartialReply(ParsedReply(self._plain(content).strip(), shown or None, tuple(calls)), channel)

    def _split_thinking(self, text: str) -> tuple[str, str, bool]:
        """(thinking, what follows it, whether it is over)."""
        if not self._thinks:
            return "", text, True
        start = text.lstrip()
        if start.startswith("<think>"):
            text = start.removeprefix("<think>")
        elif not self._opened:
            return "", text, True
        reasoning, mark, rest = text.partition("</think>")
        return reasoning, rest, bool(mark)

    def _split_calls(self, text: str, *, final: bool) -> tuple[str, list[ParsedCall], Channel]:
        form = self._form
        if form is None:
            return text, [], "content"
        if not form.begin:
            whole = self._calls(form, text) if final else []
            return ("", whole, "unknown") if whole else (text, [], "content")
        content = ""
        calls: list[ParsedCall] = []
        while True:
            before, mark, behind = text.partition(form.begin)
            content += before
            if not mark:
                return content, calls, "unknown" if calls else "content"
            inside, mark, text = behind.partition(form.end) if form.end else (behind, form.begin if final else "", "")
            if not mark and not final:
                return content, calls, "call"
            found = self._calls(form, inside) if mark else []
            calls += found
            if not found:
                # No call: it stays where it was written.
                content += form.begin + inside + (mark if form.end else "")

    def _calls(self, form: TextFormat, inside: str) -> list[ParsedCall]:
        """Calls between the two marks; none when it is malformed or names a tool that was not offered."""
        try:
            found = form.read(self._plain(inside), self._schemas) or []
        except (RecursionError, ValueError):
            return []
        if any(name not in self._schemas for name, _ in found):
            return []
        return [ParsedCall(name, arguments) for name, arguments in found]

    def _marked(self, ids: list[int]) -> str:
        """Text in which control words that were only spelled out cannot be mistaken for the real ones."""
        if not self._words:
            return self._tokenizer.decode(ids)
        out: list[str] = []
        start = 0
        for at, token in enumerate([*ids, -1]):
            if token != -1 and token not in self.control_ids:
                continue
            out.append(self._spelled(self._tokenizer.decode(ids[start:at])))
            if token != -1:
                out.append(self._tokenizer.decode([token]))
            start = at + 1
        return "".join(out)

    def _spelled(self, text: str) -> str:
        for word in self._words:
            text = text.replace(word, word[0] + GUARD + word[1:])
        return text

    def _plain(self, text: str) -> str:
        for word in self._words:
            text = text.replace(word[0] + GUARD + word[1:], word)
        return text


def _properties(tool: ToolSpec) -> Mapping[str, object]:
    schema = json.loads(tool.parameters)
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}
