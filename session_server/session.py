"""One session in memory: who it is, what it may do, its forest, its running calls and its outcome.

Plain state; the store owns its life, turns add nodes. Every open session has a ``Card``; its ``Session``
is in memory only while it is used. Depends on ``forest`` and the kernel.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tollway.records import Sampling
from tollway.session_server.bodies import Memo
from tollway.session_server.calls import CallBook
from tollway.session_server.forest import Forest, Node
from tollway.session_server.matching import Digest

__all__ = ["Card", "Outcome", "Session", "SessionState", "Settings", "Tally"]

SessionState = Literal["open", "closed"]
_MEMOS = 8
"""Conversations of a session that run side by side and are read from where they stood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the creator of a session fixed."""

    model: str = ""
    """Name of a model in the fleet; "" is the policy. A session has one for its life."""
    parent_id: str = ""
    """Session that started this one: both live on one engine, where they share what the cache holds."""
    priority: int = 0
    """Higher ones are first wherever calls wait."""
    sampling: Mapping[str, object] = field(default_factory=dict)
    """Sampling fields that were set. They win over what a harness asks for: the trainer scores with them."""
    min_version: int | None = None
    exact_version: int | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    branches: Literal["all", "main"] = "all"
    """Which leaves are exported: every one, or of each root with tools only the one continued last."""
    side_requests: Literal["mark", "train", "drop"] | None = None
    """``None``: what the server is configured to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The verdict on an episode, recorded once."""

    reward: float | None = None
    error: str | None = None
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Tally:
    """What is counted of a session and is in no row; it begins anew when the server starts."""

    sampling_overridden: int = 0
    """Requests whose temperature, top_p or top_k gave way to the session's."""
    failed_calls: dict[str, int] = field(default_factory=dict)
    """Calls that were begun and recorded nothing, by error code."""

    def __bool__(self) -> bool:
        return bool(self.sampling_overridden or self.failed_calls)


@dataclass(slots=True, eq=False)
class Card:
    """What is always known of an open session."""

    token_hash: bytes
    expires_at: float
    """Unix seconds."""
    used_at: float
    """Unix seconds of its creation, its last call, or the server's start."""
    tally: Tally | None = None
    """Of a session that is not in memory, when it counted anything."""


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    """One episode's gateway."""

    session_id: str
    token_hash: bytes
    task_id: str
    group_id: str
    created_at: float
    expires_at: float
    """Unix seconds."""
    settings: Settings
    forest: Forest
    state: SessionState = "open"
    outcome: Outcome | None = None
    calls: CallBook = field(default_factory=CallBook)
    next_number: int = 0
    """Node number of the next turn."""
    tokens: int = 0
    """Ids kept over all branches."""
    stored_bytes: int = 0
    """Journal bytes of its turns."""
    tally: Tally = field(default_factory=Tally)
    memos: list[Memo] = field(default_factory=list)
    """What is remembered of earlier request bodies, latest first."""
    committing: Counter[Digest] = field(default_factory=Counter)
    """Requests whose answers are on their way to the journal."""
    visitors: int = 0
    """Requests that hold this object; it must not leave memory meanwhile."""
    loaded_at: float = field(default_factory=time.time)
    """Unix seconds since when it is in memory."""

    @property
    def busy(self) -> bool:
        """Whether a request holds it or a call runs."""
        return self.visitors > 0 or self.calls.running > 0

    def take_number(self) -> int:
        """Reserve a node number; a failed turn leaves a gap."""
        number = self.next_number
        self.next_number += 1
        return number

    def answered(self, request_digest: Digest) -> bool:
        """Whether this very conversation has an answer, or is just getting one."""
        return self.forest.asked(request_digest) or self.committing[request_digest] > 0

    def take_in(self, node: Node, stored_bytes: int) -> None:
        """Add a committed node."""
        self.forest.add(node)
        self.tokens += node.suffix_size + node.sampled_size
        self.stored_bytes += stored_bytes
        self.next_number = max(self.next_number, node.number + 1)

    def keep_memo(self, memo: Memo, replaces: Memo | None) -> None:
        """Remember a body, in place of the one that it continued."""
        if replaces in self.memos:
            self.memos.remove(replaces)
        self.memos.insert(0, memo)
        del self.memos[_MEMOS:]

    def sampling(self) -> Sampling:
        """The session's sampling with defaults for what it leaves open."""
        known = dict(self.settings.sampling)
        for name in ("stop", "stop_token_ids"):
            known[name] = tuple(known.get(name) or ())  # type: ignore[arg-type]  # checked at creation
        return Sampling(**known)  # type: ignore[arg-type]  # checked at creation

    def describe(self) -> dict[str, object]:
        """State, tree and counters as JSON."""
        nodes = [node for _, node in sorted(self.forest.nodes.items())]
        return {
            "session_id": self.session_id,
            "state": self.state,
            "task_id": self.task_id,
            "group_id": self.group_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "model": self.settings.model,
            "parent_id": self.settings.parent_id,
            "priority": self.settings.priority,
            "metadata": self.settings.metadata,
            "reward": self.outcome.reward if self.outcome else None,
            "error": self.outcome.error if self.outcome else None,
            "in_flight": self.calls.running,
            "failed_calls": self.tally.failed_calls,
            "sampling_overridden": self.tally.sampling_overridden,
            "turns": len(nodes),
            "sampled_tokens": sum(node.sampled_size for node in nodes),
            "stored_tokens": self.tokens,
            "stored_bytes": self.stored_bytes,
            "nodes": [_describe(node) for node in nodes],
        }


def _describe(node: Node) -> dict[str, object]:
    attempts = [[each.rid, each.engine_name, each.why] for each in node.attempts]
    return {
        "number": node.number,
        "parent": node.parent.number if node.parent else None,
        "reason": node.reason,
        "tokens": node.length,
        "suffix_tokens": node.suffix_size,
        "sampled_tokens": node.sampled_size,
        "finish_reason": node.finish_reason,
        "cached_tokens": node.cached_tokens,
        "engine_id": node.engine_id,
        "versions": [[span.version, span.start, span.end] for span in node.versions],
        "engine_kinds": sorted({span.kind for span in node.versions if span.kind}),
        "superseded": node.superseded,
        "overflowed": node.overflowed,
        **({"attempts": attempts} if attempts else {}),
    }
