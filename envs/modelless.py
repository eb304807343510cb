"""Sessions without a model, for harnesses that need none: the same record of outcomes, in memory.

Nothing is sent anywhere. Depends on ``envs.base`` and the kernel.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tollway.errors import CapabilityMissing, Conflict, NotFound
from tollway.messages import Message, ToolSpec
from tollway.records import Sampling, Trajectory
from tollway.session_server.client import ChatReply, Session, SessionOptions

__all__ = ["ModellessSessions", "Outcome"]

_TTL_S = 86400.0
_NO_OPTIONS = SessionOptions()


@dataclass(slots=True)
class Outcome:
    """What is known of one session."""

    task_id: str
    reward: float | None = None
    error: str | None = None
    details: Mapping[str, object] = field(default_factory=dict)
    rewarded: bool = False
    closed: bool = False


class ModellessSessions:
    """``base.Sessions`` whose model calls are refused.

    >>> ModellessSessions().outcomes
    {}
    """

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}

    async def create(
        self,
        *,
        task_id: str = "",
        group_id: str = "",
        sampling: Sampling | None = None,
        metadata: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        wait_s: float = 0.0,
        options: SessionOptions = _NO_OPTIONS,
    ) -> Session:
        """Open a session that leads nowhere."""
        name = secrets.token_hex(16)
        self.outcomes[name] = Outcome(task_id)
        return Session(
            session_id=name,
            token=secrets.token_urlsafe(24),
            base_url="",
            openai_base_url="",
            anthropic_base_url="",
            expires_at=time.time() + (ttl_s or _TTL_S),
        )

    async def chat(self, session: Session, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> ChatReply:
        """Refused: there is no model."""
        raise CapabilityMissing(
            "there is no model here: name a server with --url or engines with --engine, or a harness that needs none"
        )

    async def reward(
        self,
        session_id: str,
        reward: float | None,
        *,
        error: str | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        """Record the outcome; a second, different one is ``Conflict``."""
        outcome = self._outcome(session_id)
        if outcome.rewarded and (outcome.reward, outcome.error) != (reward, error):
            raise Conflict(f"session {session_id[:8]} has reward {outcome.reward} already, not {reward}")
        outcome.reward, outcome.error, outcome.details, outcome.rewarded = reward, error, dict(details or {}), True

    async def trajectories(self, session_id: str) -> tuple[Trajectory, ...]:
        """No rows: no model was called."""
        self._outcome(session_id)
        return ()

    async def close(self, session_id: str) -> None:
        """End a session and keep its record."""
        self._outcome(session_id).closed = True

    async def delete(self, session_id: str) -> None:
        """Forget a session; safe to call twice."""
        self.outcomes.pop(session_id, None)

    def _outcome(self, session_id: str) -> Outcome:
        try:
            return self.outcomes[session_id]
        except KeyError:
            raise NotFound(f"no session {session_id[:8]}") from None
