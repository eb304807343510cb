"""One reply from pieces: a call that an engine aborted (pause, abort all) and that was continued.

Pure functions: the next call of a reply that is not complete, and the join. Every piece keeps its weight
versions, a continuation asks only for what is left. Depends on ``wire``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tollway.records import IndexerTopk, RoutedExperts, SamplingMask, TopLogprobs, VersionSpan
from tollway.router.wire import GenerateCall, GenerateReply, ids_json

__all__ = ["continue_call", "merge_replies"]


def continue_call(call: GenerateCall, pieces: list[GenerateReply]) -> GenerateCall | None:
    """The call that continues ``call`` after aborted ``pieces``; ``None`` when its reply is complete."""
    if pieces[-1].finish_reason != "abort":
        return None
    done = sum(int(piece.output_ids.size) for piece in pieces)
    sampling = call.sampling
    if sampling.max_new_tokens is not None:
        if done >= sampling.max_new_tokens:
            return None
        sampling = replace(sampling, max_new_tokens=sampling.max_new_tokens - done)
    prompt = call.prompt
    for piece in pieces:
        prompt = prompt.extended(ids_json(piece.output_ids), int(piece.output_ids.size))
    return replace(
        call,
        rid=f"{call.rid}-{len(pieces)}",
        prompt=prompt,
        sampling=sampling,
        routed_experts_start=_known_until([piece.routed_experts for piece in pieces], call.routed_experts_start),
        indexer_topk_start=_known_until([piece.indexer_topk for piece in pieces], call.indexer_topk_start),
    )


def merge_replies(call: GenerateCall, pieces: list[GenerateReply]) -> GenerateReply:
    """One reply from the pieces of a call that was aborted and continued; versions keep their positions."""
    if len(pieces) == 1 and pieces[0].finish_reason != "abort":
        return pieces[0]
    versions: list[VersionSpan] = []
    at = 0
    for piece in pieces:
        for span in piece.versions:
            joined = versions[-1] if versions else None
            if joined is not None and _weights(joined) == _weights(span):
                versions[-1] = replace(joined, end=at + span.end)
            else:
                versions.append(replace(span, start=at + span.start, end=at + span.end))
        at += int(piece.output_ids.size)
    last = pieces[-1]
    # A piece that was aborted while it waited had no prefill.
    first = next((piece for piece in pieces if piece.cached_tokens is not None), pieces[0])
    routes = [piece.routed_experts for piece in pieces if piece.routed_experts is not None]
    chosen = [piece.indexer_topk for piece in pieces if piece.indexer_topk is not None]
    return GenerateReply(
        output_ids=np.concatenate([piece.output_ids for piece in pieces]),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        # Aborted with its whole budget used: it ended by length.
        finish_reason="length" if last.finish_reason == "abort" else last.finish_reason,
        matched=last.matched,
        versions=tuple(versions),
        prompt_tokens=call.prompt.size,
        cached_tokens=first.cached_tokens,
        cached_tiers=first.cached_tiers,
        retractions=sum(piece.retractions for piece in pieces),
        reasoning_tokens=sum(piece.reasoning_tokens for piece in pieces),
        resumed=len(pieces) - 1,
        resumed_tokens=sum(
            piece.prompt_tokens - piece.cached_tokens
            for piece in pieces
            if piece is not first and piece.cached_tokens is not None
        ),
        routed_experts=RoutedExperts.joined(routes) if routes else None,
        top_logprobs=_merge_top(pieces),
        sampling_mask=_merge_masks(pieces),
        indexer_topk=IndexerTopk.joined(chosen) if chosen else None,
        text=None,
    )


def _weights(span: VersionSpan) -> tuple[int, str, str]:
    return span.version, span.kind, span.precision


def _known_until(parts: Sequence[RoutedExperts | IndexerTopk | None], start: int) -> int:
    """Position up to which rows are known; a piece that waited when it was aborted has none."""
    known = [part for part in parts if part is not None]
    return known[-1].start + known[-1].ids.shape[0] if known else start


def _merge_top(pieces: Sequence[GenerateReply]) -> TopLogprobs | None:
    known = [piece.top_logprobs for piece in pieces if piece.top_logprobs is not None]
    if len(known) != len(pieces):
        return None
    return TopLogprobs(
        ids=np.concatenate([part.ids for part in known]), logprobs=np.concatenate([part.logprobs for part in known])
    )


def _merge_masks(pieces: Sequence[GenerateReply]) -> SamplingMask | None:
    known = [piece.sampling_mask for piece in pieces if piece.sampling_mask is not None]
    return SamplingMask.joined(known) if len(known) == len(pieces) else None
