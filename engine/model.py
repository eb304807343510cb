"""The decoder: Qwen3-shaped, dense or mixture of experts, in plain torch for the CPU.

Owns the parameters (fused where that saves a call per layer) and the forward pass; Hugging Face names are
views into them, so loading a tensor in place is all that an update needs. Knows nothing of requests or HTTP.
Depends on ``spec`` and ``rows``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tollway.engine.rows import Rows
from tollway.engine.spec import ModelSpec

__all__ = ["Decoder", "Span"]


_PADDING = 1024
"""Positions beyond the context for which rotations exist: padding of ragged prefills reaches there."""


@dataclass(slots=True)
class Span:
    """Where one forward pass reads and writes: ``n`` adjacent rows, ``t`` new positions in each."""

    first_row: int
    positions: Tensor
    """[n, t] int64 position of every fed token in its sequence."""
    length: int
    """Keys [0, length) of each row are looked at; ``mask`` hides what a position must not see."""
    mask: Tensor
    """[n, 1, t, length] additive, 0 or -inf."""


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    post_norm: Tensor
    router: Tensor | None
    """[experts, hidden]; ``None`` in a dense model."""
    gate_up: Tensor
    """[2 * ffn, hidden], or [experts, 2 * ffn, hidden]."""
    down: Tensor
    """[hidden, ffn], or [experts, hidden, ffn]."""


class Decoder:
    """Parameters and forward pass of one model."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, context_length: int) -> None:
        self.spec, self.dtype, self.context_length = spec, dtype, context_length
        self.embed = torch.zeros(spec.vocab_size, spec.hidden_size, dtype=dtype)
        self.norm = torch.ones(spec.hidden_size, dtype=dtype)
        self.head = self.embed if spec.tied else torch.zeros_like(self.embed)
        self._layers = [_new_layer(spec, dtype) for _ in range(spec.layers)]
        # float32 throughout, as Transformers, Megatron and SGLang compute it: at position 1,000 a more exact
        # table already differs from theirs by 6e-5 rad.
        frequencies = 1.0 / spec.rope_theta ** (torch.arange(0, spec.head_dim, 2).float() / spec.head_dim)
        angles = torch.outer(torch.arange(context_length + _PADDING).float(), frequencies)
        self._cos = torch.cat([angles.cos(), angles.cos()], -1).to(dtype)
        # Half rotation as a roll: rotate_half(x) * sin == roll(x) * [-sin, sin].
        self._sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)

    def parameters(self) -> list[Tensor]:
        """The fused tensors that own the memory."""
        own = [self.embed, self.norm] + ([] if self.spec.tied else [self.head])
        for layer in self._layers:
            own += [layer.input_norm, layer.qkv, layer.q_norm, layer.k_norm, layer.out, layer.post_norm]
            own += [layer.gate_up, layer.down] + ([] if layer.router is None else [layer.router])
        return own

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor of a checkpoint by its Hugging Face name, as a view into the fused parameters."""
        named = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        if not self.spec.tied:
            named["lm_head.weight"] = self.head
        for number, layer in enumerate(self._layers):
            named |= {f"model.layers.{number}.{name}": view for name, view in _layer_views(self.spec, layer).items()}
        return named

    def forward(self, tokens: Tensor, span: Span, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Feed [n, t] ids; store their keys and values; return final hidden states and expert choices.

        Hidden states are [n, t, hidden], normalised, ready for ``logits``. Expert choices are
        [n, t, layers, top_k] int16 in router order, ``None`` in a dense model.
        """
        n, t = tokens.shape
        x = F.embedding(tokens.reshape(-1), self.embed)
        positions = span.positions.reshape(-1)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        written = rows.flat_index(span.first_row, span.positions)
        groups = self.spec.heads // self.spec.kv_heads
        mask = span.mask if t == 1 else span.mask.repeat(1, 1, groups, 1)
        choices: list[Tensor] = []
        shape = (self.spec.hidden_size,)
        for number, layer in enumerate(self._layers):
            y = F.rms_norm(x, shape, layer.input_norm, self.spec.norm_eps)
            q, k, v = self._project(layer, y, cos, sin)
            all_keys, all_values = rows.flat(number)
            all_keys.index_copy_(0, written, k.reshape(-1, self.spec.head_dim))
            all_values.index_copy_(0, written, v.reshape(-1, self.spec.head_dim))
            keys, values = rows.window(number, span.first_row, n, span.length)
            x = x + F.linear(self._attend(q, keys, values, mask, n), layer.out)
            y = F.rms_norm(x, shape, layer.post_norm, self.spec.norm_eps)
            if layer.router is None:
                x = x + _swiglu(y, layer.gate_up, layer.down)
            else:
                mixed, chosen = _experts(self.spec, layer, layer.router, y)
                x = x + mixed
                choices.append(chosen)
        hidden = F.rms_norm(x, shape, self.norm, self.spec.norm_eps).view(n, t, -1)
        if not choices:
            return hidden, None
        return hidden, torch.stack(choices, 1).view(n, t, len(choices), -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocabulary] in float32."""
        return F.linear(hidden, self.head).float()

    def _project(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, dim = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        qkv = F.linear(x, layer.qkv).view(x.shape[0], heads + 2 * kv_heads, dim)
        qk = F.rms_norm(qkv[:, : heads + kv_heads], (dim,), None, self.spec.norm_eps)
        qk[:, :heads].mul_(layer.q_norm)
        qk[:, heads:].mul_(layer.k_norm)
        qk = torch.addcmul(qk * cos, qk.roll(dim // 2, -1), sin)
        return qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :]

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, n: int) -> Tensor:
        """Grouped query heads ride in the query-length dimension, so keys and values are never repeated."""
        heads, kv_heads, dim = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        groups, t = heads // kv_heads, q.shape[0] // n
        if t == 1:
            mixed = F.scaled_dot_product_attention(q.reshape(n, kv_heads, groups, dim), keys, values, attn_mask=mask)
            return mixed.reshape(n, heads * dim)
        q = q.reshape(n, t, kv_heads, groups, dim).permute(0, 2, 3, 1, 4).reshape(n, kv_heads, groups * t, dim)
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return mixed.view(n, heads, t, dim).transpose(1, 2).reshape(n * t, heads * dim)


def _swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    both = F.linear(x, gate_up)
    half = both.shape[-1] // 2
    return F.linear(F.silu(both[:, :half]).mul_(both[:, half:]), down)


def _experts(spec: ModelSpec, layer: _Layer, router: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, then top-k; tokens are sorted by expert so that each expert runs once."""
    probabilities = torch.softmax(F.linear(x, router).float(), -1)
    weights, chosen = probabilities.topk(spec.experts_per_token, -1)
    if spec.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    sizes = torch.bincount(flat, minlength=spec.experts).tolist()
    pieces = torch.split(x[order // spec.experts_per_token], sizes)
    done = [_swiglu(piece, layer.gate_up[e], layer.down[e]) for e, piece in enumerate(pieces) if len(piece)]
    unsorted = torch.empty(flat.shape[0], x.shape[1], dtype=x.dtype)
    unsorted[order] = torch.cat(done)
    mixed = unsorted.view(*chosen.shape, -1).mul_(weights.to(x.dtype).unsqueeze(-1)).sum(1)
    return mixed, chosen.to(torch.int16)


def _new_layer(spec: ModelSpec, dtype: torch.dtype) -> _Layer:
    hidden, dim, experts = spec.hidden_size, spec.head_dim, (spec.experts,) if spec.experts else ()

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    return _Layer(
        input_norm=torch.ones(hidden, dtype=dtype),
        qkv=zeros((spec.heads + 2 * spec.kv_heads) * dim, hidden),
        q_norm=torch.ones(dim, dtype=dtype),
        k_norm=torch.ones(dim, dtype=dtype),
        out=zeros(hidden, spec.heads * dim),
        post_norm=torch.ones(hidden, dtype=dtype),
        router=zeros(spec.experts, hidden) if spec.experts else None,
        gate_up=zeros(*experts, 2 * spec.ffn_size, hidden),
        down=zeros(*experts, hidden, spec.ffn_size),
    )


def _layer_views(spec: ModelSpec, layer: _Layer) -> dict[str, Tensor]:
    q, k, v = torch.split(layer.qkv, [spec.heads * spec.head_dim, *[spec.kv_heads * spec.head_dim] * 2])
    views = {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.post_norm,
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": layer.out,
        "self_attn.q_norm.weight": layer.q_norm,
        "self_attn.k_norm.weight": layer.k_norm,
    }
    if layer.router is None:
        gate, up = torch.split(layer.gate_up, spec.ffn_size)
        return views | {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up, "mlp.down_proj.weight": layer.down}
    views["mlp.gate.weight"] = layer.router
    for expert in range(spec.experts):
        gate, up = torch.split(layer.gate_up[expert], spec.ffn_size)
        views[f"mlp.experts.{expert}.gate_proj.weight"] = gate
        views[f"mlp.experts.{expert}.up_proj.weight"] = up
        views[f"mlp.experts.{expert}.down_proj.weight"] = layer.down[expert]
    return views
