"""Operations that a training step asks for, by the model's formula: what a share of a device's peak is measured by.

Counts arithmetic that the result needs, not what a kernel does: recomputed activations, padding and elementwise
work do not count, so that a slower way to the same step never looks busier. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from tollway.trainer.backends.shape import ModelShape

__all__ = ["forward_flops", "train_flops"]


def train_flops(shape: ModelShape, row_lengths: Iterable[int]) -> float:
    """Floating point operations of one forward and backward pass over rows of these lengths, in tokens.

    Three times ``forward_flops``: the backward pass multiplies twice for each product of the forward pass.
    """
    return 3.0 * forward_flops(shape, row_lengths)


def forward_flops(shape: ModelShape, row_lengths: Iterable[int]) -> float:
    """Floating point operations of one forward pass.

    For a row of s tokens: ``2 s P + L 2 s s H d``. P counts the weights that multiply each token: projections
    of attention, the MLP (of a mixture of experts the router and the chosen experts), and the output head; the
    input embedding is a look-up. The second term is causal attention in L layers of H heads of size d: scores and
    values, 2 s s d each for a full square, of which the causal half is needed.
    """
    weights = _active_weights(shape)
    square = 2.0 * shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers
    return float(sum(2.0 * weights * length + square * length * length for length in row_lengths))


def _active_weights(shape: ModelShape) -> int:
    """Weights in matrix products with each token."""
    hidden = shape.hidden_size
    attention = 2 * hidden * (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
    if shape.num_experts:
        mlp = hidden * shape.num_experts + 3 * hidden * shape.moe_intermediate_size * shape.num_experts_per_tok
    else:
        mlp = 3 * hidden * shape.intermediate_size
    return shape.num_hidden_layers * (attention + mlp) + hidden * shape.vocab_size
