"""The reference backend: a short Qwen3-shaped decoder in plain torch, dense and mixture of experts.

Independent of Megatron on purpose: tests hold the two against each other. One process, one device, fp32, AdamW.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tollway.trainer.backends.base import BackendSpec
from tollway.trainer.backends.microbatch import MicroBatch
from tollway.trainer.backends.objective import MicroBatchedBackend, upload
from tollway.trainer.backends.shape import ModelShape, check_names, tensor_shapes
from tollway.trainer.batch import Batch, OptimizerSettings

__all__ = ["TorchBackend", "decode"]

Weights = Mapping[str, torch.Tensor]


def decode(weights: Weights, shape: ModelShape, ids: torch.Tensor) -> torch.Tensor:
    """Logits [rows, width, vocab] of token ids [rows, width], causal, no padding mask needed."""
    hidden = functional.embedding(ids, weights["model.embed_tokens.weight"])
    cos, sin = _rotary(shape, ids.shape[1], hidden.device)
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        normed = _norm(hidden, weights[prefix + "input_layernorm.weight"], shape)
        hidden = hidden + _attention(weights, prefix + "self_attn.", shape, normed, (cos, sin))
        normed = _norm(hidden, weights[prefix + "post_attention_layernorm.weight"], shape)
        mix = _experts if shape.num_experts else _mlp
        hidden = hidden + mix(weights, prefix + "mlp.", shape, normed)
    hidden = _norm(hidden, weights["model.norm.weight"], shape)
    head = "model.embed_tokens.weight" if shape.tie_word_embeddings else "lm_head.weight"
    return functional.linear(hidden, weights[head])


class TorchBackend(MicroBatchedBackend):
    """Weights are leaf tensors in a dictionary under their Hugging Face names."""

    def __init__(self, spec: BackendSpec, shape: ModelShape, weights: Weights) -> None:
        super().__init__(spec, shape)
        self._weights = {
            name: torch.empty(size, device=self._device, requires_grad=True) for name, size in tensor_shapes(shape)
        }
        self.load_weights(weights)
        self.reset_optimizer(spec.optimizer)

    def gradients(self, batch: Batch) -> dict[str, torch.Tensor]:
        """See ``TrainBackend``."""
        self._memory.require_onloaded()
        self._backward(batch)
        found = {n: (torch.zeros_like(w) if w.grad is None else w.grad).cpu() for n, w in self._weights.items()}
        # Dropped, not zeroed in place: on the CPU the result is the gradient itself.
        self._optimizer.zero_grad(set_to_none=True)
        return found

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``TrainBackend``."""
        self._memory.require_onloaded()
        for name, weight in self._weights.items():
            yield name, weight.detach()

    def load_weights(self, weights: Weights) -> None:
        """See ``TrainBackend``. Raises ``ConfigError`` naming what is missing or does not fit."""
        self._memory.require_onloaded()
        check_names(weights, self._shape)
        with torch.no_grad():
            for name, mine in self._weights.items():
                mine.copy_(weights[name])

    def reset_optimizer(self, settings: OptimizerSettings) -> None:
        """See ``TrainBackend``."""
        self._memory.require_onloaded()
        self._settings = settings
        matrices = [weight for weight in self._weights.values() if weight.dim() > 1]
        norms = [weight for weight in self._weights.values() if weight.dim() == 1]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": norms, "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=settings.betas,
            eps=settings.eps,
        )

    def save(self, directory: Path) -> None:
        """See ``TrainBackend``."""
        self._memory.require_onloaded()
        state = {"weights": self._weights, "optimizer": self._optimizer.state_dict(), "rng": torch.get_rng_state()}
        torch.save(state, directory / "state.pt")

    def load(self, directory: Path) -> None:
        """See ``TrainBackend``."""
        self._memory.require_onloaded()
        # To the CPU first: the random state is read there, and the optimizer moves its own to the weights.
        state = torch.load(directory / "state.pt", weights_only=True, map_location="cpu")
        self.load_weights(state["weights"])
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # memory of a file cannot be given back
        torch.set_rng_state(state["rng"])

    def _resident(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        self._optimizer.zero_grad(set_to_none=True)
        states = (value for state in self._optimizer.state.values() for value in state.values())
        return [*self._weights.values(), *(value for value in states if isinstance(value, torch.Tensor))], []

    def _backward(self, batch: Batch) -> tuple[float, tuple[NDArray[np.float32], ...]]:
        self._optimizer.zero_grad()
        return self._accumulate(batch)

    def _update(self, lr: float) -> float:
        limit = self._settings.clip_grad or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self._weights.values(), limit)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return float(norm)

    def _logprobs(self, micro: MicroBatch) -> torch.Tensor:
        ids = upload(micro.ids, self._device)
        logits = decode(self._weights, self._shape, ids[:, :-1])
        logits = logits / upload(micro.temperatures, self._device)[:, None, None]
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def _norm(x: torch.Tensor, weight: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, shape.rms_norm_eps)


def _rotary(shape: ModelShape, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [width, head_dim] each."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    angles = torch.outer(torch.arange(width, dtype=torch.float32, device=device), 1.0 / shape.rope_theta**steps)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat([-second, first], dim=-1) * turn[1]


def _attention(
    weights: Weights, prefix: str, shape: ModelShape, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    rows, width, _ = x.shape

    def heads(name: str) -> torch.Tensor:
        projected = functional.linear(x, weights[f"{prefix}{name}_proj.weight"])
        return projected.view(rows, width, -1, shape.head_dim).transpose(1, 2)

    query = _rotate(_norm(heads("q"), weights[prefix + "q_norm.weight"], shape), turn)
    key = _rotate(_norm(heads("k"), weights[prefix + "k_norm.weight"], shape), turn)
    seen = functional.scaled_dot_product_attention(query, key, heads("v"), is_causal=True, enable_gqa=True)
    return functional.linear(seen.transpose(1, 2).reshape(rows, width, -1), weights[prefix + "o_proj.weight"])


def _mlp(weights: Weights, prefix: str, _shape: ModelShape, x: torch.Tensor) -> torch.Tensor:
    gate = functional.silu(functional.linear(x, weights[prefix + "gate_proj.weight"]))
    return functional.linear(
        gate * functional.linear(x, weights[prefix + "up_proj.weight"]), weights[prefix + "down_proj.weight"]
    )


def _experts(weights: Weights, prefix: str, shape: ModelShape, x: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    chances = functional.linear(flat, weights[prefix + "gate.weight"]).softmax(-1, dtype=torch.float32)
    share, chosen = chances.topk(shape.num_experts_per_tok, dim=-1)
    if shape.norm_topk_prob:
        share = share / share.sum(-1, keepdim=True)
    out = torch.zeros_like(flat)
    for expert in range(shape.num_experts):
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        if token.numel():
            done = _mlp(weights, f"{prefix}experts.{expert}.", shape, flat[token])
            out = out.index_add(0, token, done * share[token, slot, None])
    return out.reshape(x.shape)
