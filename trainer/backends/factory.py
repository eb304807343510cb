"""Build a backend from its spec, inside the training process: weights first, then the framework.

The only place that picks an implementation. Imports torch, and megatron when it is asked for.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from tollway.errors import ConfigError
from tollway.trainer.backends.base import BackendSpec, TrainBackend
from tollway.trainer.backends.options import missing, refusal
from tollway.trainer.backends.shape import ModelShape, check_names, read_shape

__all__ = ["build", "starting_weights"]


def build(spec: BackendSpec) -> TrainBackend:
    """Raises ``ConfigError`` for a model directory or option that cannot be used, and for what is not installed."""
    reason = missing(spec.kind) or refusal(
        spec.kind, dtype=spec.dtype, compile_layers=spec.compile_layers, options=spec.options or {}
    )
    if reason is not None:
        raise ConfigError(reason)
    model_dir = Path(spec.model_dir)
    shape = read_shape(model_dir)
    weights = starting_weights(model_dir, shape)
    if spec.dtype == "auto":
        reduced = spec.kind == "megatron" and torch.cuda.is_available()
        spec = replace(spec, dtype="bfloat16" if reduced else "float32")
    torch.manual_seed(spec.seed)
    if spec.kind == "torch":
        from tollway.trainer.backends.torch_backend import TorchBackend

        return TorchBackend(spec, shape, weights)
    from tollway.trainer.backends.megatron import shims

    shims.apply()
    backend = importlib.import_module("tollway.trainer.backends.megatron.backend")
    shims.patch_megatron()
    made: TrainBackend = backend.MegatronBackend(spec, shape, weights)
    return made


def starting_weights(model_dir: Path, shape: ModelShape) -> dict[str, torch.Tensor]:
    """Weights of the model directory under Hugging Face names in fp32."""
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"no *.safetensors in {model_dir}: name a directory with weights, "
            "or write one with random weights: tollway new-model DIR"
        )
    weights: dict[str, torch.Tensor] = {}
    for path in files:
        weights |= {name: tensor.float() for name, tensor in load_file(path).items()}
    if shape.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    check_names(weights, shape)
    return weights
