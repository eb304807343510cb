"""The `[trainer]` section: how a run learns. Values only; nothing here decides or computes.

Must not import more than pydantic (through ``tollway.config``) and what is as light: every process reads it at start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from tollway.config import Section
from tollway.trainer.backends.options import refusal

__all__ = ["OptimizerConfig", "TrainerConfig", "WarmStartConfig"]

Scalar = bool | int | float | str


class OptimizerConfig(Section):
    """AdamW in fp32: linear warm-up, then constant or falling linearly to the last update."""

    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled; matrices only, norm weights are never decayed."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates over which the rate rises linearly from lr / warmup_updates to lr."""
    final_lr: float = Field(default=1.0, gt=0, le=1)
    """Rate of the last update as a share of lr; 1 keeps it constant."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""

    @model_validator(mode="after")
    def _betas_are_fractions(self) -> Self:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must lie in [0, 1)")
        return self


class WarmStartConfig(Section):
    """Supervised steps on demonstrations before reinforcement; 0 steps skip it."""

    steps: int = Field(default=0, ge=0)
    batch: int = Field(default=32, ge=1)
    """Demonstrations per step."""
    prompt_weight: float = Field(default=1.0, ge=0)
    """Loss weight of tokens before the first that an agent would sample; its own weigh 1."""
    context_weight: float = Field(default=1.0, ge=0)
    """Loss weight of tokens between those, such as tool output."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=2e-3, weight_decay=0.01, warmup_updates=20)


class TrainerConfig(Section):
    """Everything the trainer reads. Bounds are checked here, so that a run never starts with a bad one."""

    backend: Literal["megatron", "torch"] = "megatron"
    steps: int = Field(default=100, ge=1)
    groups_per_step: int = Field(default=16, ge=1)
    samples_per_group: int = Field(default=8, ge=1)
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimiser updates on each batch; every update sees the whole batch."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Per model call; unset: what the context leaves."""
    micro_batch_tokens: int = Field(default=2048, ge=1)
    """Padded tokens in one forward pass; changes speed and memory, never the loss."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the trained weights; gradients and optimizer state are fp32 in both. auto: bfloat16 on a GPU."""
    compile_layers: bool = False
    """Compile each decoder layer with torch; worth its minute on a GPU."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """What the training device can do at best at this dtype, to report the share of it; unset: no share."""
    optimizer: OptimizerConfig = OptimizerConfig()
    warm_start: WarmStartConfig = WarmStartConfig()

    estimator: Literal["grpo"] = "grpo"
    group_scoring: Literal["individual", "group"] = "individual"
    """A failed attempt leaves its group's statistics alone, or fails the whole group."""
    reduction: Literal["token_mean", "sample_mean"] = "token_mean"
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(default=0.2, ge=0)
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound c on the loss of tokens with negative advantage; unset: none."""

    schedule: Literal["one_step_ahead", "sync"] = "one_step_ahead"
    max_staleness: int = Field(default=4, ge=0)
    """Groups older than this many versions are dropped when they are taken."""
    dynamic_sampling: bool = False
    """Replace groups without reward variance by fresh ones; off, the step trains on the others."""
    oversample_limit: float = Field(default=4.0, ge=1)
    """With dynamic_sampling: fresh groups per step, in units of groups_per_step, before it trains on fewer."""
    max_groups_in_flight: int | None = Field(default=None, ge=1)
    """Groups generating at once; unset: groups_per_step."""
    max_failed_groups: int = Field(default=8, ge=1)
    """Groups in a row without one usable attempt before the run stops."""

    refit_transport: Literal["tensor", "cuda_ipc", "disk"] = "tensor"
    """How weights reach engines: in the calls themselves; as handles of memory on a GPU that trainer and engines
    share; or as model directories that engines read."""
    weights_dir: Path | None = None
    """Where refit_transport = "disk" writes them, held for this run alone; memory (a tmpfs) is fastest. Up to three
    versions lie there, and two stay when the run is over. Unset: weights/ in the run directory."""
    colocated: bool = False
    """Trainer and engines take turns on one device: engines sleep while the trainer trains, and its memory lies on
    the host while they generate. Wants schedule = "sync"; SGLang wants enable-memory-saver = true."""
    release_tags: tuple[Literal["kv_cache", "weights", "cuda_graph"], ...] = ("kv_cache", "weights", "cuda_graph")
    """What engines that sleep give back."""
    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    bucket_mb: float | None = Field(default=None, gt=0)
    """Of weights that travel together; a larger tensor travels alone. Unset: 512 as handles, and 16 inside a call,
    since an engine parses a call whole, on one thread, and dearer the longer it is."""
    refit_timeout_s: float = Field(default=120.0, gt=0)
    """For each control call of a refit; an engine that exceeds it is quarantined."""
    exact_drain_s: float = Field(default=60.0, ge=0)
    """How long a refit waits, before it pauses an engine, for sessions and calls that are fixed to the version that the
    engine has; without any it does not wait."""
    backend_timeout_s: float = Field(default=1800.0, gt=0, le=1e6)
    """For one call to the training process; longer silence counts as lost."""

    checkpoint_every: int = Field(default=10, ge=1)
    checkpoints_kept: int = Field(default=2, ge=1)
    keep_trajectories: bool = True
    """Keep the trained groups under trajectories/ in the run directory."""
    gap_every: int = Field(default=5, ge=0)
    """Probe the logprob gap after every this many refits; 0: only on the first batch."""
    gap_turns: int = Field(default=32, ge=1)
    megatron: dict[str, Scalar] = Field(default_factory=dict)
    """Passed to Megatron-Core's TransformerConfig, DistributedDataParallelConfig or OptimizerConfig by name."""

    @property
    def bucket_bytes(self) -> int:
        """``bucket_mb``, or what fits the transport."""
        fitting = 512.0 if self.refit_transport == "cuda_ipc" else 16.0
        return int((self.bucket_mb or fitting) * 2**20)

    @model_validator(mode="after")
    def _is_trainable(self) -> Self:
        if self.samples_per_group < 2:
            raise ValueError(f"{self.estimator} compares attempts within a group: samples_per_group must be at least 2")
        if not 0.0 < self.temperature < float("inf"):
            raise ValueError(
                f"temperature {self.temperature}: training samples at a temperature above 0, "
                "because log-probabilities are divided by it"
            )
        if self.top_p != 1.0 or self.top_k != -1:
            raise ValueError(
                f"top_p {self.top_p}, top_k {self.top_k}: the engine renormalises over the kept tokens and the "
                "trainer does not; train with top_p = 1.0 and top_k = -1"
            )
        if self.schedule == "one_step_ahead" and self.max_staleness < 1:
            raise ValueError("one_step_ahead trains on data one version old: max_staleness must be at least 1")
        return self

    @model_validator(mode="after")
    def _backend_takes_it(self) -> Self:
        reason = refusal(self.backend, dtype=self.dtype, compile_layers=self.compile_layers, options=self.megatron)
        if reason is not None:
            raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def _can_take_turns(self) -> Self:
        if not self.colocated:
            return self
        if self.schedule != "sync":
            raise ValueError(
                f"colocated with schedule {self.schedule!r}: engines cannot generate while the trainer has their "
                'device; set trainer.schedule = "sync"'
            )
        if self.pause_mode == "in_place":
            raise ValueError(
                "colocated with pause_mode 'in_place': engines that sleep give back the keys and values that it keeps; "
                'use "retract" or "abort"'
            )
        if not self.release_tags or len(set(self.release_tags)) < len(self.release_tags):
            raise ValueError(
                f"release_tags {list(self.release_tags)}: colocated engines give back at least one of kv_cache, "
                "weights and cuda_graph, each named once"
            )
        return self

    @property
    def lead(self) -> int:
        """Batches that may be generating or buffered beyond the one being trained."""
        return 0 if self.schedule == "sync" else 1
