"""Warm start: supervised steps on demonstrations, through the same weighted loss as everything else.

Depends on the planner and a backend handle; must not know where demonstrations come from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tollway.errors import ConfigError
from tollway.records import Ids
from tollway.trainer.backends.base import BackendHandle
from tollway.trainer.batch import OptimizerSettings
from tollway.trainer.config import OptimizerConfig, WarmStartConfig
from tollway.trainer.events import Listener, WarmStartStep
from tollway.trainer.planner import demonstration_batch

__all__ = ["Demonstration", "learning_rate", "optimizer_settings", "warm_start"]

Demonstration = tuple[Ids, NDArray[np.uint8]]
"""Token ids [n] and a mask [n] of those that an agent would sample."""


def learning_rate(config: OptimizerConfig, updates: int, total: int) -> float:
    """Rate of the update after ``updates`` of ``total``: linear warm-up, then linear to the final rate.

    >>> config = OptimizerConfig(lr=1.0, warmup_updates=2, final_lr=0.5)
    >>> [learning_rate(config, done, 5) for done in range(5)]
    [0.5, 1.0, 0.8333333333333334, 0.6666666666666667, 0.5]
    """
    if updates < config.warmup_updates:
        return config.lr * (updates + 1) / config.warmup_updates
    top = max(0, config.warmup_updates - 1)
    share = min(1.0, (updates - top) / max(1, total - 1 - top))
    return config.lr * (1.0 - share * (1.0 - config.final_lr))


def optimizer_settings(config: OptimizerConfig) -> OptimizerSettings:
    """The part of the optimizer's configuration that a backend keeps."""
    return OptimizerSettings(betas=config.betas, weight_decay=config.weight_decay, clip_grad=config.clip_grad)


async def warm_start(
    backend: BackendHandle,
    demonstrations: Sequence[Demonstration],
    config: WarmStartConfig,
    *,
    seed: int = 0,
    on_event: Listener = lambda _event: None,
) -> float | None:
    """Train on shuffled passes over ``demonstrations``; returns the last loss, ``None`` for 0 steps.

    The optimizer starts fresh; whoever trains next resets it again. Raises ``ConfigError`` without data.
    """
    if not config.steps:
        return None
    if not demonstrations:
        raise ConfigError("trainer.warm_start.steps is set, but there are no demonstrations")
    await backend.reset_optimizer(optimizer_settings(config.optimizer))
    draw = np.random.default_rng(seed)
    order: list[int] = []
    loss = 0.0
    for step in range(config.steps):
        while len(order) < config.batch:
            order += draw.permutation(len(demonstrations)).tolist()
        chosen, order = order[: config.batch], order[config.batch :]
        batch = demonstration_batch([_weighted(demonstrations[index], config) for index in chosen])
        report = await backend.step(batch, lr=learning_rate(config.optimizer, step, config.steps))
        loss = report.loss
        on_event(WarmStartStep(step + 1, config.steps, loss))
    return loss


def _weighted(demonstration: Demonstration, config: WarmStartConfig) -> tuple[Ids, NDArray[np.float64]]:
    ids, mask = demonstration
    before_first = np.cumsum(mask) == 0
    context = np.where(before_first, config.prompt_weight, config.context_weight)
    return ids, np.where(mask == 1, 1.0, context)
