"""Build a Qwen3-shaped Megatron GPT model: configuration, layer spec, process groups.

The one module that knows how megatron constructs a model, since upstream means to replace GPTModel. Options
of `[trainer.megatron]` override configuration fields by name. Import only after ``shims.apply``.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed
from torch._C._distributed_c10d import HashStore
from torch.nn import functional

from tollway.errors import ConfigError
from tollway.trainer.backends.megatron.attention import SdpaAttention
from tollway.trainer.backends.megatron.logprobs import target_logprobs
from tollway.trainer.backends.shape import ModelShape

__all__ = ["Options", "ScoringModel", "build_model", "join_process_group", "sort_options", "transformer_config"]

Scalar = bool | int | float | str

_RECOMPILE_LIMIT = 64
"""Programs of one function that torch keeps. A layer has one each for scoring and training, for one row and several,
for the first width and for any: its own limit of 8 would silently run what is beyond it uncompiled."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Pass-through options by the configuration object that owns the name."""

    model: Mapping[str, Scalar]
    ddp: Mapping[str, Scalar]
    optimizer: Mapping[str, Scalar]


def join_process_group(seed: int) -> None:
    """Form (once per process) a group of one rank. Several ranks need rows to be dealt out among them first."""
    if not distributed.is_initialized():
        kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(kind, store=HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(seed)


def sort_options(options: Mapping[str, Scalar]) -> Options:
    """Give each option to the configuration that has a field of its name; unknown ones are refused.

    Those that nobody may set are refused before (``options``).
    """
    owners = {"model": TransformerConfig, "ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}
    fields = {owner: {field.name for field in dataclasses.fields(kind)} for owner, kind in owners.items()}
    sorted_options: dict[str, dict[str, Scalar]] = {owner: {} for owner in owners}
    for name, value in options.items():
        owner = next((owner for owner, names in fields.items() if name in names), None)
        if owner is None:
            close = difflib.get_close_matches(name, set().union(*fields.values()), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"trainer.megatron.{name} is no Megatron-Core option{hint}")
        sorted_options[owner][name] = value
    return Options(**sorted_options)


def transformer_config(shape: ModelShape, dtype: torch.dtype, options: Mapping[str, Scalar]) -> TransformerConfig:
    """The model's configuration: no fused kernels, per-token loss (gradients are summed, not averaged)."""
    fields: dict[str, object] = {
        "num_layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_key_value_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "calculate_per_token_loss": True,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    if shape.num_experts:
        fields |= {
            "num_moe_experts": shape.num_experts,
            "moe_router_topk": shape.num_experts_per_tok,
            "moe_ffn_hidden_size": shape.moe_intermediate_size,
            "moe_router_load_balancing_type": "none",
            # Softmax over the chosen ones is what norm_topk_prob names; over all of them is its absence.
            "moe_router_pre_softmax": not shape.norm_topk_prob,
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
            "moe_router_dtype": "fp32",
        }
    return TransformerConfig(**(fields | dict(options)))


class ScoringModel(GPTModel):  # type: ignore[misc]  # megatron leaves it untyped
    """A GPT that answers with log-probabilities where megatron's computes a loss."""

    compiled = False
    """Whether the arithmetic on the logits is compiled too."""
    temperatures: torch.Tensor | None = None
    """[rows] of the pass to come; None: all are 1."""

    def compile_layers(self) -> None:
        """Compile the forward pass of each decoder layer with torch, once for all layers of one kind."""
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
        for layer in self.decoder.layers:
            layer.forward = torch.compile(layer.forward)
        self.compiled = True

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Log-probability [rows, width] of ``labels`` [rows, width] under ``logits`` [width, rows, vocab].

        Megatron's hook for the loss: here the logits are still in the order that the output layer made them in.
        """
        targets = labels.transpose(0, 1).contiguous()
        scales = None if self.temperatures is None else self.temperatures.expand(targets.shape)
        return target_logprobs(logits, targets, scales, compiled=self.compiled).transpose(0, 1)


def build_model(shape: ModelShape, config: TransformerConfig, device: torch.device) -> ScoringModel:
    """A model with undefined weights (a converter fills them) on the device, all in the configuration's type."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    model = ScoringModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rotary_percent=1.0,
    )
    # Norms without Transformer Engine are torch's own: made on the host, in fp32.
    return cast(ScoringModel, model.to(device=device, dtype=config.params_dtype))
