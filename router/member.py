"""One engine of a fleet and what is known of it: identity, limits, weights, flushes.

Pure state; the rules of its life are in ``health``, who looks at it is ``watch``. Depends on ``engines``,
``health`` and ``table``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

import aiohttp

from tollway.records import PolicyVersion
from tollway.router.engines import EngineClient
from tollway.router.health import EngineHealth, EngineState
from tollway.router.table import RoutingTable

__all__ = ["Engine", "Membership"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What whoever adds an engine says of it."""

    model: str = ""
    """Name of its model in the fleet; empty for the policy."""
    max_in_flight: int | None = None
    """Calls that it may run at once; ``None``: no limit here."""
    frozen: bool = False
    """No trainer brings it weights: it serves with the version that it has, whatever the policy's is."""
    stale: bool = False
    """Its weights are those that it was started with, whatever version it names: newer ones have to come first."""


@dataclass(slots=True)
class Engine:
    """One engine and what is known of it."""

    id: str
    url: str
    client: EngineClient
    http: aiohttp.ClientSession
    health: EngineHealth
    membership: Membership = field(default_factory=Membership)
    version: PolicyVersion | None = None
    model_path: str = ""
    context_length: int | None = None
    page_size: int = 1
    max_total_tokens: int | None = None
    dp_ranks: int = 1
    start_id: str = ""
    """Tells this start of its program from any other; empty when it does not say."""
    reloaded_start: str | None = None
    """``start_id`` of the process that a trainer gave weights to; ``None`` for none so far."""
    busy_until: float = float("-inf")
    """Monotonic seconds until which it gets no new session, because it said that it has no room."""
    flush_epoch: int = 0
    flushed: bool = False
    """It was flushed and has no new version since."""
    flushed_versions: deque[PolicyVersion] = field(default_factory=lambda: deque(maxlen=4096))
    """Versions whose refit dropped the prefix cache, oldest first."""
    evicted: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=512))
    """(monotonic seconds, evicted tokens so far), oldest first."""
    usage: float | None = None
    """Share of the KV room that running requests held when its counters were last read."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to probe now."""
    probes: int = 0
    doubted: bool = False
    """A call on it broke: is it still the same process?"""

    @property
    def name(self) -> str:
        """URL and incarnation: what records call this engine."""
        return f"{self.url}#{self.health.incarnation}"

    @property
    def model(self) -> str:
        """Name of its model in the fleet; empty for the policy."""
        return self.membership.model

    @property
    def max_in_flight(self) -> int | None:
        """Calls that it may run at once; ``None``: no limit here."""
        return self.membership.max_in_flight

    @property
    def drained(self) -> bool:
        """It takes no new sessions, also when it comes back."""
        return self.health.drained

    @property
    def follows_policy(self) -> bool:
        """Whether a trainer's weights are for it."""
        return not self.membership.model and not self.membership.frozen

    def admits(self, now: float) -> bool:
        """Whether it takes new sessions."""
        return self.health.state is EngineState.SERVING and now >= self.busy_until

    def pauses(self, now: float) -> bool:
        """Whether it takes none now and will by itself: paused, or without room."""
        if self.health.state is EngineState.PAUSED:
            return not self.drained
        return self.health.state is EngineState.SERVING and not self.admits(now)

    def brief(self) -> dict[str, object]:
        """What it is and why, for whoever asks whether turns can be served."""
        return {
            "id": self.id,
            "url": self.url,
            "model": self.model,
            "state": str(self.health.state),
            "version": self.version,
            "reason": self.health.reason,
        }

    def flushed_since(self, version: PolicyVersion, upto: PolicyVersion) -> bool:
        """Whether a refit to a version in (``version``, ``upto``] dropped the cache."""
        return any(version < flushed <= upto for flushed in self.flushed_versions)

    def refitted(self, version: PolicyVersion | None, *, flushed: bool) -> None:
        """Note a flush, a new version, or both; a flush belongs to the version that comes with or after it."""
        if flushed:
            self.flush_epoch += 1
            self.flushed = True
        if version is not None:
            self.version = version
            if self.flushed:
                self.flushed_versions.append(version)
            self.flushed = False

    def enter(self, table: RoutingTable, *, max_in_flight: int | None) -> None:
        """Tell ``table`` what it may put here; nothing while it is joining."""
        if self.health.state is EngineState.JOINING:
            return
        table.set_engine(
            self.id,
            model=self.model,
            ranks=self.dp_ranks,
            budget_tokens=self.max_total_tokens,
            max_in_flight=max_in_flight,
            version=self.version,
            admits=self.admits(time.monotonic()),
            serves=self.health.takes_calls,
        )

    def describe(self) -> dict[str, object]:
        """JSON form for ``GET /engines``."""
        return {
            **self.brief(),
            "incarnation": self.health.incarnation,
            "frozen": self.membership.frozen,
            "flush_epoch": self.flush_epoch,
            "model_path": self.model_path,
            "kind": self.client.facts.kind,
            "release": self.client.facts.release,
            "precision": self.client.facts.precision,
            "context_length": self.context_length,
            "page_size": self.page_size,
            "dp_ranks": self.dp_ranks,
            "max_in_flight": self.max_in_flight,
            "kv_budget_tokens": self.max_total_tokens,
            "failures": self.health.failures,
            "last_error": self.health.last_error,
        }
