"""What a run adds up to: counters that survive a resume, and the final report.

Totals travel through ``controller.json`` as plain numbers. Depends on the gap record only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tollway.trainer.gap import Gap

__all__ = ["Totals", "TrainReport"]

_PHASE = "phase:"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """The whole run, earlier processes of it included."""

    steps: int
    version: int
    updates: int
    episodes: int
    """Scored attempts in trained batches."""
    tokens_sampled: int
    staleness_max: int
    """Largest age, in versions, of a group that trained."""
    gap: Gap
    """Trainer against sampler at equal weights, all probes together."""
    train_rollout_logprob_abs_diff: float | None
    """Token mean over all batches before their first update, older tokens included; ``None`` untrained."""
    drops: Mapping[str, int]
    """Groups by drop: aborted, zero_variance, stale."""
    phases: Mapping[str, float]
    """Wall seconds by phase of the trainer; generation runs beside them."""
    reward_last: float | None
    """Mean reward of the last batch."""


@dataclass(slots=True)
class Totals:
    """Running sums by name."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, amount: float) -> None:
        """Add to a counter."""
        self.values[name] = self.values.get(name, 0.0) + amount

    def raise_to(self, name: str, value: float) -> None:
        """Keep the largest value."""
        self.values[name] = max(self.values.get(name, value), value)

    def add_gap(self, gap: Gap) -> None:
        """Add one probe."""
        joined = self.gap() + gap
        self.values |= {
            "gap:tokens": float(joined.tokens),
            "gap:total": joined.total,
            "gap:largest": joined.largest,
        }

    def gap(self) -> Gap:
        """All probes so far."""
        get = self.values.get
        return Gap(int(get("gap:tokens", 0)), get("gap:total", 0.0), get("gap:largest", 0.0))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the wall time of a block towards a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(_PHASE + name, time.perf_counter() - started)

    def report(self, *, steps: int, version: int, updates: int) -> TrainReport:
        """Close the books."""
        get = self.values.get
        tokens = get("diff:tokens", 0.0)
        return TrainReport(
            steps=steps,
            version=version,
            updates=updates,
            episodes=int(get("episodes", 0)),
            tokens_sampled=int(get("tokens", 0)),
            staleness_max=int(get("staleness", 0)),
            gap=self.gap(),
            train_rollout_logprob_abs_diff=get("diff:total", 0.0) / tokens if tokens else None,
            drops={name: int(get(f"drop:{name}", 0)) for name in ("aborted", "zero_variance", "stale")},
            phases={n.removeprefix(_PHASE): s for n, s in self.values.items() if n.startswith(_PHASE)},
            reward_last=get("reward"),
        )
