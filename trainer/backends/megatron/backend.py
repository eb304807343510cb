"""The Megatron-Core backend: DDP with the distributed optimizer, weights in fp32 or bfloat16.

Gradients are summed (per-token loss), never averaged: the weights in the batch are the whole normalisation. In
bfloat16 the optimizer owns fp32 main parameters: they are the truth, and the weights a copy that it rounds after each
update. Import only after ``shims.apply``; depends on ``model``, ``convert`` and ``checkpoint``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from numpy.typing import NDArray

from tollway.trainer.backends.base import BackendSpec
from tollway.trainer.backends.megatron import checkpoint, convert
from tollway.trainer.backends.megatron.model import build_model, join_process_group, sort_options, transformer_config
from tollway.trainer.backends.microbatch import MicroBatch
from tollway.trainer.backends.objective import MicroBatchedBackend, upload
from tollway.trainer.backends.shape import ModelShape, check_names
from tollway.trainer.batch import Batch, OptimizerSettings

__all__ = ["MegatronBackend"]

_COMPILED_MULTIPLE = 16
"""Widths in compiled layers: a program for any width may have asked for one that kernels like."""


class MegatronBackend(MicroBatchedBackend):
    """A whole model on one rank."""

    def __init__(self, spec: BackendSpec, shape: ModelShape, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec, shape, multiple=_COMPILED_MULTIPLE if spec.compile_layers else 1)
        join_process_group(spec.seed)
        self._dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[spec.dtype]
        self._options = sort_options(spec.options or {})
        config = transformer_config(shape, self._dtype, self._options.model)
        ddp = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True, "overlap_grad_reduce": False}
        model = build_model(shape, config, self._device)
        if spec.compile_layers:
            model.compile_layers()
        self._ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(**(ddp | dict(self._options.ddp))), model
        )
        self._params = dict(self._ddp.module.named_parameters())
        self._optimizer: MegatronOptimizer | None = None
        self.reset_optimizer(spec.optimizer)
        self.load_weights(weights)

    def gradients(self, batch: Batch) -> dict[str, torch.Tensor]:
        """See ``TrainBackend``."""
        self._memory.require_onloaded()
        self._backward(batch)
        found = {name: param.main_grad.detach().float().cpu() for name, param in self._params.items()}
        return {name: grad.clone() for name, grad in convert.to_hf(found, self._shape)}

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``TrainBackend``."""
        self._memory.require_onloaded()
        whole = {name: param.detach() for name, param in self._params.items()}
        return convert.to_hf(whole, self._shape)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """See ``TrainBackend``. Raises ``ConfigError`` naming what is missing or does not fit."""
        self._memory.require_onloaded()
        check_names(weights, self._shape)
        mains = self._mains()
        with torch.no_grad():
            for name, tensor in convert.to_megatron(weights, self._shape).items():
                self._params[name].copy_(tensor)
                if name in mains:
                    # Not by megatron's reload_model_params, which would copy the rounded weight.
                    mains[name].copy_(tensor.reshape(-1))

    def reset_optimizer(self, settings: OptimizerSettings) -> None:
        """See ``TrainBackend``."""
        self._memory.require_onloaded()
        self._settings = settings
        fields: dict[str, object] = {
            "optimizer": "adam",
            "lr": 0.0,
            "weight_decay": settings.weight_decay,
            "params_dtype": self._dtype,
            "bf16": self._dtype == torch.bfloat16,
            "use_distributed_optimizer": True,
            "clip_grad": settings.clip_grad or math.inf,
            "adam_beta1": settings.betas[0],
            "adam_beta2": settings.betas[1],
            "adam_eps": settings.eps,
        }
        config = OptimizerConfig(**(fields | dict(self._options.optimizer)))
        mains = self._mains()
        self._optimizer = None  # the old state goes before the new one is made
        self._optimizer = get_megatron_optimizer(config, [self._ddp])
        checkpoint.create_state(self._optimizer)
        # The new optimizer made its main parameters from the rounded weights.
        for name, main in self._mains().items():
            if name in mains:
                main.copy_(mains[name])

    def save(self, directory: Path) -> None:
        """See ``TrainBackend``. Sharded: every rank writes its part."""
        self._memory.require_onloaded()
        checkpoint.save(self._ddp.module, self._live, directory)

    def load(self, directory: Path) -> None:
        """See ``TrainBackend``. Raises ``ConfigError`` for weights of another type."""
        self._memory.require_onloaded()
        checkpoint.load(self._ddp.module, self._live, directory)

    @property
    def _live(self) -> MegatronOptimizer:
        if self._optimizer is None:
            raise RuntimeError("the optimizer could not be made; the error before this one says why")
        return self._optimizer

    def _mains(self) -> dict[str, torch.Tensor]:
        """The fp32 main parameter [elements] of each weight in bfloat16, by megatron's name; whole, on one rank."""
        found = {name: getattr(param, "main_param", None) for name, param in self._params.items()}
        return {name: main for name, main in found.items() if main is not None}

    def _resident(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        self._live.zero_grad()  # drops views of the gradient buffers
        model = self._ddp.module
        buffers = [*self._ddp.buffers, *self._ddp.expert_parallel_buffers]
        weights = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
        kept = [*weights, *model.parameters(), *model.buffers(), *checkpoint.tensors(self._live)]
        return kept, [buffer.grad_data for buffer in buffers]

    def _backward(self, batch: Batch) -> tuple[float, tuple[NDArray[np.float32], ...]]:
        self._ddp.zero_grad_buffer()
        self._live.zero_grad()
        result = self._accumulate(batch)
        finalize_model_grads([self._ddp])
        return result

    def _update(self, lr: float) -> float:
        for group in self._live.param_groups:
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = self._settings.weight_decay * group["wd_mult"]
        _, norm, _ = self._live.step()
        return float(norm)

    def _logprobs(self, micro: MicroBatch) -> torch.Tensor:
        ids = upload(micro.ids, self._device)
        positions = torch.arange(ids.shape[1] - 1, device=self._device).expand(ids.shape[0], -1)
        plain = bool((micro.temperatures == 1.0).all())
        self._ddp.module.temperatures = None if plain else upload(micro.temperatures, self._device)
        found: torch.Tensor = self._ddp(ids[:, :-1], positions, None, labels=ids[:, 1:])
        return found
