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

__all__ = ["FlattenedTensorMetadata", "Named", "buckets", "flatten", "serialise", "stand_in"]

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


def flatten(
    bucket: Sequence[Named], device: torch.device | None = None
) -> tuple[torch.Tensor, list[FlattenedTensorMetadata]]:
    """One bucket as a tensor of bytes [bytes] on ``device`` (the CPU) and where each tensor lies in it.

    Bytes lie without padding and the receiver views them in place, so a tensor must start at a multiple of
    its item size: the widest items go first. Raises ``ValueError`` for an empty bucket.
    """
    if not bucket:
        raise ValueError("an empty bucket cannot be sent")
    ordered = sorted(bucket, key=lambda item: -item[1].element_size())
    flat = torch.empty(sum(tensor.nbytes for _, tensor in bucket), dtype=torch.uint8, device=device or "cpu")
    metadata, at = [], 0
    for name, tensor in ordered:
        end = at + tensor.nbytes
        flat[at:end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, at, end, tensor.nbytes))
        at = end
    return flat, metadata


def serialise(bucket: Sequence[Named]) -> bytes:
    """Pickle one bucket with its bytes: {"flattened_tensor": uint8 [bytes], "metadata": [FlattenedTensorMetadata]}.

    Raises ``ValueError`` for an empty bucket.
    """
    flat, metadata = flatten(bucket)
    with stand_in():
        return pickle.dumps({"flattened_tensor": flat, "metadata": metadata})


def _load_from_bytes(_data: bytes) -> object:
    """Stand-in for ``torch.storage._load_from_bytes``, which a pickled tensor names. Nobody calls it here."""
    raise RuntimeError("a payload is for engines: nothing here reads one")


_load_from_bytes.__module__ = "torch.storage"


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Let pickle find the names that an engine's allow-list knows, and take them away afterwards.

    The class under sglang's name; and torch's own function, which Megatron-Core 0.19 replaces by one of its own.
    """
    names = ["sglang", "sglang.srt", "sglang.srt.weight_sync", _MODULE]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[_MODULE].FlattenedTensorMetadata = FlattenedTensorMetadata  # type: ignore[attr-defined]
    original = torch.storage._load_from_bytes
    torch.storage._load_from_bytes = _load_from_bytes  # put back below
    try:
        yield
    finally:
        torch.storage._load_from_bytes = original
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
