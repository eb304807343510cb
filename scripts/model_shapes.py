"""Shapes of released models, for benchmarks with random weights."""

from __future__ import annotations

from tollway.fresh_model import ModelShape

__all__ = ["QWEN3_06B"]

QWEN3_06B = ModelShape(
    vocab_size=151_936,
    hidden_size=1024,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    max_position_embeddings=40_960,
    rope_theta=1_000_000.0,
)
