"""Trajectory rows of a session: one per leaf, exactly what the engine was sent and returned.

A leaf's row ends with its last sampled id: the engine never saw what a template would put behind it. Every
sampled id has mask 1 in exactly one row, the first leaf's that reaches it; elsewhere it is context. Pure
functions over nodes; depends on ``forest`` and the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tollway.errors import InvalidRecord
from tollway.records import RoutedExperts, TokenSpan, TopLogprobs, Trajectory
from tollway.session_server.forest import Node

__all__ = ["ExportFacts", "export_rows"]


@dataclass(frozen=True, slots=True)
class ExportFacts:
    """What rows say of their session."""

    session_id: str
    reward: float | None = None
    error: str | None = None


def export_rows(leaves: Sequence[Node], facts: ExportFacts) -> tuple[Trajectory, ...]:
    """One row per leaf, in the given order. Raises ``InvalidRecord`` when routes leave a gap."""
    trained: set[int] = set()
    # Superseded leaves claim last: a prefix that they share with a live one is trained there.
    order = sorted(range(len(leaves)), key=lambda at: leaves[at].superseded)
    rows = {at: _row(leaves[at], facts, trained) for at in order}
    return tuple(rows[at] for at in range(len(leaves)))


def _row(leaf: Node, facts: ExportFacts, trained: set[int]) -> Trajectory:
    path = leaf.path()
    size = leaf.length
    ids = np.empty(size, np.int32)
    mask = np.zeros(size, np.uint8)
    logprobs = np.full(size, np.nan, np.float32)
    versions = np.full(size, -1, np.int32)
    spans = []
    own: list[Node] = []
    at = 0
    for node in path:
        record = node.record
        start = at + record.suffix_ids.size
        end = start + record.sampled_ids.size
        ids[at:start] = record.suffix_ids
        ids[start:end] = record.sampled_ids
        spans.append(TokenSpan(start, end))
        if node.number not in trained:
            trained.add(node.number)
            own.append(node)
            mask[start:end] = 1
            logprobs[start:end] = record.logprobs
            for span in record.versions:
                versions[start + span.start : start + span.end] = span.version
        at = end
    reason = next((node.reason for node in reversed(path) if node.reason != "continuation"), "root")
    return Trajectory(
        token_ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        weight_version=versions,
        session_id=facts.session_id,
        leaf=leaf.number,
        branch_reason=reason,
        turn_spans=tuple(spans),
        finish_reasons=tuple(node.record.finish_reason for node in path),
        sampling=leaf.record.sampling,
        engine_ids=tuple(node.record.engine_id for node in path),
        cached_tokens=tuple(node.record.cached_tokens for node in path),
        trainable=not leaf.superseded,
        reward=facts.reward,
        error=facts.error,
        routed_experts=_routes(path, size),
        top_logprobs=_top(own),
    )


def _routes(path: Sequence[Node], size: int) -> RoutedExperts | None:
    parts = [node.record.routed_experts for node in path]
    known = [part for part in parts if part is not None]
    if not known:
        return None
    if len(known) != len(parts):
        raise InvalidRecord(f"{len(known)} of {len(parts)} calls on the path recorded routed experts")
    at = 0
    for part in known:
        if part.start != at:
            raise InvalidRecord(f"routed experts leave a gap: rows up to {at}, next start at {part.start}")
        at += part.ids.shape[0]
    if at != size - 1:
        raise InvalidRecord(f"{at} rows of routed experts for {size} tokens, want {size - 1}")
    wide = any(part.ids.dtype == np.uint16 for part in known)
    return RoutedExperts(
        start=0, ids=np.concatenate([part.ids.astype(np.uint16) if wide else part.ids for part in known])
    )


def _top(own: Sequence[Node]) -> TopLogprobs | None:
    parts = [node.record.top_logprobs for node in own]
    known = [part for part in parts if part is not None]
    if not known or len(known) != len(parts):
        return None
    k = min(part.ids.shape[1] for part in known)
    return TopLogprobs(
        ids=np.concatenate([part.ids[:, :k] for part in known]),
        logprobs=np.concatenate([part.logprobs[:, :k] for part in known]),
    )
