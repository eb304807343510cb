"""What every trained token weighs, and which groups train at all."""

from __future__ import annotations

import numpy as np
import pytest
from trainer_helpers import group, rollout, trajectory

from tollway.errors import InvalidRecord
from tollway.trainer.config import TrainerConfig
from tollway.trainer.losses import total_loss
from tollway.trainer.planner import demonstration_batch, judge, plan

SAMPLE_MEAN = TrainerConfig(reduction="sample_mean")


def advantages(planned: object) -> list[float]:
    return [float(row.advantages[row.loss_mask == 1][0]) for row in planned.batch.rows]  # type: ignore[attr-defined]


def test_a_rollout_in_many_rows_counts_once_in_its_groups_statistics() -> None:
    rows = tuple(trajectory([0, 1, 1]) for _ in range(5))
    planned = plan([group(rollout(1.0, *rows), rollout(0.0), rollout(0.0), rollout(0.0))], TrainerConfig())
    assert advantages(planned) == pytest.approx([1.5] * 5 + [-0.5] * 3, abs=1e-4)


def test_branching_rollouts_of_two_prompts_get_the_advantages_of_their_rewards() -> None:
    row = trajectory([0, 1])
    first = group(rollout(0.0, row), rollout(1.0, row, row, row))
    second = group(rollout(2.0, row, row), rollout(4.0, row))
    assert advantages(plan([first, second], TrainerConfig())) == pytest.approx(
        [-0.7071, 0.7071, 0.7071, 0.7071, -0.7071, -0.7071, 0.7071], abs=1e-4
    )


def test_rows_of_one_rollout_with_different_rewards_are_an_error() -> None:
    bad = rollout(2.0, trajectory([0, 1], reward=2.0), trajectory([0, 1], reward=6.0))
    with pytest.raises(InvalidRecord, match="reward"):
        plan([group(bad, rollout(0.0))], TrainerConfig())


def test_token_mean_is_over_the_whole_step_not_over_its_parts() -> None:
    one = rollout(1.0, trajectory([0, 1]))
    three = rollout(0.0, trajectory([0, 1, 1, 1]))
    planned = plan([group(one, three)], TrainerConfig())
    losses = {2: 4.0, 4: 0.0}
    total = sum(float(row.weights.sum()) * losses[row.token_ids.size] for row in planned.batch.rows)
    assert total == pytest.approx(1.0)


def test_sample_mean_gives_each_rollout_the_same_share_over_all_its_rows() -> None:
    long = rollout(1.0, trajectory([0, 1, 1, 1]), trajectory([0, 0, 0, 1, 1, 1]))
    short = rollout(0.0, trajectory([0, 1]))
    rows = plan([group(long, short)], SAMPLE_MEAN).batch.rows
    assert [float(row.weights.sum()) for row in rows] == pytest.approx([0.25, 0.25, 0.5])


@pytest.mark.parametrize("config", [TrainerConfig(), SAMPLE_MEAN])
def test_weights_of_a_step_sum_to_one(config: TrainerConfig) -> None:
    groups = [group(rollout(1.0), rollout(0.0, trajectory([0, 1, 0, 1, 1]))), group(rollout(3.0), rollout(1.0))]
    assert sum(float(row.weights.sum()) for row in plan(groups, config).batch.rows) == pytest.approx(1.0)


def test_a_failed_member_leaves_the_others_statistics_alone() -> None:
    failed = group(rollout(1.0), rollout(None, error="sandbox gone"), rollout(0.0), rollout(0.0))
    fine = group(rollout(1.0), rollout(0.0), rollout(0.0), rollout(0.0))
    planned = plan([failed, fine], TrainerConfig())
    rewards = np.array([1.0, 0, 0])
    expected = (rewards - 1 / 3) / (rewards.std(ddof=1) + 1e-6)
    assert planned.verdicts == ("train", "train")
    assert advantages(planned) == pytest.approx([*expected, 1.5, -0.5, -0.5, -0.5], abs=1e-4)


def test_group_scoring_drops_a_group_with_a_failed_member_whole() -> None:
    failed = group(rollout(1.0), rollout(None), rollout(0.0))
    fine = group(rollout(1.0), rollout(0.0))
    planned = plan([failed, fine], TrainerConfig(group_scoring="group"))
    assert planned.verdicts == ("aborted", "train")
    assert planned.rollouts == 2


def test_a_reward_that_is_no_number_is_a_failed_attempt_not_a_poisoned_group() -> None:
    broken = group(rollout(1.0), rollout(float("nan")), rollout(0.0), rollout(float("inf")))
    planned = plan([broken], TrainerConfig())
    assert planned.verdicts == ("train",)
    assert advantages(planned) == pytest.approx([0.7071, -0.7071], abs=1e-4)


def test_one_survivor_is_nothing_to_compare() -> None:
    assert judge(group(rollout(1.0), rollout(None), rollout(None))) == "aborted"
    assert judge(group(rollout(1.0), rollout(1.0))) == "zero_variance"
    assert judge(group(rollout(1.0), rollout(0.0))) == "train"


def test_a_step_of_equal_rewards_has_an_empty_batch() -> None:
    planned = plan([group(rollout(1.0), rollout(1.0))], TrainerConfig())
    assert planned.batch.rows == ()
    assert planned.verdicts == ("zero_variance",)


def test_side_requests_are_not_trained_and_do_not_count() -> None:
    side = trajectory([0, 1, 1, 1, 1], trainable=False)
    planned = plan([group(rollout(1.0, trajectory([0, 1]), side), rollout(0.0, trajectory([0, 1])))], SAMPLE_MEAN)
    assert [float(row.weights.sum()) for row in planned.batch.rows] == pytest.approx([0.5, 0.5])


def test_each_row_keeps_the_temperature_it_was_sampled_at() -> None:
    cold = rollout(1.0, trajectory([0, 1], temperature=0.7))
    assert [r.temperature for r in plan([group(cold, rollout(0.0))], TrainerConfig()).batch.rows] == [0.7, 1.0]


def test_demonstrations_are_a_token_mean_that_skips_the_first_token() -> None:
    ids = np.arange(4, dtype=np.int32)
    batch = demonstration_batch([(ids, np.ones(4)), (ids[:2], np.ones(2))])
    scores = [np.array([np.nan, -1, -1, -1], np.float32), np.array([np.nan, -5], np.float32)]
    assert total_loss(batch.rows, scores, batch.objective) == pytest.approx(2.0)
    with pytest.raises(InvalidRecord, match="without a token"):
        demonstration_batch([(ids, np.zeros(4))])
