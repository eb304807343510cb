"""Megatron against the torch reference, and exact resume; megatron is imported once, in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import load_file
from trainer_helpers import model_dir, open_bucket, random_batch

from tollway.errors import ConfigError, TrainerLost
from tollway.trainer.backends.base import BackendSpec
from tollway.trainer.backends.proxy import BackendProxy
from tollway.trainer.batch import Batch, Objective, OptimizerSettings
from tollway.trainer.losses import total_loss
from tollway.trainer.planner import demonstration_batch

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

SHAPES = ["dense", "moe", "untied"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "dense": model_dir(root / "dense"),
        "moe": model_dir(root / "moe", moe=True),
        "untied": model_dir(root / "untied", tie_word_embeddings=False, num_key_value_heads=4),
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BackendProxy]:
    log = tmp_path_factory.mktemp("log") / "trainer.log"
    async with BackendProxy(spec(folders["dense"], "megatron"), log_path=log, timeout_s=100) as proxy:
        yield proxy


def spec(folder: Path, kind: str, **changes: object) -> BackendSpec:
    fields: dict[str, object] = {"seed": 5, "micro_batch_tokens": 128}
    return BackendSpec(kind=kind, model_dir=str(folder), **(fields | changes))  # type: ignore[arg-type]


def dual_clipped(batch: Batch) -> Batch:
    return Batch(rows=batch.rows, objective=Objective(ratio_low=0.9, ratio_high=1.1, dual_clip=1.2))


def demonstrations() -> Batch:
    rows = random_batch(5, seed=8).rows
    return demonstration_batch([(row.token_ids, row.loss_mask.astype(np.float64)) for row in rows])


async def weights_of(worker: BackendProxy) -> dict[str, list[object]]:
    made = await worker.weight_buckets(1 << 30)
    return {name: tensor.tolist() for payload in made.buckets for name, tensor in open_bucket(payload).items()}  # type: ignore[attr-defined]


def largest_difference(one: tuple[np.ndarray, ...], two: tuple[np.ndarray, ...]) -> float:
    return max(float(np.nanmax(np.abs(a - b))) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", SHAPES)
async def test_torch_and_megatron_give_the_same_scores_losses_and_gradients(
    worker: BackendProxy, folders: dict[str, Path], name: str
) -> None:
    batches = [random_batch(9, seed=1), dual_clipped(random_batch(6, seed=2)), demonstrations()]
    found = {}
    for kind in ("torch", "megatron"):
        await worker.rebuild(spec(folders[name], kind))
        scores = await worker.score(batches[0])
        gradients = [await worker.gradients(batch) for batch in batches]
        reports = [await worker.step(batch, lr=1e-3) for batch in batches]
        found[kind] = (scores, gradients, reports, await worker.score(batches[0]))
    torch_side, megatron = found["torch"], found["megatron"]
    assert largest_difference(torch_side[0], megatron[0]) < 1e-5
    for mine, theirs in zip(torch_side[1], megatron[1], strict=True):
        assert mine.keys() == theirs.keys()
        assert max(np.abs(grad).max() for grad in mine.values()) > 1e-4
        assert max(np.abs(mine[key] - theirs[key]).max() for key in mine) < 1e-5
    for mine, theirs in zip(torch_side[2], megatron[2], strict=True):
        assert mine.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    assert largest_difference(torch_side[3], megatron[3]) < 1e-4
    assert largest_difference(torch_side[0], torch_side[3]) > 1e-3  # the steps moved something


async def test_the_loss_is_the_numpy_references(worker: BackendProxy, folders: dict[str, Path]) -> None:
    for batch in (random_batch(9, seed=4), dual_clipped(random_batch(9, seed=4)), demonstrations()):
        for kind in ("torch", "megatron"):
            await worker.rebuild(spec(folders["dense"], kind))
            report = await worker.step(batch, lr=0.0)
            assert report.loss == pytest.approx(total_loss(batch.rows, report.logprobs, batch.objective), abs=1e-6)


@pytest.mark.parametrize(("kind", "name"), [("torch", "dense"), ("megatron", "dense"), ("megatron", "moe")])
async def test_a_run_resumed_from_disk_equals_one_that_never_stopped(
    worker: BackendProxy, folders: dict[str, Path], tmp_path: Path, kind: str, name: str
) -> None:
    # Adam's bias correction depends on its step: five before the save, eight when the load overwrites them.
    settings = OptimizerSettings(weight_decay=0.1)
    await worker.rebuild(spec(folders[name], kind, optimizer=settings))
    batch = random_batch(6, seed=6)
    for _ in range(5):
        await worker.step(batch, lr=1e-2)
    state = tmp_path / "state"
    state.mkdir()
    await worker.save(state)

    async def three() -> list[tuple[float, float]]:
        reports = [await worker.step(batch, lr=1e-2) for _ in range(3)]
        return [(report.loss, report.grad_norm) for report in reports]

    straight = await three()
    final = await weights_of(worker)
    await worker.load(state)
    assert await three() == straight
    other = model_dir(tmp_path / "other", moe=name == "moe", seed=77)
    await worker.rebuild(spec(other, kind, seed=77, optimizer=settings))
    await worker.load(state)
    assert await three() == straight
    assert await weights_of(worker) == final
    assert len({loss for loss, _ in straight}) == 3


async def test_a_fresh_optimizer_forgets_the_old_one(worker: BackendProxy, folders: dict[str, Path]) -> None:
    batch = random_batch(4, seed=9)
    for kind in ("torch", "megatron"):
        await worker.rebuild(spec(folders["dense"], kind))
        first = await weights_of(worker)
        await worker.step(batch, lr=0.0)
        await worker.step(batch, lr=0.0)
        await worker.reset_optimizer(OptimizerSettings())
        assert await weights_of(worker) == first
        await worker.step(batch, lr=1e-3)
        moved = {name: np.array(values) for name, values in (await weights_of(worker)).items()}
        start = load_file(folders["dense"] / "model.safetensors")
        # The first Adam update of a fresh state moves a weight by lr * sign(gradient).
        change = np.abs(moved["model.layers.0.mlp.up_proj.weight"] - start["model.layers.0.mlp.up_proj.weight"])
        assert np.median(change) == pytest.approx(1e-3, rel=1e-2)


async def test_norm_weights_do_not_decay(worker: BackendProxy, folders: dict[str, Path]) -> None:
    nothing = Batch(rows=random_batch(2).rows[:1], objective=Objective(kind="nll"))
    row = nothing.rows[0]
    idle = Batch(
        rows=(type(row)(**{n: getattr(row, n) for n in row.__dataclass_fields__} | {"weights": row.weights * 0}),)
    )
    for kind in ("torch", "megatron"):
        await worker.rebuild(spec(folders["dense"], kind, optimizer=OptimizerSettings(weight_decay=0.5)))
        await worker.step(idle, lr=0.1)
        moved = {name: np.array(values) for name, values in (await weights_of(worker)).items()}
        start = load_file(folders["dense"] / "model.safetensors")
        assert (moved["model.norm.weight"] == 1).all()
        name = "model.layers.1.self_attn.o_proj.weight"
        assert moved[name] == pytest.approx(start[name] * 0.95, rel=1e-5)


async def test_exported_directories_load_again_bit_for_bit(
    worker: BackendProxy, folders: dict[str, Path], tmp_path: Path
) -> None:
    for name in SHAPES:
        await worker.rebuild(spec(folders[name], "megatron"))
        before = await weights_of(worker)
        await worker.export(tmp_path / name)
        await worker.export(tmp_path / name)  # replacing is as good as writing
        await worker.rebuild(spec(tmp_path / name, "torch"))
        assert await weights_of(worker) == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


async def test_options_reach_megatron_by_name_and_unknown_ones_are_refused(
    worker: BackendProxy, folders: dict[str, Path]
) -> None:
    batch = random_batch(3)
    await worker.rebuild(spec(folders["dense"], "megatron", options={"layernorm_epsilon": 0.5}))
    changed = await worker.score(batch)
    await worker.rebuild(spec(folders["dense"], "megatron"))
    assert largest_difference(changed, await worker.score(batch)) > 1e-3
    with pytest.raises(ConfigError, match="did you mean 'layernorm_epsilon'"):
        await worker.rebuild(spec(folders["dense"], "megatron", options={"layernorm_epsilom": 0.5}))
    with pytest.raises(ConfigError, match="one rank"):
        await worker.rebuild(spec(folders["dense"], "megatron", options={"tensor_model_parallel_size": 2}))
    with pytest.raises(ConfigError, match=r"trainer\.megatron"):
        await worker.rebuild(spec(folders["dense"], "torch", options={"layernorm_epsilon": 0.5}))


async def test_a_directory_without_weights_is_refused_with_the_next_step(worker: BackendProxy, tmp_path: Path) -> None:
    bare = model_dir(tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="tollway new-model DIR"):
        await worker.rebuild(spec(bare, "torch"))
    with pytest.raises(ConfigError, match=r"no .*config\.json"):
        await worker.rebuild(spec(tmp_path, "torch"))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ConfigError, match="LlamaForCausalLM is not built here"):
        await worker.rebuild(spec(tmp_path, "torch"))


@pytest.mark.parametrize("kind", ["torch", "megatron"])
async def test_a_gradient_that_is_no_number_ends_the_run_before_its_weights_go_anywhere(
    worker: BackendProxy, folders: dict[str, Path], kind: str
) -> None:
    await worker.rebuild(spec(folders["dense"], kind))
    batch = random_batch(4)
    await worker.step(batch, lr=1e37)
    with pytest.raises(TrainerLost, match=r"norm is nan at a loss of .*goes on from the last checkpoint.*lower"):
        await worker.step(batch, lr=1e-3)
