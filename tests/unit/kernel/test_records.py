"""Records refuse what does not fit together and never change afterwards."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollway.errors import InvalidRecord
from tollway.records import (
    Group,
    IndexerTopk,
    Rollout,
    RoutedExperts,
    Sampling,
    SamplingMask,
    TokenSpan,
    TopLogprobs,
    Trajectory,
    TurnRecord,
    VersionSpan,
    parse_version,
)


def turn(**changes: object) -> TurnRecord:
    fields: dict[str, object] = {
        "suffix_ids": np.array([1, 2], np.int32),
        "sampled_ids": np.array([3, 4, 5], np.int32),
        "logprobs": np.array([-0.1, -0.2, -0.3], np.float32),
        "versions": (VersionSpan(0, 0, 1), VersionSpan(1, 1, 3)),
        "finish_reason": "stop",
        "sampling": Sampling(),
        "engine_id": "e#1",
        "prompt_tokens": 2,
        "cached_tokens": None,
        "started_at": 0.0,
        "ended_at": 1.0,
    }
    return TurnRecord(**(fields | changes))  # type: ignore[arg-type]


def mask(sizes: list[int]) -> SamplingMask:
    return SamplingMask(
        offsets=np.cumsum([0, *sizes], dtype=np.int32),
        ids=np.arange(sum(sizes), dtype=np.uint16),
        logprobs=np.zeros(len(sizes), np.float32),
    )


def row(**changes: object) -> Trajectory:
    fields: dict[str, object] = {
        "token_ids": np.array([1, 2, 3, 4], np.int32),
        "loss_mask": np.array([0, 0, 1, 1], np.uint8),
        "logprobs": np.array([np.nan, np.nan, -0.5, -0.25], np.float32),
        "weight_version": np.array([-1, -1, 3, 4], np.int32),
        "session_id": "s",
        "leaf": 0,
        "branch_reason": "root",
        "turn_spans": (TokenSpan(2, 4),),
        "finish_reasons": ("stop",),
        "sampling": Sampling(),
        "engine_ids": ("e#1",),
        "cached_tokens": (0,),
    }
    return Trajectory(**(fields | changes))  # type: ignore[arg-type]


def test_a_turn_is_frozen_after_construction() -> None:
    record = turn()
    with pytest.raises(ValueError, match="read-only"):
        record.sampled_ids[0] = 9
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.finish_reason = "length"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": np.zeros(2, np.float32)}, "2 logprobs for 3"),
        ({"logprobs": np.array([0, np.nan, 0], np.float32)}, "non-finite"),
        ({"logprobs": np.array([0, -np.inf, 0], np.float32)}, "non-finite"),
        ({"versions": (VersionSpan(0, 0, 1), VersionSpan(1, 2, 3))}, "gap at token 1"),
        ({"versions": (VersionSpan(0, 0, 2),)}, "cover 2 of 3"),
        ({"sampled_ids": np.array([3, 4, 5], np.int64)}, "int32"),
        ({"prompt_tokens": 1}, "shorter than its suffix"),
        (
            {"top_logprobs": TopLogprobs(ids=np.zeros((2, 1), np.int32), logprobs=np.zeros((2, 1), np.float32))},
            "2 top rows",
        ),
        ({"sampling_mask": mask([1, 1])}, "sampling mask of 2 rows for 3 sampled"),
    ],
)
def test_a_turn_that_does_not_fit_together_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRecord, match=message):
        turn(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": np.array([0, 0, 2, 1], np.uint8)}, "other than 0 and 1"),
        ({"logprobs": np.array([0, np.nan, -0.5, -0.25], np.float32)}, "exactly where the mask is 1"),
        ({"logprobs": np.array([np.nan, np.nan, np.nan, -0.25], np.float32)}, "exactly where the mask is 1"),
        ({"weight_version": np.array([0, -1, 3, 4], np.int32)}, "weight_version"),
        ({"weight_version": np.array([-1, -1, -1, 4], np.int32)}, "weight_version"),
        ({"loss_mask": np.zeros(3, np.uint8)}, "loss_mask has shape"),
        ({"finish_reasons": ()}, "per-turn fields"),
        ({"routed_experts": RoutedExperts(start=0, ids=np.zeros((4, 1, 2), np.uint8))}, "4 route rows for 4 tokens"),
        ({"routed_experts": RoutedExperts(start=1, ids=np.zeros((3, 1, 2), np.uint8))}, "start at 1, want 0"),
        ({"indexer_topk": IndexerTopk(start=0, ids=np.zeros((2, 1, 2), np.int16))}, "2 indexer rows for 4 tokens"),
        ({"sampling_mask": mask([1, 1, 1])}, "3 rows of sampling mask for 2 masked"),
        ({"prompt_tokens": (2, 3)}, "per-turn fields"),
        ({"turn_times": ((0.0, 1.0),) * 2}, "per-turn fields"),
        ({"turn_sampling": (Sampling(),) * 2}, "per-turn fields"),
        ({"version_spans": (VersionSpan(3, 2, 3),)}, "cover .2, 3. of call .2, 4."),
        ({"version_spans": (VersionSpan(3, 1, 4),)}, "cover .2, 2. of call .2, 4."),
        ({"version_spans": (VersionSpan(3, 2, 4), VersionSpan(3, 4, 5))}, "outside every call"),
    ],
)
def test_a_row_that_does_not_fit_together_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRecord, match=message):
        row(**changes)


def test_a_row_may_say_more_than_it_must() -> None:
    full = row(
        prompt_tokens=(2,),
        turn_times=((0.5, 1.0),),
        turn_sampling=(Sampling(seed=1),),
        version_spans=(VersionSpan(3, 2, 3, "sglang", "fp8"), VersionSpan(4, 3, 4, "embedded", "float32")),
        indexer_topk=IndexerTopk(start=0, ids=np.zeros((3, 1, 2), np.int16)),
        sampling_mask=mask([1, 3]),
        metadata={"a": [1]},
    )
    assert full.version_spans[1].precision == "float32"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"offsets": np.array([0, 1, 1], np.int32)}, "row without ids"),
        ({"offsets": np.array([1, 2, 3], np.int32)}, "row without ids"),
        ({"offsets": np.zeros(0, np.int32)}, "row without ids"),
        ({"offsets": np.array([0, 1, 4], np.int32)}, "3 ids, its rows end at 4"),
        ({"offsets": np.array([0, 1, 3], np.int64)}, "offsets of int64"),
        ({"ids": np.array([1, 2, 3], np.int64)}, "int64"),
        ({"logprobs": np.zeros(3, np.float32)}, "3 finite mask logprobs wanted for 2 rows"),
        ({"logprobs": np.array([0, np.nan], np.float32)}, "finite"),
    ],
)
def test_a_sampling_mask_that_does_not_fit_together_is_refused(fields: dict[str, object], message: str) -> None:
    good: dict[str, object] = {
        "offsets": np.array([0, 1, 3], np.int32),
        "ids": np.array([1, 2, 3], np.uint16),
        "logprobs": np.zeros(2, np.float32),
    }
    assert SamplingMask(**good).rows == 2  # type: ignore[arg-type]
    with pytest.raises(InvalidRecord, match=message):
        SamplingMask(**(good | fields))  # type: ignore[arg-type]


def test_parts_are_joined_only_where_one_ends_and_the_next_begins() -> None:
    """Ten turns that each fetch what they lack join to what one call over everything brings."""
    whole = np.arange(300, dtype=np.uint16).reshape(50, 2, 3)
    parts = [
        RoutedExperts(start=at, ids=whole[at : at + 5].astype(np.uint8 if at < 40 else np.uint16))
        for at in range(0, 50, 5)
    ]
    joined = RoutedExperts.joined(parts)
    assert (joined.start, joined.ids.dtype) == (0, np.uint16)
    np.testing.assert_array_equal(joined.ids[40:], whole[40:])
    assert RoutedExperts.joined(parts[2:3]).ids is parts[2].ids  # one part is not copied
    for wrong in ([parts[0], parts[2]], [parts[0], parts[0]], [parts[1], parts[0]], []):
        with pytest.raises(InvalidRecord, match="routed experts"):
            RoutedExperts.joined(wrong)
    rows = [IndexerTopk(start=at, ids=np.full((2, 1, 1), at, np.int16 if at else np.int32)) for at in (0, 2)]
    assert IndexerTopk.joined(rows).ids.reshape(-1).tolist() == [0, 0, 2, 2]
    with pytest.raises(InvalidRecord, match="rows up to 2, next start at 0"):
        IndexerTopk.joined([rows[0], rows[0]])
    both = SamplingMask.joined([mask([1, 2]), mask([3])])
    assert both.offsets.tolist() == [0, 1, 3, 6]


def test_the_age_of_a_group_is_its_oldest_trained_token() -> None:
    young = Rollout(session_id="a", rows=(row(weight_version=np.array([-1, -1, 7, 8], np.int32)),), reward=1.0)
    old = Rollout(session_id="b", rows=(row(),), reward=0.0)
    assert Group(group_id="g", task_id="t", rollouts=(young, old)).oldest_version == 3
    failed = Rollout(session_id="c", rows=(), reward=None, error="engine lost")
    assert Group(group_id="g", task_id="t", rollouts=(failed,)).oldest_version is None


@given(st.integers(0, 10**9))
def test_versions_travel_as_decimal_strings(version: int) -> None:
    assert parse_version(str(version)) == version


@pytest.mark.parametrize("text", ["", "default", "-1", "1.0", " 1", "１", "0x1"])
def test_any_other_version_string_is_refused(text: str) -> None:
    with pytest.raises(InvalidRecord, match="update_weight_version"):
        parse_version(text)
