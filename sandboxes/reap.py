"""Finding and ending sandboxes that nobody owns any more, at providers that outlive their users.

A trainer that is killed cannot clean up. What it left is found by its owner label: the process that made it is
gone from this host, or it carries the labels, or has the age, that an operator names. Depends on ``base``, ``owner``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tollway.errors import BadRequest, CapabilityMissing, SandboxError, SandboxGone
from tollway.sandboxes.base import SandboxInfo, SandboxProvider
from tollway.sandboxes.owner import created_at, owner_of

__all__ = ["Leftover", "find", "reap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """One sandbox at a provider, and what is known of its owner."""

    info: SandboxInfo
    age_s: float | None
    """Since its create; ``None`` when its labels do not say."""
    owner: str
    """"alive", "dead", "elsewhere" (another host: nobody here can tell) or "unknown" (not made by tollway)."""
    error: str | None = None
    """Why it could not be ended."""


async def find(provider: SandboxProvider, labels: Mapping[str, str] | None = None) -> tuple[Leftover, ...]:
    """Everything at the provider that carries ``labels``, oldest first."""
    if "attach" not in provider.caps:
        raise CapabilityMissing(
            f"provider {provider.name} keeps nothing that another process could list: what it makes ends with its "
            "owner, and what a killed owner left is removed by the next one"
        )
    now = time.time()
    found = [_described(info, now) for info in await provider.list(labels)]
    return tuple(sorted(found, key=lambda each: -(each.age_s or 0.0)))


async def reap(
    provider: SandboxProvider,
    labels: Mapping[str, str] | None = None,
    *,
    older_than_s: float | None = None,
) -> tuple[Leftover, ...]:
    """End leftovers; returns them. Without ``labels`` and ``older_than_s`` only those of dead owners on this host.

    With either, whatever matches, made by tollway or not, its owner alive or not. An age that nobody knows is
    not above any limit.
    """
    if older_than_s is not None and not older_than_s >= 0:
        raise BadRequest(f"older_than_s={older_than_s}: want a number of seconds", param="older_than_s")
    everything = await find(provider, labels)
    if older_than_s is not None:
        wanted = [each for each in everything if each.age_s is not None and each.age_s >= older_than_s]
    elif labels:
        wanted = list(everything)
    else:
        wanted = [each for each in everything if each.owner == "dead"]
    return await _end(provider, wanted)


async def _end(provider: SandboxProvider, wanted: Sequence[Leftover]) -> tuple[Leftover, ...]:
    ended = []
    for each in wanted:
        error = None
        try:
            sandbox = await provider.attach(each.info.id)
            await sandbox.kill()
            if not sandbox.begin_kill().done():
                error = f"not deleted within {provider.config.kill_timeout_s} s"
        except SandboxGone:
            pass  # somebody was faster
        except SandboxError as problem:
            error = str(problem)
        ended.append(Leftover(info=each.info, age_s=each.age_s, owner=each.owner, error=error))
    return tuple(ended)


def _described(info: SandboxInfo, now: float) -> Leftover:
    owner, created = owner_of(info.labels), created_at(info.labels)
    if owner is None:
        state = "unknown"
    elif not owner.is_here:
        state = "elsewhere"
    else:
        state = "dead" if owner.is_dead else "alive"
    return Leftover(info=info, age_s=None if created is None else max(0.0, now - created), owner=state)
