"""A fresh model directory is complete, valid and reproducible."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import load_file

from tollway.fresh_model import ModelShape, write_fresh_model


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_fresh_model(tmp_path / name, ModelShape(vocab_size=16), seed=seed)
    a, b, c = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
    assert a == b != c


def test_tied_models_have_no_head_and_norms_start_at_one(tmp_path: Path) -> None:
    write_fresh_model(tmp_path, ModelShape(vocab_size=16, num_hidden_layers=1), seed=0)
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert weights["model.layers.0.self_attn.k_proj.weight"].shape == (64, 128)
    assert (weights["model.norm.weight"] == 1).all()
    assert weights["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert all(w.dtype == np.float32 for w in weights.values())


def test_experts_are_listed_one_by_one_and_tying_is_refused(tmp_path: Path) -> None:
    shape = ModelShape(vocab_size=16, num_hidden_layers=1, num_experts=3, tie_word_embeddings=False)
    write_fresh_model(tmp_path, shape, seed=0)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["model.layers.0.mlp.gate.weight"].shape == (3, 128)
    assert weights["model.layers.0.mlp.experts.2.down_proj.weight"].shape == (128, 96)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["num_experts"] == 3
    with pytest.raises(ValidationError, match="tie_word_embeddings"):
        ModelShape(vocab_size=16, num_experts=3)
