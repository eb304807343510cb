"""Engines and trainer that take turns: the same run as apart, bit for bit, and whole runs as a user starts them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from demo_runs import wait_until_gone
from served_engine import serving

from tollway.fresh_model import ModelShape, write_fresh_model
from tollway.ports import EpisodeSource, GroupRequest
from tollway.records import Group, Rollout, TokenSpan, Trajectory
from tollway.router.engines import EngineClient, GenerateCall, GenerateReply
from tollway.router.wire import Prompt
from tollway.trainer.backends.base import BackendSpec
from tollway.trainer.backends.proxy import BackendProxy
from tollway.trainer.config import OptimizerConfig, TrainerConfig
from tollway.trainer.loop import train
from tollway.trainer.weights.refit import Refit, Sharing
from tollway.trainer.weights.transport import DiskWeights, TensorWeights
from tollway.trainer.weights.turns import Turns

TIMED = {
    "rollout/fully_async/queue_size",  # who finished before the batch was taken
    *("perf/step_time", "perf/train_wait_time", "perf/actor_train_time", "perf/actor_train_cpu_time"),
    *("perf/actor_train_tok_per_s", "perf/actor_train_tflops", "perf/actor_train_mfu", "perf/update_weights_make_time"),
    *("perf/update_weights_time", "perf/update_weights_pause_time", "perf/update_weights_gb_per_s"),
}
ASLEEP = "perf/engines_asleep_time"
SENT = "perf/update_weights_wire_bytes"
SHAPE = {"vocab_size": 32, "hidden_size": 32, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64}


class Seeded(EpisodeSource):
    """One call after the other, each with a seed of its own, so that two runs sample the same from equal weights."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._turn = asyncio.Lock()

    async def run_group(self, request: GroupRequest) -> Group:
        rollouts = []
        for sample in range(request.samples):
            seed = 1000 * request.prompt_index + sample
            call = GenerateCall(
                rid=f"{request.group_id}-{sample}",
                prompt=Prompt.of(np.array([1, 2 + request.prompt_index % 5], dtype=np.int32)),
                sampling=replace(request.sampling, max_new_tokens=8, seed=seed),
                routing_key="r",
                ignore_eos=True,
            )
            async with self._turn:
                rollouts.append(attempt(call, await self._engine.generate(call)))
        return Group(group_id=request.group_id, task_id="t", rollouts=tuple(rollouts))


def attempt(call: GenerateCall, reply: GenerateReply) -> Rollout:
    before, after = call.prompt.size, reply.output_ids.size
    mask = np.repeat([0, 1], [before, after]).astype(np.uint8)
    known = np.concatenate([np.full(before, np.nan), reply.logprobs])
    versions = np.concatenate([np.full(before, -1), *(np.full(s.end - s.start, s.version) for s in reply.versions)])
    row = Trajectory(
        token_ids=np.concatenate([call.prompt.ids(), reply.output_ids]).astype(np.int32),
        loss_mask=mask,
        logprobs=known.astype(np.float32),
        weight_version=versions.astype(np.int32),
        session_id=call.rid,
        leaf=0,
        branch_reason="root",
        turn_spans=(TokenSpan(before, before + after),),
        finish_reasons=("length",),
        sampling=call.sampling,
        engine_ids=("e#0",),
        cached_tokens=(0,),
        reward=None,
        trainable=True,
    )
    reward = float((reply.output_ids < 16).mean() + 1e-3 * reply.output_ids.sum() % 0.1)
    return Rollout(session_id=call.rid, rows=(row,), reward=reward, error=None, turns=1)


def config(**changes: object) -> TrainerConfig:
    return TrainerConfig(
        backend="torch",
        steps=3,
        groups_per_step=2,
        samples_per_group=3,
        optimizer=OptimizerConfig(lr=5e-3),
        schedule="sync",
        max_staleness=0,
        checkpoint_every=2,
        gap_every=2,
        gap_turns=3,
        **changes,  # type: ignore[arg-type]
    )


class Machine:
    """A real engine and a real training process, used by one run after the other."""

    def __init__(self, engine: EngineClient, backend: BackendProxy, spec: BackendSpec) -> None:
        self.engine, self.backend, self.spec = engine, backend, spec

    async def run(self, where: Path, settings: TrainerConfig, *, steps: int = 3) -> list[dict[str, float]]:
        """Rows of metrics.jsonl after a run in ``where``, which goes on if there was one."""
        await self.backend.rebuild(self.spec)
        weights = (
            DiskWeights(self.backend, where / "weights")
            if settings.refit_transport == "disk"
            else TensorWeights(self.backend, bucket_bytes=20_000, transport="tensor")
        )
        sharing = Sharing(self.backend, settings.release_tags) if settings.colocated else None
        turns = Turns(Refit([self.engine], weights, sharing=sharing), self.backend, shared=settings.colocated)
        settings = settings.model_copy(update={"steps": steps})
        await asyncio.wait_for(train(self.backend, Seeded(self.engine), turns, settings, run_dir=where), 100)
        state = (await self.engine.server_info()).raw["internal_states"][0]  # type: ignore[index]  # a list
        assert (state["paused"], state["released_tags"], state["weight_update_session"]) == (False, [], False)
        assert (await self.engine.model_info()).weight_version == str(steps)
        return [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    model = tmp_path / "model"
    write_fresh_model(model, ModelShape.model_validate(SHAPE), seed=2)
    spec = BackendSpec(kind="torch", model_dir=str(model))
    async with serving(model) as engine, BackendProxy(spec, log_path=tmp_path / "trainer.log") as backend:
        yield Machine(engine, backend, spec)


def untimed(rows: list[dict[str, float]], *left_out: str) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name not in TIMED | set(left_out)} for row in rows]


@pytest.mark.timeout(240)
async def test_taking_turns_and_the_way_of_the_weights_change_no_number(tmp_path: Path, machine: Machine) -> None:
    apart = await machine.run(tmp_path / "apart", config())
    together = await machine.run(tmp_path / "together", config(colocated=True))
    some = await machine.run(tmp_path / "some", config(colocated=True, release_tags=("kv_cache",)))
    disk = await machine.run(tmp_path / "disk", config(colocated=True, refit_transport="disk"))
    assert len(apart) == 3
    assert {"train/loss", "train/logprob_gap_max"} <= apart[1].keys()
    assert apart[1]["train/logprob_gap_max"] < 1e-4
    assert all(row[ASLEEP] > 0 for row in together + some + disk)
    assert untimed(together, ASLEEP) == untimed(apart)
    assert untimed(some, ASLEEP) == untimed(apart)
    assert untimed(disk, ASLEEP, SENT) == untimed(apart, SENT)
    kept = sorted(path.name for path in (tmp_path / "disk" / "weights").iterdir())
    assert kept == ["version_000002", "version_000003"]


@pytest.mark.timeout(240)
async def test_a_colocated_run_goes_on_where_it_ended(tmp_path: Path, machine: Machine) -> None:
    whole = await machine.run(tmp_path / "whole", config(colocated=True), steps=4)
    await machine.run(tmp_path / "parts", config(colocated=True), steps=2)
    parts = await machine.run(tmp_path / "parts", config(colocated=True), steps=4)
    assert [row["step"] for row in parts] == [1, 2, 3, 4]
    # The first batch of a process is probed once more; everything else is the same.
    gap = [name for name in parts[2] if name.startswith("train/logprob_gap_")]
    assert untimed(parts[2:], ASLEEP, *gap) == untimed(whole[2:], ASLEEP, *gap)


COLOCATED = ("trainer.colocated=true", "trainer.schedule=sync", 'trainer.release_tags=["kv_cache","weights"]')


@pytest.mark.timeout(300)
def test_tollway_train_takes_turns_from_warm_start_to_evaluation_and_goes_on_after_a_kill(tiny) -> None:  # type: ignore[no-untyped-def]
    run = tiny("train", "trainer.steps=500", *COLOCATED)
    run.wait_for_step(2)
    os.kill(run.pid_of("trainer.backends.worker"), signal.SIGKILL)
    assert run.wait(60) == 1, run.output
    assert "trainer_lost" in run.output
    assert wait_until_gone(run.run_dir) == []

    weights = run.run_dir.parent / "weights of this run"
    disk = ("trainer.refit_transport=disk", f"trainer.weights_dir={str(weights)!r}")
    again = tiny("train", "trainer.steps=5", *disk, *COLOCATED)
    assert again.wait(200) == 0, again.output
    assert "resumed at step" in again.output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["steps"] == 5
    assert summary["logprob_gap_tokens"] > 0
    assert summary["logprob_gap_max"] < 1e-4
    assert summary["staleness_max"] == 0
    assert summary["cache"]["unknown_tokens"] == 0
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row[ASLEEP] > 0 for row in rows)
    assert {path.name for path in weights.iterdir()} == {"version_000004", "version_000005"}
    assert (run.run_dir / "model" / "model.safetensors").is_file()
    assert wait_until_gone(run.run_dir) == []
