"""However a step is cut into rows, micro-batches and ranks, its loss and gradient are the same."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))

from trainer_helpers import group, model_dir, random_batch, rollout, trajectory

from tollway.records import Group
from tollway.trainer.advantages import normalised
from tollway.trainer.backends.base import BackendSpec
from tollway.trainer.backends.microbatch import split
from tollway.trainer.batch import Row
from tollway.trainer.config import TrainerConfig
from tollway.trainer.losses import total_loss
from tollway.trainer.planner import plan

attempts = st.tuples(
    st.sampled_from([0.0, 0.25, 1.0]),
    st.lists(st.integers(0, 1), min_size=1, max_size=12).filter(any),
    st.lists(st.floats(-5, -0.01), min_size=12, max_size=12),
)
steps = st.lists(st.lists(attempts, min_size=2, max_size=4), min_size=1, max_size=3)


def planned_rows(step: list[list[tuple]], reduction: str, cuts: list[int] | None = None) -> tuple[Row, ...]:
    """Plan a step; with ``cuts``, each rollout is split into rows whose shared prefix is context."""
    groups: list[Group] = []
    for members in step:
        rollouts = []
        for number, (reward, mask, logprobs) in enumerate(members):
            whole, known = [0, *mask], [0.0, *logprobs[: len(mask)]]
            pieces = [whole]
            if cuts is not None:
                edge = 1 + cuts[number % len(cuts)] % len(mask)
                first = whole[:edge]
                pieces = [p for p in (first, [0] * edge + whole[edge:]) if any(p)]
            rows = [trajectory(piece, logprobs=known[: len(piece)]) for piece in pieces]
            rollouts.append(rollout(reward, *rows))
        groups.append(group(*rollouts))
    return plan(groups, TrainerConfig(reduction=reduction)).batch.rows


def scores(rows: tuple[Row, ...]) -> list[np.ndarray]:
    """A log-probability for each token that depends on nothing but the token's own record."""
    return [np.where(row.loss_mask == 1, row.old_logprobs * 0.9 - 0.05, np.nan).astype(np.float32) for row in rows]


@given(steps, st.sampled_from(["token_mean", "sample_mean"]), st.lists(st.integers(0, 50), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_splitting_rollouts_into_sibling_rows_does_not_change_the_loss(step, reduction, cuts) -> None:
    objective = plan([], TrainerConfig()).batch.objective
    whole, cut = planned_rows(step, reduction), planned_rows(step, reduction, cuts)
    assert total_loss(whole, scores(whole), objective) == pytest.approx(
        total_loss(cut, scores(cut), objective), rel=1e-9, abs=1e-12
    )


@given(steps, st.sampled_from(["token_mean", "sample_mean"]), st.randoms(use_true_random=False), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_the_losses_of_ranks_sum_to_the_loss_of_the_step(step, reduction, shuffle, ranks) -> None:
    rows = planned_rows(step, reduction)
    objective = plan([], TrainerConfig()).batch.objective
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    scored = scores(rows)
    parts = [
        total_loss([rows[i] for i in order[r::ranks]], [scored[i] for i in order[r::ranks]], objective)
        for r in range(ranks)
    ]
    assert sum(parts) == pytest.approx(total_loss(rows, scored, objective), rel=1e-9, abs=1e-12)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16), st.floats(-1e3, 1e3), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_advantages_sum_to_zero_and_do_not_see_a_shift_or_the_order(rewards, shift, shuffle) -> None:
    values = np.array(rewards)
    found = normalised(values)
    assert found.sum() == pytest.approx(0, abs=1e-6)
    assert (found**2).sum() <= values.size - 1 + 1e-9
    order = list(range(values.size))
    shuffle.shuffle(order)
    if values.std() > 1e-3:
        assert normalised(values[order] + shift) == pytest.approx(found[order], abs=1e-6)


@given(st.integers(1, 20), st.integers(1, 400), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_every_row_lands_in_exactly_one_micro_batch_within_the_budget(count, budget, seed) -> None:
    batch = random_batch(count, seed=seed)
    passes = split(batch.rows, budget)
    assert sorted(index for micro in passes for index in micro.members) == list(range(count))
    assert all(micro.ids.size <= budget or len(micro.members) == 1 for micro in passes)
    assert sum(float(micro.weights.sum()) for micro in passes) == pytest.approx(1.0)


@pytest.mark.parametrize("moe", [False, True])
def test_micro_batches_do_not_change_the_gradient(tmp_path: Path, moe: bool) -> None:
    from tollway.trainer.backends.factory import build

    folder = model_dir(tmp_path / "model", moe=moe)
    batch = random_batch(7, seed=3)
    found = []
    for budget in (1, 64, 10_000):
        backend = build(BackendSpec(kind="torch", model_dir=str(folder), micro_batch_tokens=budget))
        found.append(backend.gradients(batch))
    largest = max(float(grad.abs().max()) for grad in found[0].values())
    assert largest > 1e-4
    for other in found[1:]:
        assert max(float((found[0][n] - other[n]).abs().max()) for n in other) < 1e-6
