"""Reading a reply of ``/generate``: every way in which one can fail to add up.

Pure functions over parsed JSON. A reply that cannot be recorded as truth (lengths that differ, non-finite
log-probabilities, spans with gaps, routes of the wrong size) is an ``UpstreamError`` that names both sizes;
nothing is ever reshaped to fit. Depends on numpy, ``wire``, ``blobs``, ``facts`` and the kernel.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from tollway.errors import InvalidRecord, UpstreamError
from tollway.records import (
    FinishReason,
    Ids,
    IndexerTopk,
    RoutedExperts,
    VersionSpan,
    parse_version,
)
from tollway.router.blobs import decode_blob, narrow_signed, narrow_unsigned
from tollway.router.facts import UNKNOWN, EngineFacts
from tollway.router.said import said, said_text
from tollway.router.sampled import mask_of, tops_of
from tollway.router.wire import CacheTiers, GenerateCall, GenerateReply, Json

__all__ = ["blob_names", "cached_of", "ids_of", "int_of", "logprobs_of", "meta_of", "parse_reply"]

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_ROUNDING = 1e-3
"""How far above 0 a log-probability may come to lie by rounding."""
_MOST = 2**31 - 1
"""Beyond any count of one reply; sums of what is within it fit 64 bits for ever."""
_LONGEST_VERSION = 64
"""Characters."""
_ONLY_INT = frozenset({int})
_NUMBER = frozenset({int, float, type(None)})
"""JSON has no NaN: an engine that has one sends null."""


def blob_names(call: GenerateCall) -> list[str]:
    """Keys of ``meta_info`` whose values may be large base64 strings in the reply to ``call``."""
    names = ["routed_experts"] if call.return_routed_experts else []
    if call.return_indexer_topk:
        names.append("indexer_topk")
    return names


def parse_reply(call: GenerateCall, reply: Json, *, facts: EngineFacts = UNKNOWN) -> GenerateReply:
    """Check one complete reply against its call. Raises ``UpstreamError`` naming sizes."""
    meta = meta_of(reply)
    output_ids = ids_of(reply)
    sampled = int(output_ids.size)
    completion = int_of(meta, "completion_tokens")
    if completion != sampled:
        raise UpstreamError(f"engine says {completion} completion tokens and sent {sampled} output ids")
    most = call.sampling.max_new_tokens
    if most is not None and sampled > most:
        raise UpstreamError(f"engine sent {sampled} output ids, {most} were asked for")
    finish, matched = _finish(meta)
    # A stock server leaves the facts of the prefill out when the request waited as it was aborted.
    waited = finish == "abort" and "prompt_tokens" not in meta
    prompt_tokens = call.prompt.size if waited else int_of(meta, "prompt_tokens")
    if prompt_tokens != call.prompt.size:
        raise UpstreamError(f"engine counted {prompt_tokens} prompt tokens, {call.prompt.size} ids were sent")
    logprobs = logprobs_of(meta, output_ids)
    text = reply.get("text")
    # A prefill-only reply has a row for every prompt token; otherwise the last token has none.
    rows = prompt_tokens + max(sampled, 1) - 1
    return GenerateReply(
        output_ids=output_ids,
        logprobs=logprobs,
        finish_reason=finish,
        matched=matched,
        versions=_versions(meta, sampled, facts),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_of(meta, prompt_tokens),
        cached_tiers=_tiers(meta),
        retractions=_count(meta, "num_retractions"),
        reasoning_tokens=_count(meta, "reasoning_tokens"),
        routed_experts=_routes(call, meta, rows, facts) if call.return_routed_experts and not waited else None,
        top_logprobs=tops_of(meta, sampled, call.top_logprobs) if call.top_logprobs else None,
        sampling_mask=mask_of(meta, output_ids) if call.return_sampling_mask else None,
        indexer_topk=_indexer(call, meta, rows, facts) if call.return_indexer_topk and not waited else None,
        text=text if isinstance(text, str) else None,
    )


def meta_of(reply: Json) -> Json:
    """``meta_info`` of a reply or of a stream chunk."""
    meta = reply.get("meta_info")
    if not isinstance(meta, dict):
        raise UpstreamError(f"engine reply has no meta_info object; keys are {said(sorted(map(str, reply)))}")
    return cast(Json, meta)


def ids_of(reply: Json) -> Ids:
    """[n] ``output_ids`` of a reply or of a stream chunk."""
    raw = reply.get("output_ids")
    if not isinstance(raw, list):
        raise UpstreamError(f"engine reply has no output_ids list but {type(raw).__name__}")
    # numpy would cut 7.9 to 7 and read "7" and true, and the record would not be what was sent.
    if not _ONLY_INT.issuperset(map(type, raw)):
        raise UpstreamError(f"engine sent {len(raw)} output ids that are not all integers")
    if raw and not 0 <= min(raw) <= max(raw) <= 2**31 - 1:
        raise UpstreamError(f"engine sent output ids outside int32: {min(raw)} to {max(raw)}")
    return np.array(raw, dtype=np.int32)


def logprobs_of(meta: Json, ids: Ids) -> NDArray[np.float32]:
    """[n] log-probabilities that belong to ``ids``; every entry must name the same id."""
    entries = meta.get("output_token_logprobs")
    count = int(ids.size)
    if entries is None and count == 0:
        return np.zeros(0, np.float32)
    if not isinstance(entries, list) or len(entries) != count:
        found = len(entries) if isinstance(entries, list) else type(entries).__name__
        raise UpstreamError(f"engine sent {found} output logprobs for {count} output ids")
    try:
        numbers, tokens, *_ = zip(*entries, strict=False) if entries else ((), ())
        if not (_NUMBER.issuperset(map(type, numbers)) and _ONLY_INT.issuperset(map(type, tokens))):
            raise TypeError
        with np.errstate(over="ignore"):  # beyond float32 is not finite, and said so below
            values, named = np.array(numbers, dtype=np.float32), np.array(tokens, dtype=np.int64)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError):
        raise UpstreamError(f"engine sent {count} output logprobs that are not [number, id, text]") from None
    if not np.isfinite(values).all():
        raise UpstreamError(f"engine sent a non-finite logprob at output token {int(np.argmin(np.isfinite(values)))}")
    if (values > _ROUNDING).any():
        at = int(np.argmax(values))
        raise UpstreamError(f"engine sent logprob {float(values[at])} at output token {at}: no probability exceeds 1")
    if not np.array_equal(named, ids):
        at = int(np.argmax(named != ids))
        raise UpstreamError(f"output logprob {at} is of id {int(named[at])}, output id is {int(ids[at])}")
    return values


def int_of(meta: Json, key: str) -> int:
    """A required non-negative integer of ``meta_info``."""
    value = meta.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise UpstreamError(f"engine sent {key} {said(value)}, want a count")
    return value


def cached_of(meta: Json, prompt_tokens: int) -> int | None:
    """Prompt tokens that were cached; ``None``: the engine did not say."""
    cached = meta.get("cached_tokens")
    if cached is not None and (type(cached) is not int or not 0 <= cached <= prompt_tokens):
        raise UpstreamError(f"engine reports {said(cached)} cached of {prompt_tokens} prompt tokens")
    return cached


def _tiers(meta: Json) -> CacheTiers | None:
    details = meta.get("cached_tokens_details")
    if details is None:
        return None
    if not isinstance(details, dict) or "device" not in details:
        raise UpstreamError(f"engine sent cached_tokens_details {said(details)}, want device, host and storage")
    return CacheTiers(**{name: _count(details, name) for name in ("device", "host", "storage")})


def _count(meta: Json, key: str) -> int:
    """An integer that engines may leave out."""
    return int_of(meta, key) if meta.get(key) is not None else 0


def _finish(meta: Json) -> tuple[FinishReason, int | str | None]:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if not isinstance(reason, dict) or not isinstance(kind, str) or kind not in _FINISH:
        raise UpstreamError(f"engine ended with finish_reason {said(reason)}, want stop, length or abort")
    matched = reason.get("matched")
    if isinstance(matched, list):
        matched = matched[-1] if matched else None
    return _FINISH[kind], matched if isinstance(matched, (int, str)) else None


def _versions(meta: Json, sampled: int, facts: EngineFacts) -> tuple[VersionSpan, ...]:
    spans = meta.get("weight_versions")
    if spans is None:
        if sampled == 0:
            return ()
        raise UpstreamError(
            f"engine sent no weight_versions spans for {sampled} sampled ids; SGLang sends them from 0.5.19 on (and "
            "0.5.22 or later is needed)"
        )
    if not isinstance(spans, list):
        raise UpstreamError(f"engine sent weight_versions of type {type(spans).__name__}")
    found: list[VersionSpan] = []
    at = 0
    try:
        for span in spans:
            start, end = span["start"], span["end"]
            if not _ONLY_INT.issuperset((type(start), type(end))):
                raise TypeError
            version = VersionSpan(
                parse_version(said_text(span["version"], _LONGEST_VERSION)), start, end, facts.kind, facts.precision
            )
            if version.start == version.end:
                continue
            if version.start != at:
                raise UpstreamError(f"weight version spans leave a gap at token {at}: next starts at {version.start}")
            at = version.end
            found.append(version)
    except InvalidRecord as error:
        raise UpstreamError(str(error)) from error
    except (TypeError, KeyError):
        raise UpstreamError("engine sent weight_versions that are not {version, start, end}") from None
    if at != sampled:
        raise UpstreamError(f"weight version spans cover {at} of {sampled} sampled ids")
    return tuple(found)


def _routes(call: GenerateCall, meta: Json, rows: int, facts: EngineFacts) -> RoutedExperts:
    """Rows [start, rows) of expert choices."""
    if facts.route_shape is None:
        raise UpstreamError("routed experts were asked for, but the model's layers and experts per token are unknown")
    layers, top_k = facts.route_shape
    rows -= call.routed_experts_start
    if meta.get("routed_experts") is None:
        raise UpstreamError(f"engine sent no routed_experts, want {rows} rows")
    data = decode_blob("routed_experts", meta["routed_experts"])
    want = rows * layers * top_k * 4
    if len(data) != want:
        raise UpstreamError(
            f"routed_experts has {len(data)} bytes, want {want} = {rows} rows x {layers} layers x {top_k} experts x 4"
        )
    ids = narrow_unsigned(data, "an expert choice")
    return RoutedExperts(start=call.routed_experts_start, ids=ids.reshape(rows, layers, top_k))


def _indexer(call: GenerateCall, meta: Json, rows: int, facts: EngineFacts) -> IndexerTopk:
    """Rows [start, rows) of what the indexer chose; the engine sends all rows, the known ones are cut off."""
    if facts.indexer_shape is None:
        raise UpstreamError("indexer choices were asked for, but the model's indexer layers and top_k are unknown")
    layers, top_k = facts.indexer_shape
    if meta.get("indexer_topk") is None:
        raise UpstreamError(f"engine sent no indexer_topk, want {rows} rows")
    data = decode_blob("indexer_topk", meta["indexer_topk"])
    row = layers * top_k * 4
    if len(data) != rows * row:
        raise UpstreamError(
            f"indexer_topk has {len(data)} bytes, want {rows * row} = {rows} rows x {layers} layers x {top_k} x 4"
        )
    start = call.indexer_topk_start
    ids = narrow_signed(memoryview(data)[start * row :], "indexer_topk")
    return IndexerTopk(start=start, ids=ids.reshape(rows - start, layers, top_k))
