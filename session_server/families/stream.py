"""Streaming for families that can only parse what has arrived so far.

A whole parse tells in which channel a reply is; while only ordinary text follows, the channel just grows and
costs O(new). The next control id or marker makes another parse, spaced so that all of them together stay
linear in the reply. What left is always a prefix of the final parse. Depends on ``base``.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tollway.session_server.families.base import ParsedReply, StreamDelta, StreamLedger, StreamParser

__all__ = ["Channel", "Markers", "PartialReader", "PartialReply", "ReplyStream"]


Channel = Literal["reasoning", "content", "call", "unknown"]
"""Where ordinary text that follows belongs; ``call``: nowhere that could be shown now."""


@dataclass(frozen=True, slots=True)
class PartialReply:
    """What the beginning of a reply says."""

    reply: ParsedReply
    """An unfinished call is left out."""
    channel: Channel


class Markers:
    """Strings that change the channel, as a set of their beginnings."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.whole = tuple(dict.fromkeys(markers))
        self._heads = {marker[0] for marker in self.whole}
        self._beginnings = {marker[:size] for marker in self.whole for size in range(1, len(marker))}
        self._longest = max(map(len, self._beginnings), default=0)

    def inside(self, text: str) -> bool:
        """Whether ``text`` holds a whole marker."""
        return any(head in text for head in self._heads) and any(marker in text for marker in self.whole)

    def settled(self, text: str) -> int:
        """Length of ``text`` without white space, an unfinished character or the beginning of a marker at its end.

        >>> Markers(["<think>"]).settled("so <th")
        2
        """
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                text = text[:-size]
                break
        return len(text.rstrip("\ufffd").rstrip())


class PartialReader(ABC):
    """What a stream asks of its family."""

    markers: Markers
    control_ids: frozenset[int]
    ends: frozenset[int]
    """Stop ids: nothing behind one counts."""
    probe: list[int]
    """Ids of the letter x."""

    @abstractmethod
    def read(self, ids: list[int]) -> PartialReply:
        """Parse the beginning of a reply."""

    @abstractmethod
    def text(self, ids: list[int]) -> bytes:
        """Bytes of ordinary ids."""

    @abstractmethod
    def waits(self, content: str) -> bool:
        """Whether content that begins like this may still turn into a call."""


class ReplyStream(StreamParser):
    """One reply."""

    def __init__(self, reader: PartialReader, stops: tuple[str, ...]) -> None:
        self._reader = reader
        self._stops = Markers(stops)
        self._ids: list[int] = []
        self._spent = 0
        self._next = 1
        self._run: _Run | None = None
        self._ledger = StreamLedger()
        self._ended = False

    def feed(self, ids: Sequence[int]) -> list[StreamDelta]:
        """See ``StreamParser``."""
        if self._ended:
            return []
        end = next((at for at, token in enumerate(ids) if token in self._reader.ends), len(ids))
        self._ended = end < len(ids)
        new = list(ids[:end])
        self._ids += new
        if self._run is not None and self._reader.control_ids.isdisjoint(new):
            text = self._run.take(self._reader.text(new))
            if text is not None:
                return self._append(text)
        self._run = None
        return self._parse() if self._due() else []

    def finish(self, reply: ParsedReply) -> list[StreamDelta]:
        """See ``StreamParser``."""
        return self._ledger.advance(reply)

    def _due(self) -> bool:
        """Whether another parse keeps all of them linear: eight times the reply, and room for a short one."""
        return len(self._ids) >= self._next or self._spent <= 7 * len(self._ids) + 512

    def _append(self, text: str) -> list[StreamDelta]:
        if not text or self._run is None:
            return []
        return self._ledger.grow(text, reasoning=self._run.channel == "reasoning")

    def _parse(self) -> list[StreamDelta]:
        self._spent += len(self._ids)
        self._next = len(self._ids) + max(1, len(self._ids) // 16)
        partial = self._reader.read(self._ids)
        reply = partial.reply
        content, calls = self._shown(reply.content), reply.calls
        if self._reader.waits(reply.content):
            content, calls = "", calls[:0]
        reasoning = reply.reasoning
        if not content and not calls:
            reasoning = (reasoning or "")[: self._settled(reasoning)]
        if self._ledger.content or self._ledger.calls:
            # Behind an answer, more thinking is a matter of the verdict on the whole.
            reasoning = None
        out = self._ledger.advance(ParsedReply(content, reasoning, calls))
        self._run = self._begin_run(partial)
        return out

    def _settled(self, text: str | None) -> int:
        return self._reader.markers.settled(text or "")

    def _shown(self, content: str) -> str:
        """Content that neither a marker nor a stop string can take back."""
        return content[: _before_stop(content, self._stops, self._settled(content))]

    def _begin_run(self, partial: PartialReply) -> _Run | None:
        """What ordinary text from here on does, when a trial with one more letter proves it."""
        reader, channel = self._reader, partial.channel
        if channel == "call":
            return _Run("call", reader.markers, Markers(()), "")
        thinking = channel == "reasoning"
        if channel == "unknown" or not _complete(reader.text(self._ids[-4:])):
            return None
        if self._ledger.content if thinking else reader.waits(partial.reply.content):
            return None
        self._spent += len(self._ids)
        trial = reader.read([*self._ids, *reader.probe])
        if thinking:
            sent, known, grown = self._ledger.reasoning, partial.reply.reasoning or "", trial.reply.reasoning or ""
        else:
            sent, known, grown = self._ledger.content, partial.reply.content, trial.reply.content
        # Text that is blank so far may still be stripped.
        proved = trial.channel == channel and grown.endswith("x") and grown[:-1].rstrip() == known.rstrip() != ""
        if not proved or not grown.startswith(sent):
            return None
        return _Run(channel, reader.markers, Markers(()) if thinking else self._stops, grown[len(sent) : -1])


def _complete(raw: bytes) -> bool:
    """Whether no later byte can change the last character of ``raw``."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(raw)
    return decoder.getstate()[0] == b""


def _before_stop(text: str, stops: Markers, size: int) -> int:
    """``size``, or less where ``text`` holds a stop string or, at its end, may begin one."""
    found = [at for at in map(text.find, stops.whole) if at >= 0]
    if found:
        return min(size, *found, len(text[: min(found)].rstrip()))
    return min(size, stops.settled(text))


class _Run:
    """A channel that grows by ordinary text."""

    def __init__(
        self,
        channel: Channel,
        markers: Markers,
        stops: Markers,
        pending: str,
    ) -> None:
        self.channel = channel
        self._markers = markers
        self._stops = stops
        self._pending = pending
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._closed = False

    def take(self, raw: bytes) -> str | None:
        """Text that may leave now; ``None`` when a marker has appeared and only a parse can tell."""
        self._pending += self._decoder.decode(raw)
        if self._markers.inside(self._pending):
            return None
        if self.channel == "call":
            # Only what may be the beginning of a marker has to be kept.
            self._pending = self._pending[self._markers.settled(self._pending) :]
            return ""
        if self._closed:
            return ""
        size = self._markers.settled(self._pending)
        cut = _before_stop(self._pending, self._stops, size)
        self._closed = cut < size and any(stop in self._pending for stop in self._stops.whole)
        out, self._pending = self._pending[:cut], self._pending[cut:]
        return out
