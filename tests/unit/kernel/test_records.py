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
    Rollout,
    RoutedExperts,
    Sampling,
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
    ],
)
def test_a_row_that_does_not_fit_together_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRecord, match=message):
        row(**changes)


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
