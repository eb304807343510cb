"""What a backend would refuse once it runs, and what can be said of it before anything is started.

The configuration asks, and the training process again, for a spec that no configuration made. Imports nothing heavy.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Literal

__all__ = ["missing", "refusal"]

_DECIDED = {
    "params_dtype": "set trainer.dtype",
    "pipeline_dtype": "set trainer.dtype",
    "bf16": "set trainer.dtype",
    "fp16": "set trainer.dtype",
    "cross_entropy_loss_fusion": "log-probabilities are computed here without it; trainer.compile_layers fuses them",
    "cross_entropy_fusion_impl": "log-probabilities are computed here without it",
    "use_cpu_initialization": "the device decides",
    "lr": "set trainer.optimizer.lr",
    "weight_decay": "set trainer.optimizer.weight_decay",
    "clip_grad": "set trainer.optimizer.clip_grad",
    "adam_beta1": "set trainer.optimizer.betas",
    "adam_beta2": "set trainer.optimizer.betas",
    "calculate_per_token_loss": "a step's weights of tokens are normalised before they come to the backend",
    **dict.fromkeys(
        ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
        "the model's config.json decides",
    ),
}
"""Options of Megatron-Core that would say nothing, or something else than another setting, and what to do instead."""
_NEEDS = {
    "torch": {"torch": ("torch", "engine")},
    "megatron": {"torch": ("torch", "megatron"), "megatron.core": ("Megatron-Core", "megatron")},
}
"""By backend: module, what it is called, and the extra that brings it."""


def refusal(
    kind: Literal["megatron", "torch"],
    *,
    dtype: str,
    compile_layers: bool,
    options: Mapping[str, bool | int | float | str],
) -> str | None:
    """Why such a backend cannot be built and what to change; ``None`` where only the framework can tell.

    >>> refusal("torch", dtype="bfloat16", compile_layers=False, options={})
    'the torch backend is the plain fp32 reference: remove trainer.dtype = "bfloat16", or train with "megatron"'
    """
    if kind == "torch":
        if options:
            return "the torch backend takes no [trainer.megatron] options; remove them"
        if dtype == "bfloat16" or compile_layers:
            found = "trainer.compile_layers = true" if compile_layers else 'trainer.dtype = "bfloat16"'
            return f'the torch backend is the plain fp32 reference: remove {found}, or train with "megatron"'
        return None
    for name, value in options.items():
        if name in _DECIDED:
            return f"trainer.megatron.{name} cannot be set: {_DECIDED[name]}; remove it"
        if name.endswith("_parallel_size") and value != 1:
            return f"trainer.megatron.{name} = {value}: this backend trains on one rank; remove it"
    return None


def missing(kind: Literal["megatron", "torch"]) -> str | None:
    """What is not installed here that the backend needs, and what to do; ``None``: all of it is there."""
    for module, (name, extra) in _NEEDS[kind].items():
        if not _is_installed(module):
            other = ', or set trainer.backend = "torch"' if module != "torch" else ""
            return f"the {kind} backend needs {name}: pip install 'tollway[{extra}]'{other}"
    return None


def _is_installed(module: str) -> bool:
    """Whether it can be found; its parents are imported, it is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
