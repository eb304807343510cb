"""Finished groups on disk come back exactly, and a damaged file is none."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from trainer_helpers import group, rollout, trajectory

from tollway.records import (
    Group,
    IndexerTopk,
    RoutedExperts,
    Sampling,
    SamplingMask,
    TopLogprobs,
    Trajectory,
    VersionSpan,
)
from tollway.trainer.spool import Spool, decode_group, encode_group


def rich_group() -> Group:
    row = replace(
        trajectory([0, 1, 1, 0, 1], versions=[-1, 2, 2, -1, 3], logprobs=[0, -0.5, -1.25, 0, -2], reward=1.0),
        sampling=Sampling(
            temperature=0.7, seed=3, stop=("x",), stop_token_ids=(7,), max_new_tokens=9, logit_bias=((4, -1.5),)
        ),
        routed_experts=RoutedExperts(start=0, ids=np.arange(8, dtype=np.uint8).reshape(4, 1, 2)),
        top_logprobs=TopLogprobs(
            ids=np.arange(6, dtype=np.int32).reshape(3, 2), logprobs=-np.arange(6, dtype=np.float32).reshape(3, 2)
        ),
        sampling_mask=SamplingMask(
            offsets=np.array([0, 2, 3, 5], np.int32),
            ids=np.array([4, 5, 6, 70, 8], np.uint16),
            logprobs=np.array([-0.5, 0.0, -1.0], np.float32),
        ),
        indexer_topk=IndexerTopk(start=0, ids=np.arange(-1, 7, dtype=np.int16).reshape(4, 1, 2)),
        metadata={"suite": ["a", 1]},
        task_id="t",
        group_id="g",
        truncated=True,
        side_request=True,
        trainable=False,
        untrainable_reason="side_request",
    )
    turns = len(row.turn_spans)
    row = replace(
        row,
        prompt_tokens=tuple(range(turns)),
        turn_times=((1.5, 2.5),) * turns,
        turn_sampling=(row.sampling,) * turns,
        version_spans=tuple(VersionSpan(2, span.start, span.end, "sglang", "fp8") for span in row.turn_spans),
    )
    one = replace(rollout(1.0, row, trajectory([0, 1])), turns=2, duration_s=1.5, facts={"ran_checks": 1.0})
    return group(one, rollout(None, error="sandbox gone – \u2028"), Rollout_empty())


def Rollout_empty() -> object:
    return replace(rollout(0.0), rows=())


def same(one: object, two: object) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two, equal_nan=one.dtype.kind == "f")  # type: ignore[attr-defined]
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(same, one, two))  # type: ignore[arg-type]
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(two) and all(same(getattr(one, f.name), getattr(two, f.name)) for f in fields(one))  # type: ignore[arg-type]
    return one == two


def test_a_group_survives_the_disk_field_by_field(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", None)
    spool.put(3, rich_group())
    back = spool.get(3)
    assert back is not None
    assert same(back, rich_group())
    assert back.oldest_version == 0
    assert isinstance(back.rollouts[0].rows[0], Trajectory)


def test_the_columns_are_those_of_the_export(tmp_path: Path) -> None:
    from safetensors.numpy import load

    columns = load(encode_group(rich_group()))
    assert columns["row_offsets"].tolist() == [0, 5, 7, 10]
    assert {name: columns[name].dtype.name for name in ("token_ids", "loss_mask", "logprobs", "weight_version")} == {
        "token_ids": "int32",
        "loss_mask": "uint8",
        "logprobs": "float32",
        "weight_version": "int32",
    }


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_damaged_or_missing_file_is_no_group(tmp_path: Path, damage: bytes | None) -> None:
    spool = Spool(tmp_path / "spool", None)
    spool.put(0, rich_group())
    path = tmp_path / "spool" / "group_00000000.safetensors"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage or path.read_bytes()[:100])
    assert spool.get(0) is None
    with pytest.raises((FileNotFoundError, ValueError)):
        decode_group(path)


def test_trained_groups_become_trajectories_of_their_step_or_go(tmp_path: Path) -> None:
    keeping = Spool(tmp_path / "spool", tmp_path / "trajectories")
    for index in (1, 2):
        keeping.put(index, rich_group())
    keeping.settle([1], 4)
    assert keeping.indices() == [2]
    assert same(decode_group(tmp_path / "trajectories" / "step_000004" / "group_00000001.safetensors"), rich_group())
    dropping = Spool(tmp_path / "spool", None)
    dropping.settle([2, 9], 5)
    assert dropping.indices() == []
