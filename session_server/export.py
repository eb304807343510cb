"""Trajectory rows of a session: one per leaf, exactly what the engine was sent and returned.

A leaf's row ends with its last sampled id: the engine never saw what a template would put behind it. Every
sampled id has mask 1 in exactly one row, the first leaf's that reaches it; elsewhere it is context. Built
from the journal's rows, off the event loop. Pure functions; depends on ``rows`` and the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np

from tollway.errors import InvalidRecord
from tollway.records import (
    IndexerTopk,
    RoutedExperts,
    SamplingMask,
    TokenSpan,
    TopLogprobs,
    Trajectory,
    VersionSpan,
)
from tollway.session_server.rows import KeptTurn

__all__ = ["ExportFacts", "ExportPolicy", "export_rows"]

_R = TypeVar("_R", RoutedExperts, IndexerTopk)


@dataclass(frozen=True, slots=True)
class ExportFacts:
    """What rows say of their session."""

    session_id: str
    reward: float | None = None
    error: str | None = None
    task_id: str = ""
    group_id: str = ""
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExportPolicy:
    """Which leaves become rows."""

    branches: Literal["all", "main"] = "all"
    """``main``: of each conversation that has tools (of every one, if none has), the leaf that was continued last."""
    side_requests: Literal["mark", "train", "drop"] = "mark"
    """Conversations without tools beside one with tools, such as title requests."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf with its path, root first."""

    path: tuple[KeptTurn, ...]
    side: bool

    @property
    def turn(self) -> KeptTurn:
        return self.path[-1]

    @property
    def length(self) -> int:
        return sum(int(turn.record.suffix_ids.size + turn.record.sampled_ids.size) for turn in self.path)


def export_rows(
    turns: Sequence[KeptTurn], facts: ExportFacts, policy: ExportPolicy | None = None
) -> tuple[Trajectory, ...]:
    """One row per leaf that ``policy`` keeps, oldest first. Raises ``InvalidRecord`` when routes leave a gap."""
    policy = policy or ExportPolicy()
    leaves = _kept(_leaves(turns), policy)
    trained: set[int] = set()
    # Leaves that are not for training claim last: a prefix that they share with one that is, is trained there.
    order = sorted(range(len(leaves)), key=lambda at: not _trainable(leaves[at], policy))
    rows = {at: _row(leaves[at], facts, policy, trained) for at in order}
    return tuple(rows[at] for at in range(len(leaves)))


def _leaves(turns: Sequence[KeptTurn]) -> list[_Leaf]:
    known: Mapping[int, KeptTurn] = {turn.number: turn for turn in turns}
    parents = {turn.parent for turn in turns}
    any_tools = any(turn.with_tools for turn in turns if turn.parent is None)
    leaves = []
    for turn in sorted(turns, key=lambda each: each.number):
        if turn.number in parents:
            continue
        path = [turn]
        while (parent := path[-1].parent) is not None:
            path.append(known[parent])
        path.reverse()
        leaves.append(_Leaf(tuple(path), any_tools and not path[0].with_tools))
    return leaves


def _kept(leaves: Sequence[_Leaf], policy: ExportPolicy) -> list[_Leaf]:
    if policy.side_requests == "drop":
        leaves = [leaf for leaf in leaves if not leaf.side]
    if policy.branches == "all":
        return list(leaves)
    latest: dict[int, int] = {}
    for at, leaf in enumerate(leaves):
        if not leaf.side and not leaf.turn.superseded:
            latest[leaf.path[0].number] = at
    keep = set(latest.values())
    return [leaf for at, leaf in enumerate(leaves) if leaf.side or at in keep]


def _trainable(leaf: _Leaf, policy: ExportPolicy) -> bool:
    return not leaf.turn.superseded and not (leaf.side and policy.side_requests != "train")


def _row(leaf: _Leaf, facts: ExportFacts, policy: ExportPolicy, trained: set[int]) -> Trajectory:
    path, size = leaf.path, leaf.length
    columns = _Columns(size)
    own: list[KeptTurn] = []
    for turn in path:
        mine = turn.number not in trained
        columns.add(turn, trained=mine)
        if mine:
            trained.add(turn.number)
            own.append(turn)
    records = [turn.record for turn in path]
    sampling = records[-1].sampling
    reason = "superseded" if leaf.turn.superseded else "side_request"
    return Trajectory(
        token_ids=columns.ids,
        loss_mask=columns.mask,
        logprobs=columns.logprobs,
        weight_version=columns.versions,
        session_id=facts.session_id,
        leaf=leaf.turn.number,
        branch_reason=next((turn.reason for turn in reversed(path) if turn.reason != "continuation"), "root"),
        turn_spans=tuple(columns.spans),
        finish_reasons=tuple(record.finish_reason for record in records),
        sampling=sampling,
        engine_ids=tuple(record.engine_id for record in records),
        cached_tokens=tuple(record.cached_tokens for record in records),
        version_spans=tuple(columns.version_spans),
        prompt_tokens=tuple(record.prompt_tokens for record in records),
        turn_times=tuple((record.started_at, record.ended_at) for record in records),
        turn_sampling=() if all(r.sampling == sampling for r in records) else tuple(r.sampling for r in records),
        truncated=leaf.turn.overflowed or any(record.finish_reason == "length" for record in records),
        side_request=leaf.side,
        trainable=_trainable(leaf, policy),
        untrainable_reason="" if _trainable(leaf, policy) else reason,
        reward=facts.reward,
        error=facts.error,
        task_id=facts.task_id,
        group_id=facts.group_id,
        metadata=facts.metadata,
        routed_experts=_replayed(RoutedExperts, "routed experts", [r.routed_experts for r in records], size),
        indexer_topk=_replayed(IndexerTopk, "indexer rows", [r.indexer_topk for r in records], size),
        top_logprobs=_top([turn.record.top_logprobs for turn in own]),
        sampling_mask=_masks([turn.record.sampling_mask for turn in own]),
    )


class _Columns:
    """Token columns of one row, filled call by call."""

    def __init__(self, size: int) -> None:
        self.ids = np.empty(size, np.int32)
        self.mask = np.zeros(size, np.uint8)
        self.logprobs = np.full(size, np.nan, np.float32)
        self.versions = np.full(size, -1, np.int32)
        self.spans: list[TokenSpan] = []
        self.version_spans: list[VersionSpan] = []
        self._at = 0

    def add(self, turn: KeptTurn, *, trained: bool) -> None:
        """The next call of the path."""
        record = turn.record
        start = self._at + record.suffix_ids.size
        end = start + record.sampled_ids.size
        self.ids[self._at : start] = record.suffix_ids
        self.ids[start:end] = record.sampled_ids
        self.spans.append(TokenSpan(start, end))
        self.version_spans += [
            replace(span, start=start + span.start, end=start + span.end) for span in record.versions
        ]
        if trained:
            self.mask[start:end] = 1
            self.logprobs[start:end] = record.logprobs
            for span in record.versions:
                self.versions[start + span.start : start + span.end] = span.version
        self._at = end


def _replayed(kind: type[_R], what: str, parts: Sequence[_R | None], size: int) -> _R | None:
    """Rows of every position but the last, or nothing when no call recorded any."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    if len(known) != len(parts):
        raise InvalidRecord(f"{len(known)} of {len(parts)} calls on the path recorded {what}")
    if known[0].start != 0:
        raise InvalidRecord(f"{what} leave a gap: the first row is of position {known[0].start}")
    whole = kind.joined(known)
    if whole.ids.shape[0] != size - 1:
        raise InvalidRecord(f"{whole.ids.shape[0]} {what} for {size} tokens, want {size - 1}")
    return whole


def _top(parts: Sequence[TopLogprobs | None]) -> TopLogprobs | None:
    known = [part for part in parts if part is not None]
    if not known or len(known) != len(parts):
        return None
    k = min(part.ids.shape[1] for part in known)
    return TopLogprobs(
        ids=np.concatenate([part.ids[:, :k] for part in known]),
        logprobs=np.concatenate([part.logprobs[:, :k] for part in known]),
    )


def _masks(parts: Sequence[SamplingMask | None]) -> SamplingMask | None:
    known = [part for part in parts if part is not None]
    return SamplingMask.joined(known) if known and len(known) == len(parts) else None
