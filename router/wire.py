"""SGLang's ``/generate`` on the wire: build one request body, check and decode one reply.

Pure functions over bytes and records. A reply that cannot be recorded as truth (lengths that differ,
non-finite log-probabilities, spans with gaps, routes of the wrong size) is an ``UpstreamError`` that names
both sizes; nothing is ever reshaped to fit. Must not do I/O. Depends on numpy, orjson and the kernel.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import orjson
from numpy.typing import NDArray

from tollway.errors import InvalidRecord, UpstreamError
from tollway.records import FinishReason, Ids, RoutedExperts, Sampling, TopLogprobs, VersionSpan, parse_version

__all__ = ["GenerateCall", "GenerateDelta", "GenerateReply", "Json", "encode_call", "parse_reply"]

Json = Mapping[str, object]

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_ROUNDING = 1e-3
"""How far above 0 a log-probability may come to lie by rounding."""
_ONLY_INT = frozenset({int})
_NUMBER = frozenset({int, float, type(None)})
"""JSON has no NaN: an engine that has one sends null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One request for tokens. ``routing_key`` is required: a keyless call would break prefix reuse."""

    rid: str
    """Our own request id; unique per attempt, what an abort names."""
    input_ids: Ids
    """[prompt] the whole prompt."""
    sampling: Sampling
    routing_key: str
    stream: bool = False
    top_logprobs: int = 0
    """Alternatives per sampled position; 0 asks for none."""
    return_routed_experts: bool = False
    routed_experts_start: int = 0
    """First position whose route row travels; earlier rows are already known."""
    extra_key: str | None = None
    routed_dp_rank: int | None = None
    priority: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReply:
    """A checked, complete reply of an engine."""

    output_ids: Ids
    """[sampled] the matched stop id included."""
    logprobs: NDArray[np.float32]
    """[sampled] nats, finite."""
    finish_reason: FinishReason
    matched: int | str | None
    """Stop id or string that ended generation."""
    versions: tuple[VersionSpan, ...]
    """Gapless over [0, sampled)."""
    prompt_tokens: int
    cached_tokens: int | None
    """``None``: the engine did not say."""
    routed_experts: RoutedExperts | None = None
    """[prompt + sampled - 1 - start, layers, top_k]"""
    top_logprobs: TopLogprobs | None = None
    """[sampled, k]"""
    text: str | None = None
    """The engine's own decoding, absent with skip-tokenizer-init. Never used as truth."""


@dataclass(frozen=True, slots=True)
class GenerateDelta:
    """Tokens that arrived since the previous delta of a stream."""

    output_ids: Ids
    """[new]"""
    logprobs: NDArray[np.float32]
    """[new] parallel to ``output_ids``."""


def encode_call(call: GenerateCall) -> bytes:
    """Body of ``POST /generate``. Prompt log-probabilities are never asked for: that defeats the cache."""
    sampling = call.sampling
    params: dict[str, object] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.max_new_tokens is not None:
        params["max_new_tokens"] = sampling.max_new_tokens
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if call.ignore_eos:
        params["ignore_eos"] = True
    body: dict[str, object] = {
        "rid": call.rid,
        "input_ids": np.ascontiguousarray(call.input_ids),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": call.stream,
        "routing_key": call.routing_key,
    }
    if call.top_logprobs:
        body["top_logprobs_num"] = call.top_logprobs
    if call.return_routed_experts:
        body["return_routed_experts"] = True
        body["routed_experts_start_len"] = call.routed_experts_start
    for name, value in (
        ("extra_key", call.extra_key),
        ("routed_dp_rank", call.routed_dp_rank),
        ("priority", call.priority),
    ):
        if value is not None:
            body[name] = value
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def parse_reply(call: GenerateCall, reply: Json, *, route_shape: tuple[int, int] | None = None) -> GenerateReply:
    """Check one complete reply against its call.

    ``route_shape`` is (layers, top_k) of the served model. Raises ``UpstreamError`` naming sizes.
    """
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
    prompt_tokens = int(call.input_ids.size) if waited else int_of(meta, "prompt_tokens")
    if prompt_tokens != call.input_ids.size:
        raise UpstreamError(f"engine counted {prompt_tokens} prompt tokens, {call.input_ids.size} ids were sent")
    logprobs = logprobs_of(meta, output_ids)
    cached = meta.get("cached_tokens")
    if cached is not None and (not isinstance(cached, int) or not 0 <= cached <= prompt_tokens):
        raise UpstreamError(f"engine reports {cached!r} cached of {prompt_tokens} prompt tokens")
    text = reply.get("text")
    return GenerateReply(
        output_ids=output_ids,
        logprobs=logprobs,
        finish_reason=finish,
        matched=matched,
        versions=_versions(meta, sampled),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached,
        routed_experts=_routes(call, meta, sampled, route_shape) if call.return_routed_experts and not waited else None,
        top_logprobs=_top(meta, sampled, call.top_logprobs) if call.top_logprobs else None,
        text=text if isinstance(text, str) else None,
    )


def meta_of(reply: Json) -> Json:
    """``meta_info`` of a reply or of a stream chunk."""
    meta = reply.get("meta_info")
    if not isinstance(meta, dict):
        raise UpstreamError(f"engine reply has no meta_info object; keys are {sorted(map(str, reply))}")
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
        numbers, tokens = [entry[0] for entry in entries], [entry[1] for entry in entries]
        if not (_NUMBER.issuperset(map(type, numbers)) and _ONLY_INT.issuperset(map(type, tokens))):
            raise TypeError
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
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UpstreamError(f"engine sent {key} {value!r}, want a count")
    return value


def _finish(meta: Json) -> tuple[FinishReason, int | str | None]:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if not isinstance(reason, dict) or not isinstance(kind, str) or kind not in _FINISH:
        raise UpstreamError(f"engine ended with finish_reason {reason!r}, want stop, length or abort")
    matched = reason.get("matched")
    if isinstance(matched, list):
        matched = matched[-1] if matched else None
    return _FINISH[kind], matched if isinstance(matched, (int, str)) else None


def _versions(meta: Json, sampled: int) -> tuple[VersionSpan, ...]:
    spans = meta.get("weight_versions")
    if spans is None:
        if sampled == 0:
            return ()
        raise UpstreamError(
            f"engine sent no weight_versions spans for {sampled} sampled ids; SGLang sends them from 0.5.19 on"
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
            version = VersionSpan(parse_version(str(span["version"])), start, end)
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


def _routes(call: GenerateCall, meta: Json, sampled: int, shape: tuple[int, int] | None) -> RoutedExperts | None:
    raw = meta.get("routed_experts")
    if shape is None:
        raise UpstreamError("routed experts were asked for, but the model's layers and experts per token are unknown")
    layers, top_k = shape
    # A prefill-only reply has a row for every prompt token; otherwise the last token has none.
    rows = int(call.input_ids.size) + max(sampled, 1) - 1 - call.routed_experts_start
    if not isinstance(raw, str):
        raise UpstreamError(f"engine sent no routed_experts, want {rows} rows")
    try:
        data = base64.b64decode(raw, validate=True)
    except (binascii.Error, ValueError):
        raise UpstreamError(f"routed_experts is not base64 ({len(raw)} characters)") from None
    want = rows * layers * top_k * 4
    if len(data) != want:
        raise UpstreamError(
            f"routed_experts has {len(data)} bytes, want {want} = {rows} rows x {layers} layers x {top_k} experts x 4"
        )
    wide = np.frombuffer(data, dtype="<i4").reshape(rows, layers, top_k)
    if wide.size and (wide.min() < 0 or wide.max() > 65535):
        raise UpstreamError(f"routed_experts holds expert {int(wide.max())}, want 0 to 65535")
    if not wide.size or wide.max() < 256:
        return RoutedExperts(start=call.routed_experts_start, ids=wide.astype(np.uint8))
    return RoutedExperts(start=call.routed_experts_start, ids=wide.astype(np.uint16))


def _top(meta: Json, sampled: int, k: int) -> TopLogprobs:
    rows = meta.get("output_top_logprobs")
    if sampled == 0:
        rows = []
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
