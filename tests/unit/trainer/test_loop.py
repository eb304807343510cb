"""The whole loop over a real tiny policy: sampled from the weights that refits deliver, trained in torch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from trainer_helpers import InProcessBackend, PolicySource, RecordingEngine, group, model_dir, rollout

from tollway.errors import ComponentLost, EngineLost, EpisodeFailed, TrainerLost
from tollway.ports import EpisodeSource, GroupRequest
from tollway.records import Group
from tollway.telemetry import METRICS
from tollway.trainer.backends.base import BackendSpec
from tollway.trainer.backends.proxy import BackendProxy
from tollway.trainer.backends.shape import read_shape
from tollway.trainer.config import OptimizerConfig, TrainerConfig
from tollway.trainer.events import CheckpointSaved, Event, GapMeasured, Resumed, StepFinished
from tollway.trainer.ledger import Ledger
from tollway.trainer.loop import train
from tollway.trainer.probe import FIRST_PROBE_INDEX
from tollway.trainer.report import TrainReport
from tollway.trainer.spool import decode_group
from tollway.trainer.weights.refit import Refit, Sharing
from tollway.trainer.weights.transport import TensorWeights
from tollway.trainer.weights.turns import Turns


def config(**changes: object) -> TrainerConfig:
    fields: dict[str, object] = {
        "steps": 6,
        "groups_per_step": 3,
        "samples_per_group": 4,
        "optimizer": OptimizerConfig(lr=5e-3),
        "checkpoint_every": 3,
        "gap_every": 2,
        "gap_turns": 4,
    }
    return TrainerConfig(**(fields | changes))  # type: ignore[arg-type]


def small_ids(ids: np.ndarray) -> float:
    """Reward for ids below 12, with a trace of everything else so that no two attempts tie."""
    return float((ids < 12).mean() + 1e-6 * (ids * 25.0 ** -np.arange(ids.size)).sum())


class Setup:
    """One run directory with everything that a process of the run needs."""

    def __init__(self, tmp_path: Path, *, seed: int = 1) -> None:
        self.dir = tmp_path / "run"
        folder = model_dir(tmp_path / "model", seed=seed)
        self.spec = BackendSpec(kind="torch", model_dir=str(folder), seed=seed)
        self.engine = RecordingEngine()
        self.source = PolicySource(self.engine, read_shape(folder), small_ids)
        self.backend = InProcessBackend(self.spec)
        self.events: list[Event] = []

    async def train(self, settings: TrainerConfig, *, source: EpisodeSource | None = None) -> TrainReport:
        return await asyncio.wait_for(
            train(
                self.backend,  # type: ignore[arg-type]  # returns what the port says
                source or self.source,
                self.turns(settings),
                settings,
                run_dir=self.dir,
                on_event=self.events.append,
            ),
            50,
        )

    def turns(self, settings: TrainerConfig) -> Turns:
        weights = TensorWeights(self.backend, bucket_bytes=1 << 20, transport="tensor")  # type: ignore[arg-type]
        sharing = Sharing(self.backend, settings.release_tags) if settings.colocated else None
        return Turns(Refit([self.engine], weights, sharing=sharing), self.backend, shared=settings.colocated)

    def rows(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.dir / "metrics.jsonl").read_text().splitlines()]

    def counts(self) -> dict[str, int]:
        with Ledger(self.dir / "ledger.sqlite") as ledger:
            return ledger.counts()


async def test_a_run_takes_exactly_its_steps_and_learns(tmp_path: Path) -> None:
    run = Setup(tmp_path)
    report = await run.train(config(steps=12, updates_per_batch=2))
    assert (report.steps, report.version, report.updates, run.backend.steps) == (12, 12, 24, 24)
    assert report.episodes == 12 * 3 * 4
    assert report.tokens_sampled == report.episodes * 8
    assert run.counts() == {"trained": 36}
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, 13))
    rewards = [row["rollout/raw_reward"] for row in rows]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
    assert [name for row in rows for name in row if name != "step" and name not in METRICS] == []
    assert {"rollout/fully_async/queue_size", "perf/update_weights_wire_bytes", "train/lr"} <= rows[-1].keys()
    assert run.engine.version == 12
    assert not run.engine.paused
    assert {e.step for e in run.events if isinstance(e, StepFinished)} == set(range(1, 13))


async def test_generation_runs_one_step_ahead_and_refits_fall_into_it(tmp_path: Path) -> None:
    run = Setup(tmp_path)
    run.source.delay_turns = 60
    report = await run.train(config(steps=8, gap_every=0, max_staleness=1))
    assert report.staleness_max == 1
    groups = [decode_group(path) for path in (run.dir / "trajectories").rglob("*.safetensors")]
    assert len(groups) == 24
    assert {group.group_id.partition("-")[0] for group in groups} == {group.group_id for group in groups}
    spans = [set(row.weight_version[2:].tolist()) for g in groups for r in g.rollouts for row in r.rows]
    assert any(len(span) > 1 for span in spans)


async def test_the_gap_is_rounding_only_and_drift_is_reported_apart(tmp_path: Path) -> None:
    run = Setup(tmp_path)
    report = await run.train(config(temperature=0.7))
    measured = [event for event in run.events if isinstance(event, GapMeasured)]
    assert [event.version for event in measured] == [0, 2, 4, 6]
    assert [row["step"] for row in run.rows() if "train/logprob_gap_max" in row] == [1, 2, 4, 6]
    assert report.gap.largest < 1e-5
    assert report.gap.tokens == sum(event.gap.tokens for event in measured) > 100
    assert report.train_rollout_logprob_abs_diff is not None
    assert report.train_rollout_logprob_abs_diff > 10 * report.gap.largest


async def test_a_failed_probe_is_no_failure_of_the_run(tmp_path: Path) -> None:
    run = Setup(tmp_path)
    probes = range(FIRST_PROBE_INDEX, FIRST_PROBE_INDEX + 100)
    report = await run.train(config(steps=4), source=Scripted(run.source, dict.fromkeys(probes, EpisodeFailed("no"))))
    assert report.steps == 4
    assert report.gap.tokens == 3 * 4 * 8


async def test_the_synchronous_schedule_trains_on_its_own_policy(tmp_path: Path) -> None:
    run = Setup(tmp_path)
    report = await run.train(config(schedule="sync", max_staleness=0))
    assert report.staleness_max == 0
    assert report.train_rollout_logprob_abs_diff == pytest.approx(0, abs=1e-5)


async def test_engines_get_the_weights_before_the_first_episode(tmp_path: Path) -> None:
    run = Setup(tmp_path)
    await run.train(config(steps=1))
    order = [call for call in run.engine.calls if call in ("version", "bucket")]
    assert order[:2] == ["bucket", "version"]
    assert run.source.requests[0].prompt_index == 0


class Scripted(EpisodeSource):
    """Delegates, except for prompts that ``script`` answers itself."""

    def __init__(self, inner: EpisodeSource, script: dict[int, object]) -> None:
        self.inner, self.script = inner, script

    async def run_group(self, request: GroupRequest) -> Group:
        answer = self.script.get(request.prompt_index)
        if isinstance(answer, BaseException):
            raise answer
        if callable(answer):
            return answer(await self.inner.run_group(request))  # type: ignore[no-any-return]
        return await self.inner.run_group(request)


def failing_members(count: int) -> object:
    def change(g: Group) -> Group:
        lost = tuple(rollout(None, error="sandbox gone") for _ in range(count))
        return group(*lost, *g.rollouts[count:], group_id=g.group_id)

    return change


def all_equal(g: Group) -> Group:
    return group(*(rollout(1.0, *r.rows) for r in g.rollouts), group_id=g.group_id)


async def test_each_drop_is_counted_and_its_place_given_to_another_prompt(tmp_path: Path) -> None:
    run = Setup(tmp_path)
    script = {0: EpisodeFailed("no sandbox"), 1: failing_members(3), 2: all_equal, 4: failing_members(2)}
    report = await run.train(config(dynamic_sampling=True), source=Scripted(run.source, script))
    assert report.drops == {"aborted": 2, "zero_variance": 1, "stale": 0}
    assert run.counts() == {"trained": 18, "dropped:aborted": 2, "dropped:zero_variance": 1}
    assert sum(row["rollout/fully_async/aborted_groups_filtered"] for row in run.rows()) == 2
    assert sum(row["rollout/fully_async/dynamic_groups_filtered"] for row in run.rows()) == 1
    assert sum(row["rollout/failed_rollouts"] for row in run.rows()) == 2


async def test_without_dynamic_sampling_a_step_trains_on_the_groups_that_differ(tmp_path: Path) -> None:
    run = Setup(tmp_path)
    report = await run.train(config(steps=2), source=Scripted(run.source, {0: all_equal, 4: all_equal}))
    assert report.drops["zero_variance"] == 2
    assert run.counts() == {"trained": 4, "dropped:zero_variance": 2}
    assert report.steps == 2


async def test_a_step_without_anything_to_learn_updates_nothing_and_goes_on(tmp_path: Path) -> None:
    run = Setup(tmp_path)
    script = dict.fromkeys(range(3), all_equal)
    report = await run.train(config(steps=2), source=Scripted(run.source, script))
    assert (report.steps, report.updates, report.version) == (2, 1, 2)
    assert "train/loss" not in run.rows()[0]


async def test_refilling_ends_when_no_group_differs_any_more(tmp_path: Path) -> None:
    run = Setup(tmp_path)
    script = dict.fromkeys(range(10000), all_equal)
    settings = config(steps=2, dynamic_sampling=True, oversample_limit=2.0, gap_every=0)
    report = await run.train(settings, source=Scripted(run.source, script))
    assert (report.steps, report.updates) == (2, 0)
    assert len(run.source.requests) < 30


@pytest.mark.parametrize("whole", [True, False])
async def test_groups_that_keep_failing_end_the_run_with_their_reason(tmp_path: Path, whole: bool) -> None:
    run = Setup(tmp_path)
    answer = EngineLost("engine http://e is gone") if whole else failing_members(4)
    script = dict.fromkeys(range(2, 10000), answer)
    with pytest.raises(ComponentLost, match=r"5 groups in a row failed entirely.*gone"):
        await run.train(config(max_failed_groups=5), source=Scripted(run.source, script))
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_source_that_lost_its_component_ends_the_run_at_once(tmp_path: Path) -> None:
    run = Setup(tmp_path)
    lost = ComponentLost("no engine left")
    with pytest.raises(ComponentLost, match="no engine left"):
        await run.train(config(), source=Scripted(run.source, {4: lost}))


async def test_a_refit_that_no_engine_takes_ends_the_run(tmp_path: Path) -> None:
    run = Setup(tmp_path)

    def break_engine(event: Event) -> None:
        if isinstance(event, StepFinished) and event.step == 2:
            run.engine.fail_at = "bucket"

    run.events = type("Events", (list,), {"append": lambda self, event: break_engine(event)})()
    with pytest.raises(ComponentLost, match="no engine took weights 3"):
        await run.train(config())


async def test_a_lost_training_process_ends_the_run_with_a_typed_error(tmp_path: Path) -> None:
    run = Setup(tmp_path)
    async with BackendProxy(run.spec, log_path=tmp_path / "trainer.log") as backend:
        run.backend = backend  # type: ignore[assignment]

        def kill(event: Event) -> None:
            if isinstance(event, StepFinished) and event.step == 2:
                os.kill(backend.pid, signal.SIGKILL)

        run.events = type("Events", (list,), {"append": lambda self, event: kill(event)})()
        with pytest.raises(TrainerLost, match="SIGKILL"):
            await run.train(config())
    assert run.counts()["trained"] >= 6


class Stop(Exception):
    """Stands for whatever ends a process between two steps."""


async def test_a_resumed_synchronous_run_ends_with_the_very_same_weights(tmp_path: Path) -> None:
    settings = config(steps=7, schedule="sync", max_staleness=0, updates_per_batch=2, gap_every=0)
    straight = Setup(tmp_path / "a")
    await straight.train(settings)

    first = Setup(tmp_path / "b")

    def stop(event: Event) -> None:
        if isinstance(event, StepFinished) and event.step == 5:
            raise Stop

    first.events = type("Events", (list,), {"append": lambda self, event: stop(event)})()
    with pytest.raises(Stop):
        await first.train(settings)
    second = Setup(tmp_path / "b", seed=99)
    report = await second.train(settings)
    resumed = [event for event in second.events if isinstance(event, Resumed)]
    assert [(event.step, event.version, event.reloaded, event.reissued) for event in resumed] == [(3, 3, 3, 3)]
    assert (report.steps, report.version, report.updates) == (7, 7, 14)
    assert report.episodes == 7 * 3 * 4
    assert [row["step"] for row in second.rows()] == list(range(1, 8))
    assert second.counts() == {"trained": 21}
    for name, weight in straight.engine.weights.items():
        assert second.engine.weights[name].tolist() == weight.tolist(), name  # type: ignore[attr-defined]
    stored = sorted(path.name for path in (tmp_path / "b" / "run" / "trajectories").rglob("*.safetensors"))
    assert stored == [f"group_{index:08d}.safetensors" for index in range(21)]


async def test_a_finished_run_started_again_trains_nothing_more(tmp_path: Path) -> None:
    await Setup(tmp_path).train(config(steps=3))
    again = Setup(tmp_path)
    report = await again.train(config(steps=3))
    assert (report.steps, again.backend.steps) == (3, 0)
    assert (await Setup(tmp_path).train(config(steps=4))).steps == 4


_RUN = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path.insert(0, {helpers!r})
from test_loop import Setup, config

async def main():
    run = Setup(Path(sys.argv[1]))
    left = int(sys.argv[2])
    class Events(list):
        def append(self, event):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    run.events = Events()
    await run.train(config(steps=7, gap_every=0))

asyncio.run(main())
"""


def test_every_prompt_has_one_fate_after_kills_anywhere(tmp_path: Path) -> None:
    code = _RUN.format(helpers=str(Path(__file__).parent))
    for events in (4, 5, 10_000):
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(events)], timeout=60, check=False)
    assert done.returncode == 0
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert ledger.counts() == {"trained": 21}
        steps = [ledger.trained_step(index) for index in range(ledger.next_index())]
    assert sorted(step for step in steps if step is not None) == sorted([*range(1, 8)] * 3)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 8))


async def test_checkpoints_are_made_at_the_start_on_the_way_and_at_the_end(tmp_path: Path) -> None:
    run = Setup(tmp_path)
    await run.train(config(steps=7, checkpoints_kept=2))
    assert [event.step for event in run.events if isinstance(event, CheckpointSaved)] == [0, 3, 6, 7]
    kept = sorted(path.name for path in (run.dir / "checkpoints").glob("step_*"))
    assert kept == ["step_000006", "step_000007"]


async def test_checkpoints_without_their_ledger_are_not_resumed(tmp_path: Path) -> None:
    run = Setup(tmp_path)
    await run.train(config(steps=3))
    for path in run.dir.glob("ledger.sqlite*"):
        path.unlink()
    with pytest.raises(ComponentLost, match="without its prompt ledger"):
        await run.train(config(steps=4))
