"""What the checks of the conformance suite share: a labelled sandbox, a verdict, and how a refusal is told.

Depends on ``base``.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tollway.errors import TollwayError
from tollway.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec

__all__ = ["EXEC_S", "LABELS", "NOT_CLAIMED", "Check", "Nonconformance", "opened", "refuses", "spec", "want"]

Check = Callable[[SandboxProvider], Awaitable[str | None]]
"""Tries one promise; returns why there was nothing to try, or ``None``. Raises ``Nonconformance``."""
NOT_CLAIMED = "not claimed"
LABELS = {"suite": "conformance", "suite-run": secrets.token_hex(6)}
"""Of this process's run: somebody else may be checking the same service."""
EXEC_S = 60.0
"""For commands that end at once: enough for a remote service and a loaded machine."""


class Nonconformance(Exception):
    """A promise of the protocol that the provider does not keep."""


def spec(
    *,
    ttl_s: float = 300.0,
    labels: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
    tree: Path | None = None,
    **settings: object,
) -> SandboxSpec:
    """A spec with the suite's label."""
    values = {"ttl_s": ttl_s, "labels": {**LABELS, **(labels or {})}, "files": files or {}, "tree": tree, **settings}
    return SandboxSpec(**values)  # type: ignore[arg-type]  # the names are checked by the constructor


@asynccontextmanager
async def opened(provider: SandboxProvider, **settings: object) -> AsyncIterator[Sandbox]:
    """A sandbox for one check, killed whatever happens."""
    sandbox = await provider.create(spec(**settings))  # type: ignore[arg-type]  # as above
    try:
        yield sandbox
    finally:
        await sandbox.kill()


def want(holds: bool, promise: str, found: object = "") -> None:
    """Raise ``Nonconformance`` unless it holds."""
    if not holds:
        raise Nonconformance(f"{promise}; found {found!r:.500}")


async def refuses(call: Awaitable[object], error: type[TollwayError], promise: str) -> None:
    """Await ``call`` and want exactly this kind of error."""
    try:
        answer = await call
    except error:
        return
    except TollwayError as other:
        raise Nonconformance(f"{promise}; got {type(other).__name__}: {other}") from other
    raise Nonconformance(f"{promise}; it answered {answer!r:.200}")
