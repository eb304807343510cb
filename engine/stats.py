"""Counters of one engine, as plain numbers. Written by the scheduler's thread, read by ``/metrics``."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BUCKETS_S", "BUCKETS_TOKENS", "Histogram", "Stats"]

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
BUCKETS_TOKENS = (1.0, 8.0, 32.0, 128.0, 512.0, 2048.0, 8192.0, 32768.0, 131072.0)


@dataclass(slots=True)
class Histogram:
    """Counts per upper bound (cumulated only when rendered)."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)
        self.counts[next((i for i, bound in enumerate(self.bounds) if value <= bound), len(self.bounds))] += 1
        self.total += value


@dataclass(slots=True)
class Stats:
    """Totals since start."""

    requests: int = 0
    aborted_requests: int = 0
    prompt_tokens: int = 0
    """Of finished requests."""
    cached_tokens: int = 0
    """Of finished requests, frozen at their first prefill."""
    generated_tokens: int = 0
    first_hit_tokens: int = 0
    """Prompt tokens taken from the cache at first prefills (retractions not counted again)."""
    first_input_tokens: int = 0
    """Prompt tokens computed at first prefills."""
    computed_tokens: int = 0
    """Tokens computed by prefills, retractions included."""
    reused_tokens: int = 0
    """Tokens that prefills took from the cache, retractions included."""
    decoded_tokens: int = 0
    retracted_requests: int = 0
    retracted_input_tokens: int = 0
    retracted_output_tokens: int = 0
    last_hit_rate: float = 0.0
    """Of the last prefill only, as upstream's gauge."""
    latency: Histogram = field(default_factory=lambda: Histogram(BUCKETS_S))
    uncached_prompt: Histogram = field(default_factory=lambda: Histogram(BUCKETS_TOKENS))

    def prefilled(self, prompt: int, cached: int) -> None:
        """A request was prefilled for the first time."""
        self.first_hit_tokens += cached
        self.first_input_tokens += prompt - cached
        self.last_hit_rate = cached / prompt
        self.uncached_prompt.add(prompt - cached)

    def finished(self, prompt: int, generated: int, cached: int, latency_s: float) -> None:
        """A request that was running ended."""
        self.requests += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.generated_tokens += generated
        self.latency.add(latency_s)
