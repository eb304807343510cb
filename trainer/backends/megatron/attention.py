"""Core attention for Megatron's layer spec in plain torch: causal, grouped queries, padded or packed.

Megatron's own needs Transformer Engine for packed sequences and a CUDA mask otherwise. Depends on torch only.
"""

from __future__ import annotations

import itertools

import torch
from torch.nn import functional

__all__ = ["SdpaAttention"]


class SdpaAttention(torch.nn.Module):
    """Core attention by torch SDPA, causal, grouped queries; padded [s, b, h, d] or packed (thd).

    Megatron's own needs Transformer Engine for packed sequences and a CUDA mask otherwise.
    """

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        super().__init__()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_args: object,
        packed_seq_params: object = None,
        **_kwargs: object,
    ) -> torch.Tensor:
        """Padded: [s, b, heads, d] -> [s, b, heads * d]. Packed: [t, heads, d] -> [t, 1, heads * d]."""
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return _attend(q, k, v).permute(2, 0, 1, 3).flatten(2)
        edges: list[int] = packed_seq_params.cu_seqlens_q.tolist()  # type: ignore[attr-defined]  # megatron's record
        parts = []
        for start, end in itertools.pairwise(edges):
            q, k, v = (
                x[start:end].reshape(end - start, -1, x.shape[-1]).transpose(0, 1)[None] for x in (query, key, value)
            )
            parts.append(_attend(q, k, v)[0].transpose(0, 1).flatten(1))
        return torch.cat(parts)[:, None]


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.is_cuda and query.dtype == torch.float32:
        # Of torch's kernels only flash attention takes grouped heads, and it takes no fp32: given them grouped, torch
        # falls back to one that keeps every [s, s] score.
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
