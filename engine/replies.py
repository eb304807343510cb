"""Replies of ``/generate`` in SGLang's shapes.

Pure functions from ``Progress``/``Result`` to JSON-ready dicts. Depends on ``request``, ``protocol`` and
``text``.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tollway.engine.protocol import GenerateBody
from tollway.engine.request import Finish, Progress, Request, Result, TopRow
from tollway.engine.text import TextCodec

__all__ = ["Json", "finish_reason", "reply"]

Json = dict[str, object]


def reply(body: GenerateBody, request: Request, state: Progress, codec: TextCodec | None, *, new_from: int = 0) -> Json:
    """One whole reply, or one event of a stream. ``new_from``: first generated token to include."""
    result = state if isinstance(state, Result) else None
    out: Json = {}
    if codec is not None:
        out["text"] = _text(codec, request, state, result)
    out["output_ids"] = state.ids[new_from:].tolist()
    if body.return_prompt_token_ids:
        out["prompt_token_ids"] = request.prompt.tolist()
    cached = state.cached_tokens
    meta: Json = {
        "id": request.rid,
        "finish_reason": None if result is None else finish_reason(result.finish, len(result.ids)),
        "prompt_tokens": len(request.prompt),
        "completion_tokens": len(state.ids),
        "cached_tokens": cached,
        "cached_tokens_details": {"device": cached, "host": 0},
        "reasoning_tokens": 0,
        "weight_version": state.weight_version,
        "num_retractions": request.retractions,
    }
    if request.return_logprob:
        meta |= _logprobs(body, request, state, codec, new_from)
    if result is not None:
        meta["weight_versions"] = [{"version": v, "start": start, "end": end} for v, start, end in result.versions]
        meta["e2e_latency"] = result.latency_s
        if request.return_routes:
            meta["routed_experts"] = None if result.routes is None else _base64(result.routes.astype(np.int32))
    out["meta_info"] = meta
    return out


def finish_reason(finish: Finish, generated: int) -> Json:
    """``finish_reason`` as a stock server writes it."""
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": generated}
    reason: Json = {"type": "abort", "message": finish.message}
    if finish.status is not None:
        reason |= {"status_code": finish.status, "err_type": "BadRequestError" if finish.status == 400 else None}
    return reason


def _text(codec: TextCodec, request: Request, state: Progress, result: Result | None) -> str:
    params, ids = request.params, state.ids.tolist()
    matched = None if result is None else result.finish.matched
    if isinstance(matched, int) and not params.no_stop_trim:
        ids = ids[:-1]
    text = codec.decode(ids, skip_special=params.skip_special_tokens)
    if isinstance(matched, str) and not params.no_stop_trim:
        text = text[: text.find(matched)] if matched in text else text
    # A character that is not complete yet must not be shown as broken.
    return text if result is not None else text.rstrip("�")


def _logprobs(body: GenerateBody, request: Request, state: Progress, codec: TextCodec | None, new_from: int) -> Json:
    codec = codec if body.return_text_in_logprobs else None
    values, ids = state.logprobs[new_from:], state.ids[new_from:]
    meta: Json = {"output_token_logprobs": _triples(values, ids, codec), "input_token_logprobs": []}
    if request.top_logprobs:
        if body.return_flat_raw_output_top_logprobs or body.return_flat_raw_top_logprobs_b64:
            meta |= _flat_tops(state.tops, request.top_logprobs, as_base64=body.return_flat_raw_top_logprobs_b64)
        else:
            meta["output_top_logprobs"] = [_triples(v, i, codec) for v, i in state.tops[new_from:]]
    if isinstance(state, Result) and state.input_logprobs is not None:
        start = request.logprob_start
        # The first position asked for has no predecessor among those asked for: null, as upstream.
        first: list[object] = [None, int(request.prompt[start]), None]
        meta["input_token_logprobs"] = [first, *_triples(state.input_logprobs, request.prompt[start + 1 :], codec)]
        if request.top_logprobs:
            meta["input_top_logprobs"] = [None, *(_triples(v, i, codec) for v, i in state.input_tops)]
    return meta


def _triples(
    values: NDArray[np.float32], ids: NDArray[np.int32] | NDArray[np.int64], codec: TextCodec | None
) -> list[list[object]]:
    if codec is None:
        return [[value, token, None] for value, token in zip(values.tolist(), ids.tolist(), strict=True)]
    return [[v, t, codec.decode([t])] for v, t in zip(values.tolist(), ids.tolist(), strict=True)]


def _flat_tops(tops: Sequence[TopRow], width: int, *, as_base64: bool) -> Json:
    values = np.array([v for v, _ in tops], np.float32).reshape(len(tops), width)
    ids = np.array([i for _, i in tops], np.int32).reshape(len(tops), width)
    prefix = "output_top_logprobs"
    meta: Json = {f"{prefix}_shape": [len(tops), width], f"{prefix}_null_prefix": 0}
    if as_base64:
        return meta | {
            f"{prefix}_val_flat_b64": _base64(values),
            f"{prefix}_val_flat_b64_dtype": "float32",
            f"{prefix}_idx_flat_b64": _base64(ids),
            f"{prefix}_idx_flat_b64_dtype": "int32",
        }
    return meta | {f"{prefix}_val_flat": values.ravel().tolist(), f"{prefix}_idx_flat": ids.ravel().tolist()}


def _base64(array: NDArray[np.int32] | NDArray[np.float32]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
