"""What an episode's model calls cost in tokens, read off its exported rows. Pure; depends on the records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tollway.records import Trajectory

__all__ = ["Usage", "usage_of"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Sums over model calls, each counted once however many rows show it."""

    calls: int
    sampled_tokens: int
    prompt_tokens: int | None
    """``None`` where not every call recorded it."""
    cached_tokens: int | None
    """Prompt tokens that came from the prefix cache; ``None`` where an engine did not say."""

    def facts(self) -> dict[str, float]:
        """The figures that are known, by name; nothing without a call."""
        if not self.calls:
            return {}
        found = {"sampled_tokens": self.sampled_tokens, "prompt_tokens": self.prompt_tokens}
        if self.prompt_tokens is not None:
            found["cached_tokens"] = self.cached_tokens
        return {name: float(value) for name, value in found.items() if value is not None}


def usage_of(rows: Sequence[Trajectory]) -> Usage:
    """Rows that share a beginning share its calls: a call's own engine, times and place tell it from others."""
    seen: dict[tuple[object, ...], tuple[int, int | None, int | None]] = {}
    for row in rows:
        for at, span in enumerate(row.turn_spans):
            when = row.turn_times[at] if row.turn_times else None
            # Without times only the ids themselves tell a shared call from a sibling of the same length.
            mark: object = row.token_ids[: span.end].tobytes() if when is None else when
            key = (row.session_id, row.engine_ids[at], span.start, span.end, mark)
            prompt = row.prompt_tokens[at] if row.prompt_tokens else None
            seen[key] = (span.end - span.start, prompt, row.cached_tokens[at])
    prompts, cached = [each[1] for each in seen.values()], [each[2] for each in seen.values()]
    return Usage(
        calls=len(seen),
        sampled_tokens=sum(each[0] for each in seen.values()),
        prompt_tokens=_sum(prompts),
        cached_tokens=_sum(cached),
    )


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
