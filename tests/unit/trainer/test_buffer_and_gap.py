"""Staleness from recorded spans, the admission bound, and the gap at equal weights."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from trainer_helpers import group, rollout, trajectory

from tollway.records import Group
from tollway.trainer.buffer import GroupBuffer, Ready, may_admit, newest_version, staleness
from tollway.trainer.gap import Gap, measure, scoring_batch, trajectories_at


def sampled_at(*versions: int) -> Group:
    row = trajectory([0] + [1] * len(versions), versions=[-1, *versions])
    return group(rollout(1.0, row), rollout(0.0, trajectory([0, 1], versions=max(versions))))


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    assert staleness(sampled_at(3, 5), 5) == 2
    assert newest_version(sampled_at(3, 5)) == 5
    assert staleness(group(rollout(None)), 5) == 5
    empty = group(rollout(0.0, trajectory([0, 0])))
    assert (staleness(empty, 5), newest_version(empty)) == (0, -1)


async def test_waiting_in_the_buffer_counts_as_age_and_stale_groups_are_dropped_and_counted() -> None:
    dropped: list[int] = []
    buffer = GroupBuffer(max_staleness=2, on_stale=lambda ready: dropped.append(ready.index))
    buffer.put(Ready(0, sampled_at(0)))
    buffer.put(Ready(1, sampled_at(4)))
    buffer.put(Ready(2, sampled_at(2)))
    taken = await buffer.take(2, 4)
    assert [ready.index for ready in taken] == [1, 2]
    assert dropped == [0]
    window = buffer.close_window()
    assert (sorted(window.ages), window.stale) == ([0, 2, 4], 1)
    assert buffer.close_window().ages == []


async def test_taking_waits_until_enough_fresh_groups_are_there() -> None:
    buffer = GroupBuffer(max_staleness=0, on_stale=lambda ready: None)
    waiting = asyncio.create_task(buffer.take(2, 1))
    for index, version in enumerate((1, 0, 1)):
        await asyncio.sleep(0)
        assert not waiting.done()
        buffer.put(Ready(index, sampled_at(version)))
    assert [ready.index for ready in await asyncio.wait_for(waiting, 5)] == [0, 2]
    assert buffer.ages(1) == []


@pytest.mark.parametrize(("lead", "versions", "limit"), [(0, 0, 4), (1, 0, 8), (1, 3, 20), (4, 1, 24)])
def test_admission_stops_at_the_bound(lead: int, versions: int, limit: int) -> None:
    admitted = 0
    while may_admit(admitted=admitted, batch=4, lead=lead, versions=versions):
        admitted += 1
    assert admitted == limit


def test_the_gap_is_taken_over_tokens_of_the_scoring_weights_only() -> None:
    row = trajectory([0, 1, 0, 1, 1], versions=[-1, 3, -1, 4, 4], logprobs=[0, -1, 0, -2, -3], temperature=0.7)
    old = trajectory([0, 1], versions=3)
    rows = trajectories_at([group(rollout(1.0, row, old))], 4)
    assert rows == [row]
    assert scoring_batch(rows).rows[0].temperature == 0.7
    gap = measure(rows, [np.array([np.nan, -9, -30, -2.5, -3.25], dtype=np.float32)], 4)
    assert (gap.tokens, gap.largest, gap.mean) == (2, 0.5, 0.375)


def test_gaps_join_with_the_larger_maximum_and_all_tokens() -> None:
    joined = Gap(2, 1.0, 0.75) + Gap(3, 0.5, 0.25)
    assert (joined.tokens, joined.total, joined.largest, joined.mean) == (5, 1.5, 0.75, 0.3)
    assert Gap().mean is None
