"""Text of a model: tokenizer.json where there is one, the byte convention for small vocabularies, or none.

Token ids are the truth of this server; text is a courtesy for ``text`` in replies and for stop strings.
Depends on the ``tokenizers`` library (imported only for models that bring a tokenizer.json).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from tollway.errors import ConfigError

__all__ = ["ByteCodec", "StopWatch", "TextCodec", "open_codec"]

_BYTE_VOCABULARY = 512
"""Models without tokenizer.json and at most this many ids speak bytes: ids below 256 are UTF-8 bytes."""


class TextCodec(ABC):
    """Between ids and text."""

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``; broken UTF-8 becomes the replacement character."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of ``text``."""


class ByteCodec(TextCodec):
    """Ids below 256 are bytes; the others are control ids without text.

    >>> ByteCodec().decode([104, 105, 261])
    'hi'
    """

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        if skip_special:
            return bytes(i for i in ids if i < 256).decode("utf-8", "replace")
        return "".join(chr(i) if i < 128 else f"<{i}>" for i in ids)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class _TokenizerCodec(TextCodec):
    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                f"{path} needs the tokenizers library: pip install 'tollway[renderers]', "
                "or set engine.skip_tokenizer_init = true"
            ) from error
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(f"cannot read {path}: {error}") from error

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def open_codec(directory: Path, vocab_size: int, *, skip: bool) -> TextCodec | None:
    """The codec of a model directory; ``None`` when the server deals in ids only."""
    if skip:
        return None
    path = directory / "tokenizer.json"
    if path.exists():
        return _TokenizerCodec(path)
    return ByteCodec() if vocab_size <= _BYTE_VOCABULARY else None


class StopWatch:
    """Finds the stop strings of one request in what it has generated so far."""

    def __init__(self, codec: TextCodec, stops: Sequence[str], *, skip_special: bool) -> None:
        self._codec, self._stops, self._skip = codec, tuple(stops), skip_special
        # A token decodes to at least one byte or to nothing; 4 bytes make the longest character.
        self.tail = 4 * max(len(stop.encode()) for stop in stops) + 8
        """How many of the newest ids to look at."""

    def matched(self, ids: Sequence[int]) -> str | None:
        """The stop string that the newest of the last ``tail`` ids completed, if any."""
        text = self._codec.decode(ids, skip_special=self._skip)
        return next((stop for stop in self._stops if stop in text), None)
