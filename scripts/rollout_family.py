"""A model family for benchmarks over random weights: every id of a full-size vocabulary means something.

Random weights sample any id of their vocabulary, and the byte family knows 272: a server refuses ids that its
family cannot have. Here the ids beyond the bytes are words of four letters, about the text that an id of a real
vocabulary stands for, and every reply reads as a thought and one tool call, which is what a harness of a coding
agent gets. Nothing ends a reply but its length, so every turn has the tokens that were asked for. Rendering is
the byte family's: a byte of a message is one id. No model is trained with this; it only makes load.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tollway.messages import ToolSpec
from tollway.records import Ids
from tollway.session_server.families.base import (
    ParsedCall,
    ParsedReply,
    StreamDelta,
    StreamLedger,
    StreamParser,
    arguments_text,
)
from tollway.session_server.families.compact import VOCAB_SIZE as BYTE_IDS
from tollway.session_server.families.compact import CompactFamily

NAME = "rollout_family:WideBytes"
WIDE_VOCAB_SIZE = 151_936
"""Qwen3's, padded as its models are."""
THOUGHT = 0.5
"""Share of a reply that is text; the rest are the arguments of its call."""


def word(token: int) -> bytes:
    """Text of one id: a byte, nothing for a control id, four letters for every other.

    >>> word(97), word(256), word(272), word(151_935)
    (b'a', b'', b'akma', b'iqtr')
    """
    if token < 256:
        return bytes((token,))
    if token < BYTE_IDS:
        return b""
    letters = bytearray()
    for _ in range(4):
        token, letter = divmod(token, 26)
        letters.append(97 + letter)
    return bytes(reversed(letters))


class WideBytes(CompactFamily):
    """The byte family with 151,936 ids."""

    name = "wide-bytes"
    vocab_size = WIDE_VOCAB_SIZE
    stop_ids = ()  # type: ignore[assignment]  # its base has one

    def __init__(self, tokenizer: Path | None = None) -> None:
        self._words = [word(token) for token in range(WIDE_VOCAB_SIZE)]

    def parse(
        self, sampled: Ids, tools: Sequence[ToolSpec], *, prompt_end: Ids, stop: str | None = None
    ) -> ParsedReply:
        """See ``Family``: text, then one call of the first tool with the rest as its first argument."""
        ids: list[int] = sampled.tolist()
        cut = int(len(ids) * THOUGHT) if tools else len(ids)
        text = self._text(ids[:cut])
        if not tools:
            return ParsedReply(content=text)
        call = ParsedCall(tools[0].name, arguments_text({"command": self._text(ids[cut:])}))
        return ParsedReply(content=text, calls=(call,))

    def stream(self, tools: Sequence[ToolSpec], *, prompt_end: Ids, stop: Sequence[str] = ()) -> StreamParser:
        """See ``Family``. Where the call begins depends on the length, so all of a reply leaves at its end."""
        return _AtTheEnd()

    def token_bytes(self, token: int) -> bytes:
        """See ``Family``."""
        return self._words[token] if 0 <= token < len(self._words) else b""

    def _text(self, ids: Sequence[int]) -> str:
        words = self._words
        return b"".join([words[token] for token in ids]).decode("utf-8", "replace")


class _AtTheEnd(StreamParser):
    def feed(self, ids: Sequence[int]) -> list[StreamDelta]:
        """Nothing is sure yet."""
        return []

    def finish(self, reply: ParsedReply) -> list[StreamDelta]:
        """All of it."""
        return StreamLedger().advance(reply)
