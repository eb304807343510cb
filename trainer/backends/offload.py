"""Give a device's memory back while somebody else needs it, and take it again: bytes of storages, nothing else.

A tensor keeps its identity, shape and views; only the bytes under it go to the host and come back. So nothing
that holds a tensor (an optimizer, a gradient hook, a compiled layer) notices. Depends on torch only.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Iterator

import torch

__all__ = ["HostMemory"]

_BLOCK_BYTES = 256 << 20
"""Pinned memory is handed out in powers of two: one allocation for each storage could double what it takes."""


class HostMemory:
    """The bytes of one backend, on its device or on the host. A CPU is a device like any other here."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[torch.Tensor] = []
        self._moved: list[tuple[torch.UntypedStorage, int]] | None = None
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def away(self) -> bool:
        """True between ``offload`` and ``onload``."""
        return self._moved is not None

    def require_onloaded(self) -> None:
        """Raises ``RuntimeError`` while the bytes are on the host: a tensor without them must not be read."""
        if self.away:
            raise RuntimeError("the backend's memory is on the host: call onload before anything else")

    def offload(self, kept: Iterable[torch.Tensor], dropped: Iterable[torch.Tensor]) -> None:
        """Free the storages under both; the bytes of ``kept`` come back, those of ``dropped`` are then undefined.

        Tensors elsewhere than on the device (counters on the host) stay. Nothing is freed unless all was copied.
        """
        if self.away:
            return
        moved = self._storages(kept)
        known = {storage.data_ptr() for storage, _ in moved}
        forgotten = [each for each in self._storages(dropped) if each[0].data_ptr() not in known]
        self._allocate(sum(size for _, size in moved))
        for part, block in self._copies(moved):
            block.copy_(part, non_blocking=True)
        self._synchronize()
        self._moved, self._dropped = moved, forgotten
        for storage, _ in (*moved, *forgotten):
            storage.resize_(0)
        gc.collect()
        if self._device.type == "cuda":
            # A workspace that lies in a block of freed memory keeps all of the block; the next product has a new one.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Undo ``offload``. Pinned memory is kept for the next time: to pin it anew takes seconds."""
        if self._moved is None:
            return
        for storage, size in (*self._moved, *self._dropped):
            storage.resize_(size)
        for part, block in self._copies(self._moved):
            part.copy_(block, non_blocking=True)
        self._synchronize()
        self._moved, self._dropped = None, []
        if self._device.type != "cuda":
            self._blocks = []

    def _storages(self, tensors: Iterable[torch.Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
        """Each storage on the device once, with its size in bytes."""
        found: dict[int, tuple[torch.UntypedStorage, int]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device.type and storage.nbytes():
                found.setdefault(storage.data_ptr(), (storage, storage.nbytes()))
        return list(found.values())

    def _allocate(self, size: int) -> None:
        """Have blocks for ``size`` bytes, the old ones where they suffice."""
        if sum(block.numel() for block in self._blocks) >= size:
            return
        pinned = self._device.type == "cuda"
        self._blocks = []
        self._blocks = [
            torch.empty(min(_BLOCK_BYTES, size - start), dtype=torch.uint8, pin_memory=pinned)
            for start in range(0, size, _BLOCK_BYTES)
        ]

    def _copies(self, storages: list[tuple[torch.UntypedStorage, int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(piece of a storage, its place on the host) of all storages laid end to end, as bytes."""
        start = 0
        for storage, size in storages:
            whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            first, last = start // _BLOCK_BYTES, (start + size - 1) // _BLOCK_BYTES
            edges = [start, *(index * _BLOCK_BYTES for index in range(first + 1, last + 1)), start + size]
            for left, right in itertools.pairwise(edges):
                block, offset = self._blocks[left // _BLOCK_BYTES], left % _BLOCK_BYTES
                yield whole[left - start : right - start], block[offset : offset + right - left]
            start += size

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
