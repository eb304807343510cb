"""Weights as handles of memory on a device: a bucket that another process on the same device reads in place.

The same flattened bucket as in ``wire``, pickled as multiprocessing would: with a handle in place of the bytes. The
sender keeps the bytes until the receiver has loaded them. Runs in the training process.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import cast

import torch
from torch.multiprocessing import reductions

from tollway.trainer.weights.wire import Named, flatten, stand_in

__all__ = ["Shared", "share", "with_uuid"]

_Reduced = tuple[Callable[..., object], tuple[object, ...]]
_DEVICE = 6
"""Where ``torch.multiprocessing.reductions.rebuild_cuda_tensor`` takes the device's index."""


@dataclass(frozen=True, slots=True)
class Shared:
    """One bucket that is there for another process."""

    flat: torch.Tensor
    """[bytes] on the device; must live until the receiver is done."""
    payload: bytes
    """The pickle that names it."""


def share(bucket: Sequence[Named], device: torch.device) -> Shared:
    """Copy a bucket together on ``device`` and pickle a handle of it. Raises ``ValueError`` for an empty one."""
    flat, metadata = flatten(bucket, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the receiver reads on a stream of its own
    buffer = io.BytesIO()
    with stand_in():
        _HandlePickler(buffer).dump({"flattened_tensor": flat, "metadata": metadata})
    return Shared(flat, buffer.getvalue())


def with_uuid(arguments: tuple[object, ...], uuid_of: Callable[[int], str]) -> tuple[object, ...]:
    """Arguments of ``rebuild_cuda_tensor`` with the device's uuid in place of its index.

    Processes may count their devices differently; SGLang's unpickler looks a uuid up among its own. Arguments for
    the rebuilding of other tensors stay as they are.
    """
    if len(arguments) <= _DEVICE or not isinstance(index := arguments[_DEVICE], int):
        return arguments
    return *arguments[:_DEVICE], uuid_of(index), *arguments[_DEVICE + 1 :]


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


class _HandlePickler(ForkingPickler):
    """Reduces tensors to handles. Its own hook, so that nothing else in the process pickles differently."""

    def reducer_override(self, value: object) -> _Reduced:
        """Python's hook: how ``value`` is pickled, or ``NotImplemented`` for the usual way."""
        if not isinstance(value, torch.Tensor):
            return cast(_Reduced, NotImplemented)
        reduced = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        rebuild, arguments = cast(_Reduced, reduced)
        return rebuild, with_uuid(arguments, _uuid)
