"""Vocabularies for tests: a small byte-level one built on the spot, and the real ones that packages bring."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Tokenizer

from tollway.session_server.families.catalogue import renderers_family
from tollway.session_server.families.renderers_family import RenderersFamily
from tollway.session_server.families.vocabularies import (
    QWEN_CONTROL,
    byte_level,
    real_vocabulary,
    with_control_strings,
)
from tollway.session_server.tokens import ControlTokenizer

CONTROL = QWEN_CONTROL


def _shown() -> dict[int, str]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in shown}
    table.update({byte: chr(256 + at) for at, byte in enumerate(b for b in range(256) if b not in table)})
    return table


@lru_cache(maxsize=1)
def small() -> Tokenizer:
    """Bytes, a handful of merges that can drift when text is encoded again, and Qwen3's control ids."""
    table = _shown()
    vocab = {table[byte]: byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for left, right in [
        ("\n", "\n"), ("a", "n"), ("P", "an"), ("o", "m"), ("t", "om"), ("Pan", "tom"),
        ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("o", "k"), ("u", "s"), ("us", "e"), ("use", "r"),
    ]:  # fmt: skip
        pair = tuple("".join(table[byte] for byte in part.encode()) for part in (left, right))
        if all(part in vocab for part in pair):
            merges.append((pair[0], pair[1]))
            vocab.setdefault("".join(pair), len(vocab))
    return byte_level(vocab, merges, CONTROL)


@lru_cache(maxsize=1)
def real_qwen3() -> Tokenizer:
    """Qwen3's 151,669 entries."""
    return Tokenizer.from_file(str(real_vocabulary("qwen3")))


@lru_cache(maxsize=64)
def small_family(name: str) -> RenderersFamily:
    """A family of the library over the small vocabulary and its own control strings."""
    backend = with_control_strings(Tokenizer.from_str(small().to_str()), name)
    return renderers_family(name, ControlTokenizer(backend, name=f"small {name}"))
