"""Shape of a Qwen3-like decoder, read from a Hugging Face ``config.json``, and its tensors by name.

Refuses architectures that the backends do not build, and weights that are not those of the shape. Imports
no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tollway.errors import ConfigError

__all__ = ["ModelShape", "check_names", "read_shape", "tensor_shapes"]

_ARCHITECTURES = {"Qwen3ForCausalLM": False, "Qwen3MoeForCausalLM": True}


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes under their Hugging Face names; ``num_experts`` 0 means dense."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True


def read_shape(model_dir: Path) -> ModelShape:
    """Read ``model_dir/config.json``. Raises ``ConfigError`` for a missing, broken or unknown one."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no {path}: the model directory needs a Hugging Face config.json") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    names = config.get("architectures") or ["(none)"]
    if names[0] not in _ARCHITECTURES:
        raise ConfigError(f"{path}: architecture {names[0]} is not built here; use {', '.join(_ARCHITECTURES)}")
    fields = {name: config[name] for name in ModelShape.__dataclass_fields__ if config.get(name) is not None}
    if not _ARCHITECTURES[names[0]]:
        fields = {name: value for name, value in fields.items() if name not in ("num_experts", "num_experts_per_tok")}
    elif not fields.get("num_experts"):
        raise ConfigError(f"{path}: {names[0]} needs num_experts")
    rope = config.get("rope_parameters") or {}
    fields.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
    if "hidden_size" in fields and "num_attention_heads" in fields:
        fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    if config.get("rope_scaling") or config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(f"{path}: rope_scaling, mlp_only_layers and decoder_sparse_step are not supported")
    try:
        return ModelShape(**fields)
    except TypeError as error:
        raise ConfigError(f"{path}: {error}") from error


def tensor_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the model in Hugging Face names and order, with its shape."""
    hidden, head = shape.hidden_size, shape.head_dim
    query, key_value = shape.num_attention_heads * head, shape.num_key_value_heads * head
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "self_attn.q_proj.weight", (query, hidden)
        yield prefix + "self_attn.k_proj.weight", (key_value, hidden)
        yield prefix + "self_attn.v_proj.weight", (key_value, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, query)
        yield prefix + "self_attn.q_norm.weight", (head,)
        yield prefix + "self_attn.k_norm.weight", (head,)
        yield from _mlp_shapes(prefix + "mlp.", shape)
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not shape.tie_word_embeddings:
        yield "lm_head.weight", (shape.vocab_size, hidden)


def check_names(weights: Mapping[str, _Shaped], shape: ModelShape) -> None:
    """Raise ``ConfigError`` unless ``weights`` holds exactly the model's tensors, each in its shape."""
    wanted = dict(tensor_shapes(shape))
    missing, extra = wanted.keys() - weights.keys(), weights.keys() - wanted.keys()
    if missing or extra:
        raise ConfigError(f"weights do not fit the model: missing {sorted(missing)[:3]}, unknown {sorted(extra)[:3]}")
    for name, size in wanted.items():
        if tuple(weights[name].shape) != size:
            raise ConfigError(f"weight {name} has shape {tuple(weights[name].shape)}, the model wants {size}")


def _mlp_shapes(prefix: str, shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = shape.hidden_size
    if not shape.num_experts:
        inner, owners = shape.intermediate_size, [prefix]
    else:
        yield prefix + "gate.weight", (shape.num_experts, hidden)
        inner = shape.moe_intermediate_size
        owners = [f"{prefix}experts.{expert}." for expert in range(shape.num_experts)]
    for owner in owners:
        yield owner + "gate_proj.weight", (inner, hidden)
        yield owner + "up_proj.weight", (inner, hidden)
        yield owner + "down_proj.weight", (hidden, inner)
