"""``tollway eval`` and ``tollway episode run``: open what they need, run the episodes, hand over what is known.

Which model answers: a running server, engines, engines that are started, the latest checkpoint of a run, or none for
harnesses without a model. How it is shown is in ``episode_view``. Depends on ``app``, ``stage`` and ``runs``.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass

from tollway import app
from tollway.envs.artifacts import Artifacts
from tollway.envs.base import Environment, Task
from tollway.envs.config import EnvConfig
from tollway.envs.episode import Episode, Listener
from tollway.envs.evaluate import TaskSource, evaluate_tasks
from tollway.envs.harnesses.registry import open_harness
from tollway.envs.registry import open_environment
from tollway.envs.report import Report
from tollway.envs.runner import EpisodeRunner
from tollway.envs.selection import one_task, select_tasks
from tollway.errors import ConfigError
from tollway.launching import check_program
from tollway.notes import locked
from tollway.records import Sampling
from tollway.runs import Watched, guarded, log_to_run, open_checkpoint, tasks_of
from tollway.settings import Settings
from tollway.stage import Stage, Where, open_stage
from tollway.trainer.rollout import sampling_of

__all__ = ["EvalPlan", "Watcher", "evaluate", "run_episode"]

Started = Callable[[Report], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """Which episodes an evaluation runs, and on what."""

    where: Where
    tasks: tuple[str, ...] = ()
    """As ``select_tasks`` reads them; none for the environment's order."""
    episodes: int | None = None
    """How many, without ``tasks``; ``None``: every task of a finite environment, else ``eval.episodes``."""
    samples: int = 1
    blank_tools: bool = False

    def __post_init__(self) -> None:
        if self.samples < 1 or (self.episodes is not None and self.episodes < 1):
            raise ConfigError("--samples and --episodes are 1 or more")
        if self.tasks and self.episodes is not None:
            raise ConfigError("--tasks and --episodes exclude each other: the first names the tasks, the second counts")


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who is told of an evaluation while it runs."""

    started: Started
    """Before the first episode; the report grows from then on, and is what is known when the evaluation is stopped."""
    phase: Listener
    done: Callable[[Episode], None]


def evaluate(settings: Settings, plan: EvalPlan, watcher: Watcher) -> Report:
    """Run an evaluation to its end.

    Raises ``ConfigError`` or ``SandboxUnavailable`` before anything runs, ``ComponentLost`` when nobody answers any
    more, and ``KeyboardInterrupt``; the watcher has the report of what was finished by then.
    """
    blank = {"blank_tools": plan.blank_tools or settings.env.blank_tools}
    config = tasks_of(settings, "heldout").model_copy(update=blank)
    model = _preflight(settings, config, plan.where)
    with _lock(settings, plan.where, model=model):
        log_to_run(settings, "eval")
        return app.run_to_end(_evaluate(settings, config, plan, watcher, model=model))


def run_episode(settings: Settings, name: str, where: Where, listen: Listener) -> Episode:
    """Run one episode of the task ``name``, an index or an id. Raises as ``evaluate`` does."""
    config = settings.env.model_copy(update={"seed": settings.run.seed})
    if _preflight(settings, config, where) and not where:
        raise ConfigError(
            f"harness {config.harness} calls a model: name a running server with --url, engines with --engine, or "
            "start some with --start-engines; --harness gold and --harness empty need none"
        )
    with _lock(settings, where, model=False):
        log_to_run(settings, "episode")
        return app.run_to_end(_run_episode(settings, config, name, where, listen))


def _preflight(settings: Settings, config: EnvConfig, where: Where) -> bool:
    """Find what cannot work before anything is started. Whether the harness calls a model."""
    needs_model = open_harness(config, open_environment(config)).needs_model
    if needs_model and where.url is None:
        app.check_names(settings)
    if needs_model and where.start:
        check_program(settings.engine)
    app.check_sandbox(settings)
    if (artifacts := Artifacts.of(config)) is not None:
        artifacts.check()
    return needs_model


def _lock(settings: Settings, where: Where, *, model: bool) -> AbstractContextManager[None]:
    """The run directory is taken by what starts processes in it; others only write a log there."""
    starts = bool(where.engines or where.start) or (model and not where)
    return locked(settings.run_dir) if starts else nullcontext()


async def _evaluate(settings: Settings, config: EnvConfig, plan: EvalPlan, watcher: Watcher, *, model: bool) -> Report:
    async with AsyncExitStack() as stack:
        opened = _open(settings, config, plan.where, watcher.phase, checkpoint=model and not plan.where)
        source, environment, watched = await stack.enter_async_context(opened)
        tasks = select_tasks(environment, plan.tasks, count=_count(settings, plan, environment))
        report = Report(environment=environment.name, harness=config.harness, tasks=len(tasks), samples=plan.samples)
        watcher.started(report)

        def done(episode: Episode) -> None:
            report.add(episode)
            report.artifacts_lost += config.artifacts is not None and episode.folder is None
            watcher.done(episode)

        sampling = sampling_of(settings.trainer)
        await guarded(watched, evaluate_tasks(source, tasks, samples=plan.samples, sampling=sampling, done=done))
    return report


def _count(settings: Settings, plan: EvalPlan, environment: Environment) -> int:
    if plan.episodes is None and environment.size is not None:
        return environment.size
    return math.ceil((plan.episodes or settings.eval.episodes) / plan.samples)


async def _run_episode(settings: Settings, config: EnvConfig, name: str, where: Where, listen: Listener) -> Episode:
    async with _open(settings, config, where, listen, checkpoint=False) as (source, environment, watched):
        task = one_task(environment, name)
        work = source.run_task(task, group_id="episode", samples=1, sampling=sampling_of(settings.trainer))
        (episode,) = await guarded(watched, work)
        return episode


@asynccontextmanager
async def _open(
    settings: Settings, config: EnvConfig, where: Where, listen: Listener, *, checkpoint: bool
) -> AsyncIterator[tuple[TaskSource, Environment, Watched]]:
    """What runs episodes, its environment, and what it all depends on."""
    if checkpoint:
        async with open_checkpoint(settings) as fleet, fleet.episodes(config, listen) as patient:
            yield patient, patient.environment, fleet
        return
    async with (
        open_stage(settings, where) as stage,
        app.open_episodes(config, stage.sessions, stage.provider, listen=listen) as found,
    ):
        yield _Checked(found.runner, stage), found.environment, stage


class _Checked:
    """Episodes on a stage; the first that a lost server fails ends them all."""

    def __init__(self, runner: EpisodeRunner, stage: Stage) -> None:
        self._runner, self._stage = runner, stage

    async def run_task(self, task: Task, *, group_id: str, samples: int, sampling: Sampling) -> list[Episode]:
        episodes = await self._runner.run_task(task, group_id=group_id, samples=samples, sampling=sampling)
        for episode in episodes:
            await self._stage.check(episode.error)
        return episodes
