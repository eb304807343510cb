"""Warm start: demonstrations are learned in a seeded order, on the tokens that were asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trainer_helpers import InProcessBackend, model_dir

from tollway.errors import ConfigError
from tollway.trainer.backends.base import BackendSpec
from tollway.trainer.batch import Batch, StepReport
from tollway.trainer.config import OptimizerConfig, WarmStartConfig
from tollway.trainer.events import WarmStartStep
from tollway.trainer.sft import Demonstration, learning_rate, warm_start


class Recording(InProcessBackend):
    """Also keeps the batches."""

    def __init__(self, folder: Path) -> None:
        super().__init__(BackendSpec(kind="torch", model_dir=str(model_dir(folder))))
        self.batches: list[Batch] = []
        self.rates: list[float] = []

    async def step(self, batch: Batch, *, lr: float) -> StepReport:
        """Note and train."""
        self.batches.append(batch)
        self.rates.append(lr)
        return await super().step(batch, lr=lr)  # type: ignore[return-value]


def demonstrations(count: int = 6) -> list[Demonstration]:
    draw = np.random.default_rng(0)
    return [
        (np.array([1, 2, 3 + draw.integers(0, 2), 4, 5], dtype=np.int32), np.array([0, 0, 1, 0, 1], dtype=np.uint8))
        for _ in range(count)
    ]


SETTINGS = WarmStartConfig(steps=12, batch=4, optimizer=OptimizerConfig(lr=1e-2, warmup_updates=4))


async def test_the_loss_falls_and_every_step_is_told(tmp_path: Path) -> None:
    events: list[object] = []
    backend = Recording(tmp_path)
    final = await warm_start(backend, demonstrations(), SETTINGS, on_event=events.append)  # type: ignore[arg-type]
    losses = [event.loss for event in events if isinstance(event, WarmStartStep)]
    assert len(losses) == 12
    assert final == losses[-1] < losses[0] / 2
    assert backend.rates[:5] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2])


async def test_passes_are_shuffled_by_the_seed_alone(tmp_path: Path) -> None:
    async def order(seed: int) -> list[list[int]]:
        backend = Recording(tmp_path)
        unlike = [(np.full(4, index, dtype=np.int32), np.ones(4, dtype=np.uint8)) for index in range(6)]
        await warm_start(backend, unlike, SETTINGS, seed=seed)  # type: ignore[arg-type]
        return [[int(row.token_ids[0]) for row in batch.rows] for batch in backend.batches]

    first, again, other = await order(1), await order(1), await order(2)
    assert first == again != other
    seen = [index for batch in first for index in batch]
    assert all(sorted(seen[start : start + 6]) == list(range(6)) for start in range(0, 48, 6))


@pytest.mark.parametrize(
    ("prompt", "context", "weights"), [(1, 1, [0, 1, 1, 1, 1]), (0, 0, [0, 0, 1, 0, 1]), (0, 0.5, [0, 0, 1, 0.5, 1])]
)
async def test_prompt_and_tool_output_weigh_what_was_asked_for(
    tmp_path: Path, prompt: float, context: float, weights: list[float]
) -> None:
    backend = Recording(tmp_path)
    settings = WarmStartConfig(steps=1, batch=1, prompt_weight=prompt, context_weight=context)
    await warm_start(backend, demonstrations(1), settings)  # type: ignore[arg-type]
    assert backend.batches[0].rows[0].weights.tolist() == pytest.approx([w / sum(weights) for w in weights])


async def test_no_steps_do_nothing_and_steps_without_data_are_an_error(tmp_path: Path) -> None:
    backend = Recording(tmp_path)
    assert await warm_start(backend, [], WarmStartConfig()) is None  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no demonstrations"):
        await warm_start(backend, [], SETTINGS)  # type: ignore[arg-type]


def test_without_warm_up_and_final_rate_it_is_constant() -> None:
    assert [learning_rate(OptimizerConfig(lr=0.5), n, 100) for n in (0, 1, 99)] == [0.5] * 3


def test_the_rate_rises_to_its_top_and_ends_at_the_final_share() -> None:
    config = OptimizerConfig(lr=1.0, warmup_updates=2, final_lr=0.25)
    rates = [learning_rate(config, updates, 8) for updates in range(8)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[-1] == pytest.approx(0.25)
    assert rates[1:] == sorted(rates[1:], reverse=True)
