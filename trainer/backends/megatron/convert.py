"""Hugging Face names and layouts to Megatron's, and back, for whole (unsharded) tensors.

Only slices and concatenations: a round trip is exact, and gradients convert like weights. Megatron keeps
query, key and value interleaved by key-value group, and gate and up projections stacked. Depends on torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch

from tollway.trainer.backends.shape import ModelShape

__all__ = ["to_hf", "to_megatron"]

Tensors = Mapping[str, torch.Tensor]

_PLAIN = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
"""Megatron's name to Hugging Face's inside one layer, where the layout is the same."""


def to_megatron(weights: Tensors, shape: ModelShape) -> dict[str, torch.Tensor]:
    """Megatron parameter names and tensors from a full set of Hugging Face ones."""
    out = {"embedding.word_embeddings.weight": weights["model.embed_tokens.weight"]}
    for layer in range(shape.num_hidden_layers):
        hf, mine = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for ours, theirs in _PLAIN.items():
            out[mine + ours] = weights[hf + theirs]
        parts = [weights[f"{hf}self_attn.{part}_proj.weight"] for part in "qkv"]
        out[mine + "self_attention.linear_qkv.weight"] = _interleave(parts, shape)
        if shape.num_experts:
            out[mine + "mlp.router.weight"] = weights[hf + "mlp.gate.weight"]
        for ours, theirs in _mlps(shape):
            gate, up = weights[f"{hf}{theirs}gate_proj.weight"], weights[f"{hf}{theirs}up_proj.weight"]
            out[f"{mine}{ours}linear_fc1.weight"] = torch.cat([gate, up])
            out[f"{mine}{ours}linear_fc2.weight"] = weights[f"{hf}{theirs}down_proj.weight"]
    out["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
    if not shape.tie_word_embeddings:
        out["output_layer.weight"] = weights["lm_head.weight"]
    return out


def to_hf(params: Tensors, shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face names and tensors from a full set of Megatron ones; views where the layout allows."""
    yield "model.embed_tokens.weight", params["embedding.word_embeddings.weight"]
    for layer in range(shape.num_hidden_layers):
        hf, mine = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for ours, theirs in _PLAIN.items():
            yield hf + theirs, params[mine + ours]
        parts = _separate(params[mine + "self_attention.linear_qkv.weight"], shape)
        for part, tensor in zip("qkv", parts, strict=True):
            yield f"{hf}self_attn.{part}_proj.weight", tensor
        if shape.num_experts:
            yield hf + "mlp.gate.weight", params[mine + "mlp.router.weight"]
        for ours, theirs in _mlps(shape):
            gate, up = params[f"{mine}{ours}linear_fc1.weight"].chunk(2)
            yield f"{hf}{theirs}gate_proj.weight", gate
            yield f"{hf}{theirs}up_proj.weight", up
            yield f"{hf}{theirs}down_proj.weight", params[f"{mine}{ours}linear_fc2.weight"]
    yield "model.norm.weight", params["decoder.final_layernorm.weight"]
    if not shape.tie_word_embeddings:
        yield "lm_head.weight", params["output_layer.weight"]


def _mlps(shape: ModelShape) -> list[tuple[str, str]]:
    """(Megatron, Hugging Face) prefixes of every gated MLP of a layer."""
    if not shape.num_experts:
        return [("mlp.", "mlp.")]
    return [(f"mlp.experts.local_experts.{e}.", f"mlp.experts.{e}.") for e in range(shape.num_experts)]


def _interleave(parts: list[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    """[q], [k], [v] rows to groups of (queries of the group, its key, its value)."""
    hidden = parts[0].shape[-1]
    grouped = [part.reshape(shape.num_key_value_heads, -1, hidden) for part in parts]
    return torch.cat(grouped, dim=1).reshape(-1, hidden)


def _separate(packed: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
    hidden, head = packed.shape[-1], shape.head_dim
    queries = shape.num_attention_heads // shape.num_key_value_heads * head
    grouped = packed.reshape(shape.num_key_value_heads, queries + 2 * head, hidden)
    edges = (0, queries, queries + head, queries + 2 * head)
    return [grouped[:, start:end].reshape(-1, hidden) for start, end in itertools.pairwise(edges)]
