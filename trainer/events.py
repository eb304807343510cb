"""What a run tells its user while it goes on. The command line draws these; nothing depends on being heard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tollway.trainer.gap import Gap

__all__ = ["CheckpointSaved", "Event", "GapMeasured", "Listener", "Resumed", "StepFinished", "WarmStartStep"]


@dataclass(frozen=True, slots=True)
class WarmStartStep:
    """One supervised step."""

    step: int
    """1 is the first."""
    steps: int
    loss: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run continues from a checkpoint."""

    step: int
    version: int
    reissued: int
    """Prompts that go out again."""
    reloaded: int
    """Finished groups taken from the spool."""


@dataclass(frozen=True, slots=True)
class StepFinished:
    """One reinforcement step, its refit included."""

    step: int
    """1 is the first."""
    steps: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class GapMeasured:
    """The gap at one version."""

    version: int
    gap: Gap


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is complete."""

    step: int
    path: Path


Event = WarmStartStep | Resumed | StepFinished | GapMeasured | CheckpointSaved
Listener = Callable[[Event], None]
