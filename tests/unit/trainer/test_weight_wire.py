"""Flattened buckets: what SGLang's receiver rebuilds is bit for bit what was sent."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_helpers import open_bucket

from tollway.engine.unpickle import read_bucket
from tollway.trainer.weights.wire import buckets, serialise

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
tensors = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 5), max_size=3)), min_size=1, max_size=8)


def made(shapes: list[tuple[torch.dtype, list[int]]]) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [(f"t{i}", (torch.randn(size) * 50).abs().to(kind)) for i, (kind, size) in enumerate(shapes)]


def test_odd_halves_before_wide_words_are_still_aligned() -> None:
    named = [("half", torch.tensor([1, 2, 3], dtype=torch.bfloat16)), ("word", torch.tensor([1.5, -2.5]))]
    found = open_bucket(serialise(named))
    assert found["half"].tolist() == [1, 2, 3]
    assert found["word"].tolist() == [1.5, -2.5]


@given(tensors, st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_buckets_rebuild_every_tensor_exactly_once(shapes, max_bytes) -> None:
    named = made(shapes)
    parts = list(buckets(named, max_bytes))
    assert [name for part in parts for name, _ in part] == [name for name, _ in named]
    assert all(len(part) == 1 or sum(t.nbytes for _, t in part) <= max_bytes for part in parts)
    found = {}
    for part in parts:
        found |= open_bucket(serialise(part))
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in named)


def test_the_embedded_engines_reader_accepts_the_payload() -> None:
    named = made([(torch.float32, [3, 2]), (torch.bfloat16, [3]), (torch.float32, [])])
    found = dict(read_bucket(serialise(named)))
    assert all(torch.equal(found[name], tensor) for name, tensor in named)


def test_views_travel_as_what_they_show() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    found = open_bucket(serialise([("t", whole.T), ("row", whole[1])]))
    assert torch.equal(found["t"], whole.T)
    assert torch.equal(found["row"], whole[1])
    assert len(serialise([("row", whole[1])])) < 2000


def test_an_empty_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        serialise([])
    assert list(buckets([], 10)) == []


def test_whoever_replaced_torchs_own_function_is_not_in_the_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Core 0.19 does, and an engine's allow-list does not know its name."""

    def replaced(data: bytes) -> object:
        raise AssertionError(data)

    with monkeypatch.context() as patch:
        patch.setattr(torch.storage, "_load_from_bytes", replaced)
        payload = serialise([("word", torch.tensor([1.5, -2.5]))])
        assert torch.storage._load_from_bytes is replaced
    assert dict(read_bucket(payload))["word"].tolist() == [1.5, -2.5]


def test_no_sglang_module_is_left_behind() -> None:
    code = (
        "import sys, torch\n"
        "from tollway.trainer.weights.wire import serialise\n"
        "serialise([('a', torch.ones(2))])\n"
        "print([name for name in sys.modules if name.startswith('sglang')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
