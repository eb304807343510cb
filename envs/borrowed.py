"""Sessions that a grader opens: deleted at the end of grading unless it closed them itself.

Depends on ``envs.base`` and ``envs.leases``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

from tollway.envs.base import Sessions
from tollway.envs.leases import Leases
from tollway.messages import Message, ToolSpec
from tollway.records import Sampling, Trajectory
from tollway.session_server.client import ChatReply, Session, SessionOptions

__all__ = ["BorrowedSessions"]

Delete = Callable[[str], Coroutine[object, object, None]]
_NO_OPTIONS = SessionOptions()


class BorrowedSessions:
    """``base.Sessions`` over another one. Leaving it lets go of what was opened through it and not finished."""

    def __init__(self, sessions: Sessions, delete: Delete, leases: Leases) -> None:
        self._sessions, self._delete, self._leases = sessions, delete, leases
        self._open: set[str] = set()

    async def __aenter__(self) -> BorrowedSessions:
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in self._open:
            self._leases.own(self._delete(name), "deleting a grader's session")

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
        """Open a session; one that opens after its caller was cancelled is deleted."""
        opening = self._leases.own(
            self._sessions.create(
                task_id=task_id,
                group_id=group_id,
                sampling=sampling,
                metadata=metadata,
                ttl_s=ttl_s,
                wait_s=wait_s,
                options=options,
            ),
            "opening a grader's session",
        )
        try:
            session = await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._leases.own(self._drop(opening), "deleting a grader's late session")
            raise
        self._open.add(session.session_id)
        return session

    async def chat(self, session: Session, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> ChatReply:
        """One model call."""
        return await self._sessions.chat(session, messages, tools)

    async def reward(
        self,
        session_id: str,
        reward: float | None,
        *,
        error: str | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        """Record the outcome."""
        await self._sessions.reward(session_id, reward, error=error, details=details)

    async def trajectories(self, session_id: str) -> tuple[Trajectory, ...]:
        """All rows of a session."""
        return await self._sessions.trajectories(session_id)

    async def close(self, session_id: str) -> None:
        """End a session and keep its record."""
        await self._sessions.close(session_id)
        self._open.discard(session_id)

    async def delete(self, session_id: str) -> None:
        """Abort and forget a session."""
        await self._sessions.delete(session_id)
        self._open.discard(session_id)

    async def _drop(self, opening: Awaitable[Session]) -> None:
        try:
            session = await opening
        except Exception:
            return  # it never opened
        await self._delete(session.session_id)
