"""An independent forward pass over a whole sequence, written from the architecture's description.

Reads checkpoint tensors by name; shares no code with the engine.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def forward(path: Path, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Log-softmax [n, vocabulary] and, for a mixture of experts, chosen experts [n, layers, top_k]."""
    config = json.loads((path / "config.json").read_text())
    weights = load_file(path / "model.safetensors")
    heads, kv_heads, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    n, eps = len(ids), config["rms_norm_eps"]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    def rotate(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        half = dim // 2
        for i in range(half):
            angle = torch.arange(n).float() * config["rope_theta"] ** (-2 * i / dim)
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            out[..., i] = x[..., i] * cos - x[..., i + half] * sin
            out[..., i + half] = x[..., i + half] * cos + x[..., i] * sin
        return out

    def mlp(x: Tensor, prefix: str) -> Tensor:
        gate, up, down = (weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        a = x @ gate.T
        return (a * torch.sigmoid(a) * (x @ up.T)) @ down.T

    hidden = weights["model.embed_tokens.weight"][torch.tensor(ids)]
    chosen = []
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        x = norm(hidden, weights[f"{at}.input_layernorm.weight"])
        q, k, v = ((x @ weights[f"{at}.self_attn.{p}_proj.weight"].T).view(n, -1, dim) for p in "qkv")
        q = rotate(norm(q, weights[f"{at}.self_attn.q_norm.weight"]))
        k = rotate(norm(k, weights[f"{at}.self_attn.k_norm.weight"]))
        mixed = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, shared].T / math.sqrt(dim)
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
            mixed.append(scores.softmax(-1) @ v[:, shared])
        hidden = hidden + torch.cat(mixed, -1) @ weights[f"{at}.self_attn.o_proj.weight"].T
        x = norm(hidden, weights[f"{at}.post_attention_layernorm.weight"])
        if "num_experts" not in config:
            hidden = hidden + mlp(x, f"{at}.mlp")
            continue
        probabilities = (x @ weights[f"{at}.mlp.gate.weight"].T).softmax(-1)
        best, picks = probabilities.topk(config["num_experts_per_tok"], -1)
        best = best / best.sum(-1, keepdim=True)
        rows = [
            sum(best[i, j] * mlp(x[i], f"{at}.mlp.experts.{int(picks[i, j])}") for j in range(picks.shape[1]))
            for i in range(n)
        ]
        hidden = hidden + torch.stack(rows)
        chosen.append(picks)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logits = norm(hidden, weights["model.norm.weight"]) @ head.T
    return logits.log_softmax(-1), torch.stack(chosen, 1) if chosen else torch.zeros(0)


def sampled_logprobs(path: Path, prompt: list[int], output: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probability of each output id at ``temperature``, from one full forward."""
    scaled = (forward(path, prompt + output)[0] / temperature).log_softmax(-1)
    return scaled[len(prompt) - 1 : -1].gather(1, torch.tensor(output)[:, None])[:, 0]
