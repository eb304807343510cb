"""Payloads of weight updates: what a trainer sends is read, anything else is refused and never run."""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
from dataclasses import dataclass

import pytest
import torch

from tollway.engine.unpickle import PayloadRefused, read_bucket, read_named_tensors

MODULE = "sglang.srt.weight_sync.tensor_bucket"


@dataclass
class FlattenedTensorMetadata:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@pytest.fixture
def bucket(monkeypatch):
    """Makes a bucket as a trainer without sglang does: a stand-in class under the upstream name."""
    module = types.ModuleType(MODULE)
    module.FlattenedTensorMetadata = FlattenedTensorMetadata
    for name in ("sglang", "sglang.srt", "sglang.srt.weight_sync"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(FlattenedTensorMetadata, "__module__", MODULE)

    def make(tensors: dict[str, torch.Tensor]) -> bytes:
        flat = torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors.values()])
        metadata, at = [], 0
        for name, tensor in tensors.items():
            metadata.append(
                FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, at, at + tensor.nbytes, tensor.numel())
            )
            at += tensor.nbytes
        return pickle.dumps({"flattened_tensor": flat, "metadata": metadata})

    return make


def test_a_bucket_is_rebuilt_bit_for_bit(bucket):
    tensors = {"a": torch.randn(3, 4), "c": torch.zeros(0), "b": torch.randn(5).to(torch.bfloat16)}
    read = dict(read_bucket(bucket(tensors)))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_misaligned_tensors_are_refused_with_the_remedy(bucket):
    with pytest.raises(PayloadRefused, match="put large items first"):
        read_bucket(bucket({"half": torch.zeros(3, dtype=torch.bfloat16), "full": torch.zeros(2)}))


def test_named_tensors_are_read_strided_and_as_parameters():
    named = [("a", torch.randn(4, 6).T), ("b", torch.nn.Parameter(torch.randn(3), requires_grad=False))]
    read = read_named_tensors(pickle.dumps(named))
    assert [name for name, _ in read] == ["a", "b"]
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(read, named, strict=True))


class Reduce:
    def __init__(self, function, *arguments):
        self.parts = (function, arguments)

    def __reduce__(self):
        return self.parts


@pytest.mark.parametrize("function", [os.system, open, exec, eval, torch.load, os.mkdir])
def test_a_reduce_payload_is_refused_and_creates_no_file(tmp_path, function):
    target = tmp_path / "owned"
    for argument in (f"touch {target}", str(target), f"open({str(target)!r}, 'w')"):
        for wrap in (lambda x: x, lambda x: [("a", x)], lambda x: {"flattened_tensor": x, "metadata": []}):
            payload = pickle.dumps(wrap(Reduce(function, argument)))
            for read in (read_named_tensors, read_bucket):
                with pytest.raises(PayloadRefused, match="not allowed"):
                    read(payload)
    assert not target.exists()
    pickle.loads(pickle.dumps(Reduce(os.mkdir, str(target))))
    assert target.exists()  # the same payload does act under pickle itself


def test_a_storage_that_hides_a_second_pickle_is_refused(tmp_path):
    target = tmp_path / "owned"
    inner = io.BytesIO()
    torch.save(Reduce(os.mkdir, str(target)), inner, _use_new_zipfile_serialization=False)
    payload = pickle.dumps([("a", Reduce(torch.storage._load_from_bytes, inner.getvalue()))])
    with pytest.raises(PayloadRefused):
        read_named_tensors(payload)
    assert not target.exists()


def test_a_tensor_that_reaches_beyond_its_storage_is_refused():
    storage = torch.arange(4.0)

    class Evil:
        def __reduce__(self):
            full = storage.__reduce_ex__(2)
            arguments = list(full[1])
            arguments[2] = (1000,)
            return full[0], tuple(arguments)

    with pytest.raises(PayloadRefused, match="beyond its storage"):
        read_named_tensors(pickle.dumps([("a", Evil())]))


@pytest.mark.parametrize(
    "garbage", [b"", b"nonsense", b"\x80\x04", pickle.dumps(3), pickle.dumps([1, 2]), pickle.dumps({"a": 1})]
)
def test_garbage_is_refused(garbage):
    for read in (read_named_tensors, read_bucket):
        with pytest.raises(PayloadRefused):
            read(garbage)
