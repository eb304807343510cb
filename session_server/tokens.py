"""Our tokenizer object for template libraries: template text may name control ids, foreign text never.

Foreign text (users, tools, harnesses) is ``guard``-ed before a template sees it: behind every character
that may begin a control string stands a noncharacter, which ``encode`` takes out again. So ``<|im_end|>``
in a user's message is ordinary text, ``<think>`` in the template is its control id, and text between two
control ids is encoded in one piece, which keeps merges as the model learned them. No truncation, no
padding, no BOS of the tokenizer's own. Depends on ``tokenizers`` (imported lazily).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tollway.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["GUARD", "ControlTokenizer", "load_tokenizer"]

GUARD = "\ufdd0"
"""A Unicode noncharacter: it has no meaning in interchange, and one in foreign text is doubled."""


class ControlTokenizer:
    """The structural surface that ``renderers`` asks for, over a ``tokenizers.Tokenizer``.

    Safe for concurrent use: the backend's settings are never changed after construction.
    """

    def __init__(self, backend: Tokenizer, *, name: str) -> None:
        from tokenizers import Tokenizer as Backend

        self.name_or_path = name
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = None
        added = backend.get_added_tokens_decoder()
        self.control: dict[str, int] = {token.content: number for number, token in added.items()}
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        description = json.loads(backend.to_str())
        description |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        self._ordinary = Backend.from_str(json.dumps(description))
        self._whole = backend
        self._whole.no_truncation()
        self._whole.no_padding()
        strings = sorted(added.values(), key=lambda token: -len(token.content))
        parts = []
        for token in strings:
            left, right = (r"\s*" if token.lstrip else ""), (r"\s*" if token.rstrip else "")
            parts.append(f"{left}(?:{re.escape(token.content)}){right}")
        self._controls = re.compile("(" + "|".join(parts) + ")") if parts else None
        self._starts = "".join(sorted({token.content[0] for token in strings}))
        starts = re.escape(self._starts)
        self._guarded = re.compile(f"([{starts}]){GUARD}|{GUARD}{GUARD}") if parts else None
        self._foreign = re.compile(f"([{starts}{GUARD}])") if parts else None
        self._prove()

    def _prove(self) -> None:
        """Ordinary encoding must not be able to give a control id."""
        ids = set(self.control.values())
        for text in self.control:
            found = ids.intersection(self._ordinary.encode(text, add_special_tokens=False).ids)
            if found:
                raise ConfigError(
                    f"tokenizer {self.name_or_path}: ordinary text {text!r} encodes to control id {min(found)}; "
                    "this vocabulary cannot keep user text apart"
                )

    def guard(self, text: str) -> str:
        """Foreign text in the form that ``encode`` never reads a control id from."""
        if self._foreign is None or (GUARD not in text and not any(start in text for start in self._starts)):
            return text
        return self._foreign.sub(lambda m: GUARD * 2 if m.group(1) == GUARD else m.group(1) + GUARD, text)

    def unguard(self, text: str) -> str:
        """Undo ``guard``."""
        if self._guarded is None or GUARD not in text:
            return text
        return self._guarded.sub(lambda m: m.group(1) or GUARD, text)

    # -- what renderers call -----------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = False, **_: object) -> list[int]:
        """Ids of template text with guarded foreign text inside. Never adds anything."""
        if self._controls is None:
            return list(self._ordinary.encode(text, add_special_tokens=False).ids)
        out: list[int] = []
        for at, piece in enumerate(self._controls.split(text)):
            if at % 2:
                out.append(self.control[piece.strip() if piece not in self.control else piece])
            elif piece:
                out += self._ordinary.encode(self.unguard(piece), add_special_tokens=False).ids
        return out

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: object) -> str:
        """Text of ids; incomplete UTF-8 shows as U+FFFD."""
        return self._whole.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Id of a token string, or of each of several; ``None`` when there is no such token."""
        if isinstance(tokens, str):
            return self._whole.token_to_id(tokens)
        return [self._whole.token_to_id(token) for token in tokens]

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one id of a byte-level vocabulary."""
        text = self._whole.id_to_token(token)
        if text is None or text in self.control:
            return (text or "").encode()
        table = _byte_table()
        if all(char in table for char in text):
            return bytes(table[char] for char in text)
        return self.decode([token]).encode()


def load_tokenizer(path: Path) -> ControlTokenizer:
    """Read ``tokenizer.json`` (or the one in a model directory). Raises ``ConfigError``."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError("this model family needs `pip install tollway[renderers]`") from error
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:
        # tokenizers raises bare Exception for anything wrong with the file.
        raise ConfigError(f"cannot read tokenizer {file}: {error}; set server.tokenizer") from error
    return ControlTokenizer(backend, name=str(path))


def _byte_table() -> dict[str, int]:
    """Character of a byte-level vocabulary -> byte."""
    if not _TABLE:
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in shown]
        _TABLE.update({chr(byte): byte for byte in shown})
        _TABLE.update({chr(256 + at): byte for at, byte in enumerate(hidden)})
    return _TABLE


_TABLE: dict[str, int] = {}
