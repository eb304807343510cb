"""Reading the pickles that weight updates carry, through an exact allow-list.

A payload is a pickle because SGLang's wire format says so. Nothing here calls a name that is not in the list:
tensors are rebuilt by functions of this module, classes become plain records. ``pickle.load`` is never used on
what came over the network. Depends on torch.
"""

from __future__ import annotations

import collections
import io
import pickle
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from tollway.errors import BadRequest

__all__ = ["PayloadRefused", "read_bucket", "read_named_tensors"]


class PayloadRefused(BadRequest):
    """The payload names something outside the allow-list, or is no payload of the expected form."""

    code = "payload_refused"


class FlattenedTensorMetadata:
    """Stand-in for SGLang's class of this name: where one tensor lies in a flat bucket."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@dataclass(slots=True)
class _Storage:
    """Raw bytes of a tensor and their type; ``data`` is filled once its stream was read to the end."""

    dtype: torch.dtype
    numel: int
    data: torch.UntypedStorage | None = None


def _load_storage(blob: bytes) -> _Storage:
    """Stands in for ``torch.storage._load_from_bytes``, which would unpickle anything.

    Reads torch's legacy stream: three header pickles, the storage as a persistent id, its keys, then per key
    an int64 count and the raw elements.
    """
    stream = io.BytesIO(blob)
    for _ in range(3):
        _Unpickler(stream).load()
    body = _StorageUnpickler(stream)
    storage, keys = body.load(), _Unpickler(stream).load()
    if not isinstance(storage, _Storage) or keys != list(body.found):
        raise PayloadRefused("a tensor's storage is malformed")
    for key in keys:
        found = body.found[key]
        (count,) = struct.unpack("<q", stream.read(8))
        raw = stream.read(count * found.dtype.itemsize)
        if count != found.numel or len(raw) != count * found.dtype.itemsize:
            raise PayloadRefused(f"a tensor's storage holds {count} elements and {len(raw)} bytes")
        found.data = torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8).untyped_storage()
    return storage


def _rebuild_tensor(storage: object, offset: object, size: object, stride: object, *_: object) -> Tensor:
    """Stands in for ``torch._utils._rebuild_tensor_v2``; bounds are checked by ``set_``."""
    if not isinstance(storage, _Storage) or storage.data is None or not isinstance(offset, int):
        raise PayloadRefused("a tensor of the payload is malformed")
    shape, steps = (tuple(int(n) for n in cast(Sequence[int], part)) for part in (size, stride))
    if offset < 0 or min((*shape, *steps, 0)) < 0:
        raise PayloadRefused("a tensor of the payload has a negative offset, size or stride")
    last = offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) if 0 not in shape else 0
    if last >= storage.numel and 0 not in shape:
        raise PayloadRefused("a tensor of the payload reaches beyond its storage")
    if 0 in shape:
        return torch.empty(shape, dtype=storage.dtype)
    return torch.empty(0, dtype=storage.dtype).set_(storage.data, offset, shape, steps)


def _rebuild_parameter(data: object, *_: object) -> object:
    return data


_DTYPES = ("float64", "float32", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool")
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "BoolStorage": torch.bool,
}
_TENSOR_BUCKETS = ("sglang.srt.weight_sync.tensor_bucket", "sglang.srt.model_executor.model_runner")
_ALLOWED: dict[tuple[str, str], object] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.storage", "_load_from_bytes"): _load_storage,
    **{("torch", name): getattr(torch, name) for name in _DTYPES},
    **{(module, "FlattenedTensorMetadata"): FlattenedTensorMetadata for module in _TENSOR_BUCKETS},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise PayloadRefused(f"the payload names {module}.{name}, which is not allowed") from None

    def persistent_load(self, pid: object) -> object:
        raise PayloadRefused(f"the payload refers to outside data ({type(pid).__name__})")


class _StorageUnpickler(_Unpickler):
    """Reads one storage reference; the types that it names become dtypes."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.found: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return torch.uint8
        return super().find_class(module, name)

    def persistent_load(self, pid: object) -> object:
        match pid:
            case ("storage", torch.dtype() as dtype, str(key), str(), int(numel), None) if numel >= 0:
                return self.found.setdefault(key, _Storage(dtype, numel))
        raise PayloadRefused("a tensor's storage is malformed")


def read_named_tensors(payload: bytes) -> list[tuple[str, Tensor]]:
    """A pickled list of (name, tensor). Raises ``PayloadRefused``."""
    loaded = _load(payload)
    pairs = cast("Iterable[tuple[object, object]]", loaded.items() if isinstance(loaded, dict) else loaded)
    try:
        named = [(name, tensor) for name, tensor in pairs]
    except (TypeError, ValueError):
        raise PayloadRefused("the payload is no list of (name, tensor) pairs") from None
    if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in named):
        raise PayloadRefused("the payload is no list of (name, tensor) pairs")
    return cast("list[tuple[str, Tensor]]", named)


def read_bucket(payload: bytes) -> list[tuple[str, Tensor]]:
    """A pickled ``flattened_bucket``: {flattened_tensor: uint8, metadata: [...]}. Raises ``PayloadRefused``."""
    loaded = _load(payload)
    if not isinstance(loaded, dict) or not {"flattened_tensor", "metadata"} <= loaded.keys():
        raise PayloadRefused("a flattened_bucket needs flattened_tensor and metadata")
    flat, metadata = loaded["flattened_tensor"], loaded["metadata"]
    if not isinstance(flat, Tensor) or flat.dim() != 1 or not isinstance(metadata, list):
        raise PayloadRefused("flattened_tensor must be one-dimensional and metadata a list")
    return [_slice(flat.view(torch.uint8), item) for item in metadata]


def _slice(flat: Tensor, item: object) -> tuple[str, Tensor]:
    if not isinstance(item, FlattenedTensorMetadata):
        raise PayloadRefused(f"metadata holds a {type(item).__name__}, not FlattenedTensorMetadata")
    try:
        name, dtype, shape = item.name, item.dtype, tuple(item.shape)
        start, end = item.start_idx, item.end_idx
    except AttributeError as error:
        raise PayloadRefused(f"FlattenedTensorMetadata lacks a field: {error}") from None
    count = 1
    for size in shape:
        count *= size
    if not 0 <= start <= end <= len(flat) or end - start != count * dtype.itemsize:
        raise PayloadRefused(f"{name}: bytes [{start}, {end}) of {len(flat)} do not hold {list(shape)} of {dtype}")
    if start % dtype.itemsize:
        raise PayloadRefused(f"{name}: starts at byte {start}, not aligned for {dtype}; put large items first")
    return name, flat[start:end].view(dtype).view(shape)


def _load(payload: bytes) -> object:
    load: Callable[[], object] = _Unpickler(io.BytesIO(payload)).load
    try:
        return load()
    except PayloadRefused:
        raise
    except Exception as error:  # boundary: a malformed pickle raises nearly anything
        raise PayloadRefused(f"the payload cannot be read: {type(error).__name__}: {error}") from None
