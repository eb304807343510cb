"""The training loop: groups in, updates in the training process, weights out to running engines.

One step ahead: while step k trains, the groups of step k + 1 generate; a refit happens with episodes in
flight and nobody waits for them. Details live in the named modules. Must not import torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tollway.errors import ComponentLost, TollwayError
from tollway.ports import EpisodeSource
from tollway.records import Group
from tollway.trainer import metrics as names
from tollway.trainer.backends.base import BackendHandle
from tollway.trainer.batch import StepReport
from tollway.trainer.buffer import Ready
from tollway.trainer.checkpoint import CheckpointStore, RunState
from tollway.trainer.config import TrainerConfig
from tollway.trainer.events import CheckpointSaved, GapMeasured, Listener, Resumed, StepFinished
from tollway.trainer.gap import Gap, measure, scoring_batch, trajectories_at
from tollway.trainer.ledger import DropReason, Ledger
from tollway.trainer.metrics import MetricsFile, refit_metrics, rollout_metrics, train_metrics
from tollway.trainer.planner import Plan, plan
from tollway.trainer.probe import fresh_groups
from tollway.trainer.report import Totals, TrainReport
from tollway.trainer.rollout import Rollouts, sampling_of
from tollway.trainer.sft import learning_rate, optimizer_settings
from tollway.trainer.spool import Spool
from tollway.trainer.weights.turns import Handover, Turns

__all__ = ["train"]


async def train(
    backend: BackendHandle,
    source: EpisodeSource,
    turns: Turns,
    config: TrainerConfig,
    *,
    run_dir: Path,
    on_event: Listener = lambda _event: None,
) -> TrainReport:
    """Run to ``config.steps`` steps, from the last checkpoint of ``run_dir`` if there is one.

    The backend arrives with its starting weights (a checkpoint replaces them). A device that it shares with engines
    is theirs when this ends. Raises ``ComponentLost`` when engines, server, ledger or training process are gone; what
    is committed stays for the next start.
    """
    with Ledger(run_dir / "ledger.sqlite") as ledger:
        run = _Run(backend, source, turns, config, run_dir, ledger, on_event)
        await turns.trainer()
        await run.open()
        await run.publish()
        with _one_error():
            async with asyncio.TaskGroup() as tasks:
                producer = tasks.create_task(run.rollouts.run(), name="rollouts")
                while run.step < config.steps:
                    await run.one_step()
                producer.cancel()
        return run.totals.report(steps=run.step, version=run.version, updates=run.updates)


class _Run:
    """State of one process's part of a run."""

    def __init__(
        self,
        backend: BackendHandle,
        source: EpisodeSource,
        turns: Turns,
        config: TrainerConfig,
        run_dir: Path,
        ledger: Ledger,
        on_event: Listener,
    ) -> None:
        self._backend, self._source, self._turns, self._config = backend, source, turns, config
        self._ledger, self._on_event, self._dir = ledger, on_event, run_dir
        self._spool = Spool(run_dir / "spool", run_dir / "trajectories" if config.keep_trajectories else None)
        self._checkpoints = CheckpointStore(run_dir / "checkpoints", keep=config.checkpoints_kept)
        self._unsettled: list[tuple[int, int]] = []
        """(prompt, step) of trained groups that no checkpoint covers yet."""
        self._first = True

    async def open(self) -> None:
        """Continue from the last checkpoint, or make the starting weights the first one."""
        found = self._checkpoints.latest()
        state = found[1] if found else RunState()
        self.step, self.version, self.updates = state.step, state.version, state.updates
        self.totals = Totals(dict(state.totals))
        self._metrics = MetricsFile(self._dir / "metrics.jsonl", keep_bytes=state.metrics_bytes)
        self._metrics_bytes = state.metrics_bytes
        await self._backend.reset_optimizer(optimizer_settings(self._config.optimizer))
        if found:
            await self._backend.load(found[0])
        if self.step and not self._ledger.next_index():
            raise ComponentLost(
                f"checkpoint of step {self.step} without its prompt ledger in {self._dir}: which prompts were trained "
                "is lost; restore ledger.sqlite, or start a new run directory"
            )
        self._ledger.take_back(self.step)
        self._shelve_covered()
        self.rollouts = Rollouts(
            self._source, self._config, self._ledger, self._spool, step=self.step, version=self.version
        )
        restored = self.rollouts.restore()
        self.totals.add("drop:stale", restored.stale)
        if found:
            self._on_event(Resumed(self.step, self.version, restored.reissued, restored.reloaded))
        else:
            await self._checkpoint()

    async def one_step(self) -> None:
        """Take a batch, train on it, push the weights, note what happened."""
        started = time.perf_counter()
        ready, row = await self._take()
        groups = [each.group for each in ready]
        await self._trainers_turn()
        row |= await self._probe(groups) if self._first else {}
        planned = plan(groups, self._config)
        row |= rollout_metrics(groups, planned) | await self._update(planned)
        self._settle(ready, planned)
        self.version += 1
        self.step += 1
        due = self.step % self._config.checkpoint_every == 0 or self.step == self._config.steps
        if due and self._turns.shared:
            await self._draft()  # the next line takes the weights off the device
        row |= refit_metrics(await self.publish())
        row[names.STEP_TIME] = time.perf_counter() - started
        probes = self._config.gap_every and self.step % self._config.gap_every == 0
        if probes and self._turns.shared:
            row |= await self._probe_fresh()  # takes the device once more, so nothing else may generate yet
        self.rollouts.advance(step=self.step, version=self.version)
        row |= self._windows()
        if probes and not self._turns.shared:
            row |= await self._probe_fresh()
        self._count(row)
        self._metrics_bytes = self._metrics.write(self.step, row)
        if due:
            await self._checkpoint(drafted=self._turns.shared)
        self._on_event(StepFinished(self.step, self._config.steps, row))

    async def publish(self) -> Handover:
        """Give the current weights to every engine, under the current version, and a shared device with them."""
        with self.totals.phase("refit"):
            return await self._turns.engines(self.version)

    async def _trainers_turn(self) -> None:
        if self._turns.shared:
            with self.totals.phase("sleep"):
                await self._turns.trainer()

    async def _take(self) -> tuple[list[Ready], dict[str, float]]:
        """The next batch, by prompt and not by arrival: the same groups then give the same sums bit for bit."""
        started = time.perf_counter()
        row = {names.QUEUE: float(len(self.rollouts.buffer))}
        with self.totals.phase("wait"):
            ready = sorted(await self.rollouts.take(self.version), key=lambda each: each.index)
        return ready, row | {names.WAIT_TIME: time.perf_counter() - started}

    async def _update(self, planned: Plan) -> dict[str, float]:
        """All updates on one batch; none when no group of it teaches anything."""
        reports: list[StepReport] = []
        rates = [0.0]
        total = self._config.steps * self._config.updates_per_batch
        with self.totals.phase("train"):
            for _ in range(self._config.updates_per_batch if planned.batch.rows else 0):
                rates.append(learning_rate(self._config.optimizer, self.updates, total))
                reports.append(await self._backend.step(planned.batch, lr=rates[-1]))
                self.updates += 1
        return train_metrics(planned, reports, rates[-1], peak_tflops=self._config.peak_tflops)

    def _settle(self, ready: list[Ready], planned: Plan) -> None:
        """Decide the fates of the batch's prompts: trained by the step that is about to count, or dropped."""
        step = self.step + 1
        pairs = list(zip(ready, planned.verdicts, strict=True))
        trained = [each.index for each, verdict in pairs if verdict == "train"]
        dropped: list[tuple[int, DropReason]] = [(e.index, v) for e, v in pairs if v != "train"]
        self._ledger.settle(trained, dropped, step=step)
        self._unsettled += [(index, step) for index in trained]
        for index, reason in dropped:
            self._spool.discard(index)
            self.totals.add(f"drop:{reason}", 1)

    async def _probe(self, groups: list[Group]) -> dict[str, float]:
        """Score rows that these very weights sampled."""
        self._first = False
        rows = trajectories_at(groups, self.version)
        if not rows:
            return {}
        with self.totals.phase("gap"):
            gap: Gap = measure(rows, await self._backend.score(scoring_batch(rows)), self.version)
        self.totals.add_gap(gap)
        self._on_event(GapMeasured(self.version, gap))
        out = {names.GAP_MAX: gap.largest, names.GAP_TOKENS: float(gap.tokens)}
        return out if gap.mean is None else out | {names.GAP_MEAN: gap.mean}

    async def _probe_fresh(self) -> dict[str, float]:
        """Sample fresh turns through the whole path while the weights stand still, and score them."""
        with self.totals.phase("gap"):
            groups = await fresh_groups(
                self._source, sampling_of(self._config), version=self.version, config=self._config
            )
        async with self._turns.aside(self.version):
            return await self._probe(groups)

    def _windows(self) -> dict[str, float]:
        """Staleness figures since the last step, and the drops at arrival."""
        window, drops = self.rollouts.buffer.close_window(), self.rollouts.close_window()
        self.totals.add("drop:aborted", drops.aborted)
        self.totals.add("drop:zero_variance", drops.zero_variance)
        self.totals.add("drop:stale", window.stale)
        out = {
            names.ABORTED: float(drops.aborted),
            names.DYNAMIC: float(drops.zero_variance),
            names.STALE: float(window.stale),
        }
        if window.ages:
            out |= {names.AVG_STALENESS: float(np.mean(window.ages)), names.MAX_STALENESS: float(max(window.ages))}
            trained = [age for age in window.ages if age <= self._config.max_staleness]
            self.totals.raise_to("staleness", max(trained, default=0))
        if waiting := self.rollouts.buffer.ages(self.version):
            out |= {names.BUFFER_AVG: float(np.mean(waiting)), names.BUFFER_MAX: float(max(waiting))}
        return out

    def _count(self, row: dict[str, float]) -> None:
        self.totals.add("episodes", row[names.ROLLOUTS])
        self.totals.add("tokens", row[names.SAMPLED])
        if names.RAW_REWARD in row:
            self.totals.values["reward"] = row[names.RAW_REWARD]
        if names.ABS_DIFF in row:
            self.totals.add("diff:tokens", row[names.TOKENS])
            self.totals.add("diff:total", row[names.ABS_DIFF] * row[names.TOKENS])

    async def _draft(self) -> None:
        with self.totals.phase("checkpoint"):
            await self._checkpoints.draft(self.step, self._backend.save)

    async def _checkpoint(self, *, drafted: bool = False) -> None:
        with self.totals.phase("checkpoint"):
            self._ledger.sync()
            state = RunState(
                step=self.step,
                version=self.version,
                updates=self.updates,
                metrics_bytes=self._metrics_bytes,
                totals=dict(self.totals.values),
            )
            path = await (
                self._checkpoints.commit(state) if drafted else self._checkpoints.save(state, self._backend.save)
            )
        for index, step in self._unsettled:
            self._spool.settle([index], step)
        self._unsettled.clear()
        self._on_event(CheckpointSaved(self.step, path))

    def _shelve_covered(self) -> None:
        """Finish what a kill between a checkpoint and its shelving left undone."""
        for index in self._spool.indices():
            if (step := self._ledger.trained_step(index)) is not None:
                self._spool.settle([index], step)


@contextmanager
def _one_error() -> Iterator[None]:
    """Turn a group of errors into the one that explains it: a lost component first."""
    try:
        yield
    except BaseExceptionGroup as group:
        causes = list(_leaves(group))
        for kind in (ComponentLost, TollwayError, Exception, BaseException):
            for cause in causes:
                if isinstance(cause, kind):
                    raise cause from cause.__cause__
        raise


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
