"""Sharded checkpoints of model and optimizer through megatron's dist_checkpointing, resumed exactly.

Three traps are closed here. The optimizer loads under ``no_grad``, since its fp32 main parameters are views.
After a load, torch's AdamW keeps the live value of ``step`` (its bias correction) instead of the saved one: it
is set from the loaded parameter groups. And an optimizer that has not stepped can neither be saved nor loaded
into: its state is created up front, keyed by the tensors that it updates (fp32 main parameters, where weights are
bfloat16). Import only after ``shims.apply``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from tollway.errors import ConfigError

__all__ = ["create_state", "load", "save", "tensors"]

# The other layouts of the distributed optimizer raise, or fail on load, with torch's AdamW.
_LAYOUT = {"distrib_optim_sharding_type": "dp_reshardable"}


def create_state(optimizer: MegatronOptimizer) -> None:
    """Give every parameter of torch's AdamW the state that its first step would have created."""
    for adam in _adams(optimizer):
        for group in adam.param_groups:
            for param in group["params"]:
                adam.state[param] = {
                    "step": torch.tensor(0.0),  # on the host wherever the rest is, as torch's own first step does
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }


def tensors(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Every tensor of the optimizer that outlives a step: main parameters (or views of weights) and moments."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in each.param_groups:
            yield from group["params"]
        for state in each.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def save(model: GPTModel, optimizer: MegatronOptimizer, directory: Path) -> None:
    """Write weights, optimizer state and the random state into an existing, empty directory."""
    state = _sharded(model, optimizer, is_loading=False)
    state["dtype"] = _dtype(model)
    state["random"] = torch.get_rng_state()
    state["device_random"] = {
        "kind": _device(model),
        "default": torch.cuda.get_rng_state(),
        "tracked": dict(get_cuda_rng_tracker().get_states()),
    }
    dist_checkpointing.save(
        state, str(directory), sharded_strategy=TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    )


def load(model: GPTModel, optimizer: MegatronOptimizer, directory: Path) -> None:
    """Continue from ``save``. Raises ``ConfigError`` for weights of another type."""
    found = dist_checkpointing.load_common_state_dict(str(directory)).get("dtype", "float32")
    if found != _dtype(model):
        raise ConfigError(
            f"{directory} holds {found} weights, this run trains {_dtype(model)}: "
            f'set trainer.dtype = "{found}" to continue it, or start a new run directory'
        )
    loaded = dist_checkpointing.load(_sharded(model, optimizer, is_loading=True), str(directory))
    model.load_state_dict(loaded["model"])
    with torch.no_grad():
        optimizer.load_state_dict(loaded["optimizer"])
    _restore_adam_step(optimizer)
    torch.set_rng_state(loaded["random"])
    device = loaded.get("device_random")
    if device is not None and device["kind"] == _device(model):
        # A CPU's states mean nothing to a GPU: a run that moves goes on with the seed of its start.
        torch.cuda.set_rng_state(device["default"])
        get_cuda_rng_tracker().set_states(device["tracked"])


def _dtype(model: GPTModel) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def _device(model: GPTModel) -> str:
    return str(next(model.parameters()).device.type)


def _sharded(model: GPTModel, optimizer: MegatronOptimizer, *, is_loading: bool) -> dict[str, object]:
    weights = model.sharded_state_dict()
    state = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=_LAYOUT)
    return {"model": weights, "optimizer": state}


def _restore_adam_step(optimizer: MegatronOptimizer) -> None:
    for adam in _adams(optimizer):
        for group in adam.param_groups:
            for param in group["params"]:
                adam.state[param]["step"] = torch.tensor(float(group["step"]))


def _adams(optimizer: MegatronOptimizer) -> list[torch.optim.AdamW]:
    """The torch optimizers inside; Apex's and Transformer Engine's keep ``step`` in their groups themselves."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each.optimizer for each in chained if isinstance(each.optimizer, torch.optim.AdamW)]
