"""Memory that goes to the host is really given back, and comes back bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_helpers import model_dir, random_batch

from tollway.trainer.backends import factory, offload
from tollway.trainer.backends.base import BackendSpec
from tollway.trainer.backends.offload import HostMemory
from tollway.trainer.backends.torch_backend import TorchBackend

CPU = torch.device("cpu")


def backend(folder: Path, **changes: object) -> TorchBackend:
    built = factory.build(BackendSpec(kind="torch", model_dir=str(model_dir(folder, **changes))))  # type: ignore[arg-type]
    assert isinstance(built, TorchBackend)
    return built


def held_bytes(trained: TorchBackend) -> int:
    kept, dropped = trained._resident()
    return sum(tensor.untyped_storage().nbytes() for tensor in (*kept, *dropped))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_storage_under_many_views_moves_once_and_they_all_see_it_again() -> None:
    whole = torch.arange(100, dtype=torch.float32)
    views = [whole[10:20], whole.view(10, 10).t(), torch.nn.Parameter(whole[50:])]
    scratch = torch.ones(7)
    before = [view.clone() for view in views]
    memory = HostMemory(CPU)
    memory.offload([whole, *views], [scratch, whole[:3]])
    assert whole.untyped_storage().nbytes() == scratch.untyped_storage().nbytes() == 0
    assert memory.away
    memory.onload()
    assert all(torch.equal(view, old) for view, old in zip(views, before, strict=True))
    assert scratch.shape == (7,)
    assert scratch.untyped_storage().nbytes() == 28
    assert views[0].data_ptr() == whole.data_ptr() + 40


def test_storages_are_cut_at_the_edges_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_BLOCK_BYTES", 64)
    draw = torch.Generator().manual_seed(1)
    tensors = [torch.randn(size, generator=draw) for size in (1, 16, 15, 40, 3, 16)]
    tensors.append(torch.empty(0))
    before = [tensor.clone() for tensor in tensors]
    memory = HostMemory(CPU)
    for _ in range(2):
        memory.offload(tensors, [])
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        memory.onload()
        assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))


def test_a_run_that_gives_its_memory_back_in_between_is_the_same_run(tmp_path: Path) -> None:
    batch, plain, moved = random_batch(5, seed=3), backend(tmp_path / "a"), backend(tmp_path / "b")
    (tmp_path / "state").mkdir()
    for turn in range(3):
        reports = [each.step(batch, lr=1e-2) for each in (plain, moved)]
        assert reports[0].loss == reports[1].loss
        assert reports[0].grad_norm == reports[1].grad_norm
        moved.offload()
        moved.offload()
        assert held_bytes(moved) == 0
        moved.onload()
        moved.onload()
        if turn == 1:
            moved.save(tmp_path / "state")
    weights = dict(plain.named_weights())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in moved.named_weights())
    for mine, theirs in zip(plain.score(batch), moved.score(batch), strict=True):
        assert np.array_equal(mine, theirs, equal_nan=True)
    moved.load(tmp_path / "state")
    assert moved.step(batch, lr=1e-2).loss == reports[0].loss


def test_nothing_reads_weights_that_are_away(tmp_path: Path) -> None:
    batch, trained = random_batch(2), backend(tmp_path / "a")
    trained.offload()
    calls = [
        lambda: trained.score(batch),
        lambda: trained.step(batch, lr=0.1),
        lambda: trained.gradients(batch),
        lambda: list(trained.named_weights()),
        lambda: trained.load_weights({}),
        lambda: trained.reset_optimizer(trained._settings),
        lambda: trained.save(tmp_path),
        lambda: trained.load(tmp_path),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="call onload"):
            call()


def test_the_process_shrinks_by_what_need_not_come_back() -> None:
    # On a CPU the host's copy takes what the tensors gave: what is dropped shows in the process's size.
    kept, dropped = torch.ones(32 << 20, dtype=torch.uint8), torch.ones(128 << 20, dtype=torch.uint8)
    before, memory = resident_bytes(), HostMemory(CPU)
    memory.offload([kept], [dropped])
    # The C library may keep the smaller block for the next one.
    assert before - resident_bytes() > 64 << 20
    memory.onload()
    assert bool((kept == 1).all())
    assert dropped.shape == (128 << 20,)
