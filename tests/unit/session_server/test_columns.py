"""Rows as columns and back: nothing of a row is lost, and old blobs still read."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import orjson
import pytest
from safetensors.numpy import load, save

from tollway.errors import UpstreamError
from tollway.records import (
    IndexerTopk,
    RoutedExperts,
    Sampling,
    SamplingMask,
    TokenSpan,
    TopLogprobs,
    Trajectory,
    VersionSpan,
)
from tollway.session_server.columns import FORMAT, pack_rows, rows_to_json, unpack_rows


def plain(size: int = 5) -> Trajectory:
    mask = np.zeros(size, np.uint8)
    mask[-2:] = 1
    on = mask == 1
    return Trajectory(
        token_ids=np.arange(size, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(on, -0.5, np.nan).astype(np.float32),
        weight_version=np.where(on, 4, -1).astype(np.int32),
        session_id="s",
        leaf=3,
        branch_reason="root",
        turn_spans=(TokenSpan(size - 2, size),),
        finish_reasons=("stop",),
        sampling=Sampling(),
        engine_ids=("e#1",),
        cached_tokens=(None,),
    )


def rich(size: int = 5, *, wide: bool = False) -> Trajectory:
    sampling = Sampling(
        stop=("x",), min_p=0.1, logit_bias=((4, -1.5), (5, 2.0)), constraint=(("json_schema", "{}"),), seed=3
    )
    return replace(
        plain(size),
        routed_experts=RoutedExperts(
            start=0, ids=np.full((size - 1, 2, 2), 300 if wide else 3, np.uint16 if wide else np.uint8)
        ),
        indexer_topk=IndexerTopk(start=0, ids=np.full((size - 1, 1, 3), -1, np.int32 if wide else np.int16)),
        top_logprobs=TopLogprobs(ids=np.arange(4, dtype=np.int32).reshape(2, 2), logprobs=np.zeros((2, 2), np.float32)),
        sampling_mask=SamplingMask(
            offsets=np.array([0, 1, 4], np.int32),
            ids=np.array([1, 2, 3, 70_000 if wide else 4], np.int32 if wide else np.uint16),
            logprobs=np.array([0.0, -1.5], np.float32),
        ),
        version_spans=(
            VersionSpan(3, size - 2, size - 1, "sglang", "fp8"),
            VersionSpan(4, size - 1, size, "sglang", "bfloat16"),
        ),
        prompt_tokens=(size - 2,),
        turn_times=((1.25, 2.5),),
        sampling=sampling,
        turn_sampling=(sampling,),
        truncated=True,
        side_request=True,
        trainable=False,
        untrainable_reason="side_request",
        reward=0.5,
        task_id="t",
        group_id="g",
        metadata={"suite": ["a", 1], "é": None},
    )


def same(one: object, two: object) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(two, np.ndarray) and np.array_equal(one, two, equal_nan=one.dtype.kind == "f")
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(two) and all(same(getattr(one, f.name), getattr(two, f.name)) for f in fields(one))  # type: ignore[arg-type]
    if isinstance(one, tuple):
        return isinstance(two, tuple) and len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and one == two


@pytest.mark.parametrize(
    "rows",
    [(), (plain(),), (rich(),), (rich(), plain(3), rich(7, wide=True)), (plain(), rich(4), plain())],
    ids=["none", "plain", "rich", "wide", "between"],
)
def test_every_field_of_every_row_comes_back(rows: tuple[Trajectory, ...]) -> None:
    found = unpack_rows(pack_rows(rows))
    assert len(found) == len(rows)
    for one, two in zip(rows, found, strict=True):
        for each in fields(Trajectory):
            assert same(getattr(one, each.name), getattr(two, each.name)), each.name


def test_numbers_keep_the_narrow_type_that_holds_them_all() -> None:
    narrow, wide = load(pack_rows((rich(), rich()))), load(pack_rows((rich(), rich(wide=True))))
    assert [narrow[name].dtype.name for name in ("routed_experts", "indexer_topk", "mask_ids")] == [
        "uint8",
        "int16",
        "uint16",
    ]
    assert [wide[name].dtype.name for name in ("routed_experts", "indexer_topk", "mask_ids")] == [
        "uint16",
        "int32",
        "int32",
    ]


def test_json_has_the_same_columns_and_says_where_versions_lie() -> None:
    value = orjson.loads(rows_to_json((plain(3), rich())))
    assert value["rows"][1]["version_spans"] == [[3, 4, 3, "sglang", "fp8"], [4, 5, 4, "sglang", "bfloat16"]]
    assert value["rows"][1]["turn_times"] == [[1.25, 2.5]]
    assert value["rows"][0]["turn_sampling"] == value["rows"][0]["prompt_tokens"] == []
    assert value["columns"]["mask_starts"]["data"] == [0, 1, 4]
    assert value["columns"]["mask_offsets"]["data"] == [0, 0, 2]
    assert value["columns"]["indexer_topk"]["shape"] == [4, 1, 3]
    assert set(value["columns"]) == set(load(pack_rows((plain(3), rich()))))


def test_a_blob_without_the_newer_fields_reads_with_them_unknown() -> None:
    blob = pack_rows((plain(),))
    header = orjson.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    rows: list[dict[str, Any]] = orjson.loads(header["__metadata__"]["rows"])
    for name in ("version_spans", "turn_times", "prompt_tokens", "turn_sampling", "metadata", "masks", "indexer"):
        del rows[0][name]
    for name in ("min_p", "logit_bias", "constraint"):
        del rows[0]["sampling"][name]
    old = save(load(blob), metadata={"format": FORMAT, "rows": orjson.dumps(rows).decode()})
    assert same(unpack_rows(old), (plain(),))


def test_a_damaged_blob_is_an_upstream_error() -> None:
    blob = pack_rows((rich(),))
    for damaged in (b"", blob[:20], blob[:-40]):
        with pytest.raises(UpstreamError, match="export"):
            unpack_rows(damaged)
