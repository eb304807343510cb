"""SGLang's ``/generate`` on the wire: what is asked, the body that asks it, and what a checked reply holds.

How replies are read is ``replies``' and ``streams``'. Must not do I/O. Depends on numpy, orjson, ``prompt``
and the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import orjson
from numpy.typing import NDArray

from tollway.records import (
    FinishReason,
    Ids,
    IndexerTopk,
    RoutedExperts,
    Sampling,
    SamplingMask,
    TopLogprobs,
    VersionSpan,
)
from tollway.router.prompt import Prompt, ids_json

__all__ = [
    "LOGPROB_START_LEN",
    "CacheTiers",
    "GenerateCall",
    "GenerateDelta",
    "GenerateReply",
    "Json",
    "Prompt",
    "call_pieces",
    "encode_call",
    "ids_json",
]

Json = Mapping[str, object]
LOGPROB_START_LEN = -1
"""Of every call: an engine computes prompt positions from there on whatever it has cached, so never 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One request for tokens. ``routing_key`` is required: a keyless call would break prefix reuse."""

    rid: str
    """Our own request id; unique per attempt, what an abort names."""
    prompt: Prompt
    """The whole prompt."""
    sampling: Sampling
    routing_key: str
    stream: bool = False
    top_logprobs: int = 0
    """Alternatives per sampled position; 0 asks for none."""
    return_routed_experts: bool = False
    routed_experts_start: int = 0
    """First position whose route row travels; earlier rows are already known."""
    return_sampling_mask: bool = False
    """Which ids could have been drawn; SGLang wants a finite ``top_k`` for it."""
    return_indexer_topk: bool = False
    indexer_topk_start: int = 0
    """First position whose indexer row is kept; the engine sends all of them."""
    extra_key: str | None = None
    routed_dp_rank: int | None = None
    priority: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTiers:
    """Where an engine found the cached tokens of a prompt."""

    device: int
    host: int = 0
    storage: int = 0


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
    """``None``: the engine did not say. Of a reply that was continued: of its first prefill."""
    cached_tiers: CacheTiers | None = None
    """``None``: the engine does not tell tiers apart."""
    retractions: int = 0
    """Times that the engine took its KV away while it ran."""
    reasoning_tokens: int = 0
    """Of the output, as far as the engine counts them."""
    resumed: int = 0
    """Times that it was aborted and continued."""
    resumed_tokens: int = 0
    """Tokens computed again when it was continued."""
    routed_experts: RoutedExperts | None = None
    """[prompt + sampled - 1 - start, layers, top_k]"""
    top_logprobs: TopLogprobs | None = None
    """[sampled, k]"""
    sampling_mask: SamplingMask | None = None
    """[sampled] rows"""
    indexer_topk: IndexerTopk | None = None
    """[prompt + sampled - 1 - start, indexer layers, top_k]"""
    text: str | None = None
    """The engine's own decoding, absent with skip-tokenizer-init. Never used as truth."""


@dataclass(frozen=True, slots=True)
class GenerateDelta:
    """Tokens that arrived since the previous delta of a stream."""

    output_ids: Ids
    """[new]"""
    logprobs: NDArray[np.float32]
    """[new] parallel to ``output_ids``."""
    cached_tokens: int | None = None
    """Of the prompt, when the engine has said it by now."""


def encode_call(call: GenerateCall) -> bytes:
    """Body of ``POST /generate``."""
    return b"".join(call_pieces(call))


def call_pieces(call: GenerateCall) -> list[bytes]:
    """Body of ``POST /generate`` in pieces: those of the prompt are the conversation's own, not copies.

    Prompt log-probabilities are never asked for: that defeats the cache.
    """
    body: dict[str, object] = {
        "rid": call.rid,
        "sampling_params": _params(call),
        "return_logprob": True,
        "logprob_start_len": LOGPROB_START_LEN,
        "stream": call.stream,
        "routing_key": call.routing_key,
    }
    if call.top_logprobs:
        body["top_logprobs_num"] = call.top_logprobs
        if not call.stream:
            # Arrays instead of nested lists; an engine that does not know the form sends lists.
            body["return_flat_raw_output_top_logprobs"] = body["return_flat_raw_top_logprobs_b64"] = True
    if call.return_routed_experts:
        body["return_routed_experts"] = True
        body["routed_experts_start_len"] = call.routed_experts_start
    if call.return_sampling_mask:
        body["return_sampling_mask"] = True
    if call.return_indexer_topk:
        body["return_indexer_topk"] = True
    for name, value in (
        ("extra_key", call.extra_key),
        ("routed_dp_rank", call.routed_dp_rank),
        ("priority", call.priority),
    ):
        if value is not None:
            body[name] = value
    head, tail = b'{"input_ids":[', b"]," + orjson.dumps(body)[1:]
    pieces = [head]
    for chunk in call.prompt.chunks:
        pieces += (chunk, b",")
    if call.prompt.chunks:
        pieces.pop()
    pieces.append(tail)
    return pieces


def _params(call: GenerateCall) -> dict[str, object]:
    """``sampling_params``: what was not asked for is left to the engine's default."""
    sampling = call.sampling
    params: dict[str, object] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    for name, value in (
        ("max_new_tokens", sampling.max_new_tokens),
        ("sampling_seed", sampling.seed),
        ("min_p", sampling.min_p),
        ("frequency_penalty", sampling.frequency_penalty),
        ("presence_penalty", sampling.presence_penalty),
        ("repetition_penalty", sampling.repetition_penalty),
        ("stop", list(sampling.stop) or None),
        ("stop_token_ids", list(sampling.stop_token_ids) or None),
        ("logit_bias", {str(token): bias for token, bias in sampling.logit_bias} or None),
        ("ignore_eos", call.ignore_eos or None),
        *sampling.constraint,
    ):
        if value is not None:
            params[name] = value
    return params
