"""What an engine is: program, number format of its weights, shapes of what it records beside the tokens.

Read once when an engine joins, from its ``/model_info`` and ``/server_info`` and from the model directory
when that is ours to read. Pure but for ``directory_config``. Depends on orjson and ``errors``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from tollway.errors import UpstreamError

__all__ = [
    "NEEDED_RELEASE",
    "UNKNOWN",
    "EngineFacts",
    "check_release",
    "directory_config",
    "is_unique",
    "read_facts",
    "session_open",
    "start_of",
]

Json = Mapping[str, object]

_SAME_TYPE = {"half": "float16", "float": "float32"}
_SINCE = (
    ((0, 5, 21), "weight-update sessions (begin_weight_update)"),
    ((0, 5, 19), "weight versions per token (weight_versions)"),
    ((0, 5, 22), "top log-probabilities of the reply alone (return_flat_raw_output_top_logprobs)"),
)
"""First SGLang releases that can do what turns and refits need."""
NEEDED_RELEASE = ".".join(map(str, max(since for since, _ in _SINCE)))
"""The oldest SGLang that can do all of it."""
_PAIR_KEYS = frozenset({"EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP"})
"""Speculative algorithms under which SGLang keys its prefix cache by pairs of ids."""
_LONGEST = 80
"""Characters of a name that an engine gives itself: records of every call repeat it."""
_C4 = 4
"""Compression ratio of the DeepSeek-V4 layers that have an indexer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What records say of the engine that sampled, and what its replies must look like."""

    kind: str = ""
    """The program: "sglang", "embedded", "fake"; empty when it does not say."""
    release: str = ""
    """Version of the program."""
    precision: str = ""
    """Number format of the weights: "bfloat16", "fp8", ...; empty when it is not known."""
    route_shape: tuple[int, int] | None = None
    """(layers, experts per token) of a mixture-of-experts model."""
    indexer_shape: tuple[int, int] | None = None
    """(layers, top_k) of a model with a sparse-attention indexer."""
    bigram_keys: bool = False
    """Its prefix cache is keyed by pairs of ids (EAGLE): it finds one position less."""
    strips_thinking: bool = False
    """It keeps no output of calls that reasoned in its prefix cache."""
    priority_sign: int = 0
    """1 when its scheduler takes requests with a higher ``priority`` first, -1 when lower ones, 0 when it has none."""
    cumulative_streams: bool = False
    """Every event of a stream repeats the whole reply so far: a long reply costs its length squared."""


UNKNOWN = EngineFacts()


def read_facts(model: Json, server: Json, config: Json) -> EngineFacts:
    """Facts from ``/model_info``, ``/server_info`` (empty when refused) and the model's config.json (or empty)."""
    kind = server.get("engine")
    if not isinstance(kind, str):
        # Only SGLang's own server answers with the arguments that it was started with.
        kind = "sglang" if "internal_states" in server and "launch_command" in server else ""
    return EngineFacts(
        kind=kind[:_LONGEST],
        release=_name(server.get("version")),
        precision=_precision(kind, server, config)[:_LONGEST],
        route_shape=_route_shape(model) or _route_shape(server) or _route_shape(config),
        indexer_shape=_indexer_shape(model) or _indexer_shape(server) or _indexer_shape(config),
        bigram_keys=_name(server.get("speculative_algorithm")).upper() in _PAIR_KEYS,
        strips_thinking=server.get("strip_thinking_cache") is True,
        priority_sign=_priority_sign(server),
        cumulative_streams=server.get("incremental_streaming_output") is False,
    )


def check_release(url: str, server: Json) -> None:
    """Refuse a server that cannot do what every turn and every refit needs.

    Raises ``UpstreamError`` with its release and the one that is needed. Other programs than SGLang, and builds
    without a release number, are believed until a reply proves them wrong.
    """
    version = server.get("version")
    if isinstance(server.get("engine"), str) or not isinstance(version, str):
        return
    match = re.match(r"v?(\d{1,9})\.(\d{1,9})\.(\d{1,9})[\w.+-]{0,30}", version)
    if match is None or (release := (int(match[1]), int(match[2]), int(match[3]))) == (0, 0, 0):
        return
    if lacks := [what for since, what in _SINCE if release < since]:
        raise UpstreamError(
            f"engine {url} runs SGLang {match[0]}, which has no {' and no '.join(lacks)}; "
            f"install SGLang {NEEDED_RELEASE} or later there"
        )


def start_of(server: Json) -> str:
    """What tells one start of the program from the next; empty when ``/server_info`` does not say."""
    said = [server.get("startup_time"), server.get("random_seed")]
    if said == [None, None]:
        return ""
    try:
        return orjson.dumps(said, option=orjson.OPT_SORT_KEYS).decode()[:2000]
    except TypeError:  # deeper than it writes
        return ""


def is_unique(start: str) -> bool:
    """Whether no two processes can say this start: a seed alone may have been given to many."""
    return not start.startswith("[null")


def session_open(server: Json) -> bool:
    """Whether the engine says that a weight-update session is open: its weights may be half-loaded."""
    states = server.get("internal_states")
    return isinstance(states, list) and any(
        isinstance(state, Mapping) and state.get("weight_update_session") is True for state in states
    )


def directory_config(model_path: str) -> Json:
    """config.json of a model directory; empty when it is not there or not ours to read."""
    try:
        value = orjson.loads((Path(model_path) / "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _priority_sign(server: Json) -> int:
    if server.get("enable_priority_scheduling") is not True:
        return 0  # a server without it may refuse requests that name a priority
    return -1 if server.get("schedule_low_priority_values_first") is True else 1


def _name(value: object) -> str:
    return value[:_LONGEST] if isinstance(value, str) else ""


def _precision(kind: str, server: Json, config: Json) -> str:
    quantized = server.get("quantization")
    if not quantized and isinstance(inner := config.get("quantization_config"), Mapping):
        quantized = inner.get("quant_method")
    if isinstance(quantized, str) and quantized:
        return quantized
    named = server.get("dtype")
    if isinstance(named, str) and named not in ("", "auto"):
        return _SAME_TYPE.get(named, named)
    own = config.get("dtype") or config.get("torch_dtype")
    if not isinstance(own, str):
        return ""
    if kind == "sglang" and own == "float32":
        # With dtype "auto" SGLang halves what is stored in float32.
        return "bfloat16" if str(config.get("model_type", "")).startswith("gemma") else "float16"
    return own


def _route_shape(facts: Json) -> tuple[int, int] | None:
    return _pair(facts.get("num_hidden_layers"), facts.get("num_experts_per_tok"))


def _indexer_shape(facts: Json) -> tuple[int, int] | None:
    ratios = facts.get("compress_ratios")
    if isinstance(ratios, list) and ratios:
        return _pair(sum(1 for ratio in ratios if ratio == _C4), facts.get("index_topk"))
    return _pair(facts.get("num_indexer_layers") or facts.get("num_hidden_layers"), facts.get("index_topk"))


def _pair(layers: object, top_k: object) -> tuple[int, int] | None:
    if isinstance(layers, int) and isinstance(top_k, int) and layers > 0 and top_k > 0:
        return layers, top_k
    return None
