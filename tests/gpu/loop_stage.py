"""One fleet and one training process that stay, while runs over them go on with other ways of the weights.

A stock server starts in a minute, so all transports share one. Joins what ``tollway train`` joins, through the same
functions; owns no assertion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from loop_runs import EXAMPLE, metrics_of

from tollway import app
from tollway.app import Fleet
from tollway.fleet_watch import PatientEpisodes
from tollway.ports import EpisodeSource
from tollway.runs import guarded, log_to_run, tasks_of
from tollway.settings import Settings, load_settings
from tollway.trainer.backends.proxy import BackendProxy
from tollway.trainer.checkpoint import CheckpointStore
from tollway.trainer.loop import train

__all__ = ["Stage", "Stretch", "open_stage"]


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """Some steps of a run."""

    first: int
    """Number of its first step."""
    rows: list[dict[str, float]]
    """Their metrics."""
    phases: dict[str, float]
    """Wall seconds by phase of the trainer, earlier stretches included."""


class Stage:
    """A fleet, a training process, and a run that goes on over them."""

    def __init__(self, sets: Sequence[str], fleet: Fleet, backend: BackendProxy, source: EpisodeSource) -> None:
        self._sets, self.source = tuple(sets), source
        self.fleet, self.backend = fleet, backend

    def settings(self, *sets: str) -> Settings:
        """Those of the stage with ``sets`` on top."""
        return load_settings(EXAMPLE, [*self._sets, *sets])

    @property
    def step(self) -> int:
        """Steps that the run has done."""
        settings = self.settings()
        found = CheckpointStore(settings.run_dir / "checkpoints", keep=settings.trainer.checkpoints_kept).latest()
        return found[1].step if found else 0

    async def go_on(self, steps: int, *sets: str) -> Stretch:
        """Train ``steps`` steps more, from the last checkpoint, with ``sets``."""
        before = self.step
        settings = self.settings(*sets, f"trainer.steps={before + steps}")
        if not settings.trainer.colocated:
            await self.backend.onload()  # an earlier stretch may have left it on the host
        turns = self.fleet.turns(settings, self.backend)
        work = train(self.backend, self.source, turns, settings.trainer, run_dir=settings.run_dir)
        report = await guarded(self.fleet, work)
        return Stretch(before + 1, metrics_of(settings.run_dir)[before:], dict(report.phases))

    async def states(self) -> list[tuple[str, int | None]]:
        """State and version of each engine, as the session server has them."""
        fleet = await self.fleet.sessions.fleet()
        rows = fleet["engines"]
        assert isinstance(rows, list)
        return [(row["state"], row["version"]) for row in rows]


@asynccontextmanager
async def open_stage(sets: Sequence[str]) -> AsyncIterator[Stage]:
    """Start everything of the example with ``sets``; stop it at the end."""
    settings = load_settings(EXAMPLE, list(sets))
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    log_to_run(settings, "train")
    model = app.base_model(settings)
    async with AsyncExitStack() as stack:
        # One after the other: engines measure what is free as they start.
        fleet = await stack.enter_async_context(
            app.open_fleet(settings, model, journal=Path(settings.run_dir / "journal.sqlite"))
        )
        backend = await stack.enter_async_context(app.open_backend(settings, model))
        episodes: PatientEpisodes = await stack.enter_async_context(fleet.episodes(tasks_of(settings, "train")))
        yield Stage(sets, fleet, backend, episodes)
