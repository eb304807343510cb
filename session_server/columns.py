"""Trajectory rows as columns: one safetensors blob or one JSON object, and back.

Ragged columns carry their own offsets: ``row_offsets`` for token columns, ``route_offsets`` and
``indexer_offsets`` for rows of expert and indexer choices, ``top_offsets`` for top log-probabilities,
``mask_offsets`` for rows of sampling masks, whose ids ``mask_starts`` cuts. Everything that is not an array
is JSON in the blob's metadata. Depends on numpy, safetensors, orjson and the kernel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import cast

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save

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

__all__ = ["FORMAT", "pack_rows", "rows_to_json", "unpack_rows"]

FORMAT = "tollway-trajectories-1"
_TOKEN_COLUMNS: tuple[tuple[str, type[np.generic]], ...] = (
    ("token_ids", np.int32),
    ("loss_mask", np.uint8),
    ("logprobs", np.float32),
    ("weight_version", np.int32),
)
_PLAIN = (
    *("session_id", "task_id", "group_id", "metadata", "leaf", "branch_reason", "finish_reasons", "engine_ids"),
    *("cached_tokens", "prompt_tokens", "turn_times", "trainable", "untrainable_reason", "side_request", "truncated"),
    *("reward", "error"),
)
"""Fields of a row that are JSON as they are."""
_TUPLES = {"finish_reasons", "engine_ids", "cached_tokens", "prompt_tokens", "turn_times"}
_OFFSETS = ("row_offsets", "route_offsets", "top_offsets", "mask_offsets", "indexer_offsets")
_DTYPES: dict[str, type[np.generic]] = {
    "I64": np.int64,
    "I32": np.int32,
    "F32": np.float32,
    "I16": np.int16,
    "U8": np.uint8,
    "U16": np.uint16,
}


def pack_rows(rows: Sequence[Trajectory]) -> bytes:
    """Write rows as one safetensors blob."""
    tensors, meta = _columns(rows)
    return save(tensors, metadata={"format": FORMAT, "rows": orjson.dumps(meta).decode()})


def rows_to_json(rows: Sequence[Trajectory]) -> bytes:
    """The same columns as lists; log-probabilities that are not known are null."""
    tensors, meta = _columns(rows)
    columns = {name: {"shape": list(array.shape), "data": array} for name, array in tensors.items()}
    return orjson.dumps({"format": FORMAT, "rows": meta, "columns": columns}, option=orjson.OPT_SERIALIZE_NUMPY)


def unpack_rows(data: bytes) -> tuple[Trajectory, ...]:
    """Read a blob of ``pack_rows``. Raises ``UpstreamError`` when it is not one."""
    try:
        tensors, metadata = _read_safetensors(data)
        if metadata.get("format") != FORMAT:
            raise UpstreamError(f"export has format {metadata.get('format')!r}, want {FORMAT}")
        meta = cast("list[dict[str, object]]", json.loads(metadata["rows"]))
        offsets = {name: tensors[name].tolist() for name in _OFFSETS if name in tensors}
        return tuple(
            _row(tensors, facts, {name: slice(cuts[at], cuts[at + 1]) for name, cuts in offsets.items()})
            for at, facts in enumerate(meta)
        )
    except (SafetensorError, KeyError, IndexError, TypeError, ValueError) as error:
        raise UpstreamError(f"the export cannot be read: {error!r}") from error


def _columns(rows: Sequence[Trajectory]) -> tuple[dict[str, NDArray[np.generic]], list[dict[str, object]]]:
    tensors: dict[str, NDArray[np.generic]] = {"row_offsets": _offsets([row.token_ids.size for row in rows])}
    for name, kind in _TOKEN_COLUMNS:
        tensors[name] = _joined([getattr(row, name) for row in rows], kind)
    choices: tuple[tuple[str, str, list[RoutedExperts | IndexerTopk | None]], ...] = (
        ("routed_experts", "route_offsets", [row.routed_experts for row in rows]),
        ("indexer_topk", "indexer_offsets", [row.indexer_topk for row in rows]),
    )
    for name, offsets, parts in choices:
        if known := [each.ids for each in parts if each is not None]:
            tensors[name] = known[0] if len(known) == 1 else np.concatenate(known)  # as wide as the widest
            tensors[offsets] = _offsets([0 if each is None else each.ids.shape[0] for each in parts])
    tops = [row.top_logprobs for row in rows]
    if any(each is not None for each in tops):
        k = max(each.ids.shape[1] for each in tops if each is not None)
        tensors["top_ids"] = np.concatenate([_widen(each.ids, k, -1) for each in tops if each is not None])
        tensors["top_logprobs"] = np.concatenate(
            [_widen(each.logprobs, k, -np.inf) for each in tops if each is not None]
        )
        tensors["top_offsets"] = _offsets([0 if each is None else each.ids.shape[0] for each in tops])
    masks = [row.sampling_mask for row in rows]
    if present := [each for each in masks if each is not None]:
        tensors["mask_ids"] = np.concatenate([each.ids for each in present])
        tensors["mask_logprobs"] = np.concatenate([each.logprobs for each in present])
        tensors["mask_starts"] = _offsets(np.concatenate([np.diff(each.offsets) for each in present]))
        tensors["mask_offsets"] = _offsets([0 if each is None else each.rows for each in masks])
    return tensors, [_facts(row) for row in rows]


def _facts(row: Trajectory) -> dict[str, object]:
    versions = row.weight_version[row.loss_mask == 1]
    return {
        **{name: getattr(row, name) for name in _PLAIN},
        "turn_spans": [[span.start, span.end] for span in row.turn_spans],
        "sampling": asdict(row.sampling),
        "turn_sampling": [asdict(each) for each in row.turn_sampling],
        "version_spans": [[s.start, s.end, s.version, s.kind, s.precision] for s in row.version_spans],
        "version_start": int(versions[0]) if versions.size else None,
        "version_end": int(versions[-1]) if versions.size else None,
        "routes": row.routed_experts is not None,
        "tops": row.top_logprobs is not None,
        "masks": row.sampling_mask is not None,
        "indexer": row.indexer_topk is not None,
    }


def _row(tensors: Mapping[str, NDArray[np.generic]], facts: dict[str, object], cuts: Mapping[str, slice]) -> Trajectory:
    columns = {name: tensors[name][cuts["row_offsets"]] for name, _ in _TOKEN_COLUMNS}
    given = {name: facts[name] for name in _PLAIN if name in facts}
    for name in _TUPLES & given.keys():
        given[name] = _tupled(given[name])
    spans = cast("list[list[int]]", facts["turn_spans"])
    versions = cast("list[tuple[int, int, int, str, str]]", facts.get("version_spans", []))
    sampling = cast("list[dict[str, object]]", facts.get("turn_sampling", []))
    return Trajectory(
        **columns,  # type: ignore[arg-type]  # checked by the record itself
        **given,  # type: ignore[arg-type]  # checked by the record itself
        turn_spans=tuple(TokenSpan(start, end) for start, end in spans),
        sampling=_sampling(cast("dict[str, object]", facts["sampling"])),
        turn_sampling=tuple(map(_sampling, sampling)),
        version_spans=tuple(VersionSpan(v, start, end, kind, form) for start, end, v, kind, form in versions),
        **_extras(tensors, facts, cuts),  # type: ignore[arg-type]  # one type per name
    )


def _extras(
    tensors: Mapping[str, NDArray[np.generic]], facts: dict[str, object], cuts: Mapping[str, slice]
) -> dict[str, RoutedExperts | IndexerTopk | TopLogprobs | SamplingMask]:
    """The arrays that not every row has."""
    found: dict[str, RoutedExperts | IndexerTopk | TopLogprobs | SamplingMask] = {}
    if facts["routes"]:
        ids = tensors["routed_experts"][cuts["route_offsets"]]
        found["routed_experts"] = RoutedExperts(start=0, ids=cast("NDArray[np.uint8]", ids))
    if facts.get("indexer"):
        ids = tensors["indexer_topk"][cuts["indexer_offsets"]]
        found["indexer_topk"] = IndexerTopk(start=0, ids=cast("NDArray[np.int32]", ids))
    if facts["tops"]:
        cut = cuts["top_offsets"]
        found["top_logprobs"] = TopLogprobs(
            ids=cast("NDArray[np.int32]", tensors["top_ids"][cut]),
            logprobs=cast("NDArray[np.float32]", tensors["top_logprobs"][cut]),
        )
    if facts.get("masks"):
        cut = cuts["mask_offsets"]
        starts = cast("NDArray[np.int64]", tensors["mask_starts"][cut.start : cut.stop + 1])
        found["sampling_mask"] = SamplingMask(
            offsets=(starts - starts[0]).astype(np.int32),
            ids=cast("NDArray[np.int32]", tensors["mask_ids"][starts[0] : starts[-1]]),
            logprobs=cast("NDArray[np.float32]", tensors["mask_logprobs"][cut]),
        )
    return found


def _sampling(facts: dict[str, object]) -> Sampling:
    return Sampling(**{name: _tupled(value) for name, value in facts.items()})  # type: ignore[arg-type]  # as above


def _tupled(value: object) -> object:
    """Lists of a JSON value as tuples, also inside."""
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def _read_safetensors(data: bytes) -> tuple[dict[str, NDArray[np.generic]], dict[str, str]]:
    """Arrays and metadata of a blob. ``safetensors.numpy.load`` drops the metadata, so the header is read here."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise UpstreamError(f"the export is cut: {len(data)} bytes, header says {size}")
    header = orjson.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__", {})
    body = memoryview(data)[8 + size :]
    tensors: dict[str, NDArray[np.generic]] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if end > len(body):
            raise UpstreamError(f"the export is cut inside column {name}")
        tensors[name] = np.frombuffer(body[begin:end], dtype=_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors, metadata


def _offsets(sizes: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(sizes, np.int64))])


def _joined(parts: Sequence[NDArray[np.generic]], kind: type[np.generic]) -> NDArray[np.generic]:
    return np.concatenate(parts) if parts else np.zeros(0, kind)


def _widen(array: NDArray[np.generic], k: int, fill: float) -> NDArray[np.generic]:
    if array.shape[1] == k:
        return array
    out = np.full((array.shape[0], k), fill, array.dtype)
    out[:, : array.shape[1]] = array
    return out
