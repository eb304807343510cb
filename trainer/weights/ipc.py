"""Weights as handles of memory on a device: a bucket that other processes on the same device read in place.

The same flattened bucket as in ``wire``, pickled as multiprocessing would: with a handle in place of the bytes. The
sender keeps the bytes until all readers have loaded them, and then frees them whoever read. Runs in the training
process.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import cast

import torch
from torch.multiprocessing import reductions

from tollway.trainer.weights.wire import Named, flatten, stand_in

__all__ = ["Counter", "Shared", "for_any_reader", "share"]

Counter = tuple[object, ...]
"""Where torch counts the readers of a handle: the name of shared memory and an offset in it."""
_Reduced = tuple[Callable[..., object], tuple[object, ...]]
_DEVICE = 6
"""Where ``torch.multiprocessing.reductions.rebuild_cuda_tensor`` takes the device's index."""
_COUNTER = slice(11, 13)
"""Where it takes the counter."""


@dataclass(frozen=True, slots=True)
class Shared:
    """One bucket that is there for other processes."""

    flat: torch.Tensor
    """[bytes] on the device; must live until the receivers are done."""
    payload: bytes
    """The pickle that names it."""
    counter: Counter = ()
    """Of this bucket, which no reader knows; empty for memory that torch does not count."""

    def release(self) -> None:
        """Let the memory go with the last reference to ``flat`` here. To be called once.

        torch keeps memory that was shared until its counter, which begins at one, is zero: for ever when nobody read
        it, because an engine refused it or died, and for ever when two did, since the counter knows no sign.
        """
        if self.counter:
            torch.UntypedStorage._release_ipc_counter(*self.counter, device="cuda")  # type: ignore[no-untyped-call]


def share(bucket: Sequence[Named], device: torch.device) -> Shared:
    """Copy a bucket together on ``device`` and pickle a handle of it. Raises ``ValueError`` for an empty one."""
    flat, metadata = flatten(bucket, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the receiver reads on a stream of its own
    buffer = io.BytesIO()
    pickler = _HandlePickler(buffer)
    with stand_in():
        pickler.dump({"flattened_tensor": flat, "metadata": metadata})
    return Shared(flat, buffer.getvalue(), pickler.counter)


def for_any_reader(arguments: tuple[object, ...], uuid: str, counter: Counter) -> tuple[object, ...]:
    """Arguments of ``rebuild_cuda_tensor`` with the device's uuid in place of its index, and another counter.

    Processes may count their devices differently; SGLang's unpickler looks a uuid up among its own.
    """
    return (
        *arguments[:_DEVICE],
        uuid,
        *arguments[_DEVICE + 1 : _COUNTER.start],
        *counter,
        *arguments[_COUNTER.stop :],
    )


@functools.cache
def _decoy(index: int) -> tuple[torch.Tensor, Counter]:
    """One byte on a device that is never freed, so that its counter is there for every reader to count on."""
    tensor = torch.zeros(1, dtype=torch.uint8, device=torch.device("cuda", index))
    return tensor, _reduced(tensor)[1][_COUNTER]


def _reduced(value: torch.Tensor) -> _Reduced:
    return cast(_Reduced, reductions.reduce_tensor(value))  # type: ignore[no-untyped-call]  # torch leaves it untyped


class _HandlePickler(ForkingPickler):
    """Reduces tensors to handles. Its own hook, so that nothing else in the process pickles differently."""

    counter: Counter = ()
    """That of the CUDA tensor which was pickled."""

    def reducer_override(self, value: object) -> _Reduced:
        """Python's hook: how ``value`` is pickled, or ``NotImplemented`` for the usual way."""
        if not isinstance(value, torch.Tensor):
            return cast(_Reduced, NotImplemented)
        rebuild, arguments = _reduced(value)
        if not value.is_cuda:
            return rebuild, arguments
        self.counter = arguments[_COUNTER]
        index = value.device.index
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        return rebuild, for_any_reader(arguments, uuid, _decoy(index)[1])
