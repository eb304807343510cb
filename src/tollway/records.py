"""What is known of a model call and of an episode: frozen, validated numpy records.

A record is checked once, in its constructor, and its arrays are read-only from then on. ``None`` means
"not recorded", never zero. Policy versions are non-negative ints here and decimal strings on the wire.
Depends on numpy and ``errors`` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tollway.errors import InvalidRecord

__all__ = [
    "FinishReason",
    "Group",
    "Ids",
    "IndexerTopk",
    "PolicyVersion",
    "Rollout",
    "RoutedExperts",
    "Sampling",
    "SamplingMask",
    "TokenSpan",
    "TopLogprobs",
    "Trajectory",
    "TurnRecord",
    "VersionSpan",
    "parse_version",
]

Ids = NDArray[np.int32]
PolicyVersion = int
"""Counts the trainer's refits; an engine is stamped with one before it joins."""
FinishReason = Literal["stop", "length", "abort"]


def parse_version(text: str) -> PolicyVersion:
    """Read a version from the wire: a decimal string, nothing else.

    >>> parse_version("7")
    7
    """
    # The export keeps versions as int32.
    if not (text.isascii() and text.isdigit()) or len(text) > 10 or int(text) > 2**31 - 1:
        raise InvalidRecord(
            f"weight version {text[:40]!r} is not a decimal number below 2**31; "
            "stamp the engine with update_weight_version"
        )
    return int(text)


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Half-open range of positions in a token sequence."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise InvalidRecord(f"span [{self.start}, {self.end}) is not a range")


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled tokens [start, end) came from weights ``version``."""

    version: PolicyVersion
    start: int
    end: int
    kind: str = ""
    """Engine that sampled: "sglang", "embedded", ...; empty when not recorded."""
    precision: str = ""
    """Number format of its weights: "bfloat16", "fp8", ...; empty when not recorded."""

    def __post_init__(self) -> None:
        if self.version < 0 or not 0 <= self.start <= self.end:
            raise InvalidRecord(f"bad version span {self.version} [{self.start}, {self.end})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens were drawn. The trainer needs it to score them at the same temperature."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    max_new_tokens: int | None = None
    """``None``: whatever the context leaves."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_p: float | None = None
    """This and the next three: ``None`` leaves the engine's default, which changes no distribution."""
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    constraint: tuple[tuple[str, str], ...] = ()
    """Grammar of the output as the engine takes it, such as ``(("json_schema", "{...}"),)``."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf") or not 0.0 < self.top_p <= 1.0:
            raise InvalidRecord(f"temperature {self.temperature}, top_p {self.top_p} out of range")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """Expert choices of a mixture-of-experts model, for replay in training."""

    start: int
    """Position of row 0 in the whole token sequence."""
    ids: NDArray[np.uint8] | NDArray[np.uint16]
    """[rows, layers, top_k] chosen expert of positions start..start+rows."""

    def __post_init__(self) -> None:
        if self.ids.ndim != 3 or self.ids.dtype not in (np.uint8, np.uint16) or self.start < 0:
            raise InvalidRecord(f"routes of shape {self.ids.shape} and type {self.ids.dtype} from {self.start}")
        _freeze(self.ids)

    @classmethod
    def joined(cls, parts: Sequence[RoutedExperts]) -> RoutedExperts:
        """Consecutive parts as one. Raises ``InvalidRecord`` when one does not start where the last ended."""
        _check_rows("routed experts", [(part.start, part.ids.shape[0]) for part in parts])
        return cls(start=parts[0].start, ids=_joined([part.ids for part in parts]))


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerTopk:
    """Which earlier positions a sparse-attention indexer chose, for replay in training."""

    start: int
    """Position of row 0 in the whole token sequence."""
    ids: NDArray[np.int16] | NDArray[np.int32]
    """[rows, indexer layers, top_k] as the engine sent them; -1 where it had fewer to choose from."""

    def __post_init__(self) -> None:
        if self.ids.ndim != 3 or self.ids.dtype not in (np.int16, np.int32) or self.start < 0:
            raise InvalidRecord(f"indexer rows of shape {self.ids.shape} and type {self.ids.dtype} from {self.start}")
        _freeze(self.ids)

    @classmethod
    def joined(cls, parts: Sequence[IndexerTopk]) -> IndexerTopk:
        """Consecutive parts as one. Raises ``InvalidRecord`` when one does not start where the last ended."""
        _check_rows("indexer rows", [(part.start, part.ids.shape[0]) for part in parts])
        return cls(start=parts[0].start, ids=_joined([part.ids for part in parts]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMask:
    """Which ids could have been drawn at each sampled position: what top_k, top_p and min_p left."""

    offsets: NDArray[np.int32]
    """[rows + 1] row ``r`` is ``ids[offsets[r]:offsets[r + 1]]`` and never empty."""
    ids: NDArray[np.uint16] | NDArray[np.int32]
    """[offsets[-1]]"""
    logprobs: NDArray[np.float32]
    """[rows] nats of the sampled id among the ids of its row, which the policy's own logprob is not."""

    def __post_init__(self) -> None:
        offsets = self.offsets
        if self.ids.ndim != 1 or self.ids.dtype not in (np.uint16, np.int32) or offsets.dtype != np.int32:
            raise InvalidRecord(f"sampling mask of {self.ids.dtype} {self.ids.shape}, offsets of {offsets.dtype}")
        if offsets.ndim != 1 or not offsets.size or offsets[0] != 0 or (np.diff(offsets) < 1).any():
            raise InvalidRecord("a sampling mask has a row without ids")
        if offsets[-1] != self.ids.size:
            raise InvalidRecord(f"sampling mask of {self.ids.size} ids, its rows end at {int(offsets[-1])}")
        if self.logprobs.shape != (self.rows,) or not np.isfinite(self.logprobs).all():
            raise InvalidRecord(f"{self.logprobs.size} finite mask logprobs wanted for {self.rows} rows")
        _freeze(self.offsets, self.ids, self.logprobs)

    @property
    def rows(self) -> int:
        """Number of sampled positions."""
        return int(self.offsets.size) - 1

    @classmethod
    def joined(cls, parts: Sequence[SamplingMask]) -> SamplingMask:
        """The rows of all parts, in order."""
        sizes = np.concatenate([np.zeros(1, np.int32), *(np.diff(part.offsets) for part in parts)])
        return cls(
            offsets=np.cumsum(sizes, dtype=np.int32),
            ids=_joined([part.ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """The k most likely tokens at each sampled position; short rows end in id -1 and -inf."""

    ids: Ids
    """[sampled, k]"""
    logprobs: NDArray[np.float32]
    """[sampled, k] nats"""

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.ids.shape != self.logprobs.shape:
            raise InvalidRecord(f"top ids {self.ids.shape} and logprobs {self.logprobs.shape} differ")
        _freeze(self.ids, self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """What one model call added to its conversation. Never edited after commit."""

    suffix_ids: Ids
    """[added] ids rendered for this call, after the parent's last id."""
    sampled_ids: Ids
    """[sampled] ids returned by the engine, before any decoding."""
    logprobs: NDArray[np.float32]
    """[sampled] log-probability of each sampled id, in nats, from the engine that sampled it."""
    versions: tuple[VersionSpan, ...]
    """Weight versions over [0, sampled), gapless and in order."""
    finish_reason: FinishReason
    sampling: Sampling
    engine_id: str
    """URL and incarnation of the engine that sampled, as the router names it."""
    prompt_tokens: int
    """Length of the whole prompt that was sent: path plus ``suffix_ids``."""
    cached_tokens: int | None
    """Prompt tokens the engine took from its prefix cache, frozen at the first prefill."""
    started_at: float
    ended_at: float
    """Unix seconds around the engine call."""
    matched: int | str | None = None
    """Stop id or string that ended generation."""
    routed_experts: RoutedExperts | None = None
    top_logprobs: TopLogprobs | None = None
    """[sampled, k]"""
    sampling_mask: SamplingMask | None = None
    """[sampled] rows."""
    indexer_topk: IndexerTopk | None = None

    def __post_init__(self) -> None:
        sampled = self.sampled_ids.size
        for name, array in (("suffix_ids", self.suffix_ids), ("sampled_ids", self.sampled_ids)):
            if array.ndim != 1 or array.dtype != np.int32:
                raise InvalidRecord(f"{name} must be int32 [n], got {array.dtype} {array.shape}")
        if self.logprobs.shape != (sampled,):
            raise InvalidRecord(f"{self.logprobs.size} logprobs for {sampled} sampled ids")
        if not np.isfinite(self.logprobs).all():
            raise InvalidRecord("a sampled id has a non-finite logprob")
        _check_versions(self.versions, sampled)
        if self.top_logprobs is not None and self.top_logprobs.ids.shape[0] != sampled:
            raise InvalidRecord(f"{self.top_logprobs.ids.shape[0]} top rows for {sampled} sampled ids")
        if self.sampling_mask is not None and self.sampling_mask.rows != sampled:
            raise InvalidRecord(f"sampling mask of {self.sampling_mask.rows} rows for {sampled} sampled ids")
        if self.prompt_tokens < self.suffix_ids.size:
            raise InvalidRecord(f"prompt of {self.prompt_tokens} is shorter than its suffix")
        _freeze(self.suffix_ids, self.sampled_ids, self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One exported row: a path from a root to a leaf, every token with what is known of it.

    Each sampled id has mask 1 in exactly one row of its session; in siblings that share the prefix it is
    context with mask 0.
    """

    token_ids: Ids
    """[tokens]"""
    loss_mask: NDArray[np.uint8]
    """[tokens] 1 where the engine sampled the id and this row trains it."""
    logprobs: NDArray[np.float32]
    """[tokens] NaN where the mask is 0."""
    weight_version: NDArray[np.int32]
    """[tokens] -1 where the mask is 0."""
    session_id: str
    leaf: int
    """Node number of the leaf inside its session."""
    branch_reason: str
    """Why this path is not the continuation of another: "root", "edited", "sibling", ..."""
    turn_spans: tuple[TokenSpan, ...]
    """Sampled range of each model call on the path, oldest first."""
    finish_reasons: tuple[FinishReason, ...]
    """Parallel to ``turn_spans``."""
    sampling: Sampling
    engine_ids: tuple[str, ...]
    """Parallel to ``turn_spans``."""
    cached_tokens: tuple[int | None, ...]
    """Parallel to ``turn_spans``; ``None`` where the engine did not say."""
    trainable: bool = True
    """False for side requests such as a title request."""
    reward: float | None = None
    error: str | None = None
    routed_experts: RoutedExperts | None = None
    """[tokens - 1, layers, top_k] from position 0."""
    top_logprobs: TopLogprobs | None = None
    """[masked tokens, k]"""
    sampling_mask: SamplingMask | None = None
    """[masked tokens] rows."""
    indexer_topk: IndexerTopk | None = None
    """[tokens - 1, indexer layers, top_k] from position 0."""
    version_spans: tuple[VersionSpan, ...] = ()
    """Of every sampled id on the path, masked or not, in positions of ``token_ids``."""
    prompt_tokens: tuple[int, ...] = ()
    """Parallel to ``turn_spans``, or empty: not recorded."""
    turn_times: tuple[tuple[float, float], ...] = ()
    """Unix seconds around each engine call; parallel to ``turn_spans``, or empty: not recorded."""
    turn_sampling: tuple[Sampling, ...] = ()
    """Parallel to ``turn_spans``, or empty: every call sampled with ``sampling``."""
    truncated: bool = False
    """A limit cut the conversation: one of its replies, see ``finish_reasons``, or its next request, which did not
    fit the context."""
    side_request: bool = False
    """A call beside the task, such as a title request."""
    untrainable_reason: str = ""
    """Why ``trainable`` is false: "superseded", "side_request", ..."""
    task_id: str = ""
    group_id: str = ""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """What the session's creator said of it, as JSON values. Tollway reads none of it."""

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        if len(shape) != 1 or self.token_ids.dtype != np.int32:
            raise InvalidRecord(f"token_ids must be int32 [n], got {self.token_ids.dtype} {shape}")
        for name in ("loss_mask", "logprobs", "weight_version"):
            if getattr(self, name).shape != shape:
                raise InvalidRecord(f"{name} has shape {getattr(self, name).shape}, token_ids {shape}")
        on = self.loss_mask == 1
        if not np.array_equal(on, self.loss_mask != 0):
            raise InvalidRecord("loss_mask holds values other than 0 and 1")
        if not np.isfinite(self.logprobs[on]).all() or not np.isnan(self.logprobs[~on]).all():
            raise InvalidRecord("logprobs must be finite exactly where the mask is 1 and NaN elsewhere")
        if (self.weight_version[on] < 0).any() or (self.weight_version[~on] != -1).any():
            raise InvalidRecord("weight_version must be known exactly where the mask is 1")
        turns = len(self.turn_spans)
        if not len(self.finish_reasons) == len(self.engine_ids) == len(self.cached_tokens) == turns or not all(
            len(each) in (0, turns) for each in (self.prompt_tokens, self.turn_times, self.turn_sampling)
        ):
            raise InvalidRecord(f"per-turn fields do not all have {turns} entries")
        _check_spans(self.version_spans, self.turn_spans)
        self._check_extras(shape[0], int(on.sum()))
        _freeze(self.token_ids, self.loss_mask, self.logprobs, self.weight_version)

    def _check_extras(self, tokens: int, masked: int) -> None:
        for what, rows in (("route", self.routed_experts), ("indexer", self.indexer_topk)):
            if rows is not None and rows.ids.shape[0] != tokens - 1:
                raise InvalidRecord(f"{rows.ids.shape[0]} {what} rows for {tokens} tokens")
            if rows is not None and rows.start:
                raise InvalidRecord(f"{what} rows of a whole sequence start at {rows.start}, want 0")
        if self.top_logprobs is not None and self.top_logprobs.ids.shape[0] != masked:
            raise InvalidRecord(f"{self.top_logprobs.ids.shape[0]} top rows for {masked} masked tokens")
        if self.sampling_mask is not None and self.sampling_mask.rows != masked:
            raise InvalidRecord(f"{self.sampling_mask.rows} rows of sampling mask for {masked} masked tokens")

    @property
    def trained_tokens(self) -> int:
        """Number of tokens with mask 1."""
        return int(self.loss_mask.sum())

    @property
    def oldest_version(self) -> PolicyVersion | None:
        """Oldest version of any trained token; ``None`` without trained tokens."""
        versions = self.weight_version[self.loss_mask == 1]
        return int(versions.min()) if versions.size else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt at a task: all rows of one session under one reward."""

    session_id: str
    rows: tuple[Trajectory, ...]
    reward: float | None
    """``None`` when the attempt failed for infrastructure reasons: excluded, never zero."""
    error: str | None = None
    turns: int = 0
    duration_s: float = 0.0
    facts: dict[str, float] = field(default_factory=dict)
    """Named numbers of the environment for metrics, such as ``ran_checks``."""

    @property
    def oldest_version(self) -> PolicyVersion | None:
        """Oldest version of any trained token of any row."""
        versions = [v for row in self.rows if (v := row.oldest_version) is not None]
        return min(versions, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All attempts at one prompt. Data is generated, stored and dropped by group."""

    group_id: str
    task_id: str
    rollouts: tuple[Rollout, ...]

    @property
    def oldest_version(self) -> PolicyVersion | None:
        """Oldest version of any trained token in the group: what staleness is measured from."""
        versions = [v for r in self.rollouts if (v := r.oldest_version) is not None]
        return min(versions, default=None)


def _freeze(*arrays: np.ndarray) -> None:
    for array in arrays:
        array.setflags(write=False)


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The parts as one array, as wide as the widest; a single part is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _check_rows(what: str, parts: Sequence[tuple[int, int]]) -> None:
    """Raise unless each (start, rows) begins where the one before it ended."""
    if not parts:
        raise InvalidRecord(f"no {what} to join")
    at = parts[0][0]
    for start, rows in parts:
        if start != at:
            raise InvalidRecord(f"{what} leave a gap: rows up to {at}, next start at {start}")
        at += rows


def _check_spans(versions: tuple[VersionSpan, ...], turns: tuple[TokenSpan, ...]) -> None:
    """Raise unless ``versions`` are none or cover exactly the sampled ranges, in order."""
    if not versions:
        return
    at, covered = 0, 0
    for turn in turns:
        covered = turn.start
        while at < len(versions) and versions[at].start == covered and versions[at].end <= turn.end:
            covered, at = versions[at].end, at + 1
        if covered != turn.end:
            raise InvalidRecord(f"version spans cover [{turn.start}, {covered}) of call [{turn.start}, {turn.end})")
    if at != len(versions):
        raise InvalidRecord(f"version span {versions[at]} lies outside every call")


def _check_versions(spans: tuple[VersionSpan, ...], sampled: int) -> None:
    at = 0
    for span in spans:
        if span.start != at:
            raise InvalidRecord(f"version spans leave a gap at token {at}: next starts at {span.start}")
        at = span.end
    if at != sampled:
        raise InvalidRecord(f"version spans cover {at} of {sampled} sampled ids")
