"""``tollway train``: the phases of a run, in order; and the run's latest checkpoint, for ``tollway eval``.

Train: processes, warm start, evaluation, reinforcement, evaluation, summary. Every phase is noted in the run
directory when it is done, so the same command continues after any interruption. What is started and joined
is in ``app``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from tollway import app, telemetry
from tollway.app import Fleet
from tollway.envs.config import EnvConfig
from tollway.envs.evaluate import Evaluation
from tollway.envs.evaluate import evaluate as run_episodes
from tollway.envs.micro_swe.demonstrations import demonstrations
from tollway.errors import ConfigError, TollwayError
from tollway.notes import Notes, locked
from tollway.ports import EpisodeSource, GroupRequest
from tollway.records import Group
from tollway.session_server.families.registry import load_family
from tollway.settings import Settings
from tollway.summary import Summary, evaluation_json, read_summary, summarise
from tollway.trainer.backends.proxy import BackendProxy
from tollway.trainer.checkpoint import CheckpointStore, RunState
from tollway.trainer.events import CheckpointSaved, Event
from tollway.trainer.loop import train as train_loop
from tollway.trainer.rollout import sampling_of
from tollway.trainer.sft import Demonstration, warm_start
from tollway.trainer.weights.turns import OnDevice, Turns

__all__ = [
    "EvaluationDone",
    "Listener",
    "PhaseStarted",
    "Watched",
    "check_device",
    "guarded",
    "log_to_run",
    "move_aside",
    "open_checkpoint",
    "tasks_of",
    "train",
]

logger = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")
_LAST_WORDS_S = 1.0
"""How long a failed run waits for the news that a process died, which explains the failure better."""


@dataclass(frozen=True, slots=True)
class PhaseStarted:
    """A phase of the run begins."""

    name: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """One evaluation is over."""

    name: str
    evaluation: Evaluation


Listener = Callable[[Event | PhaseStarted | EvaluationDone], None]


def train(settings: Settings, *, fresh: bool, report: Listener) -> Summary:
    """Train to the configured number of steps and return the summary, which is also in summary.json.

    Raises ``ConfigError`` or ``SandboxUnavailable`` before anything runs, ``ComponentLost`` when a part is
    lost in the middle; whatever was committed stays for the next call.
    """
    app.preflight(settings)
    if fresh and (kept := move_aside(settings.run_dir)) is not None:
        report(PhaseStarted("fresh start", f"the earlier run is kept in {kept}"))
    with locked(settings.run_dir):
        log_to_run(settings, "train")
        return app.run_to_end(_Training(settings, report).run())


def log_to_run(settings: Settings, command: str) -> None:
    """Log lines of ``command`` go to the run's directory; warnings also reach the terminal."""
    telemetry.configure(settings.run.log_level, component=command, file=settings.run_dir / "logs" / f"{command}.log")


class _Counted(EpisodeSource):
    """Counts what passes: sampled tokens of every episode."""

    def __init__(self, source: EpisodeSource, notes: Notes) -> None:
        self._source, self._notes = source, notes

    async def run_group(self, request: GroupRequest) -> Group:
        group = await self._source.run_group(request)
        self._notes.tokens_generated += sum(row.trained_tokens for one in group.rollouts for row in one.rows)
        return group


class _Training:
    """One process's part of a training run."""

    def __init__(self, settings: Settings, report: Listener) -> None:
        self._settings, self._report = settings, report
        self._dir = settings.run_dir
        self._notes = Notes(self._dir / "run.json")

    async def run(self) -> Summary:
        settings = self._settings
        store = CheckpointStore(self._dir / "checkpoints", keep=settings.trainer.checkpoints_kept)
        found = store.latest()
        self._notes.claim(_identity(settings))
        done = read_summary(self._dir)
        if found is not None and done is not None and done.steps >= settings.trainer.steps:
            self._start("finished before", "nothing to do; --fresh starts over, a larger trainer.steps goes on")
            return done
        if done is not None:
            # A finished run goes on: what was measured at its end is no longer at the end.
            for name in ("after", "blank_tools"):
                self._notes.evaluations.pop(name, None)
        model = app.base_model(settings)
        async with AsyncExitStack() as stack:
            self._start("start", "engine, session server, training process")
            with self._notes.phase("start"):
                fleet, backend, turns = await _open(stack, settings, model, journal=self._dir / "journal.sqlite")
            return await guarded(fleet, self._phases(fleet, backend, turns, found[1] if found else None))

    async def _phases(self, fleet: Fleet, backend: BackendProxy, turns: Turns, resumed: RunState | None) -> Summary:
        settings, notes = self._settings, self._notes
        if resumed is None:
            await self._warm_start(fleet, backend)
            await turns.engines(0)
            if settings.eval.at_start:
                await self._evaluate(fleet, "before")
        self._start("reinforcement", f"{settings.trainer.steps} steps")
        async with fleet.episodes(tasks_of(settings, "train")) as source:
            with notes.phase("reinforcement"):
                result = await train_loop(
                    backend,
                    _Counted(source, notes),
                    turns,
                    settings.trainer,
                    run_dir=self._dir,
                    on_event=self._on_event,
                )
        async with turns.aside(result.version):
            await backend.export(self._dir / "model")
        if settings.eval.at_end:
            await self._evaluate(fleet, "after")
        if settings.eval.blank_tools:
            await self._evaluate(fleet, "blank_tools", blank_tools=True)
        summary = summarise(result, notes, await fleet.sessions.cache(), self._dir)
        notes.save()
        return summary

    async def _warm_start(self, fleet: Fleet, backend: BackendProxy) -> None:
        settings = self._settings
        if not settings.trainer.warm_start.steps:
            return
        self._start("demonstrations", "made in real sandboxes")
        with self._notes.phase("demonstrations"):
            sequences = await _demonstrations(settings, fleet)
        self._start("warm start", f"{settings.trainer.warm_start.steps} supervised steps")
        with self._notes.phase("warm_start"):
            await warm_start(
                backend, sequences, settings.trainer.warm_start, seed=settings.run.seed, on_event=self._on_event
            )

    async def _evaluate(self, fleet: Fleet, name: str, *, blank_tools: bool = False) -> None:
        if name in self._notes.evaluations:
            return
        self._start(f"evaluation {name.replace('_', ' ')}", f"{self._settings.eval.episodes} episodes")
        with self._notes.phase(f"eval_{name}"):
            evaluation = await _evaluate(self._settings, fleet, self._notes, blank_tools=blank_tools)
        self._notes.evaluations[name] = evaluation_json(evaluation)
        self._notes.save()
        self._report(EvaluationDone(name, evaluation))

    def _on_event(self, event: Event) -> None:
        self._report(event)
        if isinstance(event, CheckpointSaved):
            self._notes.save()

    def _start(self, name: str, detail: str) -> None:
        self._report(PhaseStarted(name, detail))


def _identity(settings: Settings) -> dict[str, object]:
    """What may not change while a run goes on."""
    fresh = settings.model.fresh
    return {
        "run.seed": settings.run.seed,
        "model.path": settings.model.path,
        "model.fresh": fresh.model_dump(mode="json") if fresh is not None else None,
        "env.name": settings.env.name,
        "server.family": settings.server.family,
        "trainer.backend": settings.trainer.backend,
    }


@asynccontextmanager
async def open_checkpoint(settings: Settings) -> AsyncIterator[Fleet]:
    """Engines with the weights of the run's latest checkpoint. Raises ``ConfigError`` when there is none."""
    found = CheckpointStore(settings.run_dir / "checkpoints", keep=settings.trainer.checkpoints_kept).latest()
    if found is None:
        raise ConfigError(
            f"no checkpoint in {settings.run_dir}; train first, name the run with --set run.dir=..., or name a server "
            "with --url or engines with --engine"
        )
    journal = settings.run_dir / "eval" / "journal.sqlite"
    shutil.rmtree(journal.parent, ignore_errors=True)
    journal.parent.mkdir(parents=True)
    model = app.base_model(settings)
    async with AsyncExitStack() as stack:
        fleet, backend, turns = await _open(stack, settings, model, journal=journal)
        path, state = found
        await backend.load(path)
        await turns.engines(state.version)
        yield fleet


async def _open(
    stack: AsyncExitStack, settings: Settings, model: Path, *, journal: Path
) -> tuple[Fleet, BackendProxy, Turns]:
    """Engines and training process; the trainer may use its device at once.

    On a shared device one after the other: engines measure what is free as they start, and sleep before it is taken.
    """
    if settings.trainer.refit_transport == "disk":
        # Another run's directories go by the same names: it would delete these, or engines would load its weights.
        stack.enter_context(locked(app.weights_dir(settings), key="trainer.weights_dir"))
    backend = app.open_backend(settings, model)
    fleet_opens = stack.enter_async_context(app.open_fleet(settings, model, journal=journal))
    if not settings.trainer.colocated:
        fleet, _ = await _both(fleet_opens, stack.enter_async_context(backend))
        await check_device(settings, backend)
        return fleet, backend, fleet.turns(settings, backend)
    fleet = await fleet_opens
    stack.push_async_callback(backend.aclose)
    backend.start()
    await check_device(settings, backend)
    turns = fleet.turns(settings, backend)
    await turns.clear()
    await stack.enter_async_context(backend)
    return fleet, backend, turns


async def check_device(settings: Settings, backend: OnDevice) -> None:
    """Raise ``ConfigError`` before the warm start, rather than after it, for handles of memory that no GPU has."""
    if settings.trainer.refit_transport == "cuda_ipc" and await backend.device_memory() is None:
        raise ConfigError(
            "trainer.refit_transport is cuda_ipc, and the training process has no GPU; train on the engines' GPU, or "
            'set trainer.refit_transport = "tensor"'
        )


async def _evaluate(settings: Settings, fleet: Fleet, notes: Notes, *, blank_tools: bool) -> Evaluation:
    config = tasks_of(settings, "heldout").model_copy(update={"blank_tools": blank_tools or settings.env.blank_tools})
    async with fleet.episodes(config) as source:
        return await run_episodes(
            _Counted(source, notes),
            settings.eval.episodes,
            sampling=sampling_of(settings.trainer),
            name="blank" if blank_tools else "eval",
        )


async def _demonstrations(settings: Settings, fleet: Fleet) -> list[Demonstration]:
    """Token ids and masks of the environment's scripted episodes, rendered by the served family."""
    warm, server = settings.trainer.warm_start, settings.server
    family = load_family(
        server.family, tokenizer=server.tokenizer, thinking=server.thinking, chat_template=server.chat_template
    )
    shown = await demonstrations(
        fleet.provider, warm.steps * warm.batch, seed=settings.run.seed, recipe=settings.env.demonstrations
    )
    return [family.render_training(one.messages, one.tools) for one in shown]


def tasks_of(settings: Settings, split: Literal["train", "heldout"]) -> EnvConfig:
    """The section of the environment for one use of it: seeded by the run."""
    return settings.env.model_copy(update={"seed": settings.run.seed, "split": split})


async def _both(first: Coroutine[object, object, T], second: Coroutine[object, object, U]) -> tuple[T, U]:
    """Await two start-ups side by side; the first failure cancels the other and is raised alone."""
    try:
        async with asyncio.TaskGroup() as group:
            one, two = group.create_task(first), group.create_task(second)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return one.result(), two.result()


class Watched(Protocol):
    """A fleet, or anything else that work depends on."""

    async def watch(self) -> None:
        """Never returns; raises when it is lost."""
        ...


async def guarded(fleet: Watched, work: Coroutine[object, object, T]) -> T:
    """Run ``work``; the death of the engine or the server ends it at once and is the error that is told."""
    working, watching = asyncio.create_task(work), asyncio.create_task(fleet.watch())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            await watching
        if working.done() and isinstance(working.exception(), TollwayError):
            # A dead engine first shows as failed episodes: give its exit a moment to be seen.
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(watching), _LAST_WORDS_S)
        return await working
    except TollwayError as error:
        # The command says it once all processes are gone, which takes as long as an engine likes; its log has it now.
        logger.info("the run ends: %s", error)
        raise
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def move_aside(run_dir: Path) -> Path | None:
    """Keep what an earlier run left: its directory gets the next free number, and is returned.

    Raises ``ConfigError`` while a run goes on in it, which would write on into the new directory of that name.
    """
    if not run_dir.exists():
        return None
    with locked(run_dir):
        number = next(n for n in itertools.count(1) if not run_dir.with_name(f"{run_dir.name}.{n}").exists())
        return run_dir.rename(run_dir.with_name(f"{run_dir.name}.{number}"))
