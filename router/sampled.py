"""What a reply says of the sampled positions beside the ids: top log-probabilities and sampling masks.

Pure functions over ``meta_info``. Rows may be ragged or null; what does not add up is an ``UpstreamError``.
Depends on numpy, ``blobs`` and the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tollway.errors import InvalidRecord, UpstreamError
from tollway.records import Ids, SamplingMask, TopLogprobs
from tollway.router.blobs import decode_blob
from tollway.router.said import said

__all__ = ["mask_of", "tops_of"]

Json = Mapping[str, object]

_ONLY_INT = frozenset({int})
_NUMBER = frozenset({int, float})
_FLAT = "output_top_logprobs"


def tops_of(meta: Json, sampled: int, k: int) -> TopLogprobs:
    """[sampled, k] most likely ids, from arrays or lists; what an engine did not send is id -1 and -inf."""
    if f"{_FLAT}_shape" in meta and sampled:
        return _flat_tops(meta, sampled, k)
    rows = meta.get(_FLAT) if sampled else []
    if not isinstance(rows, list) or len(rows) != sampled:
        found = len(rows) if isinstance(rows, list) else type(rows).__name__
        raise UpstreamError(f"engine sent {found} rows of top logprobs for {sampled} output ids")
    ids = np.full((sampled, k), -1, np.int32)
    values = np.full((sampled, k), -np.inf, np.float32)
    try:
        for at, row in enumerate(rows):
            for column, (value, token, *_) in enumerate((row or [])[:k]):
                values[at, column] = value
                ids[at, column] = token
    except (TypeError, ValueError, IndexError, KeyError, OverflowError):
        raise UpstreamError("engine sent top logprobs that are not rows of [number, id, text]") from None
    return TopLogprobs(ids=ids, logprobs=values)


def mask_of(meta: Json, output_ids: Ids) -> SamplingMask:
    """One row per output id, and the id's log-probability among the ids of its row."""
    sampled = int(output_ids.size)
    rows = _list_of(meta, "output_token_sampling_mask", sampled)
    numbers = _list_of(meta, "output_token_sampling_logprobs", sampled)
    try:
        sizes = [len(row) for row in rows]  # type: ignore[arg-type]  # what has no length is a TypeError
        flat: list[int] = list(chain.from_iterable(rows))  # type: ignore[arg-type]  # as above
        if not (_ONLY_INT.issuperset(map(type, flat)) and _NUMBER.issuperset(map(type, numbers))):
            raise TypeError
        with np.errstate(over="ignore"):  # beyond float32 is not finite, which the record refuses
            ids, logprobs = np.array(flat, np.int32), np.array(numbers, np.float32)
        mask = SamplingMask(offsets=np.cumsum([0, *sizes], dtype=np.int32), ids=_narrow(ids), logprobs=logprobs)
    except InvalidRecord as error:
        raise UpstreamError(f"engine sent a {error}") from error
    except (TypeError, ValueError, OverflowError):
        raise UpstreamError("engine sent a sampling mask that is not a row of ids and a number per id") from None
    among = np.repeat(output_ids, sizes) == ids
    if sampled and not (found := np.logical_or.reduceat(among, mask.offsets[:-1])).all():
        at = int(np.argmin(found))
        raise UpstreamError(f"sampling mask {at} lacks the output id {int(output_ids[at])} that was drawn from it")
    return mask


def _list_of(meta: Json, name: str, count: int) -> list[object]:
    value = meta.get(name)
    if value is None and not count:
        return []
    if not isinstance(value, list) or len(value) != count:
        found = len(value) if isinstance(value, list) else type(value).__name__
        raise UpstreamError(f"engine sent {found} entries of {name} for {count} output ids")
    return value


def _narrow(ids: Ids) -> NDArray[np.uint16] | NDArray[np.int32]:
    if ids.size and ids.min() < 0:
        raise ValueError
    return ids.astype(np.uint16) if not ids.size or ids.max() < 2**16 else ids


def _flat_tops(meta: Json, sampled: int, k: int) -> TopLogprobs:
    """From [rows, width] arrays whose first ``null_prefix`` rows were null and left out."""
    shape, missing = meta.get(f"{_FLAT}_shape"), meta.get(f"{_FLAT}_null_prefix", 0)
    if not isinstance(shape, list) or len(shape) != 2 or not _ONLY_INT.issuperset(map(type, (*shape, missing))):
        raise UpstreamError(f"engine sent top logprobs of shape {said(shape)} after {said(missing)} null rows")
    rows, width = shape
    if rows < 0 or width < 0 or rows + missing != sampled:
        raise UpstreamError(f"engine sent {rows} + {missing} rows of top logprobs for {sampled} output ids")
    values = _flat(meta, "val", np.float32, rows * width).reshape(rows, width)
    tokens = _flat(meta, "idx", np.int32, rows * width).reshape(rows, width)
    width = min(width, k)
    ids = np.full((sampled, k), -1, np.int32)
    logprobs = np.full((sampled, k), -np.inf, np.float32)
    ids[missing:, :width], logprobs[missing:, :width] = tokens[:, :width], values[:, :width]
    return TopLogprobs(ids=ids, logprobs=logprobs)


def _flat(meta: Json, part: str, kind: type[np.float32] | type[np.int32], count: int) -> NDArray[np.generic]:
    name = f"{_FLAT}_{part}_flat"
    value = meta.get(f"{name}_b64")
    if value is not None:
        named = meta.get(f"{name}_b64_dtype", np.dtype(kind).name)
        if named != np.dtype(kind).name:
            raise UpstreamError(f"engine sent {name} as {said(named)}, want {np.dtype(kind).name}")
        data = decode_blob(name, value)
        found = np.frombuffer(data[: len(data) // 4 * 4], np.dtype(kind).newbyteorder("<"))
        size = len(data)
    else:
        try:
            found = np.array(meta.get(name), kind)
        except (TypeError, ValueError, OverflowError):
            raise UpstreamError(f"engine sent {name} that is no list of numbers") from None
        size = found.size * 4
    if found.ndim != 1 or size != count * 4:
        raise UpstreamError(f"{name} has {size} bytes, want {count * 4}")
    return found
