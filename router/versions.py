"""Weight versions that calls want: who may serve them, who waits, and whose version must not go yet.

Owns the counts of sessions and calls that are fixed to one version, so that a refit can wait for them, and the
wake-up of calls that wait for a version. Pure state but for the waiting; no network. Depends on ``targets``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tollway.errors import BadRequest, VersionNotReady
from tollway.records import PolicyVersion
from tollway.router.targets import ANY, Wanted

__all__ = ["Changes", "ExactHolders", "Holders", "narrowed", "not_ready", "will_come"]


def narrowed(session: Wanted, request: Wanted) -> Wanted:
    """What a request of a session wants: both wishes hold. Raises ``BadRequest`` when they cannot.

    >>> narrowed(Wanted(minimum=3), Wanted(minimum=5))
    Wanted(minimum=5, exact=None)
    """
    if request == ANY:
        return session
    exact = session.exact if session.exact is not None else request.exact
    minimum = max((m for m in (session.minimum, request.minimum) if m is not None), default=None)
    if exact is not None and exact != (request.exact if request.exact is not None else exact):
        raise BadRequest(
            f"the session is fixed to policy version {exact}, the request wants exactly {request.exact}; "
            "open another session for it",
            param="exact_version",
        )
    if exact is not None and minimum is not None and minimum > exact:
        raise BadRequest(
            f"exactly policy version {exact} and at least {minimum} exclude each other; leave one out",
            param="min_version",
        )
    return Wanted(minimum=minimum, exact=exact)


def not_ready(want: Wanted, versions: Iterable[PolicyVersion | None]) -> VersionNotReady:
    """The error for a call that none of ``versions`` can serve."""
    known = sorted({version for version in versions if version is not None})
    wanted = want.exact if want.exact is not None else want.minimum or 0
    newest = known[-1] if known else None
    return VersionNotReady(wanted, newest, exact=want.exact is not None, available=tuple(known))


def will_come(want: Wanted, versions: Iterable[PolicyVersion | None]) -> bool:
    """Whether waiting can help: versions only grow, so an exact one that every engine has passed is gone."""
    return want.exact is None or any(version is None or version < want.exact for version in versions)


class Changes:
    """Wakes whoever waits for the fleet to change."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """The fleet is another one than it was."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next change; False when none came in time."""
        if timeout_s <= 0:
            return False
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(future)
        return True


@dataclass(frozen=True, slots=True)
class Holders:
    """Who needs the version that an engine has now, and no other."""

    sessions: int
    """Open sessions fixed to it that live on the engine, or that may still be placed there."""
    calls: int
    """Calls fixed to it that run on the engine; those of such sessions are among them."""

    @property
    def any(self) -> bool:
        """Whether new weights would take something away."""
        return bool(self.sessions or self.calls)


class ExactHolders:
    """Sessions and running calls that are fixed to one version."""

    def __init__(self) -> None:
        self._sessions: dict[str, tuple[PolicyVersion, str]] = {}
        """(version, model) by session key."""
        self._calls: Counter[tuple[str, PolicyVersion]] = Counter()
        """By engine and version."""

    def hold(self, key: str, version: PolicyVersion, *, model: str = "") -> None:
        """Session ``key`` needs exactly this version until it is released."""
        self._sessions[key] = version, model

    def release(self, key: str) -> None:
        """The session ended. Unknown ones are fine."""
        self._sessions.pop(key, None)

    def begin(self, engine_id: str, version: PolicyVersion | None) -> None:
        """A call that is fixed to ``version`` runs; ``None`` counts nothing."""
        if version is not None:
            self._calls[engine_id, version] += 1

    def end(self, engine_id: str, version: PolicyVersion | None) -> None:
        """It ended, however it ended."""
        if version is not None:
            self._calls[engine_id, version] -= 1
            if not self._calls[engine_id, version]:
                del self._calls[engine_id, version]

    def on(
        self, engine_id: str, version: PolicyVersion | None, *, model: str, home: Callable[[str], str | None]
    ) -> Holders:
        """Holders of ``version`` on an engine; ``home`` is the engine of a session, ``None`` while it has none."""
        if version is None:
            return Holders(0, 0)
        sessions = sum(
            wanted == version and its_model == model and home(key) in (None, engine_id)
            for key, (wanted, its_model) in self._sessions.items()
        )
        return Holders(sessions, self._calls[engine_id, version])
