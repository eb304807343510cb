"""The suite that every provider must pass, runnable by a third party unchanged.

Each check is an async function over an open provider; it raises ``Nonconformance`` with the promise that was
broken. ``run`` runs them all and reports; test suites parametrise over ``CHECKS``, and ``tollway sandbox check``
prints the table. Every check kills what it creates. Only POSIX commands are used, and ``tar`` and ``split`` for
directories. Depends on ``base`` and the modules with the checks.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass

from tollway.sandboxes import promises_capabilities, promises_commands, promises_files, promises_lifetime
from tollway.sandboxes.base import SandboxProvider
from tollway.sandboxes.promises import LABELS, Check, Nonconformance

__all__ = ["CHECKS", "Check", "Nonconformance", "Outcome", "name_of", "promise_of", "run", "stream"]

_TIMEOUT_S = 300.0

CHECKS: tuple[Check, ...] = (
    *promises_commands.CHECKS,
    *promises_files.CHECKS,
    *promises_lifetime.CHECKS,
    *promises_capabilities.CHECKS,
)
"""All checks, in the order in which ``run`` runs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one check."""

    name: str
    promise: str
    error: str | None
    """``None`` when it passed, or when there was nothing to try."""
    skipped: str | None
    """Why there was nothing to try: a capability that the provider does not claim."""
    seconds: float


def name_of(check: Check) -> str:
    """What ``only`` and the reports call it."""
    return str(getattr(check, "__name__", check))


def promise_of(check: Check) -> str:
    """What a check holds a provider to, in one line."""
    return (inspect.getdoc(check) or "").partition("\n")[0]


async def run(provider: SandboxProvider, only: Collection[str] = ()) -> tuple[Outcome, ...]:
    """Run every check, or those named, one after the other. Never raises for a broken promise."""
    return tuple([outcome async for outcome in stream(provider, only)])


async def stream(provider: SandboxProvider, only: Collection[str] = ()) -> AsyncIterator[Outcome]:
    """Like ``run``, one outcome as soon as it is there."""
    for check in CHECKS:
        name = name_of(check)
        if only and name not in only:
            continue
        started, skipped = time.monotonic(), None
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                skipped = await check(provider)
            left = await provider.list(LABELS)
            error = f"the check left {len(left)} sandboxes" if left else None
        except Exception as problem:  # whatever a provider raises is its verdict
            told = str(problem) or ("not over in time" if isinstance(problem, TimeoutError) else "no text")
            error = f"{type(problem).__name__}: {told}"
        seconds = time.monotonic() - started
        yield Outcome(name=name, promise=promise_of(check), error=error, skipped=skipped, seconds=seconds)
