"""Our tokenizer object for template libraries: template text may name control ids, foreign text never.

Foreign text (users, tools, harnesses) is ``guard``-ed before a template sees it: behind every character
that may begin a control string stands a noncharacter, which ``encode`` takes out again. So ``<|im_end|>``
in a user's message is ordinary text, ``<think>`` in the template is its control id, and text between two
control ids is encoded in one piece, which keeps merges as the model learned them. No truncation, no
padding, no BOS of the tokenizer's own.

``fastokens`` encodes, some forty times faster than ``tokenizers``, when both agree on a fixed corpus for this
very vocabulary; otherwise ``tokenizers`` does. Depends on both (imported lazily).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from tollway.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

__all__ = ["CORPUS", "GUARD", "ControlTokenizer", "load_tokenizer"]

logger = logging.getLogger(__name__)
GUARD = "\ufdd0"
"""A Unicode noncharacter: it has no meaning in interchange, and one in foreign text is doubled."""
CORPUS = (
    *("", " ", "\n", "\n\n", " \n", "\r\n\r\n", "\t\t x", "   y", "a  b   c    ", "\u00a0\u2003\u3000 z", "\v\f"),
    *("Pantom hello", "don't I'LL we'Ve 'S", "x" * 300, "ab" * 200, "1234567890", "3.14159e-10", "0x1F 1_000 ½²"),
    *(
        "e\u0301 \u00e9 \u1e9b\u0323",
        "ﬁ Å Å ｶﾞ",
        "नमस्ते क़",
        "ไทยไม่มีวรรค",
        "עברית שלום",
        "日本語、中文。한국어",
        "🏳️‍🌈👩‍👩‍👧🇩🇪",
    ),
    *(
        "\x00\x01\x7f\x85",
        "\ufdd0\ufeff\u200b\u2028",
        "\U0001f9ff\U0010fffd",
        "İıſK ΑΣ ẞ",
        "a\u0300\u0301\u0302b",
        "…—“”’",
    ),
    'def f(x):\n    return {"a": [1, 2.5, None], \'b\': "\\n"}  # <tag attr="v">\n\n\n\tif x != 3: pass\n',
    '{"name": "run", "arguments": {"cmd": "ls -la /tmp | grep -v \\"x\\" && echo $HOME"}}',
    "https://example.org/a/b?c=d&e=%20f#g  user@host:~$ sudo rm -rf ./*.py >> log 2>&1\n+++ b/x.py\n@@ -1,3 +1,4 @@\n",
    "The quick brown fox, jumps over (the) lazy dog; isn't it?! CamelCaseWord snake_case_word SHOUTING\n" * 3,
)
"""What both encoders must agree on before the fast one is used; control strings are added to it."""
_SMALL = 64
_KEPT = 4096


class _Oracle:
    """``tokenizers``' ids of ordinary text, control strings included. Takes 150 MB, so it can rest."""

    def __init__(self, whole: Tokenizer) -> None:
        self._source = whole
        self._backend: Tokenizer | None = None

    def description(self) -> str:
        """The vocabulary as JSON, without control tokens and anything else that is added or cut."""
        description = json.loads(self._source.to_str())
        description |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        return json.dumps(description)

    def __call__(self, text: str) -> list[int]:
        from tokenizers import Tokenizer as Backend

        backend = self._backend
        if backend is None:
            backend = self._backend = Backend.from_str(self.description())
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    def rest(self) -> None:
        """Give the memory back until it is asked again."""
        self._backend = None


class ControlTokenizer:
    """The structural surface that ``renderers`` asks for, over a ``tokenizers.Tokenizer``.

    Safe for concurrent use: the backends' settings are never changed after construction.
    """

    def __init__(self, backend: Tokenizer, *, name: str, fast: bool = True) -> None:
        self.name_or_path = name
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = None
        added = backend.get_added_tokens_decoder()
        self.control: dict[str, int] = {token.content: number for number, token in added.items()}
        self.control_ids = frozenset(added)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        oracle = _Oracle(backend)
        self._encode_oracle: Callable[[str], list[int]] = oracle
        self._special = frozenset(number for number, token in added.items() if token.special)
        self._whole = backend
        self._whole.no_truncation()
        self._whole.no_padding()
        ordinary = oracle.description()
        self._bytes = self._byte_table(json.loads(ordinary)["decoder"])
        self._starts = "".join(sorted({token.content[0] for token in added.values()}))
        starts = re.escape(self._starts)
        self._controls = _control_pattern(added.values(), starts) if added else None
        # Some templates dump schemas as ASCII JSON, which spells the noncharacter out.
        self._guarded = re.compile(rf"([{starts}])(?:{GUARD}|\\ufdd0)|{GUARD}{GUARD}") if added else None
        self._foreign = re.compile(f"([{starts}{GUARD}])") if added else None
        self._small: dict[str, list[int]] = {}
        self._prove()
        self._encode_fast = self._fast_encoder(ordinary) if fast else None
        self._encode_piece = self._encode_fast or self._encode_oracle
        if self._encode_fast is not None:
            oracle.rest()

    @property
    def encoder(self) -> str:
        """Which library encodes: ``fastokens`` or ``tokenizers``."""
        return "fastokens" if self._encode_fast is not None else "tokenizers"

    def _prove(self) -> None:
        """Ordinary encoding must not be able to give a control id."""
        for text in self.control:
            found = self.control_ids.intersection(self._encode_oracle(text))
            if found:
                raise ConfigError(
                    f"tokenizer {self.name_or_path}: ordinary text {text!r} encodes to control id {min(found)}; "
                    "this vocabulary cannot keep user text apart"
                )

    def _fast_encoder(self, description: str) -> Callable[[str], list[int]] | None:
        """fastokens over the same description, when it encodes the corpus as the oracle does."""
        try:
            from fastokens import Tokenizer as Fast

            fast = Fast.from_json_str(description)
        except Exception as error:
            # Not installed, or a component of the file that it does not know (a ValueError of its own text).
            logger.info("tokenizer %s: encoding with tokenizers: %s", self.name_or_path, error)
            return None

        def encode(text: str) -> list[int]:
            ids: list[int] = fast.encode_ordinary(text).ids
            return ids

        differs = self.first_difference(encode, (*CORPUS, *self.control, "".join(self.control)))
        if differs is not None:
            logger.warning(
                "tokenizer %s: encoding with tokenizers, since fastokens encodes %r as %s, not as %s",
                self.name_or_path, differs, encode(differs)[:20], self._encode_oracle(differs)[:20],
            )  # fmt: skip
            return None
        return encode

    def first_difference(self, encode: Callable[[str], list[int]], texts: Iterable[str]) -> str | None:
        """The first of ``texts`` that ``encode`` and the oracle take apart differently."""
        return next((text for text in texts if encode(text) != self._encode_oracle(text)), None)

    def fast_difference(self, texts: Iterable[str]) -> str | None:
        """The first of ``texts`` on which the encoder in use and ``tokenizers`` differ."""
        return self.first_difference(self._encode_piece, texts)

    def decodes_as_the_library(self, ids: Sequence[int]) -> bool:
        """Whether ``decode`` gives what ``tokenizers`` gives."""
        return self.decode(ids) == self._whole.decode(list(ids), skip_special_tokens=False)

    def guard(self, text: str) -> str:
        """Foreign text in the form that ``encode`` never reads a control id from."""
        if self._foreign is None or (GUARD not in text and not any(start in text for start in self._starts)):
            return text
        return self._foreign.sub(lambda m: GUARD * 2 if m.group(1) == GUARD else m.group(1) + GUARD, text)

    def unguard(self, text: str) -> str:
        """Undo ``guard``."""
        if self._guarded is None or (GUARD not in text and "\\ufdd0" not in text):
            return text
        return self._guarded.sub(lambda m: m.group(1) or GUARD, text)

    def control_spans(self, text: str) -> Iterator[tuple[int, int]]:
        """(control id, end in ``text``) of every control string of template text, in order."""
        if self._controls is not None:
            for found in self._controls.finditer(text):
                piece = found.group()
                yield self.control[piece.strip() if piece not in self.control else piece], found.end()

    # -- what renderers call -----------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = False, **_: object) -> list[int]:
        """Ids of template text with guarded foreign text inside. Never adds anything."""
        if len(text) > _SMALL:
            return self._encode_whole(text)
        # Templates encode the same few words at every turn.
        known = self._small.get(text)
        if known is None:
            known = self._encode_whole(text)
            if len(self._small) < _KEPT:
                self._small[text] = known
        return known.copy()

    def _encode_whole(self, text: str) -> list[int]:
        if self._controls is None:
            return self._encode_piece(text)
        out: list[int] = []
        for at, piece in enumerate(self._controls.split(text)):
            if at % 2:
                out.append(self.control[piece.strip() if piece not in self.control else piece])
            elif piece:
                out += self._encode_piece(self.unguard(piece))
        return out

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **options: object) -> str:
        """Text of ids; incomplete UTF-8 shows as U+FFFD.

        Raises ``NotImplementedError`` for any other option: ``renderers`` has one that it uses only to find out,
        in quadratic time, which message each id came from, and nobody here asks.
        """
        if options:
            raise NotImplementedError(f"decoding takes no {', '.join(options)}")
        if self._bytes is None:
            return self._whole.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        if skip_special_tokens:
            token_ids = [token for token in token_ids if token not in self._special]
        return self._joined(token_ids).decode(errors="replace")

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Id of a token string, or of each of several; ``None`` when there is no such token."""
        if isinstance(tokens, str):
            return self._whole.token_to_id(tokens)
        return [self._whole.token_to_id(token) for token in tokens]

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one id of a byte-level vocabulary."""
        if self._bytes is not None:
            return self._joined([token])
        return self.decode([token]).encode()

    def _joined(self, token_ids: Sequence[int]) -> bytes:
        table = self._bytes or []
        try:
            # One lookup for all of them: twice as fast as one by one.
            found = itemgetter(*token_ids)(table) if len(token_ids) > 1 else [table[token] for token in token_ids]
            return b"".join(found)
        except IndexError:
            # Ids above the vocabulary (padding of the embedding) decode to nothing, as in the library.
            return b"".join(table[token] for token in token_ids if token < len(table))

    def _byte_table(self, decoder: dict[str, object] | None) -> list[bytes] | None:
        """Bytes by id, for vocabularies whose decoder only joins bytes; it is ten times faster than the library."""
        if decoder is None or decoder.get("type") != "ByteLevel":
            return None
        characters = _byte_characters()
        vocabulary = self._whole.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for text, number in vocabulary.items():
            try:
                table[number] = bytes([characters[character] for character in text])
            except KeyError:
                table[number] = text.encode()
        return table


def load_tokenizer(path: Path) -> ControlTokenizer:
    """Read ``tokenizer.json`` (or the one in a model directory). Raises ``ConfigError``."""
    if importlib.util.find_spec("tokenizers") is None:
        raise ConfigError("this model family needs `pip install tollway[renderers]`")
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        changed = file.stat().st_mtime_ns
        return _read(str(path), str(file), changed)
    except ConfigError:
        raise
    except Exception as error:
        # tokenizers raises bare Exception for anything wrong with the file.
        raise ConfigError(
            f"cannot read tokenizer {file}: {error}; set server.tokenizer to a model folder or a tokenizer.json"
        ) from error


@lru_cache(maxsize=1)
def _read(name: str, file: str, changed: int) -> ControlTokenizer:
    """One vocabulary is kept: reading it takes seconds, and a start reads the same one several times."""
    from tokenizers import Tokenizer

    return ControlTokenizer(Tokenizer.from_file(file), name=name)


def _control_pattern(added: Iterable[AddedToken], starts: str) -> re.Pattern[str]:
    """Matches the longest control string, never one whose first character is guarded.

    Control strings share prefixes, and some vocabularies have a thousand of them: as a tree, the pattern tries
    each character once.
    """
    plain: list[str] = []
    stripped: list[str] = []
    for token in sorted(added, key=lambda token: -len(token.content)):
        if token.lstrip or token.rstrip:
            left, right = (r"\s*" if token.lstrip else ""), (r"\s*" if token.rstrip else "")
            stripped.append(f"{left}(?:{re.escape(token.content)}){right}")
        else:
            plain.append(token.content)
    parts = [*stripped, f"(?=[{starts}](?!{GUARD}))(?:{_tree(plain)})"] if plain else stripped
    return re.compile(f"({'|'.join(parts)})")


def _tree(texts: Iterable[str]) -> str:
    """A regular expression for any of ``texts``, the longest first."""
    heads: dict[str, list[str]] = {}
    ends = False
    for text in texts:
        if text:
            heads.setdefault(text[0], []).append(text[1:])
        else:
            ends = True
    branches = [re.escape(head) + _tree(tails) for head, tails in heads.items()]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and not ends else f"(?:{'|'.join(branches)})"
    return joined + ("?" if ends else "")


def _byte_characters() -> dict[str, int]:
    """Character of a byte-level vocabulary -> byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}
