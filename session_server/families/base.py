"""What a model family has to offer: render, extend, parse, stream.

A family turns messages into ids (control ids come from the template only, never from foreign text) and
sampled ids into a message. It never decides what is truth: the server keeps every id whatever parsing
says. Depends on numpy and the kernel.

The rule of streaming: what a ``StreamParser`` has let out, joined, is always a prefix of ``parse`` of the
whole reply, and after ``finish`` it is all of it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tollway.messages import Message, ToolSpec
from tollway.records import FinishReason, Ids

if TYPE_CHECKING:
    from tollway.session_server.request import ToolChoice

__all__ = [
    "DEFAULT_OPTIONS",
    "Family",
    "ParsedCall",
    "ParsedReply",
    "PathTail",
    "RenderOptions",
    "StreamDelta",
    "StreamLedger",
    "StreamParser",
    "arguments_text",
    "cut_at_stop",
    "encodes",
    "stable_text",
]


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """Template switches that a request may set."""

    thinking: bool | None = None
    """``None``: the family's default."""


DEFAULT_OPTIONS = RenderOptions()


@dataclass(frozen=True, slots=True)
class PathTail:
    """The end of a conversation that is to be extended."""

    prompt_end: Ids
    """[up to 64] last ids of the prompt that the last reply answered."""
    sampled: Ids
    """[sampled] the whole last reply."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One well-formed tool call of a reply."""

    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """The verdict on a whole reply: the same streamed, not streamed and in the export."""

    content: str = ""
    reasoning: str | None = None
    calls: tuple[ParsedCall, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """What may leave now: at most one field is set."""

    content: str = ""
    reasoning: str = ""
    call: ParsedCall | None = None


class StreamParser(ABC):
    """Incremental view of one reply."""

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> list[StreamDelta]:
        """Take new sampled ids; return what no later id can change."""

    @abstractmethod
    def finish(self, reply: ParsedReply) -> list[StreamDelta]:
        """Return what is missing from ``reply``, the parse of the whole."""


class Family(ABC):
    """One model family over one vocabulary. Safe to share between sessions."""

    name: str
    vocab_size: int
    stop_ids: tuple[int, ...]
    """Ids that end a reply; the engine is told to stop at them."""
    call_end_ids: tuple[int, ...] = ()
    """Ids that close one tool call: stop ids as well when a reply may hold one call at most. Empty: unknown."""
    needs_history: bool = False
    """Whether ``extend`` must be given the whole conversation; otherwise its cost is that of what is new."""

    @abstractmethod
    def render_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: RenderOptions = DEFAULT_OPTIONS
    ) -> Ids:
        """[prompt] ids of a whole conversation and the opening of the next reply. Raises ``BadRequest``."""

    @abstractmethod
    def extend(
        self,
        tail: PathTail,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        options: RenderOptions = DEFAULT_OPTIONS,
        *,
        history: Sequence[Message] = (),
    ) -> Ids | None:
        """[added] ids that follow the tail: the close that it may lack, new messages, the next opening.

        ``None`` when the family cannot append these messages without changing earlier ids; the caller
        then starts a branch. ``history``: every message before the new ones, the last reply included, for
        families with ``needs_history``; others ignore it.
        """

    @abstractmethod
    def parse(
        self, sampled: Ids, tools: Sequence[ToolSpec], *, prompt_end: Ids, stop: str | None = None
    ) -> ParsedReply:
        """Read a whole reply. Never raises on what a model wrote: text that is no call is content.

        ``prompt_end``: last ids of the prompt (it may have opened thinking). ``stop``: the string that
        ended generation, cut from the text, never from the ids.
        """

    @abstractmethod
    def stream(self, tools: Sequence[ToolSpec], *, prompt_end: Ids, stop: Sequence[str] = ()) -> StreamParser:
        """Start reading a reply that arrives piece by piece; text that may begin a stop string waits."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """Bytes that one id stands for, for log-probability listings."""

    def tool_constraint(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, *, parallel: bool, prompt_end: Ids | None = None
    ) -> dict[str, object] | None:
        """Sampling parameters of the engine that make the reply call a tool, for ``required`` and ``named``.

        ``parallel``: whether several calls may follow each other. ``prompt_end``: last ids of the prompt;
        thinking that it opens may be finished first. ``None``: this family cannot force a call.
        """
        return None

    def content_constraint(self, schema: str, *, prompt_end: Ids | None = None) -> dict[str, object]:
        """Sampling parameters of the engine that make the content follow a JSON schema (its text).

        ``prompt_end``: as in ``tool_constraint``.
        """
        return {"json_schema": schema}

    def render_training(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[Ids, NDArray[np.uint8]]:
        """[n] ids of a finished conversation and [n] a mask of the ids that the model would have sampled.

        For supervised warm starts only; reinforcement takes its masks from what was really sampled.
        """
        raise NotImplementedError(f"family {self.name} does not render demonstrations")


class StreamLedger:
    """What a stream has let out so far; turns verdicts into deltas and never takes anything back."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls = 0

    def advance(self, reply: ParsedReply) -> list[StreamDelta]:
        """Deltas from what was sent to ``reply``; parts of it that contradict the past are left out."""
        out: list[StreamDelta] = []
        reasoning = reply.reasoning or ""
        if len(reasoning) > len(self.reasoning) and reasoning.startswith(self.reasoning):
            out += self.grow(reasoning[len(self.reasoning) :], reasoning=True)
        if len(reply.content) > len(self.content) and reply.content.startswith(self.content):
            out += self.grow(reply.content[len(self.content) :])
        out += [StreamDelta(call=call) for call in reply.calls[self.calls :]]
        self.calls = max(self.calls, len(reply.calls))
        return out

    def grow(self, text: str, *, reasoning: bool = False) -> list[StreamDelta]:
        """The delta of text that certainly continues what was sent."""
        if reasoning:
            self.reasoning += text
            return [StreamDelta(reasoning=text)]
        self.content += text
        return [StreamDelta(content=text)]


def arguments_text(value: object) -> str:
    r"""JSON text of a call's arguments as the model's text said them.

    Half a surrogate pair, which JSON can spell and UTF-8 cannot hold, stays spelled. Raises ``ValueError`` for
    numbers that JSON has no word for (NaN, 1e999): such a call is malformed.

    >>> arguments_text({"a": "\ud83d"})
    '{"a": "\\ud83d"}'
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or encodes(text) else json.dumps(value)


def encodes(text: str) -> bool:
    """Whether UTF-8 can hold a text: half a surrogate pair it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def cut_at_stop(text: str, stop: str | None) -> str:
    """Client text of a reply that ended at a stop string; the ids keep what lies behind the cut."""
    if stop is None:
        return text
    at = text.find(stop)
    return text if at < 0 else text[:at]


def stable_text(text: str, stops: Sequence[str] = ()) -> str:
    """The part of ``text`` that later ids cannot cut: ends that may begin a stop string are held back.

    >>> stable_text("abc Obs", ["Observation:"])
    'abc '
    """
    for stop in stops:
        if (at := text.find(stop)) >= 0:
            text = text[:at]
            continue
        for size in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:size]):
                text = text[:-size]
                break
    return text
