"""One session in memory: who it is, what it may do, its forest, its running calls and its outcome.

Plain state; the store owns its life, turns add nodes. Depends on ``forest`` and the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tollway.records import Sampling
from tollway.session_server.calls import CallBook
from tollway.session_server.forest import Forest

__all__ = ["Outcome", "Session", "SessionState", "Settings"]

SessionState = Literal["open", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the creator of a session fixed."""

    model: str = ""
    sampling: Mapping[str, object] = field(default_factory=dict)
    """Sampling fields that were set. They win over what a harness asks for: the trainer scores with them."""
    min_version: int | None = None
    exact_version: int | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The verdict on an episode, recorded once."""

    reward: float | None = None
    error: str | None = None
    details: Mapping[str, object] = field(default_factory=dict)


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
    sampling_overridden: int = 0
    """Requests whose temperature, top_p or top_k gave way to the session's."""

    def take_number(self) -> int:
        """Reserve a node number; a failed turn leaves a gap."""
        number = self.next_number
        self.next_number += 1
        return number

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
            "metadata": self.settings.metadata,
            "reward": self.outcome.reward if self.outcome else None,
            "error": self.outcome.error if self.outcome else None,
            "in_flight": self.calls.running,
            "sampling_overridden": self.sampling_overridden,
            "turns": len(nodes),
            "sampled_tokens": sum(int(node.record.sampled_ids.size) for node in nodes),
            "nodes": [
                {
                    "number": node.number,
                    "parent": node.parent.number if node.parent else None,
                    "reason": node.reason,
                    "tokens": node.length,
                    "suffix_tokens": int(node.record.suffix_ids.size),
                    "sampled_tokens": int(node.record.sampled_ids.size),
                    "finish_reason": node.record.finish_reason,
                    "cached_tokens": node.record.cached_tokens,
                    "engine_id": node.record.engine_id,
                    "versions": [[span.version, span.start, span.end] for span in node.record.versions],
                    "superseded": node.superseded,
                }
                for node in nodes
            ],
        }
