"""What one call could have had from the prefix cache, and the first cause that holds for what it missed.

The ids of every call are known exactly, so the possible hit is known too. Two questions, answered apart:
``reach`` says how much of a prompt the session's own parent call can have left in the cache and why not
more; ``explain`` says why the engine had less than that. Pure functions, no I/O. Depends on nothing.

Definitions for a call with prompt P and C cached tokens, whose parent call had prompt P' and output G':
``L`` is the common prefix of this prompt with the parent's whole sequence, ``I = floor(min(L, P' + G' - 1,
P - 1) / page) * page`` is the possible hit, and the waste ``max(0, I - C)``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BEYOND",
    "CAUSES",
    "MOVES",
    "CallFacts",
    "EngineKeys",
    "Evidence",
    "Miss",
    "Reach",
    "explain",
    "reach",
]

BEYOND = (
    "first_call",
    "new",
    "thinking_stripped",
    "prefix_mismatch",
    "embeds",
    "logprob_cap",
    "page_alignment",
)
"""Why a prompt token could not have been cached; together ``P - I`` of a call."""

CAUSES = (
    "moved",
    "engine_restarted",
    "refit_flush",
    "namespace",
    "parent_in_flight",
    "page_alignment",
    "host_tier",
    "eviction",
    "server_restarted",
    "unknown",
)
"""Causes of wasted tokens, in the order in which they are tried; together ``max(0, I - C)`` of a call."""

MOVES = ("engine_lost", "migration", "drain", "version", "gateway", "rank", "server_restarted", "unrecorded")
"""Reasons of ``moved``: the router's own, the outer gateway's choice, another data-parallel rank, or none known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """What must be remembered of a call to explain the next one. Nodes of a conversation keep it."""

    engine_id: str
    incarnation: int
    flush_epoch: int
    """Flushes of the engine seen when the call ended."""
    end_version: int
    """Weight version of the last sampled token."""
    prompt_tokens: int
    output_tokens: int
    started_at: float
    """Monotonic seconds of the router's clock."""
    ended_at: float
    dp_rank: int | None = None
    extra_key: str | None = None
    moved: str | None = None
    """Why the session last changed its engine."""
    engine_url: str = ""
    """Tells engines apart over restarts of the server, which number them anew."""
    evicted: float | None = None
    """Tokens that the engine had evicted by then, as far as it was read; ``None``: it does not say."""
    reasoning: bool = False
    """The engine counted tokens of reasoning in the output."""
    earlier_run: bool = False
    """Made before the server last started: its clock, incarnation and flushes say nothing now."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Tokens of one call with the reason why they were not cached."""

    cause: str
    tokens: int
    reason: str = ""
    """Of ``moved``: one of ``MOVES``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKeys:
    """How an engine keys what it keeps."""

    page: int = 1
    """Tokens per page; only whole pages are found again."""
    bigram: bool = False
    """EAGLE's keys are pairs of ids: one position less is found."""
    strips_thinking: bool = False
    """It drops the output of calls that reasoned."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The possible hit of a call and why it is not the whole prompt."""

    possible: int
    beyond: tuple[Miss, ...]
    """``P - possible`` tokens, with causes of ``BEYOND``."""
    lost_prefix: int = 0
    """Tokens of the parent's sequence that this prompt does not continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of the engine between the parent's end and this call."""

    flushed: bool = False
    """A refit dropped its cache."""
    evicted: bool = False
    """Its eviction counter rose, or running requests fill more than 90 % of its KV room."""
    host_missed: int = 0
    """Tokens that lie on the host or in storage and that the engine did not count as cached."""


def reach(
    call: CallFacts,
    parent: CallFacts | None,
    common: int,
    *,
    keys: EngineKeys,
    logprob_start: int = -1,
    embeds: bool = False,
) -> Reach:
    """``I`` of the module's definition. ``common``: ids that the prompt shares with the parent's sequence.

    ``logprob_start``: prompt positions from here on are computed whatever is cached; -1 for none. ``embeds``:
    the prompt travels as embeddings, which no cache knows. The engine never keeps the very last token.

    >>> facts = CallFacts(engine_id="e0", incarnation=0, flush_epoch=0, end_version=0, prompt_tokens=100,
    ...     output_tokens=20, started_at=0.0, ended_at=1.0)
    >>> from dataclasses import replace
    >>> reach(replace(facts, prompt_tokens=150), facts, 120, keys=EngineKeys(page=64)).possible
    64
    """
    prompt = call.prompt_tokens
    if parent is None:
        return Reach(0, (Miss("first_call", prompt),) if prompt else ())
    sequence = parent.prompt_tokens + parent.output_tokens
    common = min(common, sequence)
    whole = max(0, min(sequence - 1, prompt - 1) - keys.bigram)
    steps = [("new", whole)]
    if keys.strips_thinking and parent.reasoning:
        steps.append(("thinking_stripped", parent.prompt_tokens))
    steps.append(("prefix_mismatch", common))
    if embeds:
        steps.append(("embeds", 0))
    if logprob_start >= 0:
        steps.append(("logprob_cap", logprob_start))
    at, beyond = prompt, []
    for cause, limit in steps:
        if limit < at:
            beyond.append(Miss(cause, at - limit))
            at = limit
    if tail := at % keys.page:
        beyond.append(Miss("page_alignment", tail))
    return Reach(at - tail, tuple(beyond), sequence - common)


def explain(call: CallFacts, parent: CallFacts, waste: int, evidence: Evidence, *, page: int) -> tuple[Miss, ...]:
    """The first cause that holds for ``waste`` missed tokens; what lies on the host is told apart.

    >>> facts = CallFacts(engine_id="e0", incarnation=0, flush_epoch=0, end_version=0, prompt_tokens=9,
    ...     output_tokens=1, started_at=0.0, ended_at=1.0)
    >>> from dataclasses import replace
    >>> explain(replace(facts, started_at=2.0, incarnation=1), facts, 5, Evidence(), page=1)
    (Miss(cause='engine_restarted', tokens=5, reason=''),)
    """
    if waste <= 0:
        return ()
    cause, reason = _changed(call, parent, evidence)
    if cause:
        return (Miss(cause, waste, reason),)
    if waste < page:
        return (Miss("page_alignment", waste),)
    host = min(waste, evidence.host_missed)
    misses = [Miss("host_tier", host)] if host else []
    if waste > host:
        # What this server knew of the engine's cache went with its last run.
        rest = "eviction" if evidence.evicted else "server_restarted" if parent.earlier_run else "unknown"
        misses.append(Miss(rest, waste - host))
    return tuple(misses)


def _changed(call: CallFacts, parent: CallFacts, evidence: Evidence) -> tuple[str, str]:
    """(cause, reason) when the place of the KV, or what is in it, is not what it was; empty otherwise."""
    restarted = parent.earlier_run
    elsewhere = call.engine_url != parent.engine_url if restarted else call.engine_id != parent.engine_id
    if elsewhere:
        # Words that nobody knows would be labels without end.
        reason = call.moved if call.moved in MOVES else None
        return "moved", reason or ("server_restarted" if restarted else "unrecorded")
    if call.dp_rank != parent.dp_rank:
        return "moved", "rank"
    if not restarted and call.incarnation != parent.incarnation:
        return "engine_restarted", ""
    if evidence.flushed or (not restarted and call.flush_epoch != parent.flush_epoch):
        return "refit_flush", ""
    if call.extra_key != parent.extra_key:
        return "namespace", ""
    if not restarted and call.started_at < parent.ended_at:
        return "parent_in_flight", ""
    return "", ""
