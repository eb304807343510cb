"""Write a randomly initialised Qwen3-shaped model directory in the Hugging Face layout.

The demo and the tests start from one. numpy only, so that no process needs torch for it. Owns the shape
section of the configuration; knows nothing of engines or trainers that read the directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from safetensors.numpy import save_file

from tollway.config import Section

__all__ = ["ModelShape", "write_fresh_model"]


class ModelShape(Section):
    """Shape of a Qwen3 (dense) or Qwen3-MoE decoder."""

    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(default=128, gt=0)
    num_hidden_layers: int = Field(default=2, gt=0)
    num_attention_heads: int = Field(default=4, gt=0)
    num_key_value_heads: int = Field(default=2, gt=0)
    head_dim: int = Field(default=32, gt=0, multiple_of=2)
    intermediate_size: int = Field(default=384, gt=0)
    max_position_embeddings: int = Field(default=512, gt=0)
    rope_theta: float = Field(default=10_000.0, gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    tie_word_embeddings: bool = True
    num_experts: int = Field(default=0, ge=0)
    """0 for a dense model."""
    num_experts_per_tok: int = Field(default=2, gt=0)
    moe_intermediate_size: int = Field(default=96, gt=0)

    @model_validator(mode="after")
    def _fits(self) -> ModelShape:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.num_experts and self.tie_word_embeddings:
            raise ValueError("SGLang ignores tied embeddings of MoE models: set tie_word_embeddings = false")
        return self


def write_fresh_model(path: Path, shape: ModelShape, *, seed: int, std: float = 0.02) -> None:
    """Write ``config.json`` and ``model.safetensors`` (float32); the same seed gives the same bytes."""
    path.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    weights = {name: _draw(generator, name, size, std) for name, size in _tensors(shape)}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(_hf_config(shape), indent=2) + "\n", encoding="utf-8")


def _draw(generator: np.random.Generator, name: str, size: tuple[int, ...], std: float) -> NDArray[np.float32]:
    if name.endswith("norm.weight"):
        return np.ones(size, np.float32)
    return (generator.standard_normal(size, np.float32) * std).astype(np.float32)


def _tensors(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = shape.hidden_size
    heads, kv_heads = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer in range(shape.num_hidden_layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.self_attn.q_proj.weight", (heads, hidden)
        yield f"{at}.self_attn.k_proj.weight", (kv_heads, hidden)
        yield f"{at}.self_attn.v_proj.weight", (kv_heads, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, heads)
        yield f"{at}.self_attn.q_norm.weight", (shape.head_dim,)
        yield f"{at}.self_attn.k_norm.weight", (shape.head_dim,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        if shape.num_experts:
            yield f"{at}.mlp.gate.weight", (shape.num_experts, hidden)
            for expert in range(shape.num_experts):
                yield from _mlp(f"{at}.mlp.experts.{expert}", hidden, shape.moe_intermediate_size)
        else:
            yield from _mlp(f"{at}.mlp", hidden, shape.intermediate_size)
    yield "model.norm.weight", (hidden,)
    if not shape.tie_word_embeddings:
        yield "lm_head.weight", (shape.vocab_size, hidden)


def _mlp(at: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.gate_proj.weight", (inner, hidden)
    yield f"{at}.up_proj.weight", (inner, hidden)
    yield f"{at}.down_proj.weight", (hidden, inner)


def _hf_config(shape: ModelShape) -> dict[str, object]:
    moe = shape.num_experts > 0
    config: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if moe else "qwen3",
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        **shape.model_dump(exclude={"num_experts", "num_experts_per_tok", "moe_intermediate_size"}),
    }
    if moe:
        config |= shape.model_dump(include={"num_experts", "num_experts_per_tok", "moe_intermediate_size"})
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return config
