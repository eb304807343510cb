"""The formula against a count of the products that the reference backend really computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from trainer_helpers import model_dir, random_batch

from tollway.trainer.backends.base import BackendSpec
from tollway.trainer.backends.factory import build, starting_weights
from tollway.trainer.backends.shape import read_shape
from tollway.trainer.backends.torch_backend import decode
from tollway.trainer.flops import forward_flops, train_flops


@pytest.mark.parametrize("moe", [False, True])
def test_the_formula_is_the_count_of_a_real_pass(tmp_path: Path, moe: bool) -> None:
    shape = read_shape(model_dir(tmp_path, moe=moe))
    weights = {name: tensor.requires_grad_() for name, tensor in starting_weights(tmp_path, shape).items()}
    rows, width = 3, 16
    ids = torch.arange(rows * width).reshape(rows, width) % shape.vocab_size
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        decode(weights, shape, ids)
    # The counter charges attention for the whole square; half of it is needed.
    square = 4 * width * width * shape.head_dim * shape.num_attention_heads * shape.num_hidden_layers * rows
    counted = forward.get_flop_counts()["Global"]
    attention = sum(count for op, count in counted.items() if "attention" in str(op))
    assert attention in (0, square)  # one of torch's CPU kernels is unknown to the counter
    products = forward.get_total_flops() - attention
    wanted = forward_flops(shape, [width] * rows)
    assert products + square / 2 == wanted
    assert train_flops(shape, [width] * rows) == 3 * wanted
    with FlopCounterMode(display=False) as whole:
        decode(weights, shape, ids).sum().backward()
    backward = whole.get_flop_counts()["Global"]
    products = whole.get_total_flops() - sum(count for op, count in backward.items() if "attention" in str(op))
    assert products + 3 * square / 2 == 3 * wanted


def test_long_rows_cost_more_than_their_tokens(tmp_path: Path) -> None:
    shape = read_shape(model_dir(tmp_path))
    assert train_flops(shape, [64]) > train_flops(shape, [32, 32])
    assert train_flops(shape, []) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_a_step_reports_the_operations_of_its_rows_and_no_memory_without_a_device(tmp_path: Path) -> None:
    folder, batch = model_dir(tmp_path), random_batch(4)
    report = build(BackendSpec(kind="torch", model_dir=str(folder))).step(batch, lr=1e-3)
    assert report.flops == train_flops(read_shape(folder), [row.token_ids.size for row in batch.rows])
    assert report.peak_bytes is None
