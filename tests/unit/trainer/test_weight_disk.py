"""Weights as model directories: which of them stay, whatever an earlier process left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import torch
from trainer_helpers import model_dir

from tollway.trainer.backends.base import BackendHandle
from tollway.trainer.weights import disk
from tollway.trainer.weights.transport import DiskWeights


class Exports:
    """A training process that can only export."""

    async def export(self, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        (target / "model.safetensors").write_bytes(b"weights")


async def test_a_run_that_went_back_keeps_no_weights_of_steps_that_it_takes_anew(tmp_path: Path) -> None:
    for left in ("version_000005", "version_000006", ".version_000007.4711.tmp", ".version_000006.old"):
        (tmp_path / left).mkdir()
    weights = DiskWeights(cast(BackendHandle, Exports()), tmp_path)
    kept = []
    for version in (4, 5, 5, 6):
        await weights.payload(version)
        kept.append(sorted(path.name for path in tmp_path.iterdir()))
    four, five, six = (f"version_{version:06d}" for version in (4, 5, 6))
    assert kept == [[four], [four, five], [four, five], [five, six]]


async def test_what_others_keep_in_the_folder_stays(tmp_path: Path) -> None:
    others = {"version_1", "version_2-of-the-model", "version_000001.bak", ".version_x", "my_version_000001"}
    for name in others:
        (tmp_path / name).mkdir()
    weights = DiskWeights(cast(BackendHandle, Exports()), tmp_path)
    for version in (7, 8, 9):
        await weights.payload(version)
    assert {path.name for path in tmp_path.iterdir()} == others | {"version_000008", "version_000009"}


def test_what_a_killed_export_left_goes_with_the_next_one(tmp_path: Path) -> None:
    source, killed = model_dir(tmp_path / "source"), tmp_path / ".model.4711.tmp"
    killed.mkdir()
    disk.export([("a", torch.ones(2))], source, tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "source"]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_the_configuration_names_the_type_of_the_weights(tmp_path: Path, kind: torch.dtype) -> None:
    source = model_dir(tmp_path / "source")
    before = json.loads((source / "config.json").read_text())
    disk.export([("a", torch.ones(2, dtype=kind))], source, tmp_path / "model")
    after = json.loads((tmp_path / "model" / "config.json").read_text())
    assert {after.pop(key) for key in ("torch_dtype", "dtype") if key in after} == {str(kind).removeprefix("torch.")}
    assert after == {key: value for key, value in before.items() if key not in ("torch_dtype", "dtype")}
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert modes == {(source / "config.json").stat().st_mode & 0o777}


@pytest.mark.parametrize("version", [0, 7])
async def test_the_first_weights_need_no_folder(tmp_path: Path, version: int) -> None:
    made = await DiskWeights(cast(BackendHandle, Exports()), tmp_path / "weights").payload(version)
    assert made.weight_bytes == len(b"weights")
