"""The byte family of the demonstration: 256 bytes and ten control ids, no tokenizer file.

It also shows how a family is added: one small module, registered by name. A text byte is its own id, so
foreign text can never become a control id. Depends on numpy and ``base``.

Layout: ``[bos]``, then with tools ``[tools] "run edit:rule" [end]``, then per message ``[role] bytes
[end]``. A reply may end in calls: ``[call] name [sep] value ...`` with values in the order of the tool's
schema; the reply ends in ``[end]``.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tollway.errors import BadRequest
from tollway.messages import Message, ToolSpec
from tollway.records import Ids
from tollway.session_server.families.base import (
    DEFAULT_OPTIONS,
    Family,
    ParsedCall,
    ParsedReply,
    PathTail,
    RenderOptions,
    StreamDelta,
    StreamParser,
    arguments_text,
    cut_at_stop,
    encodes,
    stable_text,
)

__all__ = [
    "ASSISTANT",
    "BOS",
    "CALL",
    "END",
    "PAD",
    "SEP",
    "SYSTEM",
    "TOOL",
    "TOOLS",
    "USER",
    "VOCAB_SIZE",
    "CompactFamily",
]

BOS, SYSTEM, USER, ASSISTANT, TOOL, END, PAD, CALL, TOOLS, SEP = range(256, 266)
VOCAB_SIZE = 272
_ROLE = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
_VISIBLE = {CALL: b"<call>", SEP: b"<sep>"}
_NAMES = ("bos", "system", "user", "assistant", "tool", "end", "pad", "call", "tools", "sep")


class CompactFamily(Family):
    """Bytes in, bytes out.

    >>> CompactFamily().render_prompt([Message(role="user", content="hi")], ()).tolist()
    [256, 258, 104, 105, 261, 259]
    """

    name = "compact-bytes"
    vocab_size = VOCAB_SIZE
    stop_ids = (END,)

    def render_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: RenderOptions = DEFAULT_OPTIONS
    ) -> Ids:
        """See ``Family``. Thinking does not exist here, so the switch has no effect."""
        out = [BOS]
        if tools:
            out += [TOOLS, *_tools_line(tools), END]
        _emit_all(out, messages, tools)
        out.append(ASSISTANT)
        return np.array(out, np.int32)

    def extend(
        self,
        tail: PathTail,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        options: RenderOptions = DEFAULT_OPTIONS,
        *,
        history: Sequence[Message] = (),
    ) -> Ids | None:
        """See ``Family``; always possible here."""
        out: list[int] = []
        if not tail.sampled.size or int(tail.sampled[-1]) != END:
            out.append(END)
        _emit_all(out, messages, tools)
        out.append(ASSISTANT)
        return np.array(out, np.int32)

    def parse(
        self, sampled: Ids, tools: Sequence[ToolSpec], *, prompt_end: Ids, stop: str | None = None
    ) -> ParsedReply:
        """See ``Family``.

        One malformed or unknown call makes the whole reply plain text, in which a call id shows as
        ``<call>`` and a separator as ``<sep>``. Other control ids never show.
        """
        ids: list[int] = sampled.tolist()
        ended = bool(ids) and ids[-1] == END
        if ended:
            ids.pop()
        first = _find(ids, CALL)
        if ended and first < len(ids):
            calls = _parse_calls(ids[first:], tools)
            if calls is not None:
                return ParsedReply(content=_text(t for t in ids[:first] if t != SEP), calls=calls)
        # A separator means something behind a call only; elsewhere it is a control id like any other.
        return ParsedReply(content=cut_at_stop(_text([t for t in ids[:first] if t != SEP] + ids[first:]), stop))

    def stream(self, tools: Sequence[ToolSpec], *, prompt_end: Ids, stop: Sequence[str] = ()) -> StreamParser:
        """See ``Family``. The verdict on calls is on the whole reply, so they leave at its end."""
        return _CompactStream(tuple(stop))

    def token_bytes(self, token: int) -> bytes:
        """A byte, or the name of a control id in angle brackets."""
        if token < 256:
            return bytes((token,))
        name = _NAMES[token - BOS] if token - BOS < len(_NAMES) else f"unused{token}"
        return f"<{name}>".encode()

    def render_training(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[Ids, NDArray[np.uint8]]:
        """See ``Family``: assistant bytes, their call and separator ids and their end are sampled."""
        out = [BOS]
        if tools:
            out += [TOOLS, *_tools_line(tools), END]
        mask = [0] * len(out)
        for message in messages:
            _emit(out, message, tools)
            added = len(out) - len(mask)
            mask += [0, *[int(message.role == "assistant")] * (added - 1)]
        return np.array(out, np.int32), np.array(mask, np.uint8)


class _CompactStream(StreamParser):
    def __init__(self, stops: tuple[str, ...]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = stops
        self._waiting = ""
        self._sent = 0
        self._open = True

    def feed(self, ids: Sequence[int]) -> list[StreamDelta]:
        """See ``StreamParser``; text after the first call waits for the verdict on the whole."""
        if not self._open:
            return []
        ids = list(ids)
        first = _find(ids, CALL)
        self._open = first == len(ids)
        self._waiting += self._decoder.decode(bytes(token for token in ids[:first] if token < 256))
        text = stable_text(self._waiting, self._stops)
        self._waiting = self._waiting[len(text) :]
        self._sent += len(text)
        return [StreamDelta(content=text)] if text else []

    def finish(self, reply: ParsedReply) -> list[StreamDelta]:
        """See ``StreamParser``."""
        rest = reply.content[self._sent :]
        return [*([StreamDelta(content=rest)] if rest else []), *(StreamDelta(call=call) for call in reply.calls)]


def _emit_all(out: list[int], messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
    try:
        for message in messages:
            _emit(out, message, tools)
    except UnicodeEncodeError as error:
        raise BadRequest(f"a message holds half a character: {error}", param="messages") from error


def _emit(out: list[int], message: Message, tools: Sequence[ToolSpec]) -> None:
    out.append(_ROLE[message.role])
    out += message.content.encode()
    for call in message.tool_calls:
        out.append(CALL)
        out += call.name.encode()
        for value in _values(call.name, call.arguments, tools):
            out.append(SEP)
            out += value.encode()
    out.append(END)


def _values(name: str, arguments: str, tools: Sequence[ToolSpec]) -> Iterable[str]:
    """Argument values in schema order; arguments that do not fit a known schema go in as they are."""
    try:
        given = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return (arguments,)
    spec = next((tool for tool in tools if tool.name == name), None)
    if not isinstance(given, dict) or spec is None:
        return () if given == {} else (arguments,)
    properties = _properties(spec.parameters)
    last = max((at for at, (key, _) in enumerate(properties) if key in given), default=-1)
    return [_plain(given.get(key, "")) for key, _ in properties[: last + 1]]


def _plain(value: object) -> str:
    if isinstance(value, str) and encodes(value):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return text if encodes(text) else json.dumps(value)


def _parse_calls(ids: list[int], tools: Sequence[ToolSpec]) -> tuple[ParsedCall, ...] | None:
    """Calls of ``ids``, which begin with a call id; ``None`` when anything in them is malformed."""
    calls: list[ParsedCall] = []
    parts: list[list[bytearray]] = []
    for token in ids:
        if token == CALL:
            parts.append([bytearray()])
        elif token == SEP:
            parts[-1].append(bytearray())
        elif token < 256:
            parts[-1][-1].append(token)
        else:
            return None
    for name_bytes, *values in parts:
        name = name_bytes.decode("utf-8", "replace")
        spec = next((tool for tool in tools if tool.name == name), None)
        if spec is None:
            return None
        properties = _properties(spec.parameters)
        if len(values) > len(properties):
            return None
        arguments: dict[str, object] = {}
        for (key, kind), raw in zip(properties, values, strict=False):
            text = raw.decode("utf-8", "replace")
            if kind == "string":
                arguments[key] = text
                continue
            try:
                arguments[key] = json.loads(text, parse_constant=_refuse)
            except (ValueError, RecursionError):
                return None
        try:
            calls.append(ParsedCall(name, arguments_text(arguments)))
        except ValueError:
            return None
    return tuple(calls)


def _refuse(name: str) -> object:
    raise ValueError(name)


@lru_cache(maxsize=256)
def _properties(schema: str) -> tuple[tuple[str, str], ...]:
    """(name, type) of a tool's arguments in schema order; without a type it is a string."""
    try:
        properties = json.loads(schema).get("properties", {})
    except (ValueError, AttributeError, RecursionError):
        return ()
    if not isinstance(properties, dict):
        return ()
    return tuple(
        (key, str(value.get("type", "string")) if isinstance(value, dict) else "string")
        for key, value in properties.items()
    )


def _tools_line(tools: Sequence[ToolSpec]) -> bytes:
    words = []
    for tool in tools:
        keys = ",".join(key for key, _ in _properties(tool.parameters))
        words.append(f"{tool.name}:{keys}" if keys else tool.name)
    return " ".join(words).encode()


def _find(ids: list[int], token: int) -> int:
    try:
        return ids.index(token)
    except ValueError:
        return len(ids)


def _text(ids: Iterable[int]) -> str:
    return b"".join(bytes((t,)) if t < 256 else _VISIBLE.get(t, b"") for t in ids).decode("utf-8", "replace")
