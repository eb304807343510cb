"""Shape of a model, read from a Hugging Face config.json.

Owns which architectures and options the decoder can run; anything else is refused by name. Imports no torch.
Depends on ``tollway.errors``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tollway.errors import ConfigError

__all__ = ["ModelSpec", "read_config", "read_eos_ids"]

_DENSE, _MOE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that the shapes of weights and caches follow from."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    """Width of a dense feed-forward layer, or of one expert."""
    norm_eps: float
    rope_theta: float
    tied: bool
    max_position: int
    experts: int
    """0 in a dense model."""
    experts_per_token: int
    norm_topk_prob: bool
    eos_ids: tuple[int, ...]
    dtype: str
    """Type named by config.json: "float32" or "bfloat16"."""

    @classmethod
    def from_config(cls, config: Mapping[str, object], *, source: str = "config.json") -> ModelSpec:
        """Read the usual Hugging Face keys; unsupported or missing ones are a ``ConfigError`` naming the key."""
        read = _Reader(config, source)
        architecture = read.architecture()
        moe = architecture == _MOE
        read.refuse_unsupported()
        heads = read.integer("num_attention_heads")
        hidden = read.integer("hidden_size")
        kv_heads = read.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ConfigError(f"{source}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
        return cls(
            architecture=architecture,
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden,
            layers=read.integer("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=read.integer("head_dim", hidden // heads),
            ffn_size=read.integer("moe_intermediate_size" if moe else "intermediate_size"),
            norm_eps=read.number("rms_norm_eps", 1e-6),
            rope_theta=read.rope_theta(),
            tied=bool(config.get("tie_word_embeddings", False)),
            max_position=read.integer("max_position_embeddings", 32_768),
            experts=read.integer("num_experts") if moe else 0,
            experts_per_token=read.integer("num_experts_per_tok") if moe else 0,
            norm_topk_prob=bool(config.get("norm_topk_prob", True)),
            eos_ids=read.ids("eos_token_id"),
            dtype=read.dtype(),
        )

    def computes_like(self, other: ModelSpec) -> str | None:
        """Name of the first field in which ``other``'s weights would mean something else; ``None``: none."""
        free = {"max_position", "eos_ids", "dtype"}
        names = (name for name in self.__dataclass_fields__ if name not in free)
        return next((name for name in names if getattr(self, name) != getattr(other, name)), None)


def read_eos_ids(directory: Path, spec: ModelSpec) -> tuple[int, ...]:
    """End-of-sequence ids of config.json and generation_config.json together."""
    path = directory / "generation_config.json"
    if not path.exists():
        return spec.eos_ids
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return tuple({*spec.eos_ids, *_Reader(config, str(path)).ids("eos_token_id")})


def read_config(directory: Path) -> dict[str, object]:
    """Read ``directory/config.json``; says what to do when there is none."""
    if not directory.is_dir():
        raise ConfigError(
            f"model directory {directory} does not exist; set engine.model_path to a model in HF layout "
            "(tollway new-model makes one)"
        )
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{directory} has no config.json; is it a model directory in HF layout?") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return config


class _Reader:
    def __init__(self, config: Mapping[str, object], source: str) -> None:
        self._config, self._source = config, source

    def architecture(self) -> str:
        found = self._config.get("architectures")
        if not isinstance(found, list) or len(found) != 1 or found[0] not in (_DENSE, _MOE):
            raise ConfigError(f"{self._source}: architectures is {found!r}; the embedded engine runs {_DENSE}, {_MOE}")
        return str(found[0])

    def refuse_unsupported(self) -> None:
        wanted: dict[str, tuple[object, ...]] = {
            "hidden_act": ("silu", None),
            "attention_bias": (False, None),
            "rope_scaling": (None,),
            "use_sliding_window": (False, None),
            "decoder_sparse_step": (1, None),
            "mlp_only_layers": ([], None),
            "quantization_config": (None,),
        }
        for key, allowed in wanted.items():
            if self._config.get(key) not in allowed:
                raise ConfigError(
                    f"{self._source}: {key} = {self._config[key]!r} is not supported by the embedded engine; "
                    "serve this model with engine.kind = 'sglang'"
                )

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self._source}: {key} must be a positive integer, found {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._config.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{self._source}: {key} must be a positive number, found {value!r}")
        return float(value)

    def rope_theta(self) -> float:
        """``rope_theta``, at the top or inside ``rope_parameters`` as transformers 5 writes it."""
        nested = self._config.get("rope_parameters")
        if isinstance(nested, dict):
            if nested.get("rope_type", "default") != "default":
                raise ConfigError(f"{self._source}: rope_parameters.rope_type {nested['rope_type']!r} is not supported")
            return _Reader(nested, f"{self._source}: rope_parameters").number("rope_theta", 10_000.0)
        return self.number("rope_theta", 10_000.0)

    def ids(self, key: str) -> tuple[int, ...]:
        value = self._config.get(key)
        if value is None:
            return ()
        many = value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in many):
            raise ConfigError(f"{self._source}: {key} must be an id or a list of ids, found {value!r}")
        return tuple(many)

    def dtype(self) -> str:
        value = self._config.get("dtype", self._config.get("torch_dtype")) or "float32"
        if value not in ("float32", "bfloat16"):
            raise ConfigError(f"{self._source}: dtype {value!r} is not supported; use float32 or bfloat16")
        return str(value)
