"""Trajectory rows as columns: one safetensors blob or one JSON object, and back.

Ragged columns carry their own offsets: ``row_offsets`` for token columns, ``route_offsets`` for rows of
expert choices, ``top_offsets`` for top log-probabilities. Everything that is not an array is JSON in the
blob's metadata. Depends on numpy, safetensors, orjson and the kernel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save

from tollway.errors import UpstreamError
from tollway.records import FinishReason, RoutedExperts, Sampling, TokenSpan, TopLogprobs, Trajectory

__all__ = ["FORMAT", "pack_rows", "rows_to_json", "unpack_rows"]

FORMAT = "tollway-trajectories-1"
_TOKEN_COLUMNS: tuple[tuple[str, type[np.generic]], ...] = (
    ("token_ids", np.int32),
    ("loss_mask", np.uint8),
    ("logprobs", np.float32),
    ("weight_version", np.int32),
)
_DTYPES: dict[str, type[np.generic]] = {
    "I64": np.int64,
    "I32": np.int32,
    "F32": np.float32,
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
        offsets = tensors["row_offsets"].tolist()
        routes = tensors["route_offsets"].tolist() if "route_offsets" in tensors else None
        tops = tensors["top_offsets"].tolist() if "top_offsets" in tensors else None
        return tuple(
            _row(
                tensors,
                facts,
                (offsets[at], offsets[at + 1]),
                (routes[at], routes[at + 1]) if routes else None,
                (tops[at], tops[at + 1]) if tops else None,
            )
            for at, facts in enumerate(meta)
        )
    except (SafetensorError, KeyError, IndexError, TypeError, ValueError) as error:
        raise UpstreamError(f"the export cannot be read: {error!r}") from error


def _columns(rows: Sequence[Trajectory]) -> tuple[dict[str, NDArray[np.generic]], list[dict[str, object]]]:
    tensors: dict[str, NDArray[np.generic]] = {"row_offsets": _offsets([row.token_ids.size for row in rows])}
    for name, kind in _TOKEN_COLUMNS:
        tensors[name] = _joined([getattr(row, name) for row in rows], kind)
    routes = [row.routed_experts.ids if row.routed_experts is not None else None for row in rows]
    if any(each is not None for each in routes):
        wide = any(each is not None and each.dtype == np.uint16 for each in routes)
        known = [each for each in routes if each is not None]
        tensors["routed_experts"] = np.concatenate([each.astype(np.uint16) if wide else each for each in known])
        tensors["route_offsets"] = _offsets([0 if each is None else each.shape[0] for each in routes])
    tops = [row.top_logprobs for row in rows]
    if any(each is not None for each in tops):
        k = max(each.ids.shape[1] for each in tops if each is not None)
        tensors["top_ids"] = np.concatenate([_widen(each.ids, k, -1) for each in tops if each is not None])
        tensors["top_logprobs"] = np.concatenate(
            [_widen(each.logprobs, k, -np.inf) for each in tops if each is not None]
        )
        tensors["top_offsets"] = _offsets([0 if each is None else each.ids.shape[0] for each in tops])
    return tensors, [_facts(row) for row in rows]


def _facts(row: Trajectory) -> dict[str, object]:
    versions = row.weight_version[row.loss_mask == 1]
    return {
        "session_id": row.session_id,
        "leaf": row.leaf,
        "branch_reason": row.branch_reason,
        "turn_spans": [[span.start, span.end] for span in row.turn_spans],
        "finish_reasons": row.finish_reasons,
        "sampling": {
            "temperature": row.sampling.temperature,
            "top_p": row.sampling.top_p,
            "top_k": row.sampling.top_k,
            "max_new_tokens": row.sampling.max_new_tokens,
            "seed": row.sampling.seed,
            "stop": row.sampling.stop,
            "stop_token_ids": row.sampling.stop_token_ids,
        },
        "engine_ids": row.engine_ids,
        "cached_tokens": row.cached_tokens,
        "trainable": row.trainable,
        "reward": row.reward,
        "error": row.error,
        "version_start": int(versions[0]) if versions.size else None,
        "version_end": int(versions[-1]) if versions.size else None,
        "routes": row.routed_experts is not None,
        "tops": row.top_logprobs is not None,
    }


def _row(
    tensors: Mapping[str, NDArray[np.generic]],
    facts: dict[str, object],
    span: tuple[int, int],
    routes: tuple[int, int] | None,
    tops: tuple[int, int] | None,
) -> Trajectory:
    columns = {name: tensors[name][span[0] : span[1]] for name, _ in _TOKEN_COLUMNS}
    sampling = cast("dict[str, object]", facts["sampling"])
    routed = top = None
    if facts["routes"] and routes is not None:
        ids = cast("NDArray[np.uint8] | NDArray[np.uint16]", tensors["routed_experts"][routes[0] : routes[1]])
        routed = RoutedExperts(start=0, ids=ids)
    if facts["tops"] and tops is not None:
        top = TopLogprobs(
            ids=cast("NDArray[np.int32]", tensors["top_ids"][tops[0] : tops[1]]),
            logprobs=cast("NDArray[np.float32]", tensors["top_logprobs"][tops[0] : tops[1]]),
        )
    reward, error = facts["reward"], facts["error"]
    return Trajectory(
        token_ids=cast("NDArray[np.int32]", columns["token_ids"]),
        loss_mask=cast("NDArray[np.uint8]", columns["loss_mask"]),
        logprobs=cast("NDArray[np.float32]", columns["logprobs"]),
        weight_version=cast("NDArray[np.int32]", columns["weight_version"]),
        session_id=str(facts["session_id"]),
        leaf=cast(int, facts["leaf"]),
        branch_reason=str(facts["branch_reason"]),
        turn_spans=tuple(TokenSpan(start, end) for start, end in cast("list[list[int]]", facts["turn_spans"])),
        finish_reasons=tuple(cast("list[FinishReason]", facts["finish_reasons"])),
        sampling=Sampling(
            temperature=cast(float, sampling["temperature"]),
            top_p=cast(float, sampling["top_p"]),
            top_k=cast(int, sampling["top_k"]),
            max_new_tokens=cast("int | None", sampling["max_new_tokens"]),
            seed=cast("int | None", sampling["seed"]),
            stop=tuple(cast("list[str]", sampling["stop"])),
            stop_token_ids=tuple(cast("list[int]", sampling["stop_token_ids"])),
        ),
        engine_ids=tuple(cast("list[str]", facts["engine_ids"])),
        cached_tokens=tuple(cast("list[int | None]", facts["cached_tokens"])),
        trainable=bool(facts["trainable"]),
        reward=cast("float | None", reward),
        error=cast("str | None", error),
        routed_experts=routed,
        top_logprobs=top,
    )


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


def _offsets(sizes: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(sizes, np.int64))])


def _joined(parts: Sequence[NDArray[np.generic]], kind: type[np.generic]) -> NDArray[np.generic]:
    return np.concatenate(parts) if parts else np.zeros(0, kind)


def _widen(array: NDArray[np.generic], k: int, fill: float) -> NDArray[np.generic]:
    if array.shape[1] == k:
        return array
    out = np.full((array.shape[0], k), fill, array.dtype)
    out[:, : array.shape[1]] = array
    return out
