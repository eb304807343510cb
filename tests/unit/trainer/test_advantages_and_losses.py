"""Group statistics, the clipped loss, and the mismatch figures, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tollway.trainer.advantages import has_variance, normalised
from tollway.trainer.batch import Objective, Row
from tollway.trainer.config import TrainerConfig
from tollway.trainer.losses import mismatch, policy_loss, total_loss
from tollway.trainer.planner import objective_of


def row(mask: list[int], *, old: list[float], advantages: list[float] | None = None) -> Row:
    on = np.array(mask, dtype=np.uint8)
    return Row(
        token_ids=np.arange(on.size, dtype=np.int32),
        loss_mask=on,
        weights=on / max(1, on.sum()),
        advantages=on * np.array(advantages if advantages is not None else [1.0] * on.size),
        old_logprobs=np.where(on == 1, old, np.nan).astype(np.float32),
    )


def test_advantages_use_the_sample_deviation() -> None:
    assert normalised(np.array([1.0, 0, 0, 0])) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-4)
    one_of_eight = np.array([1.0] + [0.0] * 7)
    assert 0.875 / normalised(one_of_eight)[0] == pytest.approx(0.3536, abs=1e-4)


def test_advantages_of_one_group_sum_to_zero() -> None:
    assert normalised(np.array([1.0, 0, 0, 0])).sum() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("rewards", [[0.3] * 8, [0.1] * 7, [0.35] * 16, [5.0]])
def test_equal_rewards_have_no_variance_whatever_float32_says(rewards: list[float]) -> None:
    assert not has_variance(np.array(rewards, dtype=np.float64))


def test_a_small_real_difference_is_variance() -> None:
    assert has_variance(np.array([0, 0, 0, 1e-3]))


def test_statistics_of_one_rollout_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        normalised(np.array([1.0]))


def test_large_means_do_not_swallow_the_deviation() -> None:
    rewards = 1000 + 0.01 * np.array([1.0, -1.0, 1.0, -1.0])
    assert normalised(rewards) == pytest.approx(np.array([1, -1, 1, -1]) * 0.01 / (0.01 * np.sqrt(4 / 3) + 1e-6))


def test_the_dual_clip_reaches_the_loss_from_the_configuration() -> None:
    ratios, advantages = np.array([2.0, 2.0, 0.5]), np.array([2.0, -2.0, 2.0])
    plain = objective_of(TrainerConfig())
    bounded = objective_of(TrainerConfig(dual_clip=1.5))
    assert policy_loss(np.log(ratios), np.zeros(3), advantages, bounded) == pytest.approx([-2.4, 3.0, -1.0])
    assert policy_loss(np.log(ratios), np.zeros(3), advantages, plain) == pytest.approx([-2.4, 4.0, -1.0])


def test_clip_bounds_are_distances_from_one_in_the_configuration() -> None:
    objective = objective_of(TrainerConfig(clip_low=0.2, clip_high=0.28))
    assert (objective.ratio_low, objective.ratio_high) == pytest.approx((0.8, 1.28))


def test_a_hopeless_token_stays_finite() -> None:
    loss = policy_loss(np.array([100.0, -100.0]), np.zeros(2), np.array([0.0, 0.0]), Objective())
    assert loss.tolist() == [0.0, 0.0]
    assert np.isfinite(policy_loss(np.array([100.0]), np.zeros(1), np.array([-1.0]), Objective())).all()


def test_the_denominator_counts_trained_tokens_only() -> None:
    mask = [0, 1, 1, 0, 0, 0, 1]
    batch = [row(mask, old=[0.0] * 7)]
    scored = [np.full(7, -1.0, dtype=np.float32)]
    assert total_loss(batch, scored, Objective(kind="nll")) == pytest.approx(1.0)


def test_masked_tokens_do_not_enter_the_mismatch() -> None:
    batch = [row([0, 1, 0, 1], old=[0.0, -1.0, 0.0, -2.0])]
    found = mismatch(batch, [np.array([np.nan, -1.5, -30.0, -2.0], dtype=np.float32)], Objective())
    assert found is not None
    assert (found.tokens, found.abs_diff, found.abs_diff_max) == (2, pytest.approx(0.25), pytest.approx(0.5))


def test_equal_policies_have_no_mismatch() -> None:
    found = mismatch([row([0, 1, 1], old=[0, -1, -2])], [np.array([np.nan, -1, -2], np.float32)], Objective())
    assert found is not None
    assert (found.abs_diff, found.kl, found.ess_ratio, found.clipfrac) == (0.0, 0.0, 1.0, 0.0)


def test_kl_and_effective_sample_size_follow_their_formulas() -> None:
    delta = np.array([0.5, -0.25])
    found = mismatch(
        [row([0, 1, 1], old=[0, -1, -2])],
        [np.array([np.nan, -1 + delta[0], -2 + delta[1]], np.float32)],
        Objective(),
    )
    assert found is not None
    ratio = np.exp(delta)
    assert found.kl == pytest.approx((ratio - 1 - delta).mean(), rel=1e-6)
    assert found.ess_ratio == pytest.approx(ratio.sum() ** 2 / (2 * (ratio**2).sum()), rel=1e-6)
    assert found.clipfrac == pytest.approx(0.5)


def test_nothing_trained_has_no_mismatch_rather_than_zero() -> None:
    assert mismatch([row([0, 0], old=[0, 0])], [np.zeros(2, np.float32)], Objective()) is None
