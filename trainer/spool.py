"""Finished groups on disk, one safetensors file each: for resume, and to be read by people and scripts.

Columns are those of the trajectory export (ragged rows over ``row_offsets``, route and top columns over
their own offsets), everything else is JSON metadata. No pickle. Depends on safetensors and the records.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

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
    VersionSpan,
)
from tollway.trainer.atomic import write_file

__all__ = ["Spool", "decode_group", "encode_group"]

_TOKEN_COLUMNS = ("token_ids", "loss_mask", "logprobs", "weight_version")
_ROW_FIELDS = (
    *("session_id", "leaf", "branch_reason", "finish_reasons", "engine_ids", "cached_tokens", "trainable"),
    *("reward", "error", "prompt_tokens", "turn_times", "truncated", "side_request", "untrainable_reason"),
    *("task_id", "group_id"),
)
"""Fields of a row that are JSON as they are."""


class Spool:
    """A folder of groups by prompt index. A file is whole or absent."""

    def __init__(self, folder: Path, trained: Path | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._trained = folder, trained

    def put(self, index: int, group: Group) -> None:
        """Write one group; a second write replaces the first."""
        write_file(self._path(index), encode_group(group))

    def get(self, index: int) -> Group | None:
        """Read one group; ``None`` when it is not there or not readable."""
        try:
            return decode_group(self._path(index))
        except (OSError, InvalidRecord):
            return None

    def discard(self, index: int) -> None:
        """Forget one group. Safe when it is not there."""
        self._path(index).unlink(missing_ok=True)

    def indices(self) -> list[int]:
        """Prompts that have a file."""
        return sorted(int(path.stem.removeprefix("group_")) for path in self._folder.glob("group_*.safetensors"))

    def settle(self, indices: Sequence[int], step: int) -> None:
        """A checkpoint covers these trained groups: keep them as trajectories of ``step``, or delete them."""
        for index in indices:
            path = self._path(index)
            if self._trained is None or not path.exists():
                path.unlink(missing_ok=True)
                continue
            shelf = self._trained / f"step_{step:06d}"
            shelf.mkdir(parents=True, exist_ok=True)
            os.replace(path, shelf / path.name)

    def _path(self, index: int) -> Path:
        return self._folder / f"group_{index:08d}.safetensors"


def encode_group(group: Group) -> bytes:
    """One group as a safetensors file."""
    rows = [row for rollout in group.rollouts for row in rollout.rows]
    columns: dict[str, NDArray[np.generic]] = {"row_offsets": _offsets([row.token_ids.size for row in rows])}
    types = (np.int32, np.uint8, np.float32, np.int32)
    for name, kind in zip(_TOKEN_COLUMNS, types, strict=True):
        columns[name] = np.concatenate([np.zeros(0, kind), *(getattr(row, name) for row in rows)]).astype(kind)
    for at, row in enumerate(rows):
        if row.routed_experts is not None:
            columns[f"routed_experts.{at}"] = np.ascontiguousarray(row.routed_experts.ids)
        if row.top_logprobs is not None:
            columns[f"top_ids.{at}"] = np.ascontiguousarray(row.top_logprobs.ids)
            columns[f"top_logprobs.{at}"] = np.ascontiguousarray(row.top_logprobs.logprobs)
        if row.indexer_topk is not None:
            columns[f"indexer_topk.{at}"] = np.ascontiguousarray(row.indexer_topk.ids)
        if (mask := row.sampling_mask) is not None:
            columns[f"mask_starts.{at}"] = np.ascontiguousarray(mask.offsets)
            columns[f"mask_ids.{at}"] = np.ascontiguousarray(mask.ids)
            columns[f"mask_logprobs.{at}"] = np.ascontiguousarray(mask.logprobs)
    about = {
        "group_id": group.group_id,
        "task_id": group.task_id,
        "rollouts": [_about_rollout(rollout) for rollout in group.rollouts],
    }
    return save(columns, metadata={"group": json.dumps(about, ensure_ascii=False)})


def decode_group(path: Path) -> Group:
    """Read a file of ``encode_group``. Raises ``InvalidRecord`` when it is damaged."""
    try:
        with safe_open(path, framework="numpy") as file:
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
            about = json.loads((file.metadata() or {})["group"])
        rows = iter(range(columns["row_offsets"].size - 1))
        rollouts = tuple(
            Rollout(
                session_id=one["session_id"],
                rows=tuple(_row(columns, next(rows), row) for row in one["rows"]),
                reward=one["reward"],
                error=one["error"],
                turns=one["turns"],
                duration_s=one["duration_s"],
                facts=one["facts"],
            )
            for one in about["rollouts"]
        )
        return Group(group_id=about["group_id"], task_id=about["task_id"], rollouts=rollouts)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged file may fail in any way
        raise InvalidRecord(f"{path} is not a readable group: {type(error).__name__}: {error}") from error


def _about_rollout(rollout: Rollout) -> dict[str, object]:
    about: dict[str, object] = {
        name: getattr(rollout, name) for name in ("session_id", "reward", "error", "turns", "duration_s", "facts")
    }
    about["rows"] = [
        {name: getattr(row, name) for name in _ROW_FIELDS}
        | {
            "sampling": dataclasses.asdict(row.sampling),
            "turn_sampling": [dataclasses.asdict(each) for each in row.turn_sampling],
            "turn_spans": [[span.start, span.end] for span in row.turn_spans],
            "version_spans": [dataclasses.astuple(span) for span in row.version_spans],
            "metadata": dict(row.metadata),
        }
        for row in rollout.rows
    ]
    return about


def _row(columns: dict[str, NDArray[np.generic]], at: int, about: dict[str, object]) -> Trajectory:
    start, end = (int(edge) for edge in columns["row_offsets"][at : at + 2])
    parts = {name: columns[name][start:end].copy() for name in _TOKEN_COLUMNS}
    fields = {name: _tupled(about[name]) for name in _ROW_FIELDS if name in about}
    return Trajectory(
        **parts,  # type: ignore[arg-type]  # checked by the record itself
        **fields,  # type: ignore[arg-type]  # checked by the record itself
        sampling=_sampling(about["sampling"]),
        turn_sampling=tuple(map(_sampling, cast("list[object]", about.get("turn_sampling", [])))),
        turn_spans=tuple(TokenSpan(*span) for span in cast("list[list[int]]", about["turn_spans"])),
        version_spans=tuple(VersionSpan(*span) for span in cast("list[Any]", about.get("version_spans", []))),
        metadata=cast("dict[str, object]", about.get("metadata", {})),
        **_extras(columns, at),
    )


def _extras(columns: dict[str, NDArray[Any]], at: int) -> dict[str, Any]:
    """Arrays that not every row has."""
    found: dict[str, object] = {}
    if (ids := columns.get(f"routed_experts.{at}")) is not None:
        found["routed_experts"] = RoutedExperts(start=0, ids=ids)
    if (ids := columns.get(f"indexer_topk.{at}")) is not None:
        found["indexer_topk"] = IndexerTopk(start=0, ids=ids)
    if (ids := columns.get(f"top_ids.{at}")) is not None:
        found["top_logprobs"] = TopLogprobs(ids=ids, logprobs=columns[f"top_logprobs.{at}"])
    if (ids := columns.get(f"mask_ids.{at}")) is not None:
        starts, logprobs = columns[f"mask_starts.{at}"], columns[f"mask_logprobs.{at}"]
        found["sampling_mask"] = SamplingMask(offsets=starts, ids=ids, logprobs=logprobs)
    return found


def _sampling(facts: object) -> Sampling:
    known = cast("dict[str, object]", facts)
    return Sampling(**{name: _tupled(value) for name, value in known.items()})  # type: ignore[arg-type]  # checked there


def _tupled(value: object) -> object:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def _offsets(sizes: list[int]) -> NDArray[np.int64]:
    return np.cumsum([0, *sizes], dtype=np.int64)
