"""Weights as SGLang's flattened buckets: one byte tensor and a list of where each tensor lies in it.

Produces exactly the pickle that stock SGLang's allow-listed unpickler rebuilds, without importing sglang: a
stand-in carries the class's qualified name for the moment of pickling. Runs where torch lives (the training
process), never on the controller.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["FlattenedTensorMetadata", "Named", "buckets", "serialise"]

Named = tuple[str, torch.Tensor]

_MODULE = "sglang.srt.weight_sync.tensor_bucket"


@dataclass
class FlattenedTensorMetadata:
    """Stand-in for sglang's class: the same name, module and attributes on the wire."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    """First byte in the bucket."""
    end_idx: int
    """One past the last byte."""
    numel: int
    """Length in bytes: the bucket is a tensor of bytes."""


FlattenedTensorMetadata.__module__ = _MODULE


def buckets(named: Iterable[Named], max_bytes: int) -> Iterator[list[Named]]:
    """Group tensors in order up to ``max_bytes`` each; a larger tensor travels alone."""
    held: list[Named] = []
    size = 0
    for name, tensor in named:
        if held and size + tensor.nbytes > max_bytes:
            yield held
            held, size = [], 0
        held.append((name, tensor))
        size += tensor.nbytes
    if held:
        yield held


def serialise(bucket: Sequence[Named]) -> bytes:
    """Pickle one bucket: {"flattened_tensor": uint8 [bytes], "metadata": [FlattenedTensorMetadata]}.

    Bytes lie without padding and the receiver views them in place, so a tensor must start at a multiple of
    its item size: the widest items go first. Raises ``ValueError`` for an empty bucket.
    """
    if not bucket:
        raise ValueError("an empty bucket cannot be sent")
    ordered = sorted(bucket, key=lambda item: -item[1].element_size())
    parts, metadata, at = [], [], 0
    for name, tensor in ordered:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, at, at + flat.numel(), flat.numel()))
        parts.append(flat)
        at += flat.numel()
    with _stand_in():
        return pickle.dumps({"flattened_tensor": torch.cat(parts), "metadata": metadata})


@contextlib.contextmanager
def _stand_in() -> Iterator[None]:
    """Make the class importable under sglang's name while pickle looks it up, and gone afterwards."""
    names = ["sglang", "sglang.srt", "sglang.srt.weight_sync", _MODULE]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[_MODULE].FlattenedTensorMetadata = FlattenedTensorMetadata  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
