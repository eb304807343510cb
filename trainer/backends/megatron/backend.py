"""The Megatron-Core backend: DDP with the distributed optimizer, vocab-parallel log-probabilities.

Gradients are summed (per-token loss), never averaged: the weights in the batch are the whole
normalisation. Import only after ``shims.apply``; depends on ``model``, ``convert`` and ``checkpoint``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from numpy.typing import NDArray

from tollway.trainer.backends.base import BackendSpec
from tollway.trainer.backends.megatron import checkpoint, convert
from tollway.trainer.backends.megatron.model import build_model, join_process_group, sort_options, transformer_config
from tollway.trainer.backends.microbatch import MicroBatch
from tollway.trainer.backends.objective import MicroBatchedBackend
from tollway.trainer.backends.shape import ModelShape, check_names
from tollway.trainer.batch import Batch, OptimizerSettings

__all__ = ["MegatronBackend"]


class MegatronBackend(MicroBatchedBackend):
    """A whole model on one rank."""

    def __init__(self, spec: BackendSpec, shape: ModelShape, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec, shape)
        join_process_group(spec.seed)
        self._options = sort_options(spec.options or {})
        config = transformer_config(shape, self._options.model)
        ddp = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True, "overlap_grad_reduce": False}
        self._ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(**(ddp | dict(self._options.ddp))), build_model(shape, config)
        )
        self._params = dict(self._ddp.module.named_parameters())
        self.load_weights(weights)
        self.reset_optimizer(spec.optimizer)

    def gradients(self, batch: Batch) -> dict[str, torch.Tensor]:
        """See ``TrainBackend``."""
        self._backward(batch)
        found = {name: param.main_grad.detach().float().cpu() for name, param in self._params.items()}
        return {name: grad.clone() for name, grad in convert.to_hf(found, self._shape)}

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``TrainBackend``."""
        whole = {name: param.detach() for name, param in self._params.items()}
        return convert.to_hf(whole, self._shape)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """See ``TrainBackend``. Raises ``ConfigError`` naming what is missing or does not fit."""
        check_names(weights, self._shape)
        with torch.no_grad():
            for name, tensor in convert.to_megatron(weights, self._shape).items():
                self._params[name].copy_(tensor)

    def reset_optimizer(self, settings: OptimizerSettings) -> None:
        """See ``TrainBackend``."""
        self._settings = settings
        fields: dict[str, object] = {
            "optimizer": "adam",
            "lr": 0.0,
            "weight_decay": settings.weight_decay,
            "params_dtype": torch.float32,
            "use_distributed_optimizer": True,
            "clip_grad": settings.clip_grad or math.inf,
            "adam_beta1": settings.betas[0],
            "adam_beta2": settings.betas[1],
            "adam_eps": settings.eps,
        }
        config = OptimizerConfig(**(fields | dict(self._options.optimizer)))
        self._optimizer = get_megatron_optimizer(config, [self._ddp])
        checkpoint.create_state(self._optimizer)

    def save(self, directory: Path) -> None:
        """See ``TrainBackend``. Sharded: every rank writes its part."""
        checkpoint.save(self._ddp.module, self._optimizer, directory)

    def load(self, directory: Path) -> None:
        """See ``TrainBackend``."""
        checkpoint.load(self._ddp.module, self._optimizer, directory)

    def _backward(self, batch: Batch) -> tuple[float, tuple[NDArray[np.float32], ...]]:
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        result = self._accumulate(batch)
        finalize_model_grads([self._ddp])
        return result

    def _update(self, lr: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = self._settings.weight_decay * group["wd_mult"]
        _, norm, _ = self._optimizer.step()
        return float(norm)

    def _logprobs(self, micro: MicroBatch) -> torch.Tensor:
        device = next(iter(self._params.values())).device
        ids = torch.from_numpy(micro.ids).to(device)
        positions = torch.arange(ids.shape[1] - 1, device=device).expand(ids.shape[0], -1)
        logits = self._ddp(ids[:, :-1], positions, None).float()
        # A new tensor by the division: the cross entropy works in place on [s, b, v].
        logits = logits / torch.from_numpy(micro.temperatures).to(device)[:, None, None]
        targets = ids[:, 1:].transpose(0, 1).contiguous()
        losses: torch.Tensor = vocab_parallel_cross_entropy(logits.transpose(0, 1).contiguous(), targets)
        return -losses.transpose(0, 1)
