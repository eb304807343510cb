"""The training loop on one device: a stock SGLang and Megatron-Core side by side, weights from one to the other."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast

import aiohttp
import pytest
import pytest_asyncio
from loop_runs import (
    EXAMPLE,
    ON_CPU,
    Run,
    device_sets,
    metrics_of,
    needs_device,
    note,
    rollouts_by_step,
    run_folder,
    sandbox_sets,
    versions_by_step,
)
from loop_stage import Stage, Stretch, open_stage

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from model_shapes import QWEN3_06B

from tollway.errors import ComponentLost, EngineRefused, TollwayError
from tollway.free_ports import free_ports
from tollway.ports import GroupRequest
from tollway.session_server.client import Json, SessionClient
from tollway.trainer.rollout import sampling_of

pytestmark = [pytest.mark.gpu, needs_device]

KILLED_AFTER = 3 if ON_CPU else 8
# Of each of the two lives of a run. A machine without a GPU may be a small and busy one.
LIFE_S = 1200 if ON_CPU else 240
# The demo's small model and little work: the path is the same, and the rise is for the device to show.
SMALL = (
    *("model.fresh.hidden_size=128", "model.fresh.head_dim=32", "model.fresh.intermediate_size=384"),
    *("trainer.warm_start.optimizer.lr=4e-3", "trainer.optimizer.lr=5e-4", "env.demonstrations.distinct_tasks=64"),
    *("trainer.steps=6", "trainer.groups_per_step=4", "trainer.checkpoint_every=1", "eval.episodes=64"),
)


class Start(Protocol):
    """Starts ``tollway train`` of the example in one run directory."""

    def __call__(self, *sets: str) -> Run: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Every run that it starts is ended, with all that belongs to it."""
    runs: list[Run] = []

    def started(*sets: str) -> Run:
        run_dir = tmp_path / "run"
        values = (f"run.dir={json.dumps(str(run_dir))}", *device_sets(), *sandbox_sets(), *sets)
        flags = [part for value in values for part in ("--set", value)]
        runs.append(Run(run_dir, tmp_path / f"log{len(runs)}", ["train", "-c", str(EXAMPLE), *flags]))
        return runs[-1]

    yield started
    for run in runs:
        run.end()


@pytest.mark.timeout(2 * LIFE_S + 60)
def test_the_reward_rises_and_a_run_that_was_killed_goes_on(start: Start) -> None:
    began = time.monotonic()
    sets = SMALL if ON_CPU else ()
    first = start(*sets)
    first.kill_after(KILLED_AFTER, LIFE_S)
    killed_s = time.monotonic() - began
    assert first.wait_until_gone() == [], "neither engine nor trainer outlives the run"

    again = start(*sets)
    said = again.finish(LIFE_S)
    assert "resumed at step" in said
    summary = json.loads((again.run_dir / "summary.json").read_text(encoding="utf-8"))
    rows = metrics_of(again.run_dir)
    versions = versions_by_step(again.run_dir)
    note(
        "loop_demo",
        {
            "killed_after_s": killed_s,
            "wall_s": time.monotonic() - began,
            "isolated": not sandbox_sets(),
            "rewards": [row.get("rollout/raw_reward") for row in rows],
            "versions": {step: sorted(found) for step, found in versions.items()},
            "metrics": rows[-1],
            **{name: summary[name] for name in ("reward_before", "reward_after", "steps", "phases", "cache")},
            **{name: summary[name] for name in ("logprob_gap_max", "train_rollout_logprob_abs_diff", "episodes")},
        },
    )
    assert [row["step"] for row in rows] == list(range(1, summary["steps"] + 1)), "no step is lost or done twice"
    # Synchronous: what step k + 1 learns from was sampled with the weights of step k, all of it.
    assert versions
    assert all(found == {step - 1} for step, found in versions.items())
    if ON_CPU:
        assert summary["reward_after"] > summary["reward_before"]
    else:
        assert summary["reward_before"] < 0.5
        assert summary["reward_after"] > 0.75


KEY = "a-key-for-this-test-only"
FLEET = (
    *("engine.count=2", "trainer.steps=1000", "trainer.warm_start.steps=200", "trainer.gap_every=0"),
    *("trainer.checkpoint_every=1", "eval.episodes=64"),
)


@pytest.mark.timeout(LIFE_S + 60)
async def test_an_engine_killed_in_the_middle_of_a_step_loses_nothing_and_comes_back(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOLLWAY_ADMIN_KEY", KEY)
    began = time.monotonic()
    (port,) = free_ports()  # the server listens there once engines have loaded
    run = start(*(SMALL if ON_CPU else ()), *FLEET, f"server.port={port}")
    await asyncio.to_thread(run.wait_for_step, 1, LIFE_S)
    async with aiohttp.ClientSession() as http:
        client = SessionClient(f"http://127.0.0.1:{port}", KEY, http=http, retry_s=1.0)

        async def until(look: Callable[[Json], bool], what: str) -> Json:
            try:
                while not look(fleet := await client.fleet()):
                    assert time.monotonic() < began + LIFE_S, f"never: {what}\n{run.output}"
                    await asyncio.sleep(0.01)
            except TollwayError as error:
                with suppress(subprocess.TimeoutExpired):  # it has something to say
                    await asyncio.to_thread(run.process.wait, 30)
                pytest.fail(f"never: {what}; {error}\n{run.output}")
            return fleet

        await until(lambda fleet: all(row["in_flight"] >= 2 for row in rows_of(fleet)), "both generate")
        victim, step = run.engines()[0], len(metrics_of(run.run_dir)) + 1
        os.kill(victim, signal.SIGKILL)
        fleet = await until(lambda fleet: len(serving(fleet)) == 1, "the other one is alone")
        alone = serving(fleet)
        await until(lambda fleet: len(serving(fleet)) == 2 and min(serving(fleet).values()) > step, "two have new ones")
        back_s = time.monotonic() - began
        last = len(metrics_of(run.run_dir)) + 2
        await asyncio.to_thread(run.wait_for_step, last, LIFE_S)
        cache = await client.cache()
    run.process.terminate()
    await asyncio.to_thread(run.process.wait, 60)
    assert run.wait_until_gone() == []

    rows, rollouts = metrics_of(run.run_dir), rollouts_by_step(run.run_dir)
    assert [row["step"] for row in rows[:last]] == list(range(1, last + 1)), "no step is lost or done twice"
    assert all(found == {number - 1} for number, found in versions_by_step(run.run_dir).items())
    assert [one.error for each in rollouts.values() for one in each if one.error] == []
    hit = [row for one in rollouts[step] for row in one.rows if len(set(row.engine_ids)) > 1]
    assert all(row.engine_ids[-1].startswith(tuple(alone)) for row in hit), "they went where there was an engine"
    assert (cache["failed_calls"], cache["unknown_tokens"]) == (0, 0), cache
    assert set(cast("dict[str, int]", cache["waste"])) <= {"moved", "refit_flush"}, cache
    assert set(cast("dict[str, int]", cache["moved"])) <= {"engine_lost"}, cache
    figures = {name: cache[name] for name in ("calls", "hit_rate", "ceiling", "efficiency", "waste", "moved")}
    note("loop_kill", {"step": step, "moved_rows": len(hit), "back_s": back_s, "steps": last, **figures})


def rows_of(fleet: Json) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", fleet["engines"])


def serving(fleet: Json) -> dict[str, int]:
    """Version by address of the engines that serve."""
    return {row["url"]: row["version"] for row in rows_of(fleet) if row["state"] == "serving"}


# Qwen3's 0.6 billion parameters, random ones: they cannot work, so a task that needs no work gives the rewards.
LARGE = (
    *(f"model.fresh.{name}={json.dumps(value)}" for name, value in QWEN3_06B.model_dump().items()),
    "model.fresh.max_position_embeddings=2048",
    *("engine.sglang.mem-fraction-static=0.85", "engine.sglang.max-total-tokens=200000"),
    *("engine.sglang.enable-fp32-lm-head=false", "env.harness_options.prompt_bytes='1024'"),
    *("trainer.max_new_tokens=512", "trainer.micro_batch_tokens=8192"),
    *("trainer.peak_tflops=989", "trainer.optimizer.lr=1e-6"),
)
TOY = (
    *("model.fresh.vocab_size=1024", "model.fresh.hidden_size=64", "model.fresh.head_dim=16"),
    *("model.fresh.intermediate_size=128", "env.harness_options.prompt_bytes='100'"),
    *("trainer.groups_per_step=2", "trainer.max_new_tokens=32", "trainer.peak_tflops=1", "trainer.bucket_mb=0.1"),
)
PARITY = (
    *("env.name=loop_words:Parity", "server.family=loop_words:wide", "trainer.warm_start.steps=0"),
    *("trainer.gap_every=0", "trainer.checkpoints_kept=1", "trainer.checkpoint_every=100"),
)
SEPARATE = ("trainer.colocated=false", "trainer.schedule=one_step_ahead")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """One large model on one device, for every way of its weights."""
    folder = run_folder(tmp_path_factory.mktemp("stage"), 25)
    sets = (f"run.dir={json.dumps(str(folder / 'run'))}", *device_sets(), *PARITY, *(TOY if ON_CPU else LARGE))
    try:
        with pytest.MonkeyPatch.context() as patch:
            here = str(Path(__file__).parent)
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])))
            async with open_stage(sets) as opened:
                yield opened
    finally:
        shutil.rmtree(folder)  # it may lie in memory


def _note_stretch(name: str, done: Stretch, versions: dict[int, set[int]]) -> None:
    parts = ("step", "perf/", "train/", "rollout/")
    steps = [{key: value for key, value in row.items() if key.startswith(parts)} for row in done.rows]
    shown = {str(step): sorted(found) for step, found in versions.items()}
    note(name, {"steps": steps, "versions": shown, "phases_so_far": done.phases})


@pytest.mark.timeout(LIFE_S)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_large_model_takes_turns_with_its_engine(stage: Stage) -> None:
    done = await stage.go_on(3)
    versions = {step: found for step, found in versions_by_step(stage.settings().run_dir).items() if step >= done.first}
    _note_stretch("loop_colocated", done, versions)
    assert versions == {step: {step - 1} for step in range(done.first, done.first + 3)}
    for row in done.rows:
        assert row["perf/engines_asleep_time"] > 0
        assert row["train/grad_norm"] > 0
    if not ON_CPU:
        weights = done.rows[0]["perf/update_weights_wire_bytes"]
        assert weights < 1e6, "handles travel, not weights"
        assert all(row["perf/engines_freed_bytes"] > 20e9 for row in done.rows)
        assert all(0 < row["perf/actor_train_mfu"] < 1 for row in done.rows)


@pytest.mark.timeout(LIFE_S)
@pytest.mark.asyncio(loop_scope="module")
# Over HTTP it takes seconds: one step.
@pytest.mark.parametrize(("transport", "steps"), [("cuda_ipc", 2), ("disk", 2), ("tensor", 1)])
async def test_weights_reach_a_large_model_that_serves(stage: Stage, transport: str, steps: int) -> None:
    if ON_CPU and transport == "cuda_ipc":
        pytest.skip("there is no device to share")
    done = await stage.go_on(steps, *SEPARATE, f"trainer.refit_transport={transport}")
    versions = {step: found for step, found in versions_by_step(stage.settings().run_dir).items() if step >= done.first}
    _note_stretch(f"loop_{transport}", done, versions)
    assert sorted(versions) == list(range(done.first, done.first + steps))
    for step, found in versions.items():
        assert max(found) <= step - 1, "nothing is sampled by weights that do not exist yet"
        assert min(found) >= done.first - 1, "the first weights are those that the stretch began with"
    assert await stage.states() == [("serving", done.first + steps - 1)]
    assert all(row["perf/update_weights_pause_time"] > 0 for row in done.rows)


@pytest.mark.timeout(LIFE_S)
@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_refuses_weights_is_quarantined_until_the_next_ones(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = stage.settings(*SEPARATE, f"trainer.refit_transport={'tensor' if ON_CPU else 'cuda_ipc'}")
    version = stage.step
    (engine,) = await stage.fleet.members.targets()
    load = engine.update_weights_from_tensor

    async def outside_its_session(payload: bytes) -> None:
        await engine.end_weight_update()
        await load(payload)

    await stage.backend.onload()
    turns = stage.fleet.turns(settings, stage.backend)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "update_weights_from_tensor", outside_its_session)
        with pytest.raises(ComponentLost, match="no engine took weights") as refused:
            await turns.engines(version)
    assert isinstance(refused.value.__cause__, EngineRefused)
    assert [state for state, _ in await stage.states()] == ["quarantined"]

    pushed = (await turns.engines(version)).pushed
    assert pushed.quarantined == ()
    assert await stage.states() == [("serving", version)]
    sampling = sampling_of(settings.trainer)
    group = await stage.source.run_group(
        GroupRequest(group_id="after", prompt_index=2_000_000_000, samples=2, sampling=sampling)
    )
    assert all(one.error is None for one in group.rollouts)
    sampled = {int(v) for one in group.rollouts for row in one.rows for v in row.weight_version[row.loss_mask == 1]}
    assert sampled == {version}
    note("loop_refusal", {"reason": str(refused.value), "reload_s": pushed.seconds, "make_s": pushed.make_s})
