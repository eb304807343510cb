"""One reply from pieces: a call that an engine aborted (pause, abort all) and that was continued.

Pure functions: the next call of a reply that is not complete, and the join. Every piece keeps its weight
versions, a continuation asks only for what is left. Depends on ``wire``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tollway.errors import InvalidRecord
from tollway.records import RoutedExperts, TopLogprobs, VersionSpan
from tollway.router.wire import GenerateCall, GenerateReply

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
    ids = np.concatenate([call.input_ids, *(piece.output_ids for piece in pieces)]).astype(np.int32, copy=False)
    rid = f"{call.rid}-{len(pieces)}"
    return replace(call, rid=rid, input_ids=ids, sampling=sampling, routed_experts_start=_routed_until(call, pieces))


def merge_replies(call: GenerateCall, pieces: list[GenerateReply]) -> GenerateReply:
    """One reply from the pieces of a call that was aborted and continued; versions keep their positions."""
    if len(pieces) == 1 and pieces[0].finish_reason != "abort":
        return pieces[0]
    versions: list[VersionSpan] = []
    at = 0
    for piece in pieces:
        for span in piece.versions:
            joined = versions[-1] if versions else None
            if joined is not None and joined.version == span.version:
                versions[-1] = VersionSpan(span.version, joined.start, at + span.end)
            else:
                versions.append(VersionSpan(span.version, at + span.start, at + span.end))
        at += int(piece.output_ids.size)
    last = pieces[-1]
    return GenerateReply(
        output_ids=np.concatenate([piece.output_ids for piece in pieces]),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        # Aborted with its whole budget used: it ended by length.
        finish_reason="length" if last.finish_reason == "abort" else last.finish_reason,
        matched=last.matched,
        versions=tuple(versions),
        prompt_tokens=int(call.input_ids.size),
        cached_tokens=pieces[0].cached_tokens,
        routed_experts=_merge_routes(pieces),
        top_logprobs=_merge_top(pieces),
        text=None,
    )


def _routed_until(call: GenerateCall, pieces: list[GenerateReply]) -> int:
    """Position up to which the routes of ``call`` are known; a piece that waited when it was aborted has none."""
    known = [piece.routed_experts for piece in pieces if piece.routed_experts is not None]
    return known[-1].start + known[-1].ids.shape[0] if known else call.routed_experts_start


def _merge_routes(pieces: list[GenerateReply]) -> RoutedExperts | None:
    known = [piece.routed_experts for piece in pieces if piece.routed_experts is not None]
    if not known:
        return None
    at = known[0].start
    for part in known:
        if part.start != at:
            raise InvalidRecord(f"routes of a continued reply leave a gap: {at} rows, next starts at {part.start}")
        at += part.ids.shape[0]
    return RoutedExperts(start=known[0].start, ids=np.concatenate([part.ids for part in known]))


def _merge_top(pieces: list[GenerateReply]) -> TopLogprobs | None:
    parts = [piece.top_logprobs for piece in pieces]
    if any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    return TopLogprobs(
        ids=np.concatenate([part.ids for part in known]), logprobs=np.concatenate([part.logprobs for part in known])
    )
